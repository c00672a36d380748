"""What torch was told by a compiler is noted and read back, and what a compiler says is told to people."""

import json
import shlex
import time
from pathlib import Path

import pytest

from warmstart import toolchain
from warmstart.toolchain import BuildError

COMPILE = "CppCompileError: C++ compile error\n\nCommand:\ng++ x.cpp -o x.so\n\nOutput:\n"
NOTE = {"name": "g++", "info": "gcc version 12", "intel": False, "old_gcc": True}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (COMPILE + "x.cpp:9:10: fatal error: Python.h: No such file or directory\n    9 |", "python3-dev"),
        (COMPILE + "/a/b.h:3:10: fatal error: omp.h: No such file or directory", "the header omp.h, so nothing"),
        (COMPILE + "x.cpp:1:10: fatal error: 'omp.h' file not found", "libomp-dev for clang"),
        (COMPILE + "x.cpp:1:10: fatal error: sys/a.h: No such file or directory", "install the package that has it"),
        (COMPILE + "/usr/bin/ld: cannot find -lgomp: No such file\ncollect2: error: ld returned 1", "install libgomp"),
        (COMPILE + "note\ng++: fatal error: Killed signal terminated program cc1plus", "Killed signal terminated"),
        (COMPILE, "the C++ compiler fails (it says nothing)"),
        (COMPILE + "\n\nSet TORCHDYNAMO_VERBOSE=1 for the error", "the C++ compiler fails (it says nothing)"),
        ("backend='inductor' raised:\nInvalidCxxCompiler: No working C++ compiler", "torch finds no C++ compiler"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'openssl'", "install openssl"),
        ("backend='inductor' raised:\nBuildError: x.cpp would have to be built\n\nSet TORCH", "x.cpp would have to be"),
        ("RuntimeError: shapes do not match", ""),
    ],
)
def test_what_a_compiler_says_is_one_line_with_a_remedy(text: str, words: str) -> None:
    said = toolchain.trouble(RuntimeError(text))
    assert words in said
    assert bool(said) == bool(words)
    assert "\n" not in said


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", json.dumps({**NOTE, "more": 1}), json.dumps({**NOTE, "name": 1}), json.dumps(["g++"])],
)
def test_a_note_that_is_none_is_not_used(text: str) -> None:
    assert toolchain._read(text) is None
    assert toolchain._read(json.dumps(NOTE)) == toolchain.Compiler(**NOTE)


def test_without_a_note_nothing_stands_in(tmp_path: Path) -> None:
    assert not toolchain.stand_in(tmp_path)


def test_a_compiler_that_hangs_is_ended_with_all_it_started_and_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "BUILD_TIMEOUT_S", 1.0)
    monkeypatch.setattr(toolchain, "_hung", "")
    script = tmp_path / "g++"
    # The child holds the pipe, as cc1plus does.
    script.write_text(f"#!/bin/sh\nsleep 600 & echo $! > {tmp_path}/child\nwait\n")
    script.chmod(0o755)
    with pytest.raises(BuildError, match="did not end within 1 s"):
        toolchain._build(shlex.join([str(script), "x.cpp"]), str(tmp_path))
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    for _ in range(600):
        if not child.exists() or child.read_text().split()[2] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the compiler's child lives on")
    script.unlink()
    with pytest.raises(BuildError, match="did not end within 1 s"):
        toolchain._build(shlex.join([str(script), "x.cpp"]), str(tmp_path))


def test_a_full_disk_is_no_working_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert toolchain.works()

    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(toolchain.tempfile, "TemporaryDirectory", full)
    assert not toolchain.works()

"""Hosts whose C++ compiler is missing or broken: warm from a cache all the same, else eager with one line of reason."""

import shutil
import sys
from pathlib import Path

import pytest
from booting import HEADER, ONE, QUICK, SEVEN, TWO

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

COMPILER = shutil.which("g++")
WIDE = [["three", "3:2", 1, 8, 1.0, 12]]


@pytest.fixture(scope="module")
def right(boot, tmp_path_factory):
    """The pictures that an uncompiled boot draws."""
    store = tmp_path_factory.mktemp("eager") / "store"
    return boot(store, draw=[*SEVEN, *WIDE], before=ONE, environment={"WARMSTART_COMPILE": "off"}).pictures


@pytest.fixture(scope="module")
def filled(boot, tmp_path_factory):
    """A store with the bundle of a boot that had a compiler, and what that boot drew.

    CXX is set there and nowhere else: the name is in Inductor's own key, which must be found without it.
    """
    store = tmp_path_factory.mktemp("filled") / "store"
    booted = boot(store, draw=SEVEN, before=ONE, environment={**QUICK, "CXX": str(COMPILER)})
    assert booted.report["outcome"] == "cold"
    return store, booted


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The surroundings of a host without a compiler: nothing is on PATH but Python."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "python").symlink_to(sys.executable)
    return {**QUICK, "PATH": str(folder)}


def broken(folder: Path, body: str) -> dict[str, str]:
    """The surroundings of a host whose g++ tells its version, as the real one, and otherwise does as said."""
    assert COMPILER, "g++ is not on PATH, and tests need it; install it (scripts/test names the packages)"
    path = folder / "bin" / "g++"
    path.parent.mkdir()
    # Found on PATH under that name: GCC takes its own place from it, and tells it in the text of its version.
    real = f'PATH=/usr/bin:/bin exec -a g++ {COMPILER} "$@"'
    path.write_text(f'#!/bin/bash\ncase "$1" in --version|-v|-dump*) {real};; esac\n{body}\n{real}\n')
    path.chmod(0o755)
    return {**QUICK, "PATH": f"{path.parent}:/usr/bin:/bin"}


def is_warm(booted) -> bool:
    zeros = ("fx_misses", "aot_misses", "fx_bypasses", "aot_bypasses", "kernels_built")
    counts = booted.counts
    hits = counts["fx_hits"] == counts["aot_hits"] == counts["graphs"] > 0
    return booted.report["outcome"] == "warm" and hits and not any(counts[name] for name in zeros)


# --- Cold: nothing to start from ------------------------------------------------------------------------------------


NO_HEADERS = """
import sysconfig
real = sysconfig.get_path
sysconfig.get_path = lambda name, *args, **options: "/nowhere" if name == "include" else real(name, *args, **options)
"""
IMPATIENT = "\nfrom warmstart import toolchain\ntoolchain.BUILD_TIMEOUT_S = 5.0"


def test_a_host_without_a_compiler_says_so_and_is_eager(boot, bare, right, tmp_path):
    booted = boot(tmp_path / "store", draw=SEVEN, before=ONE, environment=bare)
    assert booted.report["outcome"] == "eager"
    reason = booted.report["reason"]
    assert reason.startswith("there is no C++ compiler: CXX is not set, and g++ is not on PATH; install g++")
    assert booted.pictures == right[:1]
    assert not list(tmp_path.glob("store/*/*/*.zst"))


def test_a_compiler_that_does_not_tell_its_version_is_none(boot, right, tmp_path):
    booted = boot(tmp_path / "store", draw=SEVEN, before=ONE, environment={**QUICK, "CXX": "/bin/false"})
    assert booted.report["outcome"] == "eager"
    assert "CXX is '/bin/false', which fails when asked for its version" in booted.report["reason"]
    assert booted.pictures == right[:1]


@pytest.mark.parametrize(
    ("body", "before", "words"),
    [
        ('[[ "$*" == *-shared* ]] && { echo "collect2: error: no ld"; exit 1; }', "", "fails (collect2: error: no ld)"),
        ("sleep 1000", IMPATIENT, "did not end within 5 s"),
        ("", NO_HEADERS, "does not find the header Python.h, so nothing can be compiled; install Python's headers"),
    ],
    ids=["links nothing", "hangs", "no Python.h"],
)
def test_a_compiler_that_cannot_compile_is_an_eager_boot_with_a_reason(boot, right, tmp_path, body, before, words):
    environment = broken(tmp_path, body) | {HEADER: "1"}
    booted = boot(tmp_path / "store", draw=SEVEN, before=ONE + before, environment=environment)
    assert booted.report["outcome"] == "eager"
    assert booted.report["reason"].startswith("the compile failed: the C++ compiler")
    assert words in booted.report["reason"]
    assert booted.pictures == right[:1]


# --- Warm: all is in the cache --------------------------------------------------------------------------------------


def test_a_host_without_a_compiler_is_warm_from_what_another_compiled(boot, bare, filled):
    store, first = filled
    before = sorted(path.relative_to(store) for path in store.rglob("*"))
    booted = boot(store, draw=SEVEN, before=ONE, environment=bare)
    assert is_warm(booted), booted.report["reason"]
    assert booted.pictures == first.pictures
    assert any("there is no C++ compiler" in warning for warning in booted.report["warnings"])
    assert booted.report["facts"]["vector_isa"] == first.report["facts"]["vector_isa"]
    assert sorted(path.relative_to(store) for path in store.rglob("*")) == before


def test_it_is_warm_from_another_version_too(boot, bare, filled):
    environment = {**bare, "WARMSTART_MODEL_VERSION": "another"}
    booted = boot(filled[0], draw=SEVEN, before=ONE, environment=environment)
    assert is_warm(booted), booted.report["reason"]
    assert "inherited from version" in booted.report["reason"]
    assert booted.pictures == filled[1].pictures


def test_a_compiler_that_broke_since_is_done_without(boot, filled, tmp_path):
    booted = boot(filled[0], draw=SEVEN, before=ONE, environment=broken(tmp_path, "exit 1"))
    assert is_warm(booted), booted.report["reason"]
    assert booted.pictures == filled[1].pictures
    assert any("the C++ compiler fails" in warning for warning in booted.report["warnings"])


def test_what_was_compiled_by_nobody_knows_what_is_not_used(boot, bare, filled, right):
    """As in a store that was filled before compilers were noted."""
    before = ONE + "\nfrom warmstart import toolchain\ntoolchain.NOTES = 'nowhere'"
    booted = boot(filled[0], draw=SEVEN, before=before, environment=bare)
    assert booted.report["outcome"] == "eager"
    assert "there is no C++ compiler" in booted.report["reason"]
    assert booted.pictures == right[:1]


def test_what_is_not_in_the_cache_runs_uncompiled(boot, bare, right, tmp_path):
    store = tmp_path / "store"
    fixed = {"WARMSTART_DYNAMIC": "false"}
    boot(store, before=TWO, environment={**QUICK, **fixed, "WARMSTART_SETUP_BUDGET_S": "0.01"})
    environment = {**bare, **fixed, "WARMSTART_UNPLANNED": "compile"}
    booted = boot(store, draw=[*SEVEN, *WIDE], before=TWO, environment=environment)
    assert booted.report["outcome"] == "partial"
    assert "1 of 2 planned requests run compiled, the others uncompiled" in booted.report["reason"]
    assert "is not in the cache and would have to be built" in booted.report["reason"]
    assert (booted.counts["fx_hits"], booted.counts["kernels_built"]) == (1, 0)
    assert [item["graphs"] for item in booted.drawn] == [0, 0]
    assert "uncompiled where no graph covers it" in booted.drawn[1]["reason"]
    assert booted.pictures == right


AHEAD = """
from warmstart import inductor
real, begun = inductor.build_ahead, []
inductor.build_ahead = lambda *given: begun.append(real(*given)) or begun[-1]
"""


def test_only_a_boot_that_must_compile_builds_the_header_ahead_and_no_boot_builds_it_twice(boot, tmp_path):
    log = tmp_path / "log"
    environment = broken(tmp_path, f'echo "$@" >> {log}') | {HEADER: "1"}
    for outcome, ahead, headers in (("cold", [True], 1), ("warm", [], 0)):
        log.write_text("")
        booted = boot(
            tmp_path / "store", draw=SEVEN, before=ONE + AHEAD, after="answer = begun", environment=environment
        )
        assert (booted.report["outcome"], booted.after) == (outcome, ahead)
        assert log.read_text().count("-x c++-header") == headers


# --- The processor's test -------------------------------------------------------------------------------------------


def test_kernels_are_vectorised_again_after_the_test_of_the_processor_was_cut_short(boot, tmp_path):
    """A cut one fails to load, and torch takes that for a processor without vector units, without a word."""
    live = tmp_path / "live"
    environment = {**QUICK, "TORCHINDUCTOR_CACHE_DIR": str(live)}
    first = boot(tmp_path / "store", draw=SEVEN, before=ONE, environment=environment)
    assert first.report["facts"]["vector_isa"] not in (None, "none"), "this processor has no vector units to lose"
    kernels = {path.relative_to(live) for path in live.rglob("*.main.so")}
    for library in live.rglob("*.so"):
        library.write_bytes(library.read_bytes()[:3000])
    for folder in ("fxgraph", "aotautograd"):
        shutil.rmtree(live / folder)
    again = boot(tmp_path / "other", draw=SEVEN, before=ONE, environment=environment)
    assert again.report["facts"]["vector_isa"] == first.report["facts"]["vector_isa"]
    # Named by the source and the command that built them, which has the instruction set.
    assert {path.relative_to(live) for path in live.rglob("*.main.so")} == kernels
    assert again.pictures == first.pictures

"""Torch's trace: where it is asked for, and what becomes of tlparse's report."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from warmstart import trace


def begun(directory: Path, first: str = "") -> subprocess.CompletedProcess[str]:
    """Begins a trace in a process that has not imported torch; prints the variable."""
    lines = [first, "import os", "from warmstart import trace", f"trace.begin({str(directory)!r})"]
    code = "\n".join([*lines, "print(os.environ['TORCH_TRACE'])"])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_the_directory_is_made_and_torch_is_told(tmp_path):
    done = begun(tmp_path / "a" / "trace")
    assert done.stdout.strip() == str(tmp_path / "a" / "trace")
    assert list((tmp_path / "a" / "trace").iterdir()) == []


def test_once_torch_is_there_it_is_too_late(tmp_path):
    done = begun(tmp_path, "import sys\nsys.modules['torch'] = None")
    assert "torch was imported before warmstart.boot()" in done.stderr


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    assert "WARMSTART_TRACE_DIR: [Errno 20] Not a directory" in begun(tmp_path / "file" / "trace").stderr


@pytest.fixture
def tlparse(tmp_path, monkeypatch):
    """Puts a tlparse on PATH, and takes away the one that is installed."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    def put(script: str) -> None:
        command = tmp_path / "tlparse"
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return put


def test_without_tlparse_there_is_no_page(tlparse, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert trace.report(str(tmp_path)) is None


@pytest.fixture
def logs(tmp_path):
    """Traces of two boots, the later one last."""
    paths = [tmp_path / f"dedicated_log_torch_trace_{name}.log" for name in ("z", "a")]
    for seconds, path in enumerate(paths, 1000):
        path.write_text("")
        os.utime(path, (seconds, seconds))
    return paths


def test_tlparse_is_asked_for_the_latest_trace_and_for_no_browser(tlparse, logs, tmp_path):
    tlparse('echo "$@" > "$0.asked"')
    assert trace.report(str(tmp_path)) == tmp_path / "report" / "index.html"
    asked = (tmp_path / "tlparse.asked").read_text().split()
    assert {"--no-browser", "--overwrite"} <= set(asked)
    assert asked[-1] == str(logs[1])


def test_a_tlparse_that_fails_is_told_by_its_first_line(tlparse, logs, tmp_path):
    tlparse("echo Error: the log is cut >&2; echo 0: main >&2; exit 3")
    with pytest.raises(trace.TraceError, match=f"no page of {logs[1]}: Error: the log is cut"):
        trace.report(str(tmp_path))


def test_a_tlparse_that_hangs_is_ended(tlparse, logs, tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "_PARSE_S", 0.2)
    tlparse("exec sleep 60")
    with pytest.raises(trace.TraceError, match=r"tlparse cannot be run: .* timed out"):
        trace.report(str(tmp_path))


def test_a_boot_that_left_no_trace_is_told(tlparse, tmp_path):
    tlparse("exit 0")
    with pytest.raises(trace.TraceError, match="torch wrote no trace into"):
        trace.report(str(tmp_path))

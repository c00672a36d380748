"""Torch's own trace of all compiles, and the page that tlparse makes of it; knows where they lie, no word of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

VARIABLE = "TORCH_TRACE"
_REPORT = "report"
# tlparse takes a second for the trace of a boot; it must not hold one up.
_PARSE_S = 60.0


class TraceError(OSError):
    """No trace can be written or read; the text says why. The boot goes on without."""


def begin(directory: str) -> None:
    """Has torch, which reads the variable once when it is imported, write its trace into the directory.

    Raises:
        TraceError: nothing can be written there, or torch is imported already.
    """
    if "torch" in sys.modules:
        raise TraceError(
            "torch was imported before warmstart.boot(), so it writes no trace; import it later, or set"
            f" {VARIABLE}={directory} before the process starts"
        )
    path = Path(directory).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        (probe := path / ".warmstart-probe").touch()
        probe.unlink()
    except OSError as error:
        raise TraceError(f"no trace can be written to WARMSTART_TRACE_DIR: {error}") from error
    os.environ[VARIABLE] = str(path)


def report(directory: str) -> Path | None:
    """Has tlparse make its page of the latest trace, in `report/`; None where tlparse is not installed.

    Raises:
        TraceError: there is no trace, or it failed.
    """
    # pip puts it beside Python, which need not be on PATH.
    command = shutil.which("tlparse", path=Path(sys.executable).parent) or shutil.which("tlparse")
    if command is None:
        return None
    path = Path(directory).absolute()
    # Earlier boots may have left theirs in the same directory.
    logs = sorted(path.glob("*torch_trace_*.log"), key=lambda log: log.stat().st_mtime)
    if not logs:
        raise TraceError(f"torch wrote no trace into {path}")
    order = [command, "--overwrite", "--no-browser", "-o", str(path / _REPORT), str(logs[-1])]
    try:
        done = subprocess.run(order, capture_output=True, text=True, errors="replace", timeout=_PARSE_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise TraceError(f"tlparse cannot be run: {error}") from error
    if done.returncode:
        # The error comes first, then a stack of addresses.
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise TraceError(f"tlparse made no page of {logs[-1]}: {said[0]}")
    return path / _REPORT / "index.html"

"""Ends a server's processes once its starter or the server itself is gone; knows processes, nothing of servers.

`python _watchdog.py SESSION` reads its standard input, which ends when whoever started it does, killed or not. It is
a process beside the server and not above it, so nothing else in the server's life changes.

The worker of coglet 0.23.1 notices the end of its parent only between two requests, and never in setup(). In a
container the namespace ends both; without one this does. Linux's "signal on the parent's death" is no way out: it is
not inherited by the worker, and it follows the thread that started a process, which the server may end at any time.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

POLL_S = 0.2
GRACE_S = 10.0  # what docker stop gives


def members(session: int) -> list[int]:
    """Return the processes of a session that run, from /proc; none where there is no /proc. Zombies do not run.

    A session's number stays taken while it has a process. It is somebody else's only if a new leader has it, which
    the caller rules out: it has not fetched the leader's end yet, or the number is a running process.
    """
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return sorted(pid for pid in pids if _session(pid) == session)


def _session(pid: int) -> int | None:
    """Return the session of a process that runs."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it ended while we looked
        return None
    # The name, in parentheses, may hold anything; state, parent, group and session follow the last of them.
    state, _, _, session = stat.rpartition(")")[2].split()[:4]
    return None if state in "ZX" else int(session)


def kill(session: int) -> None:
    """Kill every process of a session, also those that appear meanwhile."""
    while pids := members(session):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def watch(session: int, starter: int) -> None:
    """Return once the descriptor `starter` ends, or the process that leads those which are watched."""
    while _session(session) == session:
        if select.select([starter], [], [], POLL_S)[0]:
            return


def main(session: int) -> None:
    """Wait, give what is left time to save, and end it."""
    watch(session, sys.stdin.fileno())
    if _session(session) == session:
        os.kill(session, signal.SIGTERM)
    ends = time.monotonic() + GRACE_S
    while members(session) and time.monotonic() < ends:
        time.sleep(POLL_S)
    kill(session)


if __name__ == "__main__":
    main(int(sys.argv[1]))

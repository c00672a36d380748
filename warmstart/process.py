"""What this process takes of its machine: memory, children, threads, time to look for garbage. Knows not what runs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path


def memory_bytes() -> tuple[int, int] | None:
    """Resident memory of this process now and at its highest; None where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    # "VmRSS:     1024 kB"; the kernel's kB are 1024 bytes.
    values = {name: text.split() for name, _, text in (line.partition(":") for line in lines)}
    try:
        return int(values["VmRSS"][0]) * 1024, int(values["VmHWM"][0]) * 1024
    except (KeyError, IndexError, ValueError):
        return None


def children() -> list[str]:
    """Command lines of the processes that this one started and that still run."""
    found = []
    for task in _listed(Path("/proc/self/task")):
        try:
            pids = (task / "children").read_text().split()
        # The thread ended since, or the kernel has no such file.
        except OSError:
            continue
        found += [_command(int(pid)) for pid in pids]
    return sorted(filter(None, found))


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _command(pid: int) -> str:
    """Empty for a process that has ended, whether or not somebody has asked for its exit status."""
    try:
        return " ".join(os.fsdecode(part) for part in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") if part)
    except OSError:
        return ""


def spread_threads() -> None:
    """Moves running threads of this process that share a core to cores that none of them is on, and leaves them free.

    Linux often puts a new thread on the core of the one that starts it, takes up to 30 ms to see that another is idle,
    and meanwhile each operation of the two takes as long as the first waits busily. Threads that were bound to other
    cores than the calling one stay; so do Python's, which could start a thread while they are bound.
    """
    with contextlib.suppress(OSError):  # a kernel that does not let cores be chosen
        allowed = os.sched_getaffinity(0)
        free = set(allowed)
        of_python = {thread.native_id for thread in threading.enumerate()}
        for thread, core in _running():
            if core in free:
                free.discard(core)
            elif free and thread not in of_python and os.sched_getaffinity(thread) == allowed:
                try:
                    os.sched_setaffinity(thread, {free.pop()})
                finally:
                    os.sched_setaffinity(thread, allowed)


def _running() -> list[tuple[int, int]]:
    """Threads of this process that run or could, each with the core that it was on last, the calling one first."""
    found = []
    for task in _listed(Path("/proc/self/task")):
        try:
            # After the name, which may hold anything: the state, and 36 fields later the core. See proc_pid_stat(5).
            state, *rest = (task / "stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            continue  # it has ended
        if state == "R":
            found.append((int(task.name), int(rest[35])))
    return sorted(found, key=lambda item: item[0] != threading.get_native_id())


def end_idle_threads() -> None:
    """Ends the threads of OpenMP that work for the calling one, until it needs them again.

    Each thread that runs parallel work has a team of its own, which lives as long as the thread does. Where teams have
    more threads than there are cores, GNU's libgomp lets none of them wait busily: each then sleeps after each kernel,
    and to wake it takes as long as a small kernel (`gomp_throttled_spin_count` in its config/linux/wait.h). The server
    answers each prediction on a thread of a pool, which stays for 10 s.
    """
    # Of OpenMP 5. Torch loads its runtime for all; where there is none there is no team.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).omp_pause_resource_all(1)  # omp_pause_soft: settings stay


@contextlib.contextmanager
def passing_threads() -> Iterator[None]:
    """For what may run on any thread: inside it OpenMP may have threads for this one, and at its end they end."""
    try:
        yield
    finally:
        end_idle_threads()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """For imports: inside it Python looks for no garbage in cycles, and never again among all that is there at its end.

    Importing torch, diffusers and Inductor makes a million objects that stay. To look through them again and again
    while their number grows is a quarter of the CPU time of the imports, and each later look at all of them a pause.
    """
    gc.collect()  # what is garbage now would be kept too
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()

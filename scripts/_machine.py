"""What else the machine does while something is measured on it; knows Linux's /proc, not what is measured."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path


def busy_s() -> float:
    """Return the CPU time that the whole machine has been busy for since it started."""
    ticks = [int(number) for number in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")


def own_cpu_s() -> float:
    """Return the CPU time of this process, its threads and the children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(row.ru_utime + row.ru_stime for row in used)


def peak_bytes() -> int:
    """Return the highest resident size of this process.

    Not ru_maxrss: a child that was started without a copy of its parent's memory counts the parent's highest there.
    """
    return _kilobytes(Path("/proc/self/status"), "VmHWM:") * 1024


def free_bytes() -> int:
    """Return the memory that processes may still take, as the kernel estimates it for the whole machine."""
    return _kilobytes(Path("/proc/meminfo"), "MemAvailable:") * 1024


def _kilobytes(file: Path, name: str) -> int:
    [line] = [line for line in file.read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1])


def cpu_model() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())

"""What the boot knows and asks of its own process."""

import gc
import os
import subprocess
import sys
import weakref

import pytest

from warmstart import process


@pytest.fixture(autouse=True)
def collector():
    """Leaves Python's search for garbage as it was."""
    enabled = gc.isenabled()
    yield
    gc.unfreeze()
    gc.enable() if enabled else gc.disable()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_inside_no_garbage_is_looked_for_and_later_not_among_what_was_made():
    with process.uncollected():
        assert not gc.isenabled()
        kept = weakref.ref(Cycle())
    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000
    gc.collect()
    assert kept() is not None, "it is not looked at again"
    later = weakref.ref(Cycle())
    gc.collect()
    assert later() is None, "what came later is"


def test_what_was_garbage_before_is_not_kept():
    gc.disable()
    garbage = weakref.ref(Cycle())
    gc.enable()
    with process.uncollected():
        assert garbage() is None


def test_it_ends_with_an_error_too():
    with pytest.raises(ImportError), process.uncollected():
        raise ImportError("no module named torch")
    assert gc.isenabled()


def test_it_does_not_begin_what_was_off():
    gc.disable()
    with process.uncollected():
        pass
    assert not gc.isenabled()


def test_memory_and_children_are_those_of_this_process():
    resident, highest = process.memory_bytes()
    assert 1e6 < resident <= highest
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        # Where another child ends meanwhile, Linux may leave some out of its list.
        assert any("input()" in command for _ in range(100) for command in process.children())
        child.communicate(b"\n")
    assert not any("input()" in command for command in process.children())


# In a process of its own: how many threads OpenMP has is settled when torch is loaded, and tests have one each.
TEAMS = """
import os, time
import torch
from warmstart import process

def more(expected):
    for _ in range(600):  # what was told to end takes a moment
        if (found := len(os.listdir("/proc/self/task")) - before) == expected:
            break
        time.sleep(0.1)
    return found

torch.set_num_threads(2)
before = len(os.listdir("/proc/self/task"))
large = torch.zeros(1 << 20)
print(more(1))
process.end_idle_threads()
print(more(0))
print(bool((large.cos() == 1).all()), more(1), torch.get_num_threads())
"""


def test_threads_that_work_for_an_idle_one_end_and_come_again():
    done = subprocess.run(
        [sys.executable, "-c", TEAMS],
        capture_output=True, text=True, timeout=120, check=True, env={**os.environ, "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert done.stdout.split() == ["1", "0", "True", "1", "2"]


# OpenMP's thread and the one that it works for, begun on one core and then allowed on all, as Linux may begin them.
SHARED = """
import os, threading
import torch
from warmstart import process

torch.set_num_threads(2)
process.end_idle_threads()
allowed = os.sched_getaffinity(0)
tasks = lambda: set(map(int, os.listdir("/proc/self/task")))
def core(thread):
    return int(open(f"/proc/self/task/{thread}/stat").read().rpartition(")")[2].split()[36])
shared = spread = kept = 0
for _ in range(10):
    before = tasks()
    os.sched_setaffinity(0, {min(allowed)})
    torch.zeros(1 << 20)
    [other] = tasks() - before
    os.sched_setaffinity(0, allowed)
    os.sched_setaffinity(other, allowed)
    if core(threading.get_native_id()) == core(other):
        shared += 1
        process.spread_threads()
        spread += core(threading.get_native_id()) != core(other)
    kept += os.sched_getaffinity(0) == os.sched_getaffinity(other) == allowed
    process.end_idle_threads()
    while len(tasks()) > len(before):
        pass
print(shared, spread, kept)
"""


def test_threads_on_one_core_are_spread_and_left_free():
    assert len(os.sched_getaffinity(0)) > 1, "threads cannot be spread over one core"
    # It waits busily for as long as the test takes.
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "10000000000"}
    done = subprocess.run(
        [sys.executable, "-c", SHARED], capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    shared, spread, kept = map(int, done.stdout.split())
    assert shared >= 3, "the test means to have both on one core"
    assert spread > shared / 2, "on busy cores Linux may put both on one again at once; without it none is spread"
    assert kept == 10


def test_without_openmp_there_is_nothing_to_end(monkeypatch):
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: object())
    process.end_idle_threads()

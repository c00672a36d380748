"""What the boot knows and asks of its own process."""

import gc
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
        assert any("input()" in command for command in process.children())
        child.communicate(b"\n")
    assert not any("input()" in command for command in process.children())

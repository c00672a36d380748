"""That the boot lets a restore go first, and no longer than that."""

import importlib
import threading
import time

import pytest

from warmstart.cache import Restored, RestoreOutcome

boot = importlib.import_module("warmstart.boot")


class Cache:
    """A restore that takes as long as it is told to."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.done = threading.Event()

    def restore(self, deadline_s: float) -> Restored:
        time.sleep(self.seconds)
        self.done.set()
        return Restored(RestoreOutcome.RESTORED, "")


@pytest.mark.parametrize(("seconds", "is_done"), [(0.02, True), (30.0, False)])
def test_a_restore_that_is_quick_is_over_before_the_imports_and_a_slow_one_does_not_hold_them(seconds, is_done) -> None:
    cache = Cache(seconds)
    restoring = boot._Restoring(cache, (), None, 60.0)
    started = time.monotonic()
    restoring.head_start()
    waited_s = time.monotonic() - started
    assert cache.done.is_set() is is_done
    assert waited_s < 5.0
    assert is_done or waited_s >= 0.9 * boot._HEAD_START_S


def test_where_no_thread_can_be_started_there_is_nothing_to_wait_for(monkeypatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    restoring = boot._Restoring(Cache(0.0), (), None, 60.0)
    restoring.head_start()
    assert restoring.wait().outcome is RestoreOutcome.RESTORED

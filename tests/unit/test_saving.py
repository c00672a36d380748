"""When is saved: soon, one save at a time, again after a failure, and never in the way of who asks for it."""

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from warmstart import saving
from warmstart.cache import Persisted, PersistOutcome
from warmstart.report import Stopwatch
from warmstart.saving import Saver

LONG_S = 60.0


class Cache:
    """A cache whose saves end when the test lets them, with the outcomes it gives."""

    def __init__(self, *outcomes: PersistOutcome | Exception) -> None:
        self.outcomes = list(outcomes)
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.go_on.set()
        self.saves = 0

    def persist(self, deadline_s: float) -> Persisted:
        assert deadline_s == LONG_S
        self.saves += 1
        self.begun.release()
        assert self.go_on.wait(LONG_S)
        outcome = self.outcomes.pop(0) if self.outcomes else PersistOutcome.NOTHING_NEW
        if isinstance(outcome, Exception):
            raise outcome
        return Persisted(outcome, f"because {outcome.value}")


@pytest.fixture
def told() -> list[Persisted]:
    return []


@pytest.fixture
def start(told: list[Persisted]) -> Iterator[Callable[[Cache], Saver]]:
    savers = []

    def make(cache: Cache) -> Saver:
        savers.append(Saver(cache, LONG_S, told.append))  # type: ignore[arg-type]
        return savers[-1]

    yield make
    for saver in savers:
        saver.close()


def test_who_asks_for_a_save_does_not_wait_for_it(start) -> None:
    cache = Cache()
    cache.go_on.clear()
    saver = start(cache)
    for _ in range(20):
        saver.soon()
    assert cache.begun.acquire(timeout=LONG_S)
    assert saver.saves == []
    cache.go_on.set()
    assert saver.settle(LONG_S)


def test_a_burst_during_a_save_is_one_more_save(start) -> None:
    cache = Cache()
    saver = start(cache)
    cache.go_on.clear()
    saver.soon()
    assert cache.begun.acquire(timeout=LONG_S)
    for _ in range(50):
        saver.soon()
    cache.go_on.set()
    assert saver.settle(LONG_S)
    assert cache.saves == 2


def test_to_wait_where_nothing_is_new_saves_nothing(start) -> None:
    cache = Cache()
    assert start(cache).settle(LONG_S)
    assert cache.saves == 0


def test_what_was_told_before_a_wait_is_saved_when_it_ends(start, told) -> None:
    saver = start(Cache(PersistOutcome.PUBLISHED))
    saver.soon()
    assert saver.settle(LONG_S)
    assert PersistOutcome.PUBLISHED in [saved.outcome for saved in saver.saves]
    assert [saved.reason for saved in told] == ["because published"]


def test_a_store_that_hangs_is_not_waited_for_longer_than_was_said(start) -> None:
    cache = Cache()
    cache.go_on.clear()
    saver = start(cache)
    saver.soon()
    started = time.monotonic()
    assert not saver.settle(0.2)
    assert time.monotonic() - started < LONG_S / 2
    cache.go_on.set()


@pytest.mark.parametrize("failure", [PersistOutcome.FAILED, OSError("no room")])
def test_a_failed_save_is_tried_again_by_itself(start, told, monkeypatch: pytest.MonkeyPatch, failure) -> None:
    monkeypatch.setattr(saving, "_RETRIES_S", (0.01, 0.01))
    cache = Cache(failure, failure, PersistOutcome.PUBLISHED)
    saver = start(cache)
    saver.soon()
    for _ in range(3):
        assert cache.begun.acquire(timeout=LONG_S)
    assert saver.settle(LONG_S)
    assert [saved.outcome.value for saved in told] == ["failed", "failed", "published"]


def test_a_store_that_stays_away_is_asked_a_few_times_only(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_RETRIES_S", (0.01, 0.01))
    cache = Cache(*[PersistOutcome.FAILED] * 10)
    saver = start(cache)
    saver.soon()
    for _ in range(3):
        assert cache.begun.acquire(timeout=LONG_S)
    assert not cache.begun.acquire(timeout=0.5)
    # The next compile, or the exit, asks once more.
    assert not saver.settle(LONG_S)


def test_after_its_end_nothing_is_saved(start) -> None:
    cache = Cache()
    saver = start(cache)
    saver.close()
    saver.soon()
    assert not saver.settle(0.2)
    assert cache.saves == 0


def test_where_no_thread_can_be_started_who_waits_saves(told, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    cache = Cache(PersistOutcome.FAILED, PersistOutcome.PUBLISHED)
    saver = Saver(cache, LONG_S, told.append)  # type: ignore[arg-type]
    saver.soon()
    assert cache.saves == 0
    assert [saver.settle(LONG_S), saver.settle(LONG_S), saver.settle(LONG_S)] == [False, True, True]
    assert cache.saves == 2


@pytest.mark.parametrize(
    ("settled", "outcomes", "words"),
    [
        (True, ["failed", "published"], ""),
        (False, ["published", "failed"], "because failed"),
        (False, ["failed", "published"], "it had not ended after 2 s"),
        (False, [], "it had not ended after 2 s"),
    ],
)
def test_a_boot_warns_of_what_is_not_saved_and_not_of_what_was_in_the_end(settled, outcomes, words) -> None:
    here = object.__new__(importlib.import_module("warmstart.boot")._Boot)
    here.clock, here.warnings, here.cache = Stopwatch(), [], SimpleNamespace()
    saves = [Persisted(PersistOutcome(outcome), f"because {outcome}") for outcome in outcomes]
    here.savers = [SimpleNamespace(saves=saves, settle=lambda _: settled)]
    here._settle()
    assert [words in warning for warning in here.warnings] == ([] if settled else [True])

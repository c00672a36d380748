"""The order of a warm-up, without a model."""

import threading
import time

import pytest

from warmstart import warmup
from warmstart.models import Request

PLAN = [Request(label, {}) for label in ("a", "b", "c")]


def nothing(*_: object) -> None:
    pass


def test_each_request_is_run_in_order_and_saved_before_the_next():
    events: list[str] = []
    done = warmup.warm(
        lambda request: events.append(f"run {request.label}"),
        PLAN,
        before_each=lambda: events.append("before"),
        after_each=lambda item: events.append(f"save {item.request.label}"),
        budget_ends=None,
    )
    assert events == [event for label in "abc" for event in ("before", f"run {label}", f"save {label}")]
    assert [item.request.label for item in done] == ["a", "b", "c"]


def test_a_spent_budget_still_runs_the_first_request():
    done = warmup.warm(nothing, PLAN, before_each=nothing, after_each=nothing, budget_ends=time.monotonic() - 1)
    assert [item.request.label for item in done] == ["a"]


def test_verify_runs_each_again():
    seen: list[str] = []
    done = warmup.warm(nothing, PLAN, before_each=nothing, after_each=nothing, budget_ends=None)
    warmup.verify(lambda request: seen.append(request.label), done)
    assert seen == ["a", "b", "c"]
    assert all(item.steady_s is not None and item.graphs_again == 0 for item in done)


def test_in_thread_is_another_thread_and_hands_on_results_and_errors():
    assert warmup.in_thread(threading.current_thread) is not threading.current_thread()

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warmup.in_thread(fail)


@pytest.mark.parametrize(("plan", "words"), [([], "is empty"), ([*PLAN, PLAN[0]], "labelled 'a'")])
def test_a_plan_that_cannot_be_warmed_is_refused(plan, words):
    with pytest.raises(warmup.PlanError, match=words):
        warmup.check_plan(plan)


def test_without_a_thread_to_be_had_the_work_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert warmup.in_thread(threading.get_ident) == threading.get_ident()
    with pytest.raises(KeyError, match="wrong"):
        warmup.in_thread(lambda: {}["wrong"])

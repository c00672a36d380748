"""Runs the planned requests once to compile and once more to prove it. Does not know how anything is cached."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from warmstart import inductor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from warmstart.models import Request

T = TypeVar("T")


class PlanError(ValueError):
    """The plan of requests cannot be used; the text says which and why."""


@dataclass
class Warmed:
    """One planned request and what it cost."""

    request: Request
    first_s: float
    """Seconds of the first call, compile included."""
    graphs: int
    """Graphs that the first call compiled."""
    steady_s: float | None = None
    """Seconds of the call again, when everything was compiled."""
    graphs_again: int = 0
    """Graphs that the call again compiled; anything but 0 means that a user would have waited."""


def check_plan(plan: Sequence[Request]) -> None:
    """Refuses a plan that cannot be warmed.

    Raises:
        PlanError: it is empty, or two requests have the same label.
    """
    if not plan:
        raise PlanError("the warm-up plan is empty, so every request would be unplanned; plan at least one request.")
    labels = [request.label for request in plan]
    if double := sorted({label for label in labels if labels.count(label) > 1}):
        raise PlanError(
            f"the warm-up plan has more than one request labelled {double[0]!r}, so a request could not be told to be"
            " planned; give each kind of request its own label."
        )


def warm(
    run: Callable[[Request], object],
    plan: Sequence[Request],
    *,
    before_each: Callable[[], None],
    after_each: Callable[[Warmed], None],
    budget_ends: float | None,
) -> list[Warmed]:
    """Runs each planned request, which compiles what it needs.

    Args:
        run: answers a request just as a prediction does.
        plan: the requests.
        before_each: called before each request.
        after_each: called when one is done, so that its work is saved before the next begins.
        budget_ends: `time.monotonic()` after which no further request is begun, or None.
    """
    done: list[Warmed] = []
    for request in plan:
        # The first is always run: without it nobody would know whether the model works.
        if done and budget_ends is not None and time.monotonic() >= budget_ends:
            break
        before_each()
        seconds, graphs = _timed(run, request)
        done.append(Warmed(request, first_s=seconds, graphs=graphs))
        after_each(done[-1])
    return done


def verify(run: Callable[[Request], object], warmed: Sequence[Warmed]) -> None:
    """Runs each warmed request again and notes whether anything was compiled; it should not be."""
    for item in warmed:
        item.steady_s, item.graphs_again = _timed(run, item.request)


def in_thread(work: Callable[[], T]) -> T:
    """Does the work in a new thread, as the server does each prediction, and hands on what it returns or raises.

    Thread-locals and context variables of `setup()` are absent there, in the warm-up as in a prediction.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=body, name="warmstart-warmup", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the container's limit of threads; here it costs one more compile, but it goes on
        body()
    else:
        thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _timed(run: Callable[[Request], object], request: Request) -> tuple[float, int]:
    before, started = inductor.counts(), time.perf_counter()
    run(request)
    return time.perf_counter() - started, (inductor.counts() - before).graphs

"""Saves in the background what was compiled, one save at a time; knows when to save, not what or where."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import TYPE_CHECKING

from warmstart.cache import Persisted, PersistOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmstart.cache import Cache

# A store that failed is asked again after so many seconds each; then the next compile or the exit asks once more.
_RETRIES_S = (10.0, 60.0, 300.0)


class Saver:
    """A thread that saves one live directory's new files whenever it is told that there may be some.

    What is told while a save is under way is done by one more save after it, so a burst of compiles costs two.

    Args:
        cache: what to save with.
        deadline_s: longest wait for one save.
        tell: called on the thread after each save that did something or failed.

    Attributes:
        saves: what became of each save, oldest first.
    """

    def __init__(self, cache: Cache, deadline_s: float, tell: Callable[[Persisted], None]) -> None:
        self.saves: list[Persisted] = []
        self._cache = cache
        self._deadline_s = deadline_s
        self._tell = tell
        # A cancelled prediction is ended between any two of its instructions. This queue is C code, which that cannot
        # leave half done; an Event or a Condition could keep its lock for ever.
        self._orders: queue.SimpleQueue[queue.SimpleQueue[bool] | None] = queue.SimpleQueue()
        self._closed = False
        self._failed = False
        # A daemon: a store that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="warmstart-save", daemon=True)
        # The container may have no thread left; then a save is whoever's that waits for it.
        with contextlib.suppress(RuntimeError):
            self._thread.start()

    def soon(self) -> None:
        """Has what is new saved, without waiting; safe from a prediction that may be cancelled."""
        self._orders.put(None)

    def settle(self, timeout_s: float) -> bool:
        """Waits until all that was told is saved, also what failed before; False if it fails or the time runs out."""
        answer: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._orders.put(answer)
        if self._thread.ident is None:
            self._obey([self._orders.get() for _ in range(self._orders.qsize())])
        with contextlib.suppress(queue.Empty):
            return answer.get(timeout=timeout_s)
        return False

    def close(self) -> None:
        """Saves nothing from here on; one that is under way ends as it does."""
        self._closed = True
        self._orders.put(None)

    def _work(self) -> None:
        retries = iter(_RETRIES_S)
        retry_s: float | None = None
        while True:
            orders = self._next_orders(retry_s)
            if self._closed:
                return
            if self._obey(orders):
                retries = retries if self._failed else iter(_RETRIES_S)
                retry_s = next(retries, None) if self._failed else None

    def _obey(self, orders: list[queue.SimpleQueue[bool] | None]) -> bool:
        """Saves if there is something to save, which it tells, and answers those who wait."""
        saves = self._failed or None in orders
        if saves:
            self._failed = self._save().outcome is PersistOutcome.FAILED
        for answer in filter(None, orders):
            answer.put(not self._failed)
        return saves

    def _next_orders(self, retry_s: float | None) -> list[queue.SimpleQueue[bool] | None]:
        """Waits for an order, or until it is time to try again; takes all that have come."""
        found: list[queue.SimpleQueue[bool] | None] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._orders.get(timeout=retry_s))
            while True:
                found.append(self._orders.get_nowait())
        return found

    def _save(self) -> Persisted:
        started = time.monotonic()
        try:
            saved = self._cache.persist(self._deadline_s)
        # The boundary: the thread must go on, since later saves and the exit wait for its answers.
        except Exception as error:  # noqa: BLE001
            reason = f"nothing was published ({type(error).__name__}: {error}); it is tried again"
            saved = Persisted(PersistOutcome.FAILED, reason, seconds=time.monotonic() - started)
        self.saves.append(saved)
        if saved.outcome in (PersistOutcome.PUBLISHED, PersistOutcome.FAILED):
            self._tell(saved)
        return saved

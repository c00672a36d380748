"""The booted model as a Predictor sees it: answers requests, never compiling in one unless that is the policy."""

from __future__ import annotations

import atexit
import threading
import time
from typing import TYPE_CHECKING

from warmstart import inductor
from warmstart.models import Request, Result

if TYPE_CHECKING:
    from warmstart.cache import Cache
    from warmstart.models import Model
    from warmstart.report import Report

# A stopping container has ten seconds by default before it is killed; saving must leave room for the rest.
_EXIT_SAVE_S = 5.0


class UnplannedRequestError(ValueError):
    """The request was not planned, and the policy is to refuse such."""


class Served:
    """A warm model. Call it with a request; it may be called from any thread, one request at a time runs.

    Attributes:
        report: what the boot did.
    """

    report: Report

    def __init__(self, model: Model, *, unplanned: str, persist_deadline_s: float) -> None:
        self._model = model
        self._unplanned = unplanned
        self._persist_deadline_s = persist_deadline_s
        self._cache: Cache | None = None
        self._planned: frozenset[str] = frozenset()
        self._running = threading.Lock()
        self._unsaved = threading.Event()

    def __call__(self, request: Request) -> Result:
        """Answers one request.

        Raises:
            UnplannedRequestError: it was not planned and WARMSTART_UNPLANNED is `reject`.
        """
        reason = "" if request.label in self._planned else self._unplanned_reason(request)
        # One lock round whatever may compile: Dynamo compiles in one thread at a time, and pipelines keep state.
        with self._running, inductor.compiling(allowed=self._unplanned == "compile"):
            before, started = inductor.counts(), time.perf_counter()
            outputs = self._model.run(request)
            seconds, compiled = time.perf_counter() - started, inductor.counts() - before
        if compiled.graphs:
            self._save_soon()
        return Result(outputs, seconds, compiled.graphs, reason)

    def rehearse(self, request: Request) -> None:
        """Answers a planned request during the boot, when compiling is allowed."""
        with self._running, inductor.compiling(allowed=True):
            self._model.run(request)

    def never_compile(self) -> None:
        """Has an unplanned request run uncompiled where the policy is to compile it, since nothing can be built."""
        if self._unplanned == "compile":
            self._unplanned = "eager"

    def finish(self, report: Report, cache: Cache | None, planned: frozenset[str]) -> None:
        """Ends the boot: from here on the labels in `planned` are known to need no compile.

        Args:
            report: what the boot did.
            cache: where to save what a request compiles, if anywhere.
            planned: labels of the requests that are ready.
        """
        self.report = report
        self._cache = cache
        self._planned = planned
        atexit.register(self._save_at_exit)

    def _unplanned_reason(self, request: Request) -> str:
        known = ", ".join(sorted(self._planned)) or "nothing, since no request was warmed"
        if self._unplanned == "reject":
            raise UnplannedRequestError(
                f"the request {request.label!r} was not planned, so it might wait for a compile, which this server is"
                f" set to refuse (WARMSTART_UNPLANNED=reject); planned are: {known}."
            )
        how = "is compiled now" if self._unplanned == "compile" else "runs uncompiled"
        return f"{request.label} was not warmed, so what no compiled graph covers {how}"

    def _save_soon(self) -> None:
        """Saves in the background what a request compiled; a save that is under way takes it along or is repeated."""
        already = self._unsaved.is_set()
        self._unsaved.set()
        if self._cache is not None and not already:
            threading.Thread(target=self._save, name="warmstart-save", daemon=True).start()

    def _save(self) -> None:
        if self._cache is not None:
            self._unsaved.clear()
            print(f"warmstart: a request compiled; {self._cache.persist(self._persist_deadline_s).reason}", flush=True)

    def _save_at_exit(self) -> None:
        if self._cache is not None and self._unsaved.is_set():
            self._cache.persist(_EXIT_SAVE_S)

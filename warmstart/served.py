"""The booted model as a Predictor sees it: answers requests, never compiling in one unless that is the policy."""

from __future__ import annotations

import atexit
import threading
import time
from typing import TYPE_CHECKING, Any

from warmstart import inductor
from warmstart.inductor import Missing
from warmstart.models import Request, Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmstart.models import Model
    from warmstart.regions import Region
    from warmstart.report import Report
    from warmstart.saving import Saver


_RUNNING = threading.Lock()
"""One for all models of the process, as torch's stance and its counters are."""


class UnplannedRequestError(ValueError):
    """The request was not planned, and the policy is to refuse such."""


class Served:
    """A warm model. Call it with a request; it may be called from any thread, one request at a time runs.

    Attributes:
        report: what the boot did.
    """

    report: Report

    def __init__(self, model: Model, *, unplanned: str, fullgraph: bool, stop_grace_s: float) -> None:
        self._model = model
        self._unplanned = unplanned
        # A region that is one graph is refused before any of it has run. One with graph breaks might be refused half
        # way, and to run it again from its start would be wrong where it changes a key-value cache, say.
        self._uncompiled = Missing.REFUSED if fullgraph else Missing.EAGER
        self._missing = Missing.COMPILED if unplanned == "compile" else self._uncompiled
        self._stop_grace_s = stop_grace_s
        self._saver: Saver | None = None
        self._regions: Sequence[Region] = ()
        self._planned: frozenset[str] = frozenset()

    def __call__(self, request: Request) -> Result:
        """Answers one request.

        Raises:
            UnplannedRequestError: it was not planned and WARMSTART_UNPLANNED is `reject`.
        """
        planned = request.label in self._planned
        if not planned and self._unplanned == "reject":
            raise UnplannedRequestError(
                f"the request {request.label!r} was not planned, so it might wait for a compile, which this server is"
                f" set to refuse (WARMSTART_UNPLANNED=reject); planned are: {self._known()}."
            )
        # One lock round whatever may compile: Dynamo compiles in one thread at a time, and pipelines keep state.
        with _RUNNING, inductor.compiling(self._missing):
            for region in self._regions:
                region.uncovered = ""
            before, started = inductor.graphs(), time.perf_counter()
            outputs, refused = self._run(request)
            seconds, graphs = time.perf_counter() - started, inductor.graphs() - before
            reason = self._why_slower(request, planned, graphs, refused)
        return Result(outputs, seconds, graphs, reason)

    def _run(self, request: Request) -> tuple[list[Any], str]:
        """Answers a request; also says what of the model's own compiled code no graph covered, outside our regions."""
        try:
            return self._model.run(request), ""
        except RuntimeError as error:
            if not (refused := inductor.refusal(error)):
                raise
        with inductor.no_more_graphs():
            return self._model.run(request), refused

    def rehearse(self, request: Request) -> None:
        """Answers a planned request during the boot, when compiling is allowed."""
        with _RUNNING, inductor.compiling(Missing.COMPILED):
            self._model.run(request)

    def never_compile(self) -> None:
        """Has an unplanned request run uncompiled where the policy is to compile it, since nothing can be built."""
        if self._unplanned == "compile":
            self._unplanned = "eager"
            self._missing = self._uncompiled

    def finish(self, report: Report, saver: Saver | None, planned: frozenset[str], regions: Sequence[Region]) -> None:
        """Ends the boot: from here on the labels in `planned` are known to need no compile.

        Args:
            report: what the boot did.
            saver: saves what a request compiles, and what is not saved yet; None where nothing is saved.
            planned: labels of the requests that are ready.
            regions: what is compiled.
        """
        self.report = report
        self._saver = saver
        self._planned = planned
        self._regions = regions
        atexit.register(self.save, self._stop_grace_s)

    def save(self, timeout_s: float) -> bool:
        """Waits until all that was compiled is in the store, and brings `persisted` of the report up to date.

        It is saved in the background anyway, and once more at the process's exit, within WARMSTART_STOP_GRACE_S.

        Args:
            timeout_s: longest wait.

        Returns:
            Whether it is; True too where nothing is to be saved.
        """
        if self._saver is None:
            return True
        settled = self._saver.settle(timeout_s)
        self.report.persisted = [saved.row() for saved in self._saver.saves]
        return settled

    def _known(self) -> str:
        return ", ".join(sorted(self._planned)) or "nothing, since no request was warmed"

    def _why_slower(self, request: Request, planned: bool, graphs: int, refused: str) -> str:
        what = f"{request.label}{'' if planned else ' was not warmed, and'}"
        if uncovered := next((region for region in self._regions if region.uncovered), None):
            return f"{what} ran {uncovered.name} uncompiled where no graph covers it: {uncovered.uncovered}"
        if refused:
            return f"{what} ran again uncompiled where no graph of the model's own code covers it: {refused}"
        # Of a planned request that is not known.
        if full := next((region for region in self._regions if region.full and not planned), None):
            return f"{what} ran {full.name} uncompiled where none of its {full.full} graphs, the limit, covers it"
        if graphs:
            return f"{what} waited for a compile of {graphs} graph{'s' if graphs > 1 else ''}"
        if not planned and self._missing is Missing.EAGER:
            return f"{what} ran uncompiled where no graph covers it"
        return ""

"""The booted model as a Predictor sees it: answers requests, never compiling in one unless that is the policy."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, cast

from warmstart import inductor, process
from warmstart.inductor import Missing
from warmstart.models import Request, RequestError, Result

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from warmstart.lora import Fitted, Slots
    from warmstart.models import Model, TextModel
    from warmstart.regions import Region
    from warmstart.report import Report
    from warmstart.saving import Saver


_RUNNING = threading.Lock()
"""One for all models of the process, as torch's stance and its counters are."""


class UnplannedRequestError(ValueError):
    """The request was not planned, and the policy is to refuse such."""


@dataclass
class _Tally:
    """What a request has cost so far."""

    label: str
    planned: bool
    seconds: float = 0.0
    graphs: int = 0
    refused: str = ""
    """What of the model's own compiled code no graph covered, outside our regions."""
    loras: Fitted | None = field(default=None, repr=False)
    """What to put into the slots while it is answered; None where the model has none."""
    run: inductor.Run = field(default_factory=inductor.Run, repr=False)
    uncovered: list[str] = field(default_factory=list)
    """For each region why a call of it ran uncompiled; "" if all were covered."""


class Served:
    """A warm model. Call it with a request; it may be called from any thread, one request at a time runs.

    Attributes:
        report: what the boot did.
    """

    report: Report

    def __init__(
        self,
        model: Model,
        *,
        unplanned: str,
        fullgraph: bool,
        stop_grace_s: float,
        slots: Slots | None = None,
        on_cpu: bool = False,
    ) -> None:
        self._model = model
        self._on_cpu = on_cpu
        self._begun = threading.local()
        self._slots = slots
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
            RequestError: a LoRA that it names cannot be read or does not fit; the model stays as it was.
        """
        tally = self._tally(request)
        # One lock round whatever may compile: Dynamo compiles in one thread at a time, and pipelines keep state.
        with process.passing_threads(), _RUNNING, inductor.compiling(self._missing), self._counted(tally):
            self._begin()
            self._adapt(tally)
            outputs, tally.refused = self._run(request)
        return Result(outputs, tally.seconds, tally.graphs, self._why_slower(tally))

    def stream(self, request: Request) -> Stream:
        """Answers one request of a language model piece by piece.

        Each piece is made when it is asked for, and between two of them nothing is held: other requests may come in
        between, and a stream that is not read to its end costs nobody anything.

        Raises:
            UnplannedRequestError: it was not planned and WARMSTART_UNPLANNED is `reject`.
            RequestError: the model writes no text, or cannot answer this request.
        """
        if not hasattr(self._model, "stream"):
            raise RequestError(f"{type(self._model).__name__} writes no text that could be streamed; call it instead.")
        return Stream(self, cast("TextModel", self._model), request, self._tally(request))

    def _begin(self) -> None:
        """In the first request on a thread: later ones find Linux expecting that much work of it."""
        if self._on_cpu and not hasattr(self._begun, "on_this_thread"):
            self._begun.on_this_thread = True
            inductor.start_threads()

    def _tally(self, request: Request) -> _Tally:
        label = self._model.label(request)
        planned = label in self._planned
        if not planned and self._unplanned == "reject":
            raise UnplannedRequestError(
                f"the request {label!r} was not planned, so it might wait for a compile, which this server is"
                f" set to refuse (WARMSTART_UNPLANNED=reject); planned are: {self._known()}."
            )
        return _Tally(label, planned, loras=self._read(request))

    def _read(self, request: Request) -> Fitted | None:
        """The LoRAs of a request; also that there are none is something to be put in place of another request's."""
        if self._slots is not None:
            return self._slots.read(request.loras)
        if request.loras:
            raise RequestError(
                "the request names a LoRA, and the model was compiled without room for any, so it would be ignored; set"
                " WARMSTART_LORA_RANK to the largest rank that is to fit (the first boot with it compiles)."
            )
        return None

    def _adapt(self, tally: _Tally) -> None:
        """Has the model answer with the request's LoRAs and with no other's."""
        if self._slots is not None and tally.loras is not None:
            self._slots.put(tally.loras)

    @contextlib.contextmanager
    def _counted(self, tally: _Tally) -> Iterator[None]:
        """Adds to a tally what is done inside, which goes on from where its request was."""
        inductor.run_for(tally.run)
        before, started = inductor.graphs(), time.perf_counter()
        for region, why in zip(self._regions, tally.uncovered or [""] * len(self._regions), strict=True):
            region.uncovered = why
        try:
            yield
        finally:
            tally.uncovered = [region.uncovered for region in self._regions]
            tally.seconds += time.perf_counter() - started
            tally.graphs += inductor.graphs() - before

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
            inductor.run_for(inductor.Run())
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
        if self._slots is not None:
            # What the boot filled them with is not for whoever calls the model by himself.
            self._slots.put(self._slots.read(()))
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

    def _why_slower(self, tally: _Tally) -> str:
        planned, graphs = tally.planned, tally.graphs
        what = f"{tally.label}{'' if planned else ' was not warmed, and'}"
        for region, why in zip(self._regions, tally.uncovered, strict=True):
            if why:
                return f"{what} ran {region.name} uncompiled where no graph covers it: {why}"
        if tally.refused:
            return f"{what} ran again uncompiled where no graph of the model's own code covers it: {tally.refused}"
        # Of a planned request that is not known.
        if full := next((region for region in self._regions if region.full and not planned), None):
            return f"{what} ran {full.name} uncompiled where none of its {full.full} graphs, the limit, covers it"
        if graphs:
            return f"{what} waited for a compile of {graphs} graph{'s' if graphs > 1 else ''}"
        if not planned and self._missing is Missing.EAGER:
            return f"{what} ran uncompiled where no graph covers it"
        return ""


class Stream:
    """A text in the making: an iterator over its pieces.

    Attributes:
        tokens: how many were made so far.
    """

    def __init__(self, served: Served, model: TextModel, request: Request, tally: _Tally) -> None:
        self.tokens = 0
        self._served = served
        self._model = model
        self._request = request
        self._tally = tally
        self._text: list[str] = []
        self._pieces = model.stream(request)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        """Makes the next piece. No lock is held, nor anything of torch set, when it is handed out."""
        try:
            while (piece := self._step()) is not None:
                if piece:
                    self._text.append(piece)
                    return piece
            raise StopIteration
        except BaseException:
            process.end_idle_threads()  # at its end; between two pieces they would only be started again
            raise

    def result(self) -> Result:
        """The text so far and what it cost; the time between the pieces is the reader's own."""
        return Result(
            ["".join(self._text)], self._tally.seconds, self._tally.graphs, self._served._why_slower(self._tally)
        )

    def _step(self) -> str | None:
        """Makes one token; None after the last."""
        served, tally = self._served, self._tally
        with _RUNNING, inductor.compiling(served._missing), served._counted(tally):
            served._begin()
            # Another request may have come in between.
            served._adapt(tally)
            try:
                piece = self._next()
            except RuntimeError as error:
                if tally.refused or not (refused := inductor.refusal(error)):
                    raise
                # What is made anew begins with the pieces that were handed out, as the seed is the same.
                tally.refused = refused
                self._pieces = islice(self._model.stream(self._request), self.tokens, None)
                piece = self._next()
        self.tokens += piece is not None
        return piece

    def _next(self) -> str | None:
        if not self._tally.refused:
            return next(self._pieces, None)
        with inductor.no_more_graphs():
            return next(self._pieces, None)

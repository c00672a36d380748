"""The order of a boot; the only module that sees all others.

settings -> key -> restore -> load -> regions -> warm-up -> persist after each request -> verify -> report. A cache, a
store, a compiler or a compile that fails makes a boot slower, never wrong and never fatal; a model that fails is fatal.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmstart import bundle, identity, inductor, notes, process, toolchain, trace
from warmstart.bundle import Limits
from warmstart.cache import Cache, Persisted, PersistOutcome, Restored, RestoreOutcome, explain
from warmstart.key import compiler_trouble, lacks_compiler
from warmstart.leftover import Leftover, UnfitError
from warmstart.live import LiveDirectory, do_without, headers_in, prepare, set_aside
from warmstart.models import ModelError, family
from warmstart.models.own import adopt
from warmstart.report import Evidence, Outcome, Report, Stopwatch, decide, say, sentence
from warmstart.saving import Saver
from warmstart.served import Served
from warmstart.settings import Settings, SettingsError
from warmstart.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from warmstart.key import Key
    from warmstart.lora import Slots
    from warmstart.models import Model, Request
    from warmstart.regions import Part, Region
    from warmstart.warmup import Warmed

SHIPPED = "cache"
"""The store inside the image; it is read first and, unless another is set, written to."""

# coglet 0.23.1 loses what setup() prints just before it returns: of four boots on a busy core three lost the report
# without a pause, none with 0.1 s. To be taken out when READY waits for the log.
_LOG_S = 0.2
# READY waits no longer than this for the last save. A store nearby takes less, and the report then says what is saved.
_READY_S = 2.0
# The report warns of a region that takes so many times as long compiled as uncompiled, and so much of a request's time.
# On two busy cores single calls vary by a third; the smallest blocks lose microseconds, which nobody notices.
_SLOWER, _LOST = 1.5, 0.1
# Added to the restore's own deadline before the boot goes on without an answer.
_ANSWER_S = 5.0
# How long the imports wait for the restore at most: what a megabyte from a disk takes on a busy core.
_HEAD_START_S = 0.15
# Kind of the notes that say which part breaks the compile, and how, also where nothing was restored.
_FAILING = "failing-parts"


class CompileRequiredError(RuntimeError):
    """The model could not be compiled, and WARMSTART_COMPILE=required makes that fatal."""


def boot(
    plan: Sequence[Request],
    *,
    sources: Sequence[str] = (),
    load: Callable[[], object] | None = None,
    settings: Settings | None = None,
    publish: bool = True,
) -> Served:
    """Loads, compiles and warms the model, from the cache where it can.

    Args:
        plan: the requests to warm, each with a label of its own. What they need compiled is compiled here.
        sources: files whose text is part of the model's version, `[__file__]` of the Predictor at least.
        load: loads the model in place of WARMSTART_MODEL: gives an `OwnModel`, another object with the methods of
            `Model`, or a diffusers pipeline. Called once, beside the restore.
        settings: in place of those in the environment.
        publish: whether what is compiled goes to the store; without, every store stays as it is.

    Raises:
        SettingsError: a setting cannot be used.
        KeyFactError: a fact of the key cannot be read, a damaged weights file say.
        PlanError: the plan is empty or has a label twice.
        ModelError: the model cannot be loaded or fails uncompiled too.
        CompileRequiredError: it cannot be compiled and WARMSTART_COMPILE is `required`.
    """
    served = _Boot(plan, sources, load, settings or Settings.from_environment(), publish).run()
    say("\n".join(served.report.lines()))
    time.sleep(_LOG_S)
    return served


@dataclass
class _Restoring:
    """A restore on a thread of its own, beside the imports and the loading of weights."""

    cache: Cache
    stores: Sequence[Store]
    key: Key
    deadline_s: float

    def __post_init__(self) -> None:
        self._result: Restored | None = None
        self._why = ""
        self._thread = threading.Thread(target=self._work, name="warmstart-restore", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the container's limit of threads
            self._work()

    def _work(self) -> None:
        self._result = self.cache.restore(self.deadline_s)
        if self._result.outcome is RestoreOutcome.NOTHING:
            try:
                self._why = explain(self.key, self.stores)
            # The boundary: a store that cannot be asked leaves the boot without an explanation, no more.
            except Exception as error:  # noqa: BLE001
                self._why = f"{self._result.reason} ({error})"

    def wait(self) -> Restored:
        if self._thread.ident is not None:
            self._thread.join(min(self.deadline_s + _ANSWER_S, threading.TIMEOUT_MAX))
        if self._result is None:
            reason = f"nothing was restored: no store had answered {_ANSWER_S:g} s after the deadline"
            return Restored(RestoreOutcome.FAILED, reason, seconds=self.deadline_s + _ANSWER_S)
        return self._result

    def head_start(self) -> None:
        """Lets it go first for a moment, in which a store on a disk has mostly been read.

        Loading torch's libraries keeps all other Python threads from running for as long as it takes: a restore beside
        it took 0.5 s where it takes 0.06 s alone.
        """
        if self._thread.ident is not None:
            self._thread.join(_HEAD_START_S)

    def found_nothing(self) -> bool:
        """Whether it has ended already, and no store holds anything for this boot."""
        return self._result is not None and self._result.outcome is RestoreOutcome.NOTHING

    def why_nothing(self) -> str:
        """What differs from the nearest stored key, if nothing was stored for this one."""
        return self._why


@dataclass(frozen=True)
class _Suspects:
    """What was restored and set aside, until it is known whether it broke the compile."""

    broken_by: str
    """What went wrong with it, in words."""
    failures: frozenset[str]
    """The same by part, as `_failures` names them."""
    leftover: Leftover | None
    """Files of the live directory that an earlier boot left."""
    restorer: Cache | None
    """What had restored the version's own bundles, if they alone can have been to blame."""


class _Boot:
    """One boot, step by step."""

    def __init__(
        self,
        plan: Sequence[Request],
        sources: Sequence[str],
        load: Callable[[], object] | None,
        settings: Settings,
        publish: bool,
    ) -> None:
        self.plan = plan
        self.load = load
        self.publish = publish
        self.settings = settings
        self.clock = Stopwatch()
        self.warnings: list[str] = []
        self.savers: list[Saver] = []
        self.restored = Restored(RestoreOutcome.NOTHING, "")
        self.why_nothing = ""
        self.found = False
        # Torch's counters, and what kernels there were, before the attempts that `counts` and `kernels_built` are of.
        self.counted = inductor.Counts()
        self.had: frozenset[str] = frozenset()
        self.counts = inductor.Counts()
        self.kernels_built = 0
        self.parts: list[Part] = []
        self.warmed: list[Warmed] = []
        self.stores: list[Store] = []
        self.cache: Cache | None = None
        self.ready = False
        self.live: LiveDirectory | None = None
        self.leftover: Leftover | None = None
        self.nowhere = ""
        # Why nothing can be built here, and what of the plan that leaves uncompiled; empty where a compiler is.
        self.trouble = self.unbuilt = ""
        self.standing_in = False
        self.slots: Slots | None = None
        self.quantized = 0
        self.noted: Path | None = None
        self.headers: Path | None = None
        # Whether the compiler was put to work on an empty live directory before the first attempt.
        self.ahead = False
        self.onednn = False
        with self.clock.phase("key"):
            self.device = identity.device(settings)
            self.key = identity.current_key(plan, sources=sources, load=load, settings=settings)

    def run(self) -> Served:
        tracing = self._begin_trace()
        restoring = self._start_restore()
        if restoring is not None:
            with self.clock.phase("restore"):
                restoring.head_start()
        with self.clock.phase("imports"), process.uncollected():
            self._import(restoring)
        with self.clock.phase("weights"):
            model = self._load()
            self.slots = self._prepare(model)
        if restoring is not None:
            with self.clock.phase("restore"):
                self.restored = restoring.wait()
                self.why_nothing = restoring.why_nothing()
        served = Served(
            model,
            slots=self.slots,
            unplanned=self.settings.unplanned,
            fullgraph=self.settings.fullgraph,
            stop_grace_s=self.settings.stop_grace_s,
            on_cpu=self.device == "cpu",
        )
        outcome, reason = self._climb(served, model)
        if self.standing_in:
            served.never_compile()
        with self.clock.phase("workers"):
            inductor.shut_down_workers()
            process.end_idle_threads()  # of loading the model; predictions run on other threads
            if self.headers is not None and self.settings.unplanned != "compile":
                inductor.drop_headers(self.headers)
        self._settle()
        traced = self._read_trace() if tracing else None
        report = self._report(outcome, reason)
        report.facts["trace"] = traced
        # Where nothing is compiled no planned request is slower than another, so none is unplanned.
        nothing_compiles = outcome is Outcome.EAGER or self.standing_in
        ready = self.plan if nothing_compiles else [item.request for item in self.warmed]
        saver = self.savers[-1] if self.cache is not None else None
        served.finish(report, saver, frozenset(request.label for request in ready), self.regions)
        self.ready = True
        self._write(report)
        return served

    def _begin_trace(self) -> bool:
        if self.settings.trace_dir:
            try:
                trace.begin(self.settings.trace_dir)
            except trace.TraceError as error:
                self.warnings.append(str(error))
            else:
                return True
        return False

    def _read_trace(self) -> str:
        """Where the trace of the boot is, as a page for people if that can be made."""
        with self.clock.phase("trace"):
            try:
                return str(trace.report(self.settings.trace_dir) or self.settings.trace_dir)
            except trace.TraceError as error:
                self.warnings.append(str(error))
                return self.settings.trace_dir

    # --- restore ---------------------------------------------------------------------------------------------------

    def _start_restore(self) -> _Restoring | None:
        with self.clock.phase("key"):
            if self.settings.compile == "off":
                do_without(self.settings.live_dir or self.settings.torch_cache_dir)
                return None
            self.live = self._prepare_live()
            if self.live is None:
                return None
            self.stores = self._stores()
            self._use(cache := self._new_cache(self.live))
            return _Restoring(cache, self.stores, self.key, self.settings.restore_deadline_s)

    def _new_cache(self, live: LiveDirectory) -> Cache:
        target = self.stores[-1] if self.stores and self.publish else None
        reserve_bytes = Limits.reserve_bytes
        # In a small tmpfs (Docker's --tmpfs has 64 MiB) the usual reserve would keep out every restore, and compiling
        # anew takes more room than that. A neighbour may just be emptying a directory that is shared.
        with contextlib.suppress(OSError):
            reserve_bytes = min(reserve_bytes, shutil.disk_usage(live.path).total // 8)
        limits = Limits(max_raw_bytes=self.settings.max_bundle_bytes, reserve_bytes=reserve_bytes)
        if self.leftover is None:
            return Cache(self.stores, target, self.key, live.path, limits)
        cache = Cache(self.stores, target, self.key, live.path, limits, self.leftover.record)
        cache.know(self.leftover.entries)
        return cache

    def _prepare_live(self) -> LiveDirectory | None:
        name = f"{self.key.environment_digest[:16]}-{self.key.version_digest[:16]}"
        preset = self.settings.live_dir or self.settings.torch_cache_dir
        live, refused = prepare(preset, name)
        if live is not None and preset and live.path == Path(preset).absolute():
            try:
                self.leftover = Leftover(live.path)
                self.warnings += self.leftover.findings
            except (UnfitError, OSError) as error:
                self.warnings.append(f"{error}; this boot uses a directory of its own")
                live, refused = prepare("", name)
        self.nowhere = f"there is no place for compiled code: not {', not '.join(refused)}"
        if live is not None and refused:
            self.warnings.append(f"compiled code cannot be kept in {', nor in '.join(refused)}; it is in {live.path}")
        return live

    def _stores(self) -> list[Store]:
        """The image's own store first, then the configured one; the last is written to."""
        found: list[Store] = []
        for location in dict.fromkeys((SHIPPED, self.settings.cache_url)):
            try:
                found.append(open_store(location, self.settings.cache_secret))
            # The boundary: a store that cannot be opened is a store that holds nothing.
            except Exception as error:  # noqa: BLE001
                self.warnings.append(f"the store {location} cannot be used: {error}")
        return found

    # --- model -----------------------------------------------------------------------------------------------------

    def _import(self, restoring: _Restoring | None) -> None:
        import torch

        torch.set_num_threads(self.settings.threads)
        if restoring is not None and restoring.found_nothing():
            self._build_ahead()
        from warmstart import matmul, regions, warmup

        self._matmul, self._regions, self._warmup = matmul, regions, warmup
        if self.load is None:
            self._loader = self._family()
        warmup.check_plan(self.plan)
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ModelError(
                f"the device is {self.device}, but torch {torch.__version__} finds no usable NVIDIA GPU, so the model"
                " cannot run there; check the host's driver, or set WARMSTART_DEVICE=cpu."
            )

    def _build_ahead(self) -> None:
        """On a boot that must compile, has the compiler at work beside the imports, the weights and the tracing."""
        if self.device != "cpu" or self.live is None or lacks_compiler(self.key.environment):
            return
        if inductor.holds_code(self.live.path):
            return
        if self.leftover is not None:
            self.leftover.begin()  # what a boot leaves that dies from here on is known to be its own
        try:
            inductor.load()
            toolchain.bound_builds()
            if precompile := self._precompile_late(self.live):
                self.ahead = inductor.build_ahead(precompile, self.live.path)
        # The boundary: torch's private parts may be others in another version; the compile itself tells what matters.
        except Exception as error:  # noqa: BLE001
            self.warnings.append(f"nothing was built ahead of the first compile: {sentence(error)}")

    def _precompile_late(self, live: LiveDirectory) -> Callable[..., str] | None:
        self.headers = headers_in(live.path)
        return inductor.precompile_headers_in(self.headers)

    def _family(self) -> Callable[..., Model]:
        """What loads WARMSTART_MODEL. A family's libraries take seconds to import, so only its own are."""
        source, revision = self.settings.model, self.settings.model_revision
        if family(source, self.plan) == "causal":
            from warmstart.models.causal import CausalModel

            return functools.partial(CausalModel, source, revision=revision, plan=self.plan)
        from warmstart.models.diffusers import DiffusersModel

        return functools.partial(DiffusersModel, source, revision=revision)

    def _load(self) -> Model:
        if self.load is not None:
            return adopt(self.load(), self.device)
        return self._loader(device=self.device, dtype=identity.dtype(self.settings, self.device))

    def _prepare(self, model: Model) -> Slots | None:
        """Changes the layers of the parts that are to be compiled as the settings say, before any graph holds them."""
        parts = model.parts()
        chosen = {name: parts[name] for name in self.settings.parts or model.default_parts() if name in parts}
        if self.settings.quantize != "none":
            from warmstart.quantize import quantize

            self.quantized = quantize(chosen, self.settings.quantize, self.device)
        if not self.settings.lora_rank:
            return None
        from warmstart.lora import attach

        slots = attach(
            chosen,
            rank=self.settings.lora_rank,
            targets=self.settings.lora_targets,
            convert=getattr(model, "lora_tensors", dict),
        )
        slots.fill()
        return slots

    # --- the ladder: from the cache, else compiled, else eager -------------------------------------------------------

    def _climb(self, served: Served, model: Model) -> tuple[Outcome, str]:
        if self.settings.compile == "off":
            return self._eager(served, "WARMSTART_COMPILE is off")
        if self.live is None:
            return self._eager(served, self.nowhere)
        if not self._can_build(self.live):
            return self._eager(served, f"{self.trouble}. {self.why_nothing or self.restored.reason}")
        try:
            with self.clock.phase("regions"), process.uncollected():
                inductor.load()
                if self.device == "cpu":
                    self.onednn = self._matmul.use(self.key.environment["cpu vendor"])
                self._compile(model)
        except SettingsError as error:
            return self._eager(served, str(error))
        # The boundary: torch's private parts, on which some of this leans, may be others in another version.
        except Exception as error:  # noqa: BLE001
            self._regions.leave_uncompiled(self.regions)
            return self._eager(served, f"torch cannot be prepared for the compile: {sentence(error)}")
        cause = self._attempt(served, self.live)
        if cause and self.trouble and not self.standing_in and toolchain.works():
            self.trouble = ""
        if cause and self.trouble and not self.standing_in and self._stand_in(self.live):
            cause = self._attempt(served, self.live)
        if cause and self.standing_in:
            return self._eager(served, f"{cause}; and nothing can be built anew: {self.trouble}")
        if cause := self._without_what_fails(served, cause):
            return self._eager(served, f"the compile failed: {cause}")
        if all(part.outcome == "uncompiled" for part in self.parts):
            return self._eager(served, _uncompiled(self.parts))
        return self._judge()

    @property
    def regions(self) -> list[Region]:
        """All regions of all parts."""
        return [region for part in self.parts for region in part.regions]

    def _without_what_fails(self, served: Served, cause: str) -> str:
        """Goes on without the parts that break the compile; returns what still goes wrong, or an empty string.

        What was restored may be why they do, so all is compiled anew once, unless an earlier boot has noted that they
        break in this way without it too.
        """
        suspects: _Suspects | None = None
        suspected = self.found
        known: set[str] = set()
        anew: set[str] = set()
        while cause and self.live is not None:
            failures = _failures(self.regions, cause)
            if suspected and not (failures and failures <= {*notes.read(self.live.path, _FAILING)}):
                suspected = False
                self.warnings.append(f"with the restored cache the compile failed ({cause}); it was set aside")
                suspects, cause = self._attempt_cold(served, self.live, cause, failures)
                if suspects is not None:
                    self._note_failing(self.live, known)  # in the new directory, for the boot after this one
                continue
            known |= failures
            if not self.found:
                anew |= failures
                self._note_failing(self.live, failures)
            if not self._leave_out(cause):
                break
            cause = self._attempt(served, self.live, goes_on=True)
        if suspects is not None:
            # A part that broke in the same way without these files says nothing against them.
            mended = suspects.failures.isdisjoint(anew) if suspects.failures else not cause
            self._judge_suspects(suspects, guilty=mended and not self.trouble)
        return cause

    def _leave_out(self, cause: str) -> bool:
        """Serves the parts uncompiled whose regions broke the last attempt; says whether any other is left to try."""
        broken = {region.part for region in self.regions if region.broke}
        serving = [region for region in self.regions if not region.failed]
        guilty = [region for region in serving if region.part in broken]
        if not guilty or len(guilty) == len(serving):
            return False
        for region in guilty:
            region.give_up(cause)
        for region in self.regions:
            region.calls, region.broke = 0, False
        return True

    def _note_failing(self, live: LiveDirectory, failures: Iterable[str]) -> None:
        """Has later boots know these failures, unless they are the compiler's."""
        if self.trouble or not failures:
            return
        try:
            for failure in sorted(failures):
                notes.add(live.path, _FAILING, failure)
        except OSError as error:
            self.warnings.append(f"what fails to compile cannot be noted for later boots: {error}")
        else:
            self._save_soon()

    def _compile(self, model: Model) -> None:
        parts = model.parts()
        chosen = self.settings.parts or model.default_parts()
        if missing := [name for name in chosen if name not in parts]:
            raise SettingsError(
                f"WARMSTART_PARTS names {missing[0]!r}, which this model does not have; it has: {', '.join(parts)}."
            )
        self.parts = [
            self._regions.find(name, parts[name], strategy=self.settings.strategy, wanted=self.settings.regions)
            for name in chosen
        ]
        options = self._regions.CompileOptions(
            mode=self.settings.mode,
            dynamic=identity.dynamic(self.settings, self.plan),
            fullgraph=self.settings.fullgraph,
            recompile_limit=self._graph_limit(),
        )
        self._regions.compile_in_place(self.regions, options, self._save_soon)
        if self.live is not None and self.headers is None:
            self._precompile_late(self.live)

    def _graph_limit(self) -> int:
        """Most graphs of one region: a few for each planned request, far above what is needed, and for unplanned ones.

        Torch has a limit of its own, over all models of a process, which is no argument of the compile call.
        """
        unplanned = 64 if self.settings.unplanned == "compile" else 0
        return min(max(16, 4 * len(self.plan)) + unplanned, inductor.MAX_GRAPHS)

    def _can_build(self, live: LiveDirectory) -> bool:
        """Whether this machine can compile, or run what the live directory holds as if it could."""
        if self.device != "cpu":
            return True
        toolchain.bound_builds()
        if not lacks_compiler(self.key.environment):
            return True
        self.trouble = compiler_trouble(self.settings.compiler)
        return self._stand_in(live)

    def _stand_in(self, live: LiveDirectory) -> bool:
        """Goes on from what is compiled already, building nothing, if it is known by which compiler."""
        self.standing_in = toolchain.stand_in(live.path)
        if self.standing_in:
            self.warnings.append(f"{self.trouble}. What was compiled before is used; nothing new can be")
            self._forget()
        return self.standing_in

    def _forget(self) -> None:
        """Leaves no trace of an attempt before the next one."""
        inductor.forget()
        for region in self.regions:
            region.forget()

    def _attempt(self, served: Served, live: LiveDirectory, *, goes_on: bool = False) -> str:
        """Warms, checks and verifies; returns what went wrong in words, or an empty string.

        Args:
            served: the model.
            live: where compiled code lives.
            goes_on: from the attempt before. What that one compiled is still there, and counts as compiled.
        """
        self._remove_incomplete(live)
        if not goes_on:
            ahead, self.ahead = self.ahead, False
            # Restored by us, or by a platform into a directory of its own.
            self.found = not ahead and inductor.holds_code(live.path)
            self.had = frozenset() if ahead else inductor.kernels(live.path)
            self.counted = inductor.counts()
        if self.leftover is not None:
            self.leftover.begin()
        try:
            self._warm(served)
        # The boundary: compiler, cache and disk may raise anything. Whether it was the model is asked in `_eager`.
        except Exception as error:  # noqa: BLE001
            self.trouble = self.trouble or toolchain.trouble(error)
            return toolchain.trouble(error) or sentence(error)
        finally:
            self.counts = inductor.counts() - self.counted
            self.kernels_built = len(inductor.kernels(live.path) - self.had)
        cause = self._failed_check()
        if self.leftover is not None and not cause:
            self.leftover.end(self.cache.entries if self.cache is not None else ())
        return cause

    def _remove_incomplete(self, live: LiveDirectory) -> None:
        try:
            removed = bundle.remove_incomplete(live.path)
        except OSError as error:
            self.warnings.append(f"the live directory cannot be looked through: {error}")
            return
        if removed:
            self.warnings.append(
                f"{len(removed)} half-written files of a killed compile were removed from the live directory,"
                f" {removed[0]} for one; they are built anew"
            )

    def _attempt_cold(
        self, served: Served, live: LiveDirectory, broken_by: str, failures: frozenset[str]
    ) -> tuple[_Suspects | None, str]:
        """Sets aside what was restored, and compiles all anew; returns what was set aside, and what went wrong."""
        aside, refused = set_aside(live, self.key.version_digest[:16])
        if aside is None:
            return None, f"and there is no other place for compiled code: not {', not '.join(refused)}"
        self.live = aside
        leftover, self.leftover = self.leftover, None
        restored, restorer = self.restored, self.cache
        # What broke may be the version's own bundles, or what a directory that was set from outside held besides. Not
        # knowing which, the same paths are not published twice; the next boot finds that directory without them.
        own = restored.bundles and not restored.inherited
        mixed = leftover is not None and not leftover.was_empty
        self._use(None if own and mixed else self._new_cache(self.live))
        self.restored = Restored(RestoreOutcome.FAILED, "what was restored broke the compile and was set aside")
        self._forget()
        suspects = _Suspects(broken_by, failures, leftover, restorer if own and not mixed else None)
        return suspects, self._attempt(served, self.live)

    def _judge_suspects(self, suspects: _Suspects, *, guilty: bool) -> None:
        """Has later boots know that what was set aside is broken, or leaves it as good as any."""
        if suspects.leftover is not None:
            suspects.leftover.condemn() if guilty else suspects.leftover.give_up()
        if guilty and suspects.restorer is not None:
            arguments = (suspects.restorer, self.savers[-1], suspects.broken_by)
            noting = threading.Thread(target=self._condemn, args=arguments, daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread to be had: the next boot finds out again
                noting.start()
                noting.join(_READY_S)

    def _condemn(self, restorer: Cache, saver: Saver, broken_by: str) -> None:
        """Has bundles noted as broken once what was compiled in their place is saved; beside a slow store, later."""
        deadline_s = self.settings.persist_deadline_s
        saver.settle(deadline_s)
        better = {saved.name for saved in saver.saves if saved.outcome is PersistOutcome.PUBLISHED}
        if told := restorer.condemn(better, broken_by, deadline_s):
            say(f"warmstart: {told}") if self.ready else self.warnings.append(told)

    def _warm(self, served: Served) -> None:
        budget_s = self.settings.setup_budget_s
        ends = time.monotonic() + max(0.0, budget_s - self.clock.total_s()) if budget_s else None

        def warm(plan: Sequence[Request]) -> list[Warmed]:
            done: list[Warmed] = self._warmup.warm(
                served.rehearse,
                plan,
                before_each=self._check_next,
                after_each=lambda _: self._save_soon(),
                budget_ends=ends,
            )
            return done

        def work() -> None:
            self.warmed = self._warm_what_is_built(warm, ends) if self.standing_in else warm(self.plan)
            with self.clock.phase("verify"):
                self._warmup.verify(served.rehearse, self.warmed)

        with self.clock.phase("warm-up"):
            self._warmup.in_thread(work)

    def _warm_what_is_built(
        self, warm: Callable[[Sequence[Request]], list[Warmed]], ends: float | None
    ) -> list[Warmed]:
        """Warms the planned requests that need no build; the others are left to run uncompiled."""
        done: list[Warmed] = []
        for request in self.plan:
            if done and ends is not None and time.monotonic() >= ends:
                break
            try:
                done += warm([request])
            except Exception as error:
                self.unbuilt = toolchain.trouble(error)
                if not self.unbuilt:
                    raise
                for region in self.regions:
                    region.checking = False
        if not done:
            raise toolchain.BuildError(self.unbuilt)
        return done

    def _check_next(self) -> None:
        if self.settings.self_check:
            self._regions.check_next_call(self.regions)

    # --- saving ----------------------------------------------------------------------------------------------------

    def _use(self, cache: Cache | None) -> None:
        """Saves with this cache from here on, and with an earlier one no more."""
        for earlier in self.savers:
            earlier.close()
        self.cache = cache
        if cache is not None:
            self.savers.append(Saver(cache, self.settings.persist_deadline_s, self._tell_saved))

    def _save_soon(self) -> None:
        """After each graph, beside the next one's compile: a kill loses no more than the compile that it meets."""
        if self.cache is None or self.standing_in:
            return
        if self.live is not None and self.noted != self.live.path:
            self.noted = self.live.path
            self._note_compiler()
        self.savers[-1].soon()

    def _settle(self) -> None:
        """Waits a moment for the last save, so that the report can tell; a slow store is not waited for."""
        if self.cache is None:
            return
        with self.clock.phase("persist"):
            settled = self.savers[-1].settle(_READY_S)
        if not settled:
            last = self.savers[-1].saves[-1:]
            failed = bool(last) and last[0].outcome is PersistOutcome.FAILED
            reason = last[0].reason if failed else f"it had not ended after {_READY_S:g} s"
            self.warnings.append(f"not all is saved yet, which goes on in the background: {reason}")

    def _tell_saved(self, saved: Persisted) -> None:
        if self.ready:
            say(f"warmstart: what was compiled since: {saved.reason}")

    def _persisted(self) -> list[Persisted]:
        return [saved for saver in self.savers for saved in saver.saves]

    def _note_compiler(self) -> None:
        if self.device == "cpu" and self.live is not None:
            try:
                toolchain.note(self.live.path)
            # The boundary: in the middle of a region's call, whose compile went well.
            except Exception as error:  # noqa: BLE001
                self.warnings.append(f"which compiler was used cannot be noted: {sentence(error)}")

    def _failed_check(self) -> str:
        # One that is served uncompiled for good may have differed before.
        for region in (region for region in self.regions if not region.failed):
            for difference in region.differences:
                # Written so that a NaN fails too.
                if not difference <= region.tolerance:
                    region.broke = True
                    return (
                        f"{region.name} differs from its eager self by {difference:.1e} of the largest value,"
                        f" {region.tolerance:.0e} is allowed"
                    )
        return ""

    def _eager(self, served: Served, reason: str) -> tuple[Outcome, str]:
        """The last rung. What fails here too is the model's own fault."""
        if self.leftover is not None:
            self.leftover.give_up()
        if self.settings.compile == "required":
            raise CompileRequiredError(f"{reason}; WARMSTART_COMPILE=required makes that fatal.")
        for region in self.regions:
            region.give_up(region.failed or reason)
        try:
            with self.clock.phase("warm-up"):
                self._warmup.in_thread(lambda: served.rehearse(self.plan[0]))
        except Exception as error:
            raise ModelError(
                f"the model fails on the planned request {self.plan[0].label!r}, uncompiled too ({sentence(error)});"
                " correct the request in predict.py or the model."
            ) from error
        self.warmed = []
        return Outcome.EAGER, reason

    # --- report ----------------------------------------------------------------------------------------------------

    def _judge(self) -> tuple[Outcome, str]:
        counts = self.counts
        for region in self.regions:
            if slower := _slower(region, self.warmed):
                self.warnings.append(slower)
            if region.counts.fx_bypasses:
                self.warnings.append(f"torch refuses to cache {region.name}, so it compiles on every boot")
        for item in self.warmed:
            if item.graphs_again:
                self.warnings.append(f"{item.request.label} compiled {item.graphs_again} graphs when called again")
        outcome, reason = decide(
            Evidence(
                hits=counts.fx_hits,
                misses=counts.fx_misses,
                retraced=counts.aot_misses,
                bypasses=counts.fx_bypasses + counts.aot_bypasses,
                kernels_built=self.kernels_built,
                restored=self.found,
            )
        )
        if self.unbuilt:
            outcome = Outcome.PARTIAL
            reason = (
                f"{counts.fx_hits} graphs from the cache; {len(self.warmed)} of {len(self.plan)} planned requests run"
                f" compiled, the others uncompiled: {self.unbuilt}, and {self.trouble}"
            )
        elif len(self.warmed) < len(self.plan):
            reason += f"; warmed {len(self.warmed)} of {len(self.plan)} requests within WARMSTART_SETUP_BUDGET_S"
        if lacking := _uncompiled(self.parts):
            if self.settings.compile == "required":
                raise CompileRequiredError(f"{lacking}; WARMSTART_COMPILE=required makes that fatal.")
            reason += f"; {lacking}"
        if self.restored.inherited:
            reason += f"; {self.restored.reason}"
        elif outcome is not Outcome.WARM:
            reason += f". {self.why_nothing or self.restored.reason}"
        return outcome, reason

    def _report(self, outcome: Outcome, reason: str) -> Report:
        if self.device != "cpu" and self.settings.mode in ("reduce-overhead", "max-autotune"):
            self.warnings.append(
                f"WARMSTART_MODE={self.settings.mode} uses CUDA graphs, which belong to one thread, and each prediction"
                " runs on another; use max-autotune-no-cudagraphs"
            )
        boot_s = self.clock.total_s()
        return Report(
            outcome=outcome,
            reason=reason,
            boot_s=boot_s,
            phases=dict(self.clock.seconds),
            background={
                "restore": self.restored.seconds,
                "persist": sum(saved.seconds for saved in self._persisted()),
            },
            counts=asdict(self.counts) | {"kernels_built": self.kernels_built},
            parts=[_part_row(part) for part in self.parts],
            regions=[_region_row(region) for region in self.regions],
            requests=[_request_row(item) for item in self.warmed],
            restored=self.restored.row(),
            persisted=[saved.row() for saved in self._persisted()],
            facts=self._facts(),
            process=self._process(),
            warnings=self.warnings,
        )

    def _facts(self) -> dict[str, Any]:
        return {
            "environment": self.key.environment_digest,
            "version": self.key.version_digest,
            "device": self.device,
            "dtype": self.key.version["dtype"],
            "threads": self.settings.threads,
            "vector_isa": inductor.vector_isa() if self.device == "cpu" else None,
            "matmul": "oneDNN" if self.onednn else "torch",
            "dynamic": identity.dynamic(self.settings, self.plan),
            "strategy": self.settings.strategy,
            "quantization": self.settings.quantize + (f", {self.quantized} layers" if self.quantized else ""),
            "lora": self.key.version["lora"] + (f", {len(self.slots.layers)} slots" if self.slots else ""),
            "live_dir": str(self.live.path) if self.live else None,
            "live_dir_reason": self.live.reason if self.live else None,
        }

    def _process(self) -> dict[str, Any]:
        """What is left running, and the memory, when the model is ready."""
        children = process.children()
        if children:
            self.warnings.append(f"{len(children)} processes that the boot started still run: {children[0][:100]}")
        resident_bytes, peak_bytes = process.memory_bytes() or (None, None)
        return {
            "pid": os.getpid(),
            "resident_bytes": resident_bytes,
            "peak_bytes": peak_bytes,
            "threads": threading.active_count(),
            "children": children,
        }

    def _write(self, report: Report) -> None:
        if self.settings.report_path:
            try:
                Path(self.settings.report_path).write_text(report.json() + "\n")
            except OSError as error:
                report.warnings.append(f"the report cannot be written to WARMSTART_REPORT_PATH: {error}")


def _failures(regions: Sequence[Region], cause: str) -> frozenset[str]:
    """Names the parts that broke an attempt and how they did, in a way that is the same in each boot.

    Of what went wrong only the words count: numbers, addresses and paths may be others each time.
    """
    how = " ".join(word for word in cause.split() if not re.search(r"[\d/]", word))
    return frozenset(json.dumps([part, how]) for part in {region.part for region in regions if region.broke})


def _uncompiled(parts: Sequence[Part]) -> str:
    """Which parts are not compiled, or not all of them, and why."""
    outcomes = {"partly": "compiled in part only", "uncompiled": "not compiled"}
    return "; ".join(f"{part.name} is {outcomes[part.outcome]} ({part.failed})" for part in parts if part.failed)


def _slower(region: Region, warmed: Sequence[Warmed]) -> str:
    """Says so if requests are clearly slower for a region's being compiled; "" if not, or if that is not known."""
    if region.failed:
        return ""
    eager_s = _mean([speed.eager_s for speed in region.speeds]) or 0.0
    compiled_s = _mean([speed.compiled_s for speed in region.speeds]) or 0.0
    # Each request was run twice, to warm it and to verify.
    lost_s = (compiled_s - eager_s) * region.calls / max(1, 2 * len(warmed))
    steady_s = _mean([item.steady_s for item in warmed if item.steady_s is not None]) or 0.0
    if compiled_s <= _SLOWER * eager_s or lost_s <= _LOST * steady_s:
        return ""
    return (
        f"{region.name} takes {compiled_s / eager_s:.2f} times as long compiled as uncompiled, which costs each request"
        f" {lost_s:.3f} of {steady_s:.3f} s; leave its class out of WARMSTART_REGIONS, or its part out of"
        " WARMSTART_PARTS, if that stays so"
    )


def _part_row(part: Part) -> dict[str, Any]:
    return {"name": part.name, "outcome": part.outcome, "found": part.how, "reason": part.failed}


def _region_row(region: Region) -> dict[str, Any]:
    return {
        "name": region.name,
        "modules": len(region.modules),
        "calls": region.calls,
        **asdict(region.counts),
        "difference": max(region.differences, default=None),
        "tolerance": region.tolerance,
        "compile_s": {stage: sum(item.seconds[stage] for item in region.compiles) for stage in inductor.STAGES},
        "recompiles": [item.reason for item in region.compiles if item.reason],
        "eager_s": _mean([speed.eager_s for speed in region.speeds]),
        "compiled_s": _mean([speed.compiled_s for speed in region.speeds]),
    }


def _mean(seconds: list[float]) -> float | None:
    return statistics.fmean(seconds) if seconds else None


def _request_row(item: Warmed) -> dict[str, Any]:
    return {
        "label": item.request.label,
        "first_s": item.first_s,
        "graphs": item.graphs,
        "steady_s": item.steady_s,
        "graphs_again": item.graphs_again,
    }

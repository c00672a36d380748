"""Compiles the blocks of any module in place, counts and checks them. Knows no pipeline and no cache."""

from __future__ import annotations

import collections
import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from warmstart import blocks, inductor
from warmstart.arguments import canonical, flat
from warmstart.blocks import BlocksError
from warmstart.direct import Direct
from warmstart.guards import Asked, Guards, Known, Passes
from warmstart.inductor import Compile, Counts, Missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from warmstart.arguments import Flat

# Largest difference between a compiled region and its eager self, relative to the largest magnitude in the output.
# A fused kernel rounds elsewhere than the separate ones: some hundred units in the last place of the precision.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class CompileOptions:
    """How a region is compiled; the arguments of `torch.compile`."""

    mode: str
    dynamic: bool | None
    fullgraph: bool
    recompile_limit: int

    def arguments(self) -> dict[str, Any]:
        """As keyword arguments. The limit is passed per call: torch's configuration is lost between threads."""
        return {
            "mode": None if self.mode == "default" else self.mode,
            "dynamic": self.dynamic,
            "fullgraph": self.fullgraph,
            "recompile_limit": self.recompile_limit,
        }

    @property
    def remembers_guards(self) -> bool:
        """Whether compiled code can be called without torch: not where it goes on after a graph break, nor recorded."""
        return self.fullgraph and self.mode in {"default", "max-autotune-no-cudagraphs"}


# Of so many calls the fastest counts: others may have met whatever else the machine was doing.
_ROUNDS = 3


class Speed(NamedTuple):
    """Seconds of one call of a module, each the least of three, when nothing is left to compile."""

    eager_s: float
    compiled_s: float


@dataclass
class Region:
    """All modules of one class in one part, which share their graphs."""

    part: str
    class_name: str
    modules: list[nn.Module] = field(repr=False)
    within: nn.Module | None = field(default=None, repr=False)
    """What calls the modules; None if nothing is known of it, or if it is the only one of them."""
    calls: int = 0
    counts: Counts = field(default_factory=Counts)
    eager: bool = False
    """Set to serve the region uncompiled."""
    compiles: list[Compile] = field(default_factory=list, repr=False)
    """Torch's records of what was compiled or loaded in its calls."""
    speeds: list[Speed] = field(default_factory=list, repr=False)
    """Of each call that the self-check compared."""
    differences: list[float] = field(default_factory=list)
    """What the self-check measured: largest difference to eager, relative to the output's largest magnitude."""
    tolerance: float = 0.0
    checking: bool = field(default=False, repr=False)
    """Set to compare the next call with eager."""
    full: int = 0
    """The limit of graphs, once it is reached; calls that no graph covers then run uncompiled."""
    uncovered: str = ""
    """Why a call since this was last emptied ran uncompiled: what no graph covers. "" if all were covered."""
    failed: str = ""
    """Why it is served uncompiled for good; "" if it is not."""
    broke: bool = field(default=False, repr=False)
    """Whether the latest attempt to compile ended in a call of this region."""

    @property
    def name(self) -> str:
        """Part and class, as the report names the region."""
        return f"{self.part}.{self.class_name}"

    def forget(self) -> None:
        """Leaves nothing of an attempt that failed."""
        self.calls, self.counts, self.full, self.broke = 0, Counts(), 0, False
        self.compiles, self.speeds, self.differences = [], [], []

    def give_up(self, why: str) -> None:
        """Serves the region uncompiled from here on."""
        self.eager, self.failed = True, why


@dataclass
class Part:
    """A component of the model, and what became of the wish to compile it."""

    name: str
    regions: list[Region]
    how: str
    """How its regions were found, or why there are none, as the end of a sentence."""

    @property
    def failed(self) -> str:
        """Why it, or some region of it, is not compiled; "" if all is."""
        if not self.regions:
            return self.how
        causes = [f"{region.class_name}: {why}" for region in self.regions if (why := _unused(region))]
        return "; ".join(causes)

    @property
    def outcome(self) -> str:
        """`compiled`, `partly` compiled, or `uncompiled`."""
        unused = [bool(_unused(region)) for region in self.regions]
        return "uncompiled" if all(unused) else "partly" if any(unused) else "compiled"


def _unused(region: Region) -> str:
    return region.failed or ("" if region.calls else "no planned request calls it")


def find(part: str, module: nn.Module, *, strategy: str, wanted: Sequence[str] = ()) -> Part:
    """Says what of a part is to be compiled: its repeated blocks, by class, or it as a whole.

    Args:
        part: name of the component.
        module: the component.
        strategy: "regional" for the repeated blocks, "whole" for the component itself.
        wanted: class names in place of those that are found. A part that holds none of them has no region.
    """
    if strategy == "whole":
        found = blocks.whole(module, "as WARMSTART_STRATEGY says")
    else:
        try:
            found = blocks.find(module, wanted)
        except BlocksError as error:
            return Part(part, [], str(error))
    regions = [
        Region(part, name, modules, within=None if modules == [module] else module)
        for name, modules in found.groups.items()
    ]
    return Part(part, regions, found.how)


def compile_in_place(
    regions: Sequence[Region], options: CompileOptions, compiled_some: Callable[[], None] = lambda: None
) -> None:
    """Makes every region compile at its first call; names, types and state dict of the model stay as they are.

    Args:
        regions: what to compile.
        options: how.
        compiled_some: called after each call of a region that compiled a graph, on that call's thread.
    """
    inductor.keep_records()
    meter = _Meter(regions, options.recompile_limit, compiled_some)
    passes: dict[int, Passes] = {}
    for region in regions:
        own = passes.setdefault(id(region.within), Passes(region.within))
        if region.within is not None and options.remembers_guards:
            region.within._compiled_call_impl = own
        for module in region.modules:
            compiled = torch.compile(module.forward, **options.arguments())
            # What `Module.compile` sets, and `Module.__call__` uses. What the compiled code is given must be prepared
            # outside it, and hooks run outside it too: transformers collects hidden states by some that torch cannot
            # trace.
            guards = Guards(module, own) if options.remembers_guards else None
            module._compiled_call_impl = _Call(region, module, compiled, meter, guards)


def leave_uncompiled(regions: Sequence[Region]) -> None:
    """Undoes `compile_in_place`, also where it ended half way."""
    for region in regions:
        for module in [*region.modules, *([] if region.within is None else [region.within])]:
            module._compiled_call_impl = None


def check_next_call(regions: Sequence[Region]) -> None:
    """Has each region compare its next call with its eager self."""
    for region in regions:
        region.checking = True


class _Meter:
    """Tells how torch's counters moved since it was asked last. Shared by all regions, as only they compile.

    It also knows the graphs of each class, since torch's limit is on those of one code object, wherever its modules
    are. Beyond the limit torch fails under fullgraph, and without it goes eager and says nothing.
    """

    def __init__(self, regions: Sequence[Region], limit: int, compiled_some: Callable[[], None]) -> None:
        self.limit = limit
        self.compiled_some = compiled_some
        self._regions: dict[type[nn.Module], list[Region]] = collections.defaultdict(list)
        for region in regions:
            self._regions[type(region.modules[0])].append(region)
        self._last = inductor.counts()

    def moved(self) -> Counts | None:
        """The difference if a graph was compiled since, else None: in steady state a call costs one look-up."""
        if inductor.graphs() == self._last.graphs:
            return None
        last, self._last = self._last, inductor.counts()
        return self._last - last

    def limit_reached(self, kind: type[nn.Module]) -> None:
        """Notes it in all regions of a class if no further graph of it may be made."""
        if sum(region.counts.graphs for region in self._regions[kind]) >= self.limit:
            for region in self._regions[kind]:
                region.full = self.limit


class _Call:
    """What `Module.__call__` calls in place of the compiled code: prepares arguments, counts, checks."""

    def __init__(
        self,
        region: Region,
        module: nn.Module,
        compiled: Callable[..., Any],
        meter: _Meter,
        guards: Guards | None = None,
    ) -> None:
        self._region = region
        self._guards = guards
        self._module = module
        self._forward = vars(module).get("forward")
        self._eager: Callable[..., Any] = module._call_impl
        self._compiled = compiled
        self._meter = meter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        region = self._region
        region.calls += 1
        # A whole-model compile that meets this call while tracing goes through to the module, and so does eager.
        replaced = vars(self._module).get("forward") is not self._forward
        if region.eager or replaced or torch.compiler.is_compiling():
            if self._guards:
                self._guards.interrupt()
            if replaced and not region.uncovered:
                # By one of diffusers' caches, for example, which means the module as it is.
                region.uncovered = f"the forward of a {region.class_name} was replaced"
            return self._eager(*args, **kwargs)
        given = found = None
        if self._guards and not region.checking:
            given = flat(args, kwargs)
            found = self._guards.find(given)
            if given and isinstance(found, Direct):
                return self._directly(found, given)
        seen: set[int] = set()
        args = canonical(args, seen)
        kwargs = canonical(kwargs, seen)
        # The module may write into what it is given, so its eager self gets what it was before.
        kept = copy.deepcopy((args, kwargs)) if region.checking else None
        try:
            if self._guards and given and isinstance(found, Known):
                return self._guards.run(found, given, args, kwargs)
            output = self._covered(*args, **kwargs)
        except Exception:
            region.broke = True
            raise
        finally:
            if moved := self._meter.moved():
                self._note(moved)
        if self._guards and given and isinstance(found, Asked) and not (moved or region.full or region.uncovered):
            self._guards.called(found, given, args, kwargs)
        if region.checking and kept is not None:
            region.checking = False
            region.speeds += self._speed(kept)
            self._check(output, self._eager(*kept[0], **kept[1]))
        return output

    def _directly(self, found: Direct, given: Flat) -> Any:
        try:
            return found(given.tensors)
        except Exception:
            self._region.broke = True
            raise

    def _note(self, moved: Counts) -> None:
        """Counts what this call had compiled."""
        self._region.counts += moved
        self._region.compiles += inductor.take_compiles()
        self._meter.limit_reached(type(self._module))
        self._meter.compiled_some()

    def _covered(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled code, or, where no graph covers the call and none may be made, the module as it is."""
        region = self._region
        # The refusal names its reason, which takes milliseconds: once for each request is enough.
        if region.full or region.uncovered:
            with inductor.no_more_graphs():
                return self._between_hooks(*args, **kwargs)
        try:
            return self._between_hooks(*args, **kwargs)
        except RuntimeError as error:
            if why := inductor.refusal(error):
                region.uncovered = why
            elif why := inductor.untraceable(error):
                region.uncovered = why
                region.give_up(why)
            else:
                raise
        return self._eager(*args, **kwargs)

    def _speed(self, given: Any) -> Iterator[Speed]:
        """Times the module on what it was given, which it may write into; nothing if that would compile once more."""
        # Without hooks, which may keep what they see.
        calls = (self._module.forward, self._compiled)
        rounds: list[Speed] = []
        try:
            with inductor.no_more_graphs(Missing.REFUSED):
                for _ in range(_ROUNDS):
                    eager_s, compiled_s = (_timed(call, copy.deepcopy(given)) for call in calls)
                    rounds.append(Speed(eager_s, compiled_s))
        except RuntimeError as error:
            if not inductor.refusal(error):
                raise
            return
        yield Speed(*map(min, zip(*rounds, strict=True)))

    def _has_hooks(self) -> bool:
        return bool(self._module._forward_hooks or self._module._forward_pre_hooks)

    def _between_hooks(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled code, and the module's hooks, if it has any, before and after it."""
        module = self._module
        if not self._has_hooks():
            return self._compiled(*args, **kwargs)
        own = vars(module).get("forward")
        module.forward = self._compiled
        try:
            return self._eager(*args, **kwargs)
        finally:
            vars(module).pop("forward")
            if own is not None:
                module.forward = own

    def _check(self, output: Any, expected: Any) -> None:
        pairs = list(zip(_tensors(output), _tensors(expected), strict=True))
        for got, want in pairs:
            scale = want.abs().max().clamp(min=torch.finfo(want.dtype).tiny)
            difference = ((got - want).abs().max() / scale).item()
            self._region.differences.append(difference)
            self._region.tolerance = max(self._region.tolerance, TOLERANCES.get(want.dtype, 1e-4))


def _timed(call: Callable[..., Any], given: Any) -> float:
    args, kwargs = given
    # A GPU works on after the call that gave it the work has returned.
    wait: Any = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    started = time.perf_counter()
    call(*args, **kwargs)
    wait()
    return time.perf_counter() - started


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors in a region's output, in order: a tensor, or a tuple, list or dictionary of such.

    Outputs of diffusers and transformers (`BaseOutput`, `ModelOutput`) are dictionaries.
    """
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)

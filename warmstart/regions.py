"""Finds the repeated blocks of any module and compiles them in place. Knows no pipeline and no cache."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from warmstart import inductor
from warmstart.inductor import Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Largest difference between a compiled region and its eager self, relative to the largest magnitude in the output.
# A fused kernel rounds elsewhere than the separate ones: some hundred units in the last place of the precision.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class RegionsError(RuntimeError):
    """No region can be found; the text says where it was looked for and what to set."""


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


@dataclass
class Region:
    """All modules of one class in one part, which share their graphs."""

    part: str
    class_name: str
    modules: list[nn.Module] = field(repr=False)
    calls: int = 0
    counts: Counts = field(default_factory=Counts)
    eager: bool = False
    """Set to serve the region uncompiled."""
    differences: list[float] = field(default_factory=list)
    """What the self-check measured: largest difference to eager, relative to the output's largest magnitude."""
    tolerance: float = 0.0
    checking: bool = field(default=False, repr=False)
    """Set to compare the next call with eager."""
    full: int = 0
    """The limit of graphs, once it is reached; calls that no graph covers then run uncompiled."""
    uncovered: str = ""
    """Why a call since this was last emptied ran uncompiled: what no graph covers. "" if all were covered."""

    @property
    def name(self) -> str:
        """Part and class, as the report names the region."""
        return f"{self.part}.{self.class_name}"


def find(part: str, module: nn.Module, *, strategy: str, wanted: Sequence[str] = ()) -> list[Region]:
    """Groups the modules of a part that are to be compiled by their class.

    Args:
        part: name of the component.
        module: the component.
        strategy: "regional" for the repeated blocks, "whole" for the component itself.
        wanted: class names in place of those that are found.

    Raises:
        RegionsError: there is no repeated block, or a wanted class does not occur.
    """
    if strategy == "whole":
        return [Region(part, type(module).__name__, [module])]
    names = list(wanted) or repeated_classes(module)
    groups: dict[str, list[nn.Module]] = {name: [] for name in names}
    for found in _outermost(module, set(names)):
        groups[type(found).__name__].append(found)
    present = [Region(part, name, modules) for name, modules in groups.items() if modules]
    # A model may declare a block class that this configuration of it does not use.
    if not present:
        raise RegionsError(
            f"{type(module).__name__} ({part}) holds no module of class {', '.join(names) or 'any repeated block'}, so"
            f" there is no region to compile; set WARMSTART_REGIONS to one of: {', '.join(_class_names(module))}."
        )
    return present


def repeated_classes(module: nn.Module) -> list[str]:
    """Names of the repeated block classes: as the model's class declares them, else those of its longest lists.

    diffusers declares `_repeated_blocks`, transformers `_no_split_modules` (blocks never split over devices, which
    are the layers). Without either, every class that fills a ModuleList of at least two counts.
    """
    for attribute in ("_repeated_blocks", "_no_split_modules"):
        if declared := getattr(module, attribute, None):
            return sorted(declared)
    sizes: collections.Counter[str] = collections.Counter()
    for child in module.modules():
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len({type(item) for item in child}) == 1:
            sizes[type(child[0]).__name__] += len(child)
    return sorted(sizes)


def compile_in_place(
    regions: Sequence[Region], options: CompileOptions, compiled_some: Callable[[], None] = lambda: None
) -> None:
    """Makes every region compile at its first call; names, types and state dict of the model stay as they are.

    Args:
        regions: what to compile.
        options: how.
        compiled_some: called after each call of a region that compiled a graph, on that call's thread.
    """
    meter = _Meter(options.recompile_limit, compiled_some)
    for region in regions:
        for module in region.modules:
            module.compile(**options.arguments())
            # `compile` stores what `Module.__call__` then uses. It is wrapped, since what the compiled code is given
            # must be prepared outside it.
            compiled: Any = module._compiled_call_impl
            module._compiled_call_impl = _Call(region, module, compiled, meter)


def leave_uncompiled(regions: Sequence[Region]) -> None:
    """Undoes `compile_in_place`, also where it ended half way."""
    for region in regions:
        for module in region.modules:
            module._compiled_call_impl = None


def check_next_call(regions: Sequence[Region]) -> None:
    """Has each region compare its next call with its eager self."""
    for region in regions:
        region.checking = True


def canonical(value: Any) -> Any:
    """Gives tensors (any shape) the strides that their shape implies, also in tuples and lists.

    The first block of a transformer sees a contiguous tensor, later ones a slice of a joint one; Dynamo guards on
    strides, so each pattern costs a graph. `contiguous` copies only where elements lie apart; `view` then gives
    dimensions of size 1, whose strides mean nothing, the implied ones. An output that a region writes into a sliced
    input would be lost; blocks of diffusers and transformers return theirs.
    """
    if isinstance(value, torch.Tensor):
        return value.contiguous().view(value.shape) if value.layout is torch.strided else value
    if type(value) in (tuple, list):
        return type(value)(canonical(item) for item in value)
    return value


class _Meter:
    """Tells how torch's counters moved since it was asked last. Shared by all regions, as only they compile.

    It also counts the graphs of each class, since torch's limit is on those of one code object, wherever its modules
    are. Beyond the limit torch fails under fullgraph, and without it goes eager and says nothing.
    """

    def __init__(self, limit: int, compiled_some: Callable[[], None]) -> None:
        self.limit = limit
        self.graphs: collections.Counter[type[nn.Module]] = collections.Counter()
        self.compiled_some = compiled_some
        self._last = inductor.counts()

    def moved(self) -> Counts | None:
        """The difference if a graph was compiled since, else None: in steady state a call costs one look-up."""
        if inductor.graphs() == self._last.graphs:
            return None
        last, self._last = self._last, inductor.counts()
        return self._last - last


class _Call:
    """What `Module.__call__` calls in place of the compiled code: prepares arguments, counts, checks."""

    def __init__(self, region: Region, module: nn.Module, compiled: Callable[..., Any], meter: _Meter) -> None:
        self._region = region
        self._class = type(module)
        self._eager: Callable[..., Any] = module._call_impl
        self._compiled = compiled
        self._meter = meter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        region = self._region
        region.calls += 1
        # A whole-model compile that meets this call while tracing goes through to the module, and so does eager.
        if region.eager or torch.compiler.is_compiling():
            return self._eager(*args, **kwargs)
        args = canonical(args)
        kwargs = {name: canonical(value) for name, value in kwargs.items()}
        if self._meter.graphs[self._class] >= self._meter.limit:
            region.full = self._meter.limit
        try:
            output = self._covered(*args, **kwargs)
        finally:
            if moved := self._meter.moved():
                region.counts += moved
                self._meter.graphs[self._class] += moved.graphs
                self._meter.compiled_some()
        if region.checking:
            region.checking = False
            self._check(output, self._eager(*args, **kwargs))
        return output

    def _covered(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled code, or, where no graph covers the call and none may be made, the module as it is."""
        region = self._region
        # The refusal names its reason, which takes milliseconds: once for each request is enough.
        if region.full or region.uncovered:
            with inductor.no_more_graphs():
                return self._compiled(*args, **kwargs)
        try:
            return self._compiled(*args, **kwargs)
        except RuntimeError as error:
            if not (why := inductor.refusal(error)):
                raise
            region.uncovered = why
        return self._eager(*args, **kwargs)

    def _check(self, output: Any, expected: Any) -> None:
        pairs = list(zip(_tensors(output), _tensors(expected), strict=True))
        for got, want in pairs:
            scale = want.abs().max().clamp(min=torch.finfo(want.dtype).tiny)
            difference = ((got - want).abs().max() / scale).item()
            self._region.differences.append(difference)
            self._region.tolerance = max(self._region.tolerance, TOLERANCES.get(want.dtype, 1e-4))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors in a region's output, a tensor or a tuple of them, in order."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _outermost(module: nn.Module, names: set[str]) -> Iterator[nn.Module]:
    """Modules of the named classes that are in no other of them: a compiled region compiles what it calls."""
    for child in module.children():
        if type(child).__name__ in names:
            yield child
        else:
            yield from _outermost(child, names)


def _class_names(module: nn.Module) -> list[str]:
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList)]
    names = {type(item).__name__ for child in lists for item in child}
    return sorted(names or {type(child).__name__ for child in module.children()})

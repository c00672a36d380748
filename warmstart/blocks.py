"""Finds the repeated blocks of any module; knows how libraries declare them, nothing of compiling or of pipelines."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Blocks of a class are repeated if, on average, so many are equal in shape; others would each be a graph of its own.
_EQUAL = 2
# A class whose blocks hold less than this share of what the largest one's hold is not worth graphs of its own.
_WORTHWHILE = 1 / 20
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class BlocksError(RuntimeError):
    """The wanted classes do not occur; the text says where they were looked for and what to set."""


@dataclass(frozen=True)
class Blocks:
    """What of a part is compiled by itself."""

    groups: dict[str, list[nn.Module]]
    """By class name, the modules of that class that lie in no other of them."""
    how: str
    """How they were found, as the end of a sentence: "as FluxTransformer2DModel declares"."""


def find(module: nn.Module, wanted: Sequence[str] = ()) -> Blocks:
    """The blocks of a module: those wanted, else those it declares, else those its lists repeat, else it as a whole.

    Args:
        module: a model, or a component of one.
        wanted: class names in place of those that are found. The module's own class means it as a whole.

    Raises:
        BlocksError: no module of a wanted class occurs.
    """
    kind = type(module).__name__
    if wanted:
        if kind in wanted:
            return whole(module, "as WARMSTART_REGIONS says")
        if groups := _grouped(module, set(wanted)):
            return Blocks(groups, "as WARMSTART_REGIONS says")
        raise BlocksError(
            f"{kind} holds no module of class {' or '.join(wanted)}, so there is nothing to compile; set"
            f" WARMSTART_REGIONS to some of: {', '.join(class_names(module))}."
        )
    if groups := _grouped(module, set(_declared(module, module))):
        return Blocks(groups, f"as {kind} declares")
    if groups := _worthwhile(_grouped(module, _repeated(module))):
        return Blocks(groups, f"as the lists of {kind} repeat them")
    others = [name for name in class_names(module) if name != kind]
    hint = f", which has no list of equal blocks (WARMSTART_REGIONS may name {', '.join(others)})" if others else ""
    return whole(module, f"as a whole{hint}")


def whole(module: nn.Module, how: str) -> Blocks:
    """The module itself as its only block."""
    return Blocks({type(module).__name__: [module]}, how)


def class_names(module: nn.Module) -> list[str]:
    """Classes that may be named as blocks: what lists hold, else what the module holds, and its own for the whole."""
    lists = [child for child in module.modules() if isinstance(child, _CONTAINERS)]
    names = {type(item).__name__ for child in lists for item in _items(child)}
    return sorted((names or {type(child).__name__ for child in module.children()}) | {type(module).__name__})


def _declared(module: nn.Module, root: nn.Module) -> Iterator[str]:
    """Class names that the module declares as its blocks, else those that its children declare, if in `root`.

    diffusers declares `_repeated_blocks`. `_no_split_modules`, of transformers and of diffusers, are never split over
    devices: the layers, and embeddings that occur once and are not worth a graph.
    """
    repeated = getattr(module, "_repeated_blocks", None) or ()
    unsplit = getattr(module, "_no_split_modules", None) or ()
    names = [name for name in repeated if _grouped(root, {name})]
    names = names or [name for name in unsplit if len(_grouped(root, {name}).get(name, ())) > 1]
    yield from names
    for child in () if names else module.children():
        yield from _declared(child, root)


def _repeated(module: nn.Module) -> set[str]:
    """Class names of which lists, however nested, hold equal blocks; where a class has too few, those inside it count.

    The levels of a VAE's decoder are one class, and nearly each has another width; but in them are equal ones.
    """
    names = set()
    for child in module.modules():
        if isinstance(child, _CONTAINERS):
            counts = collections.Counter(_shape(item) for item in _items(child) if any(True for _ in item.children()))
            names |= {shape[0].__name__ for shape, count in counts.items() if count > 1}
    while unequal := {name for name, group in _grouped(module, names).items() if _equal(group) < _EQUAL}:
        names -= unequal
    return names


def _equal(group: Sequence[nn.Module]) -> float:
    return len(group) / len({_shape(module) for module in group})


def _items(container: nn.Module) -> Iterator[nn.Module]:
    for item in container.children():
        if isinstance(item, _CONTAINERS):
            yield from _items(item)
        else:
            yield item


def _shape(module: nn.Module) -> tuple[type[nn.Module], tuple[tuple[str, tuple[int, ...]], ...]]:
    """What two blocks must have in common to share their graphs, as far as can be seen without running them."""
    tensors = chain(module.named_parameters(), module.named_buffers())
    return type(module), tuple((name, tuple(tensor.shape)) for name, tensor in tensors)


def _worthwhile(groups: dict[str, list[nn.Module]]) -> dict[str, list[nn.Module]]:
    sizes = {name: sum(p.numel() for module in group for p in module.parameters()) for name, group in groups.items()}
    least = _WORTHWHILE * max(sizes.values(), default=0)
    return {name: group for name, group in groups.items() if sizes[name] >= least}


def _grouped(module: nn.Module, names: set[str]) -> dict[str, list[nn.Module]]:
    """By class name, in order, the modules of those classes that lie in no other of them."""
    groups: dict[str, list[nn.Module]] = {}
    for found in _outermost(module, names):
        groups.setdefault(type(found).__name__, []).append(found)
    return dict(sorted(groups.items()))


def _outermost(module: nn.Module, names: set[str]) -> Iterator[nn.Module]:
    """Modules of the named classes that are in no other of them: a compiled block compiles what it calls."""
    for child in module.children():
        if type(child).__name__ in names:
            yield child
        else:
            yield from _outermost(child, names)

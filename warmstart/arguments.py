"""What a block is called with: strides that make no difference, and the tensors apart from all else."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

CONSTANTS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.Size}
)

# What AOTAutograd puts on the outputs of a graph for sizes of any value: which those are. Dynamo heeds it when it
# compiles, and no guard looks at it (torch/_functorch/_aot_autograd/runtime_wrappers.py).
_NOT_GUARDED = {"_dynamo_propagated_dynamic_indices"}


def canonical(value: Any, seen: set[int] | None = None) -> Any:
    """Gives tensors (any shape) the strides that their shape implies, also in tuples, lists and dictionaries.

    The first block of a transformer sees a contiguous tensor, later ones a slice of a joint one; Dynamo guards on
    strides, so each pattern costs a graph. `contiguous` copies only where elements lie apart; `view` then gives
    dimensions of size 1, whose strides mean nothing, the implied ones. An output that a region writes into a sliced
    input would be lost; blocks of diffusers and transformers return theirs. Lists and dictionaries stay the caller's
    own, since a module may leave something in them (the video VAEs keep what they saw of earlier frames there).

    Args:
        value: what a region is called with, or a part of it.
        seen: identities of tensors that the same call was given before. One that comes again is given as another
            object: Dynamo guards on two arguments' being one.
    """
    if isinstance(value, torch.Tensor):
        return _with_implied_strides(value, set() if seen is None else seen)
    if type(value) not in (tuple, list, dict):
        return value
    seen = set() if seen is None else seen
    if type(value) is tuple:
        return tuple([canonical(item, seen) for item in value])
    if type(value) is list:
        value[:] = [canonical(item, seen) for item in value]
    else:
        value.update({name: canonical(item, seen) for name, item in value.items()})
    return value


class Flat(NamedTuple):
    """The arguments of a call, apart."""

    tensors: list[torch.Tensor]
    """In order."""
    form: tuple[Any, ...]
    """All else: containers, names, constants, and where the tensors are, also in their memory."""


def flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flat | None:
    """Takes arguments apart; None if there is anything but plain tensors, constants and containers of them."""
    tensors: list[torch.Tensor] = []
    form: list[Any] = [len(args), *kwargs]
    if _take_apart(args, tensors, form) and _take_apart(kwargs.values(), tensors, form):
        return Flat(tensors, tuple(form))
    return None


def _take_apart(values: Iterable[Any], tensors: list[torch.Tensor], form: list[Any]) -> bool:
    # This runs for each call of a block.
    for value in values:
        kind = type(value)
        form.append(kind)
        if kind is torch.Tensor:
            # An attribute may be asked for, or say that a size of it is dynamic.
            if value.__dict__ and value.__dict__.keys() != _NOT_GUARDED:
                return False
            form.append(value.storage_offset())
            tensors.append(value)
        elif kind in CONSTANTS:
            form.append(value)
        elif kind is tuple or kind is list:
            form.append(len(value))
            if not _take_apart(value, tensors, form):
                return False
        elif kind is dict and all(type(name) is str for name in value):
            form.append(tuple(value))
            if not _take_apart(value.values(), tensors, form):
                return False
        else:
            return False
    return True


def _with_implied_strides(tensor: torch.Tensor, seen: set[int]) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor
    # To look costs a tenth of what making another tensor does.
    if id(tensor) in seen or tensor.stride() != _implied_strides(tensor.shape):
        return tensor.contiguous().view(tensor.shape)
    seen.add(id(tensor))
    return tensor


@functools.lru_cache(maxsize=1024)
def _implied_strides(shape: torch.Size) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))

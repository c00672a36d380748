"""Has the graph of a whole module hold its repeated blocks as sub-graphs, each compiled once; knows no settings."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn


def nest(groups: Mapping[str, Sequence[nn.Module]]) -> None:
    """Makes every block a region of whatever graph calls it, in place: a graph has the code of each class once.

    A block called outside a compile does what it did. Names, types and state dict of the model stay as they are.

    Args:
        groups: blocks by class; those of one class share their code where shapes agree.
    """
    for modules in groups.values():
        region = torch.compiler.nested_compile_region(_apart(type(modules[0]).forward))
        for module in modules:
            module.forward = types.MethodType(region, module)


def flatten(groups: Mapping[str, Sequence[nn.Module]]) -> None:
    """Undoes `nest`, also where it ended half way."""
    for modules in groups.values():
        for module in modules:
            vars(module).pop("forward", None)


def _apart(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with each tensor that it returns in memory of its own.

    Torch 2.13 refuses a region that returns two slices of one tensor, and one that returns what it was given. A clone
    that keeps the strides of a slice passes, but what follows then reads it by other strides: wrong values, and nothing
    says so. Contiguous ones are right. Can go when a region may return slices (torch/_higher_order_ops/
    invoke_subgraph.py).
    """

    def region(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return torch.utils._pytree.tree_map_only(torch.Tensor, _contiguous_copy, forward(module, *args, **kwargs))

    return region


def _contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)

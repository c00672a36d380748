"""Products of matrices on processors for which torch's library for them is not made; knows graphs, not models.

Torch 2.13 computes a linear layer in float32 on a CPU with MKL, which uses half of an AMD processor: 200 GFLOP/s on two
cores of one with AVX-512, where oneDNN, which torch holds as well and uses for the narrower types, reaches 420
(docs/decisions.md). In compiled graphs such layers go to oneDNN; an eager model is left as it is. To be taken out when
torch chooses by the processor (pytorch/pytorch has no setting for it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

if TYPE_CHECKING:
    from torch.fx import Graph, Node

VENDORS = frozenset({"AuthenticAMD"})
"""Whose processors, as in /proc/cpuinfo; others were not measured."""

MIN_ROWS = 32
MIN_MULTIPLICATIONS = 1 << 22
"""Below either a call of oneDNN costs more than it saves: it brings the weights into its own order each time. Measured
with 32 to 4096 rows and weights from 64x64 to 3072x3072: about half of MKL's time above, up to three times it below."""

_aten = torch.ops.aten


def use(vendor: str) -> bool:
    """Has `beside` add the pass from now on where it is of use; returns whether it is.

    Args:
        vendor: the processor's, as in /proc/cpuinfo.
    """
    global _pass
    libraries = (torch.backends.mkl, torch.backends.mkldnn)
    if vendor not in VENDORS or not all(library.is_available() for library in libraries):
        return False
    _accept_any_weights()
    _pass = _pass or LinearPass()
    return True


def beside(theirs: Any) -> Any:
    """What `post_grad_custom_post_pass` of Inductor's configuration is to be: a pass that somebody set stays alone."""
    return _pass if theirs is None else theirs


class LinearPass(CustomGraphPass):
    """Gives the linear layers of a graph to oneDNN, where that is faster."""

    def uuid(self) -> bytes:
        """In Inductor's key of each graph."""
        return get_hash_for_files((__file__,))

    def __call__(self, graph: Graph) -> None:
        """Replaces nodes in place."""
        for node in list(graph.nodes):
            if (found := _linear(node)) is None:
                continue
            x, weight, bias = found
            with graph.inserting_before(node):
                new = graph.call_function(_onednn(), (x, weight, bias, "none", [], ""))
            new.meta.update(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)


_pass: LinearPass | None = None


def _onednn() -> Any:
    return torch.ops.mkldnn._linear_pointwise.default


def _linear(node: Any) -> tuple[Node, Node, Node | None] | None:
    """Input, weight and bias of a node that is a linear layer worth replacing; None of any other."""
    if node.kwargs:
        return None
    if node.target is _aten.addmm.default:
        bias, x, transposed = node.args
    elif node.target is _aten.mm.default:
        bias, (x, transposed) = None, node.args
    else:
        return None
    if transposed.target is not _aten.permute.default or list(transposed.args[1]) != [1, 0]:
        return None
    weight = transposed.args[0]  # one of the graph's arguments, or computed in it from 8 bits
    values = [item.meta["val"] for item in (x, weight, bias) if item is not None]
    if any(value.dtype != torch.float32 or value.device.type != "cpu" for value in values):
        return None
    if not values[1].is_contiguous():
        return None
    # What addmm would spread over rows or columns; oneDNN's bias has a number for each output.
    if bias is not None and tuple(values[2].shape) != (values[1].shape[0],):
        return None
    return (x, weight, bias) if _worth_it(values[0].shape[0], *values[1].shape) else None


def _worth_it(rows: int | torch.SymInt, *weight: int) -> bool:
    """Whether a product of so many rows is faster; of sizes of any value by the one that the graph was made for."""
    count = rows if isinstance(rows, int) else rows.node.hint
    if count is None or not all(isinstance(size, int) for size in weight):
        return False
    return count >= MIN_ROWS and count * weight[0] * weight[1] >= MIN_MULTIPLICATIONS


def _accept_any_weights() -> None:
    """Has Inductor take this operation also with weights that are no constants of the graph.

    Torch's lowering is for frozen models, where each graph has its own weights; here all blocks share one.
    """
    from torch._inductor import ir, lowering, mkldnn_ir
    from torch._inductor.virtualized import V

    theirs = lowering.lowerings[_onednn()]
    if hasattr(theirs, "any_weights"):
        return

    def lower(x: Any, w: Any, *rest: Any, layout: Any = None) -> Any:
        if w.get_name() in V.graph.constants:
            return theirs(x, w, *rest, layout)
        made = mkldnn_ir.LinearUnary.create(x, w, *rest)  # type: ignore[no-untyped-call]
        return made if isinstance(made, ir.TensorBox) else ir.TensorBox.create(made)

    lower.any_weights = True  # type: ignore[attr-defined]
    lowering.lowerings[_onednn()] = lower

"""Calls the graph that compiled code is made round, and spares that code.

What Dynamo makes of a block's `forward` is a function: it looks up each parameter by its path, calls the compiled
graph with these and the tensors among its arguments, and puts what comes back in the shape that `forward` would have
returned. For one module and one kind of call the same goes to the same places each time, so it is watched once. The
graph is one of Inductor's inside functions of AOTAutograd, which for inference mostly hand on what they are given;
where they did, Inductor's is called. Knows Python's bytecode, and neither guards nor regions.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from warmstart.arguments import CONSTANTS, canonical, flat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from warmstart.arguments import Flat

# Instructions that only look something up, or make something new. No jumps, so all of them run once.
_PURE = (
    "BINARY_SUBSCR", "BUILD_", "CACHE", "CALL", "COPY", "DELETE_FAST", "DUP_", "EXTENDED_ARG", "KW_NAMES",
    "LIST_EXTEND", "LOAD_", "NOP", "POP_TOP", "PRECALL", "PUSH_NULL", "RESUME", "RETURN_VALUE", "ROT_", "STORE_FAST",
    "SWAP", "UNPACK_SEQUENCE",
)  # fmt: skip
# More than this round a graph is something unknown.
_MOST_ROUND = 1000
_WATCHING = threading.Lock()
# The only global beside the graph: a file of torch's, whose functions below tell sizes where they are symbolic.
_UTILITIES = "__import_torch_dot__dynamo_dot_utils"
# All attributes: where modules have their parameters and buffers, and what tells sizes.
_ATTRIBUTES = {
    "_modules", "_parameters", "_buffers", "size", "stride", "storage_offset", "call_size", "call_stride",
    "call_storage_offset",
}  # fmt: skip


class _OtherError(Exception):
    """What was watched is not of the kind that can be done without the code."""


class Direct(NamedTuple):
    """A compiled graph, and all that it is given and gives back."""

    graph: Callable[[list[Any]], Sequence[Any]]
    constants: list[Any]
    """In their places, None in the others."""
    own: list[tuple[int, weakref.ref[torch.Tensor]]]
    """Places and parameters or buffers of the module; weakly, or old weights would stay beside new ones."""
    places: list[tuple[int, int]]
    """Of the inputs, and which of the call's tensors goes there."""
    odd: list[int]
    """Those tensors that have to be given canonical strides."""
    result: Callable[[Sequence[Any], list[torch.Tensor]], Any]

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        """Calls the graph with the tensors of another call of the same kind; returns what the module would."""
        for number in self.odd:
            tensors[number] = canonical(tensors[number])
        inputs = self.constants.copy()
        for place, parameter in self.own:
            inputs[place] = parameter()
        for place, number in self.places:
            inputs[place] = tensors[number]
        return self.result(self.graph(inputs), tensors)


@functools.lru_cache(maxsize=256)
def graph_name(code: types.CodeType) -> str:
    """The global by which code calls its graph; "" if it may do anything but look things up and call that."""
    used = set()
    for step in dis.get_instructions(code):
        if not step.opname.startswith(_PURE):
            return ""
        if step.opname == "LOAD_GLOBAL":
            used.add(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval not in _ATTRIBUTES:
            return ""
    [name, *others] = used - {_UTILITIES} or [""]
    return name if name.startswith("__compiled_fn_") and not others else ""


def watched(
    function: types.FunctionType,
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    own: dict[int, weakref.ref[torch.Tensor]],
) -> tuple[Any, Direct | None]:
    """Calls compiled code and watches how it calls its graph.

    Args:
        function: the code; `graph_name` knows its graph.
        module: its first argument.
        args: the others, with canonical strides.
        kwargs: the same.
        own: parameters and buffers of the module by their identities.

    Returns:
        What it returned, and how to do without it; None if that cannot be told.
    """
    given = flat(args, kwargs)
    name = graph_name(function.__code__)
    graph = function.__globals__[name]
    outer: list[_Seen] = []

    def watching(*inputs: Any) -> Any:
        outputs = graph(*inputs)
        outer.append(_Seen(lambda inputs: graph(*inputs), inputs, outputs))
        return outputs

    # Globals of its own: another thread may run the same code.
    alike = types.FunctionType(function.__code__, {**function.__globals__, name: watching})
    alike.__defaults__, alike.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    with _watched_inside(graph) as inner:
        result = alike(module, *args, **kwargs)
    # Otherwise it left something in a list or a dictionary.
    if not given or len(outer) != 1 or not _alike(given, flat(args, kwargs)):
        return result, None
    # One output more is an input that Inductor changed, and what is outside it puts that in its place.
    if len(inner) == 1 and [*map(id, inner[0].outputs)] == [*map(id, outer[0].outputs)]:
        with contextlib.suppress(_OtherError):
            return result, _direct(inner[0], result, given.tensors, own)
    with contextlib.suppress(_OtherError):
        return result, _direct(outer[0], result, given.tensors, own)
    return result, None


def _alike(given: Flat, after: Flat | None) -> bool:
    return after is not None and after.form == given.form and [*map(id, after.tensors)] == [*map(id, given.tensors)]


class _Seen(NamedTuple):
    graph: Callable[[list[Any]], Sequence[Any]]
    inputs: Sequence[Any]
    outputs: Sequence[Any]


def _direct(seen: _Seen, result: Any, tensors: list[torch.Tensor], own: dict[int, weakref.ref[torch.Tensor]]) -> Direct:
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    inputs = [*enumerate(seen.inputs)]
    places = [(place, numbers[id(item)]) for place, item in inputs if id(item) in numbers]
    parameters = [(place, own[id(item)]) for place, item in inputs if id(item) in own and own[id(item)]() is item]
    known = {place for place, _ in (*places, *parameters)}
    constants = [None if place in known else _constant(item) for place, item in inputs]
    return Direct(seen.graph, constants, parameters, places, [], _recipe(result, seen.outputs, numbers))


@contextlib.contextmanager
def _watched_inside(graph: Any) -> Iterator[list[_Seen]]:
    """Within it, what Inductor's part of a graph is called with is seen; nothing if there is none."""
    seen: list[_Seen] = []
    inner = _of_inductor(graph)
    if inner is None:
        yield seen
        return
    call = inner.current_callable

    def watching(inputs: list[Any]) -> Any:
        kept = [*inputs]  # the callee empties the list
        outputs = call(inputs)
        seen.append(_Seen(call, kept, outputs))
        return outputs

    # One at a time, or one would take the other for Inductor's. Calls of other threads are seen too: two are too many.
    with _WATCHING:
        inner.current_callable = watching
        try:
            yield seen
        finally:
            inner.current_callable = call


def _of_inductor(graph: Any) -> Any:
    """Inductor's part of a graph: the one that the functions round it lead to; None if that is not so."""
    try:
        from torch._inductor.output_code import CompiledFxGraph
    except ImportError:
        return None  # another version of torch
    found: dict[int, Any] = {}
    seen = {id(graph): graph}
    left = [graph]
    for item in left:
        if isinstance(item, CompiledFxGraph):
            found[id(item)] = item
            continue
        leads_to: list[Any] = []
        if isinstance(item, types.FunctionType):
            for cell in item.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty one
                    leads_to.append(cell.cell_contents)
        elif type(item).__module__.startswith("torch._functorch."):
            leads_to += getattr(item, "__dict__", {}).values()
        left += [other for other in leads_to if id(other) not in seen]
        seen |= {id(other): other for other in leads_to}
        if len(seen) > _MOST_ROUND:
            return None
    return found.popitem()[1] if len(found) == 1 else None


def _constant(value: Any) -> Any:
    """An input that is the same in each call of the kind."""
    if type(value) in CONSTANTS:
        return value
    raise _OtherError


def _recipe(value: Any, outputs: Sequence[Any], numbers: dict[int, int]) -> Callable[[Any, Any], Any]:
    """How to make what the code returned of what the graph gave, and of the call's tensors."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        for place, output in enumerate(outputs):
            if output is value:
                return lambda outputs, tensors: outputs[place]
        if id(value) in numbers:
            number = numbers[id(value)]
            return lambda outputs, tensors: tensors[number]
    elif kind in CONSTANTS:
        return lambda outputs, tensors: value
    elif kind is tuple or kind is list:
        items = [_recipe(item, outputs, numbers) for item in value]
        return lambda outputs, tensors: kind([item(outputs, tensors) for item in items])
    elif kind is dict:
        named = {name: _recipe(item, outputs, numbers) for name, item in value.items()}
        return lambda outputs, tensors: {name: item(outputs, tensors) for name, item in named.items()}
    raise _OtherError

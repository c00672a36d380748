"""Spares the later calls of a module within one run of the model the evaluation of torch's guards.

Dynamo keeps for each code object what it compiled, and guards: what must still be so for the compiled code to be right.
It evaluates them in each call, and those of a transformer's block look at hundreds of attributes: 0.3 to 0.4 ms of CPU
time for each block and step, a tenth of what the reference transformer's blocks take, whatever the model's size. Here
they are evaluated in the first call of a run, and in any later one for which something that they look at may have
changed. Knows torch's private parts, and nothing of regions; without those parts each call evaluates them as before.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from warmstart import inductor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# More kinds of call than this in one run are not remembered: each evaluates the guards.
_MOST_KINDS = 64
# A module that leads to more dictionaries than this is not watched: to look at them would cost what the guards do.
_MOST_DICTIONARIES = 1000

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)
# What a module or its helpers may refer to, and what cannot change without another object in its place. A tensor's
# shape can, but nobody changes that within a run.
_FIXED = (*_CONSTANTS, torch.Tensor, type, types.BuiltinFunctionType, types.ModuleType, torch.Size)
# Attributes of a module which torch does not guard (hooks, and what of it is saved), and what calls the compiled code.
_NOT_GUARDED = (
    "_hooks",
    "_hooks_with_kwargs",
    "_hooks_always_called",
    "_non_persistent_buffers_set",
    "_compiled_call_impl",
)


class _UnwatchableError(Exception):
    """Something can change that cannot be watched."""


class _Watch:
    """Dictionaries and lists that guards may look into, and how they were."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self._dictionaries: dict[int, dict[Any, Any]] = {}
        self._lists: list[tuple[list[Any] | set[Any], list[Any], list[int]]] = []
        seen: set[int] = set()
        for root in roots:
            self._follow(root, seen)
        self._watched = list(self._dictionaries.values())
        self._versions = list(map(_dict_version, self._watched))

    def unchanged(self) -> bool:
        """Whether nothing was set, added or removed in any of them since."""
        if list(map(_dict_version, self._watched)) != self._versions:
            return False
        # By identity: tensors have an equality of their own.
        return all([*map(id, now)] == before for now, _, before in self._lists)

    def _follow(self, value: Any, seen: set[int]) -> None:
        if isinstance(value, _FIXED) or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, nn.Module):
            if value._forward_hooks or value._forward_pre_hooks:
                raise _UnwatchableError
            self._add(getattr(type(value).forward, "__globals__", {}))
            self._add(attributes := vars(value))
            for item in (item for name, item in attributes.items() if not name.endswith(_NOT_GUARDED)):
                self._follow(item, seen)
        elif isinstance(value, dict):
            self._add(value)
            for item in value.values():
                self._follow(item, seen)
        elif isinstance(value, (list, set)):
            # What is in it is kept, so that nothing else gets its identity.
            self._lists.append((value, items := list(value), [*map(id, items)]))
            for item in items:
                self._follow(item, seen)
        elif isinstance(value, (tuple, frozenset)):
            for item in value:
                self._follow(item, seen)
        elif isinstance(value, types.FunctionType):
            if value.__closure__:
                raise _UnwatchableError
            self._add(value.__globals__)
        elif isinstance(value, types.MethodType):
            self._follow(value.__func__, seen)
            self._follow(value.__self__, seen)
        elif hasattr(value, "__dict__") and not any(vars(kind).get("__slots__") for kind in type(value).__mro__):
            self._follow(vars(value), seen)
        else:
            raise _UnwatchableError

    def _add(self, dictionary: dict[Any, Any]) -> None:
        self._dictionaries[id(dictionary)] = dictionary
        if len(self._dictionaries) > _MOST_DICTIONARIES:
            raise _UnwatchableError


class _Known(NamedTuple):
    """A kind of call whose guards held, and what must still be as it was before the call that evaluated them."""

    state: Any
    """Torch's record of its global state: grad mode, autocast, determinism and so on."""
    ambient: tuple[Any, ...]
    watches: tuple[_Watch, ...]
    objects: tuple[weakref.ref[Any], ...]
    """What was among the arguments. It is not kept: keys and values of a text may be most of a GPU's memory."""
    code: Callable[..., Any] | None = None
    """What torch ran for it."""

    def holds(self) -> bool:
        """Whether guards that held need not be evaluated again."""
        return bool(
            self.state.check() and self.ambient == _ambient() and all(watch.unchanged() for watch in self.watches)
        )


class Guards:
    """The calls of one module for which torch's guards held in this run."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forward = _function(module) if _HAS_PARTS else None
        self._run = -1
        self._known: dict[tuple[Any, ...], _Known] = {}
        self._watch: _Watch | None = None
        self._next: tuple[tuple[Any, ...], _Known] | None = None

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        """The compiled code to call with the module and these arguments; None if the guards must be evaluated.

        Args:
            args: tensors of the strides that their shapes imply, in tuples, lists and dictionaries, and other values.
            kwargs: the same.
        """
        self._next = None
        if self._forward is None:
            return None
        if self._run != inductor.run():
            self._run = inductor.run()
            self._known.clear()
        kind: list[Any] = []
        objects: list[Any] = []
        if not (_describe(args, kind, objects) and _describe(kwargs, kind, objects)):
            return None
        signature = tuple(kind)
        known = self._known.get(signature)
        if known is not None and known.holds():
            return known.code
        # What is so now, before the call: the module may change itself in it, which the next call's guards have to see.
        try:
            self._next = signature, self._present(signature, objects)
        except (_UnwatchableError, TypeError):
            self._forward = None  # nor will that be watchable later, and to find it out takes time
        return None

    def called(self, covered: bool) -> None:
        """Notes how the call went that `find` was asked about last.

        Args:
            covered: torch had compiled code for it, and compiled nothing.
        """
        (found, self._next), forward = (self._next, None), self._forward
        if not covered or found is None or forward is None or len(self._known) >= _MOST_KINDS:
            return
        # Torch has the one that it used last in front.
        entries = _entries(forward.__code__)
        if not entries or (code := entries[0].code).co_freevars != forward.__code__.co_freevars:
            return
        function = types.FunctionType(
            code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
        )
        function.__kwdefaults__ = forward.__kwdefaults__
        signature, present = found
        self._known[signature] = present._replace(code=function)

    def _present(self, signature: tuple[Any, ...], objects: list[Any]) -> _Known:
        """What must stay as it is; raises `TypeError` for an object of which none can know when it is gone."""
        if self._watch is None or not self._watch.unchanged():
            self._watch = _Watch([self._module])
        watches = (self._watch, _Watch(objects)) if objects else (self._watch,)
        forget = functools.partial(_drop, weakref.ref(self), signature)
        references = tuple(weakref.ref(item, forget) for item in objects)
        return _Known(torch._C._dynamo.guards.GlobalStateGuard(), _ambient(), watches, references)


def _drop(guards: weakref.ref[Guards], signature: tuple[Any, ...], _: object) -> None:
    """Forgets a kind of call with an object that is gone: another one may get its identity."""
    if (found := guards()) is not None:
        found._known.pop(signature, None)


def _function(module: nn.Module) -> types.FunctionType | None:
    """The function that is a module's `forward`, if it is one of its class."""
    forward = module.forward
    if isinstance(forward, types.MethodType) and isinstance(forward.__func__, types.FunctionType):
        return forward.__func__
    return None


def _describe(value: Any, kind: list[Any], objects: list[Any]) -> bool:
    """Appends all that guards look at in an argument; objects that have to be watched are appended to `objects`.

    Returns:
        False if there is something that cannot be described.
    """
    cls = type(value)
    if cls is torch.Tensor or cls is nn.Parameter:
        if value.layout is not torch.strided:
            return False
        kind += (value.shape, value.dtype, value.device, value.requires_grad, value.is_inference())
        return True
    kind.append(cls)
    if cls in _CONSTANTS:
        kind.append(value)
        return True
    if isinstance(value, tuple) or cls is list:
        kind.append(len(value))
        return all(_describe(item, kind, objects) for item in value)
    if cls is dict:
        kind.append(tuple(value))
        return all(_describe(item, kind, objects) for item in value.values())
    if isinstance(value, torch.Tensor):  # a subclass, which may be anything
        return False
    kind.append(id(value))
    objects.append(value)
    return True


def _ambient() -> tuple[Any, ...]:
    """What guards look at of torch's modes, beside its global state."""
    return torch.is_inference_mode_enabled(), torch._C._len_torch_function_stack()


try:
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list as _entries
    from torch._C._dynamo.guards import dict_version as _dict_version
except ImportError:
    _HAS_PARTS = False  # another version of torch
else:
    _HAS_PARTS = True

"""Spares the later calls of a module within one run of the model the evaluation of torch's guards.

Dynamo keeps for each code object what it compiled, and guards: what must still be so for the compiled code to be right.
It evaluates them in each call, and those of a transformer's block look at hundreds of attributes: 0.3 to 0.5 ms of CPU
time for each block and step, a tenth of what the reference transformer's blocks take, whatever the model's size. Here
they are evaluated in the first call of a run, and in any later one for which something that they look at may have
changed. Only for modules of torch and diffusers, which keep what they depend on in their attributes, and only for calls
with plain arguments: what code of other origin depends on cannot be known. Knows torch's private parts, and nothing of
regions; without those parts each call evaluates guards as before.
"""

from __future__ import annotations

import inspect
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from warmstart import inductor

if TYPE_CHECKING:
    from collections.abc import Callable

LIBRARIES = ("torch", "diffusers", "warmstart")
"""Top packages whose modules are known to depend on nothing but their attributes and their files' globals."""

# More kinds of call than this in one run are not remembered: each evaluates the guards.
_MOST_KINDS = 64
# A module that leads to more than this is not watched: to look at it would cost what the guards do.
_MOST_WATCHED = 1000
# A module that was found changed so often, and spared never since, is looked at no more: that takes time too.
_MOST_CHANGES = 16

_CONSTANTS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.Size}
)
_BUILT_IN = frozenset({dict, list, set, tuple, frozenset})
# Attributes of a module which torch does not guard (hooks, and what of it is saved), and what calls the compiled code.
_NOT_GUARDED = frozenset(name for name in vars(nn.Module()) if "_hooks" in name) | {
    "_non_persistent_buffers_set",
    "_compiled_call_impl",
}


class _UnwatchableError(Exception):
    """Something can change that cannot be watched."""


class _Watch:
    """All that a module's guards may look at in its attributes, and how that was."""

    def __init__(self, module: nn.Module) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self._dictionaries: dict[int, dict[Any, Any]] = {}
        self._lists: list[list[Any] | set[Any]] = []
        self._objects: dict[int, Any] = {}
        self._count = 0
        self._follow(module)
        self._all = list(self._dictionaries.values())
        self._instances = [item for item in self._objects.values() if type(item) not in _BUILT_IN]
        self._parameters = list(self.tensors.values())
        # Nothing else may get the identity of what was in a list.
        self._kept = [list(items) for items in self._lists]
        self._now = self._state()

    def unchanged(self) -> bool:
        """Whether nothing was set, added, removed or put in another's place since."""
        return self._state() == self._now

    def _state(self) -> tuple[Any, ...]:
        return (
            # CPython gives a dictionary another version with each change.
            [*map(_dict_version, self._all)],
            [*map(type, self._instances)],
            # `Module.to` puts other data in a parameter, and no dictionary changes.
            [(item.shape, item.stride(), item.dtype, item.device, item.requires_grad) for item in self._parameters],
            # By identity: tensors have an equality of their own.
            [[*map(id, items)] for items in self._lists],
        )

    def _follow(self, value: Any) -> None:
        kind = type(value)
        if kind in _CONSTANTS or id(value) in self._objects or id(value) in self.tensors:
            return
        self._count += 1
        if self._count > _MOST_WATCHED:
            raise _UnwatchableError
        if kind is torch.Tensor or kind is nn.Parameter:
            self._require(_is_plain(value))
            self.tensors[id(value)] = value
        elif kind is types.FunctionType:
            self._follow_function(value)
        elif not (issubclass(kind, type) or kind in (types.BuiltinFunctionType, types.ModuleType)):
            self._objects[id(value)] = value
            self._follow_object(value, kind)

    def _follow_object(self, value: Any, kind: type) -> None:
        if kind in (list, set):
            self._lists.append(value)
        elif kind not in (tuple, frozenset):
            self._require(kind is dict or _of_library(kind.__module__))
            if isinstance(value, nn.Module):
                self._require(not value._forward_hooks and not value._forward_pre_hooks)
                self._follow_function(type(value).forward)
            else:
                self._require(kind is dict or not any(vars(base).get("__slots__") for base in kind.__mro__))
            if isinstance(value, dict):
                self._dictionaries[id(value)] = value
                self._follow_all(value.values())
            if kind is not dict:
                self._dictionaries[id(vars(value))] = vars(value)
                skipped = _NOT_GUARDED if isinstance(value, nn.Module) else ()
                self._follow_all([item for name, item in vars(value).items() if name not in skipped])
            return
        self._follow_all(list(value))

    def _follow_all(self, values: Any) -> None:
        for value in values:
            self._follow(value)

    def _follow_function(self, function: Any) -> None:
        """What a function depends on beside its arguments: the globals of its file. A closure may hold anything."""
        self._require(type(function) is types.FunctionType and _of_library(function.__module__))
        self._require(function.__closure__ is None)
        self._dictionaries[id(function.__globals__)] = function.__globals__

    @staticmethod
    def _require(watchable: bool) -> None:
        if not watchable:
            raise _UnwatchableError


def _of_library(module: Any) -> bool:
    # A function that was made by `exec` may have none.
    return isinstance(module, str) and module.partition(".")[0] in LIBRARIES


class Asked(NamedTuple):
    """A call whose guards have to be evaluated, and what was so before it."""

    signature: tuple[Any, ...]
    state: Any
    """Torch's record of its global state: grad mode, autocast, determinism and so on."""
    inference: bool
    """Whether it was in inference mode, which is not in that record."""
    watch: _Watch
    code: Callable[..., Any] | None = None
    """What torch ran for it."""

    def holds(self) -> bool:
        """Whether guards that held need not be evaluated again."""
        inference = torch.is_inference_mode_enabled()
        return bool(self.state.check()) and self.inference is inference and self.watch.unchanged()


class Guards:
    """The calls of one module for which torch's guards held in this run."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forward: types.FunctionType | None = _function(module) if _HAS_PARTS else None
        self._run = 0
        self._known: dict[tuple[Any, ...], Asked] = {}
        self._watch: _Watch | None = None
        self._changes = 0

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | Asked | None:
        """What to do with a call.

        Args:
            args: tensors of the strides that their shapes imply, in tuples, lists and dictionaries, and other values.
            kwargs: the same.

        Returns:
            The compiled code, to be called with the module and these arguments; or, where guards must be evaluated,
            what `called` is to be given afterwards; None if the call is nothing to be remembered.
        """
        run = inductor.run()
        if self._forward is None or not run or _in_a_mode():
            return None
        if self._run != run:
            self._run = run
            self._known.clear()
        kind: list[Any] = []
        tensors: list[int] = []
        if not (_describe(args, kind, tensors) and _describe(kwargs, kind, tensors)):
            return None
        signature = tuple(kind)
        known = self._known.get(signature)
        if known is not None and known.holds():
            self._changes = 0
            return known.code
        # What is so now, before the call: the module may change itself in it, which the next call's guards have to see.
        watch = self._watched()
        # A parameter of the module that is an argument too is one input to torch.
        if watch is None or not watch.tensors.keys().isdisjoint(tensors):
            return None
        state = torch._C._dynamo.guards.GlobalStateGuard()
        return Asked(signature, state, torch.is_inference_mode_enabled(), watch)

    def called(self, asked: Asked, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes that a call went well and had nothing compiled; by which code, torch is asked.

        Args:
            asked: what `find` returned.
            args: of the call.
            kwargs: the same.
        """
        forward = self._forward
        if forward is None or len(self._known) >= _MOST_KINDS or not _from_entries():
            return
        entries = _entries(forward.__code__)
        # One that is alone was the one. Of several, which hold other kinds of call, its own guards say.
        if len(entries) > 1:
            entries = [entry for entry in entries if _accepts(entry, forward, self._module, args, kwargs)]
        if not entries or (code := entries[0].code).co_freevars:
            return
        function = types.FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__)
        function.__kwdefaults__ = forward.__kwdefaults__
        self._known[asked.signature] = asked._replace(code=function)

    def _watched(self) -> _Watch | None:
        if self._watch is not None and self._watch.unchanged():
            return self._watch
        self._changes += 1
        try:
            if self._changes > _MOST_CHANGES:
                raise _UnwatchableError
            self._watch = _Watch(self._module)
        # The boundary: an object may do anything when it is looked at, and something may be nested too deep.
        except Exception:  # noqa: BLE001
            self._forward = self._watch = None  # for good: to find that out each time takes time
            self._known.clear()
        return self._watch


def _function(module: nn.Module) -> types.FunctionType | None:
    """The function that is a module's `forward`, if it is one of its class."""
    forward = module.forward
    if isinstance(forward, types.MethodType) and isinstance(forward.__func__, types.FunctionType):
        return forward.__func__
    return None


def _describe(value: Any, kind: list[Any], tensors: list[int]) -> bool:
    """Appends all that guards look at in an argument; the identities of its tensors are appended to `tensors`.

    Returns:
        False if there is something that cannot be described.
    """
    cls = type(value)
    if cls is torch.Tensor:
        if value.__dict__ or not _is_plain(value):
            return False
        tensors.append(id(value))
        kind += (value.shape, value.dtype, value.device, value.requires_grad, value.is_inference())
        return True
    kind.append(cls)
    if cls in _CONSTANTS:
        kind.append(value)
        return True
    if cls is tuple or cls is list:
        kind.append(len(value))
        return all(_describe(item, kind, tensors) for item in value)
    if cls is dict:
        return _describe(tuple(value), kind, tensors) and all(_describe(item, kind, tensors) for item in value.values())
    return False


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements are in memory as its strides, shape and dtype say."""
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _in_a_mode() -> bool:
    """Whether something stands between calls and what they do: a default device, vmap. Torch guards on what it is."""
    return bool(torch._C._len_torch_function_stack()) or torch._C._functorch.peek_interpreter_stack() is not None


def _from_entries() -> bool:
    """Whether a call that compiled nothing was run by compiled code: in other stances it may have run as it is."""
    return _eval_frame._stance.stance in ("default", "fail_on_recompile") and not torch._dynamo.config.disable


def _accepts(
    entry: Any, forward: types.FunctionType, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether the guards of one of torch's entries hold for a call, which they are given as the frame's variables."""
    bound = inspect.signature(forward).bind(module, *args, **kwargs)
    bound.apply_defaults()
    return bool(entry.guard_manager.check(dict(bound.arguments)))


try:
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list as _entries
    from torch._C._dynamo.guards import dict_version as _dict_version
    from torch._dynamo import eval_frame as _eval_frame

    _HAS_PARTS = hasattr(_eval_frame._stance, "stance")
except (ImportError, AttributeError):
    _HAS_PARTS = False  # another version of torch

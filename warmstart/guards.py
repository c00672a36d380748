"""Spares most calls of a model's blocks the evaluation of torch's guards.

Dynamo keeps for each code object what it compiled, and guards: what must still be so for the compiled code to be right.
It evaluates them in each call, and those of a transformer's block look at hundreds of attributes: 0.3 to 0.5 ms of CPU
time for each block and step, a tenth of what the reference transformer's blocks take, whatever the model's size. They
look at three things, and here each is looked at where it can change:

- The block's own attributes, and those of all that it leads to: by the versions of their dictionaries, before each
  forward pass of the model; and before the call itself if anything but code of libraries ran since.
- The arguments: in each call.
- Classes and globals, which all blocks of one kind share: in each run of the model one block of the kind has all of its
  guards evaluated by torch, and that goes for the others.

A call for which all is as it was goes to the compiled graph itself (`direct`). Only for modules of torch and diffusers,
which keep what they depend on in their attributes, and only for calls with plain arguments: what code of other origin
depends on cannot be known. Knows torch's private parts, and nothing of regions; without those parts each call evaluates
guards as before.
"""

from __future__ import annotations

import inspect
import types
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from warmstart import direct, inductor
from warmstart.arguments import CONSTANTS, Flat, canonical, flat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from warmstart.direct import Direct

LIBRARIES = ("torch", "diffusers", "warmstart")
"""Top packages whose modules are known to depend on nothing but their attributes and their files' globals."""

# When so many kinds of call are known, all are forgotten: what the guards of each look at may be large.
_MOST_KINDS = 64
# A block that leads to more than this is not watched: to look at it would cost what the guards do. Nor is a model.
_MOST_WATCHED, _MOST_AROUND = 1000, 20_000
# A module that was found changed so often, and spared never since, is looked at no more: that takes time too.
_MOST_CHANGES = 16

_BUILT_IN = frozenset({dict, list, set, tuple, frozenset})
# Attributes of a module which torch does not guard (hooks, and what of it is saved), and what calls the compiled code.
_NOT_GUARDED = frozenset(name for name in vars(nn.Module()) if "_hooks" in name) | {
    "_non_persistent_buffers_set",
    "_compiled_call_impl",
}
# Where torch's own layers without buffers and submodules look for neither.
_UNUSED = _NOT_GUARDED | {"_buffers", "_modules"}


class _UnwatchableError(Exception):
    """Something can change that cannot be watched."""


class _Walk:
    """All that a module's guards may look at in its attributes."""

    def __init__(self, module: nn.Module, *, but: Iterable[nn.Module] = (), most: int = _MOST_WATCHED) -> None:
        """Of modules in `but`, which are watched elsewhere, nothing is; the others then may get no hooks either."""
        self.tensors: dict[int, weakref.ref[torch.Tensor]] = {}
        self.dictionaries: dict[int, dict[Any, Any]] = {}
        self.lists: list[list[Any] | set[Any]] = []
        self.functions: list[types.FunctionType] = []
        self._objects: dict[int, Any] = {}
        self._but = {id(module) for module in but}
        self._left = most
        self._follow(module)
        self.instances = [item for item in self._objects.values() if type(item) not in _BUILT_IN]

    def form(self) -> tuple[Any, ...]:
        """What two modules have in common whose attributes have the same names, and objects of the same classes."""
        return (*map(type, self._objects.values()), *[tuple(vars(item)) for item in self.instances])

    def _follow(self, value: Any) -> None:
        kind = type(value)
        if kind in CONSTANTS or id(value) in self._objects or id(value) in self.tensors or id(value) in self._but:
            return
        self._left -= 1
        self._require(self._left >= 0)
        if kind is torch.Tensor or kind is nn.Parameter:
            self._require(_is_plain(value))
            # Weakly: whoever puts other weights in their place may have no room for both.
            self.tensors[id(value)] = weakref.ref(value)
            self.dictionaries[id(value.__dict__)] = value.__dict__
        elif kind is types.FunctionType:
            self._require(value.__closure__ is None)
            self.functions.append(value)
            self.dictionaries[id(vars(value))] = vars(value)
            self._follow_function(value)
        elif not (issubclass(kind, type) or kind in (types.BuiltinFunctionType, types.ModuleType)):
            self._objects[id(value)] = value
            self._follow_object(value, kind)

    def _follow_object(self, value: Any, kind: type) -> None:
        if kind in (list, set):
            self.lists.append(value)
        elif kind not in (tuple, frozenset):
            self._require(kind is dict or _of_library(kind.__module__))
            # What they hold is in no dictionary.
            self._require(not isinstance(value, (list, set, tuple, frozenset)))
            if isinstance(value, nn.Module):
                self._require(not _has_hooks(value) and not (self._but and "forward" in vars(value)))
                self._follow_function(type(value).forward)
            else:
                self._require(kind is dict or not any(vars(base).get("__slots__") for base in kind.__mro__))
            if isinstance(value, dict):
                self.dictionaries[id(value)] = value
                self._follow_all(value.values())
            if kind is not dict:
                self.dictionaries[id(vars(value))] = vars(value)
                skipped = () if not isinstance(value, nn.Module) else _UNUSED if _is_simple(value) else _NOT_GUARDED
                self._follow_all([item for name, item in vars(value).items() if name not in skipped])
                if self._but and isinstance(value, nn.Module):
                    for hooks in (value._forward_hooks, value._forward_pre_hooks):
                        self.dictionaries[id(hooks)] = hooks
            return
        self._follow_all(list(value))

    def _follow_all(self, values: Any) -> None:
        for value in values:
            self._follow(value)

    def _follow_function(self, function: Any) -> None:
        """What a function depends on beside its arguments: the globals of its file. A closure may hold anything."""
        self._require(type(function) is types.FunctionType and _of_library(function.__module__))
        # Around the blocks it counts whose code runs, not on what it depends.
        self._require(bool(self._but) or function.__closure__ is None)
        self.dictionaries[id(function.__globals__)] = function.__globals__

    @staticmethod
    def _require(watchable: bool) -> None:
        if not watchable:
            raise _UnwatchableError


class _Watch:
    """What was found in some modules, and how it was."""

    def __init__(self, found: list[_Walk]) -> None:
        self._dictionaries = [item for walk in found for item in walk.dictionaries.values()]
        self._instances = [item for walk in found for item in walk.instances]
        self._functions = [item for walk in found for item in walk.functions]
        self._lists = [item for walk in found for item in walk.lists]
        # Nothing else may get the identity of what was in a list, or of a function's defaults.
        self._kept = [[list(items) for items in self._lists], [_defaults(item) for item in self._functions]]
        # `Module.to` puts other data in a parameter, and no dictionary changes.
        self._parameters = [item for walk in found for item in walk.tensors.values()]
        self._same_metadata = _metadata_check([cast("torch.Tensor", item()) for item in self._parameters])
        self._now = self._state()

    def unchanged(self) -> bool:
        """Whether nothing was set, added, removed or put in another's place since."""
        if self._state() != self._now:
            return False
        parameters = [item() for item in self._parameters]
        return all(item is not None for item in parameters) and self._same_metadata(*parameters)

    def _state(self) -> tuple[Any, ...]:
        return (
            # CPython gives a dictionary another version with each change.
            [*map(_dict_version, self._dictionaries)],
            [*map(type, self._instances)],
            # By identity: tensors have an equality of their own.
            [[*map(id, items)] for items in self._lists],
            [[*map(id, _defaults(item))] for item in self._functions],
        )


def _defaults(function: types.FunctionType) -> tuple[Any, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _of_library(module: Any) -> bool:
    # A function that was made by `exec` may have none.
    return isinstance(module, str) and module.partition(".")[0] in LIBRARIES


class Asked(NamedTuple):
    """A call whose guards have to be evaluated, and what was so before it."""

    form: tuple[Any, ...]
    """Of its arguments, without the tensors among them."""
    same: Callable[..., bool]
    """Whether tensors are of the shapes, strides, dtypes and so on that they were of."""
    state: Any
    """Torch's record of its global state: grad mode, autocast, determinism and so on."""
    inference: bool
    """Whether it was in inference mode, which is not in that record."""
    walk: _Walk
    stretch: int = -1
    """That of the call, if all was looked at before it and nothing else ran since."""


@dataclass(eq=False)
class Known:
    """A kind of call for which torch's guards held."""

    code: types.FunctionType
    """What torch ran for it."""
    entry: tuple[int, int]
    """That code, and the form of modules. Of its guards only those on the module's own attributes held for it alone."""
    asked: Asked
    direct: Direct | None = None
    """What to call instead, once that is known."""

    def holds(self) -> bool:
        """Whether torch is in the state in which it was."""
        return self.asked.inference is torch.is_inference_mode_enabled() and bool(self.asked.state.check())


class Passes:
    """The forward passes of a model, one after the other, and what its blocks share. Called in the model's place."""

    def __init__(self, model: nn.Module | None) -> None:
        """None for modules that are part of nothing, or of something unknown; that is not to be called."""
        self._model = model
        self.guards: list[Guards] = []
        self.number = 0
        """Of the present stretch in which nothing runs but known calls of blocks and code of libraries."""
        self.looked = -1
        """The stretch at whose begin all blocks were looked at."""
        self.runs: dict[tuple[int, int], int] = {}
        """The run in which the guards of some code were last evaluated on a module of some form."""
        self.forms: dict[tuple[Any, ...], int] = {}
        self._inside = False
        self._around: tuple[_Walk, _Watch] | None = None
        self._walks: list[_Walk | None] = []
        self._watch: _Watch | None = None
        self._changes = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model; what is looked at here need not be looked at by each of its blocks.

        All at once that takes a fifth of the time, since the processor's caches hold what looking needs.
        """
        model = cast("Any", self._model)
        # Among its arguments there may be code of anybody's.
        if torch.compiler.is_compiling() or self._changes > _MOST_CHANGES or flat(args, kwargs) is None:
            self._watch, self._walks = None, []  # nor is anything kept that was replaced
            return model._call_impl(*args, **kwargs)
        self._inside = True
        self.look()
        try:
            return model._call_impl(*args, **kwargs)
        finally:
            self._inside = False
            self.interrupt()

    def interrupt(self) -> None:
        """Says that other code may run, and change anything."""
        self.number += 1

    def look(self) -> None:
        """Looks at all blocks at once, and at the model around them, if it is the model that calls them now."""
        self.interrupt()
        if not self._inside:
            return
        walks = [guards.walk for guards in self.guards]
        # A list compares its items by identity first, and these have no other equality.
        if self._watch is not None and walks == self._walks and self._watch.unchanged():
            self._changes = 0
        else:
            self._watch, self._walks = None, []
            # The boundary: an object may do anything when it is looked at.
            try:
                self._look_anew()
            except Exception:  # noqa: BLE001
                self._around, self._changes = None, _MOST_CHANGES + 1  # for good
        if self._watch is not None:
            self.looked = self.number

    def _look_anew(self) -> None:
        if self._around is None or not self._around[1].unchanged():
            self._around = None
            self._changes += 1
            if self._changes > _MOST_CHANGES:
                return
            # Nothing but code of libraries runs between the calls of the blocks, or this fails.
            blocks = [guards.module for guards in self.guards]
            walk = _Walk(cast("nn.Module", self._model), but=blocks, most=_MOST_AROUND)
            self._around = walk, _Watch([walk])
        # Only of what is unchanged now may what follows be the measure.
        for guards in self.guards:
            guards.look()
        self._walks = [guards.walk for guards in self.guards]
        self._watch = _Watch([self._around[0], *filter(None, self._walks)])


class Guards:
    """The calls of one module for which torch's guards held."""

    def __init__(self, module: nn.Module, passes: Passes) -> None:
        self.module = module
        self.walk: _Walk | None = None
        self._watch: _Watch | None = None
        self._passes = passes
        passes.guards.append(self)
        self._forward: types.FunctionType | None = _function(module) if _HAS_PARTS else None
        self._known: dict[tuple[Any, ...], list[Known]] = {}
        self._kinds = 0
        self._changes = 0

    def look(self) -> None:
        """Forgets all if something of the module changed."""
        watch = self._watch
        if watch is not None and not watch.unchanged():
            self._forget()

    def interrupt(self) -> None:
        """Says that code runs of which nothing is known."""
        self._passes.interrupt()

    def find(self, given: Flat | None) -> Direct | Known | Asked | None:
        """What to do with a call.

        Args:
            given: its arguments.

        Returns:
            What to call with the tensors among these; or what to have `run`; or, where torch must evaluate guards, what
            `called` is to be given afterwards; None if the call is nothing to be remembered.
        """
        passes = self._passes
        looked = passes.looked == passes.number
        found = None if given is None or self._forward is None else self._find(given)
        if not isinstance(found, direct.Direct):
            self.interrupt()
        return found._replace(stretch=passes.number) if looked and isinstance(found, Asked) else found

    def _find(self, given: Flat) -> Direct | Known | Asked | None:
        run, passes = inductor.run(), self._passes
        if not run or _in_a_mode() or _has_hooks(self.module):
            return None
        if passes.looked != passes.number:
            self.look()
        # What is so now, before the call: the module may change itself in it, which the next call's guards have to see.
        walk = self.walk or self._walked()
        ids = {*map(id, given.tensors)}
        # One tensor in two places is one input to torch, also where one of them is an attribute of the module.
        if walk is None or len(ids) != len(given.tensors) or not walk.tensors.keys().isdisjoint(ids):
            return None
        for known in self._known.get(given.form, ()):
            if known.asked.same(*given.tensors):
                if passes.runs.get(known.entry) == run and known.holds():
                    self._changes = 0
                    return known.direct or known
                break
        if not all(map(_is_plain, given.tensors)):
            return None
        state = torch._C._dynamo.guards.GlobalStateGuard()
        return Asked(given.form, _metadata_check(given.tensors), state, torch.is_inference_mode_enabled(), walk)

    def called(self, asked: Asked, given: Flat, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes that a call went well and had nothing compiled; by which code, torch is asked.

        Args:
            asked: what `find` returned.
            given: what it was given.
            args: of the call, with canonical strides.
            kwargs: the same.
        """
        passes, forward = self._passes, self._forward
        if forward is None or self.walk is not asked.walk or not _from_entries():
            return
        entries = _entries(forward.__code__)
        all_pure = all(_is_pure(entry.code) for entry in entries)
        # One that is alone was the one. Of several, which hold other kinds of call, its own guards say.
        if len(entries) > 1:
            entries = [entry for entry in entries if _accepts(entry, forward, self.module, args, kwargs)]
        if not entries:
            return
        code = entries[0].code
        if not _is_pure(code):
            self._give_up()
            return
        # Whichever of them ran, it changed nothing.
        if all_pure and passes.number == asked.stretch:
            passes.looked = passes.number
        entry = (id(code), passes.forms.setdefault(asked.walk.form(), len(passes.forms)))
        passes.runs[entry] = inductor.run()
        known = [known for known in self._known.get(given.form, ()) if known.asked.same(*given.tensors)]
        if not (known and known[0].entry == entry and known[0].holds()):
            function = types.FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__)
            function.__kwdefaults__ = forward.__kwdefaults__
            self._remember(Known(function, entry, asked), given)

    def run(self, known: Known, given: Flat, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls what is known, and finds out how to do without its code.

        Args:
            known: what `find` returned.
            given: what it was given.
            args: of the call, with canonical strides.
            kwargs: the same.
        """
        result, found = direct.watched(known.code, self.module, args, kwargs, known.asked.walk.tensors)
        if found is None:
            self._give_up()
        else:
            tensors = enumerate(given.tensors)
            known.direct = found._replace(odd=[number for number, tensor in tensors if canonical(tensor) is not tensor])
        return result

    def _remember(self, known: Known, given: Flat) -> None:
        if self._kinds >= _MOST_KINDS:
            self._known.clear()
            self._kinds = 0
        before = self._known.get(given.form, [])
        others = [other for other in before if not other.asked.same(*given.tensors)]
        self._kinds += 1 + len(others) - len(before)
        self._known[given.form] = [known, *others]

    def _walked(self) -> _Walk | None:
        self._changes += 1
        try:
            if self._changes > _MOST_CHANGES:
                raise _UnwatchableError
            self.walk = _Walk(self.module)
            self._watch = _Watch([self.walk])
        # The boundary: an object may do anything when it is looked at, and something may be nested too deep.
        except Exception:  # noqa: BLE001
            self._give_up()
        return self.walk

    def _forget(self) -> None:
        self.walk = self._watch = None
        self._known.clear()
        self._kinds = 0

    def _give_up(self) -> None:
        """Has torch evaluate the guards of each call: to find out each time that it must would take time."""
        self._forward = None
        self._forget()


def _is_simple(module: nn.Module) -> bool:
    file = type(module).__module__
    own = file.startswith("torch.nn.modules.") and file != "torch.nn.modules.container"
    return own and not module._buffers and not module._modules


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _function(module: nn.Module) -> types.FunctionType | None:
    """The function that is a module's `forward`, if it is one of its class."""
    forward = module.forward
    if isinstance(forward, types.MethodType) and isinstance(forward.__func__, types.FunctionType):
        return forward.__func__
    return None


def _metadata_check(tensors: list[torch.Tensor]) -> Callable[..., bool]:
    """Torch's own check of as many tensors for the same classes, dtypes, devices, shapes and strides."""
    check: Callable[..., bool] = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def _is_pure(code: types.CodeType) -> bool:
    """Whether compiled code does nothing but call its graph."""
    return not code.co_freevars and bool(direct.graph_name(code))


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


class _Probe:
    """Has attributes as those of any object are."""


def _versions_count() -> bool:
    """Whether a dictionary of attributes gets another version when an attribute is set.

    It does not in CPython 3.13.0 (python/cpython#125608, mended in 3.13.1); to be taken out with support for that.
    """
    probe = _Probe()
    attributes = vars(probe)
    seen = [_dict_version(attributes)]
    for value in range(2):
        probe.value = value  # type: ignore[attr-defined]
        seen.append(_dict_version(attributes))
    return len({*seen}) == len(seen)


try:
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list as _entries
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
    from torch._C._dynamo.guards import dict_version as _dict_version
    from torch._dynamo import eval_frame as _eval_frame

    _HAS_PARTS = hasattr(_eval_frame._stance, "stance") and _versions_count()
except (ImportError, AttributeError):
    _HAS_PARTS = False  # another version of torch

"""Which calls need no evaluation of guards, and that each change which a guard would see is seen without one."""

import argparse
import collections
import functools
import gc
import weakref
from typing import NamedTuple

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock
from torch import nn
from torch._functorch._aot_autograd.runtime_wrappers import mark_dynamo_propagated_dynamic_indices

from warmstart import guards, inductor, quantize, regions
from warmstart.arguments import flat
from warmstart.guards import _Walk, _Watch
from warmstart.regions import CompileOptions

# As with torch's own guards, which warn of it: use 3.13.1.
pytestmark = pytest.mark.skipif(
    not guards._versions_count(), reason="in Python 3.13.0 attributes change and their dictionary's version does not"
)
OPTIONS = CompileOptions(mode="default", dynamic=False, fullgraph=True, recompile_limit=64)
FACTOR = 1.0


class Helper:
    """What a module may have beside modules, as diffusers' attention processors."""

    def __init__(self) -> None:
        self.added = 0.0
        self.table = {"a": 0.0}


class Slotted:
    __slots__ = ("added",)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))
        self.helper = Helper()
        self.scale = 1.0
        self.terms = [0.0, 0.0]
        self.names = {"x"}
        self.rest = nn.Sequential()

    def forward(self, x, more=None, *, flag=False):
        y = (
            self.inner(x.to(self.inner[0].weight.dtype)) * self.scale * FACTOR
            + self.helper.added
            + self.helper.table["a"]
            + self.terms[1]
        )
        if more is not None:
            y = y + (more["t"][0] if isinstance(more, dict) else more)
        if "y" in self.names:
            y = y + 3
        y = self.rest(y)
        return -y if flag else y


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Counting(nn.Module):
    """Its graph depends on what its last call left."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * (1.0 if self.calls % 2 else 2.0)


@pytest.fixture(autouse=True)
def _run(monkeypatch):
    """A run of its own for each test, in which this file is taken for one of a library."""
    monkeypatch.setattr("warmstart.guards.LIBRARIES", ("torch", __name__.partition(".")[0]))
    torch._dynamo.reset()
    with inductor.compiling(inductor.Missing.COMPILED):
        inductor.run_for(inductor.Run())
        yield


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch):
    """What compiles is Dynamo, as for real; what it makes runs as it is."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled(function, backend="eager", **options))


class Watched:
    """A compiled module, alone or one of several of a region, and how many of its calls torch saw."""

    def __init__(self, module: nn.Module, *others: nn.Module) -> None:
        if module._compiled_call_impl is None:
            regions.compile_in_place([regions.Region("t", type(module).__name__, [module, *others])], OPTIONS)
        self.module = module
        self.call = module._compiled_call_impl
        self.evaluated = 0
        self._compiled = self.call._compiled
        self.call._compiled = self._through_torch

    def _through_torch(self, *args, **kwargs):
        self.evaluated += 1
        return self._compiled(*args, **kwargs)

    def is_right(self, *args, **kwargs) -> bool:
        got = self.module(*args, **kwargs)
        return torch.equal(got, self.call._eager(*args, **kwargs))


@pytest.fixture
def watched() -> Watched:
    """A block whose calls with one tensor of (2, 4) are known."""
    found = Watched(Block())
    for _ in range(2):  # the first one compiles
        assert found.is_right(torch.ones(2, 4))
    assert found.evaluated == 2
    return found


def test_within_a_run_guards_are_evaluated_once_for_each_kind_of_call(watched):
    for value in (1.0, 2.0, 3.0):
        assert watched.is_right(torch.full((2, 4), value))
    assert watched.evaluated == 2


def test_a_mark_that_no_guard_looks_at_makes_no_difference(watched):
    """Torch's own, on the output of a graph for sizes of any value."""
    x = torch.ones(2, 4)
    mark_dynamo_propagated_dynamic_indices(x, {0})
    assert x.__dict__
    assert watched.is_right(x)
    assert watched.evaluated == 2


@pytest.mark.parametrize("marked", [torch._dynamo.mark_dynamic, torch._dynamo.maybe_mark_dynamic])
def test_a_mark_that_guards_look_at_has_them_evaluated(marked):
    x = torch.ones(2, 4)
    mark_dynamo_propagated_dynamic_indices(x, {0})
    marked(x, 0)
    assert flat((x,), {}) is None


def test_another_run_evaluates_them_anew(watched):
    inductor.run_for(inductor.Run())
    assert watched.is_right(torch.ones(2, 4))
    assert watched.is_right(torch.ones(2, 4))
    assert watched.evaluated == 3


def test_a_run_that_goes_on_does_not(watched):
    owner = inductor.Run()
    for _ in range(3):
        inductor.run_for(owner)
        assert watched.is_right(torch.ones(2, 4))
    assert watched.evaluated == 3


class Model(nn.Module):
    """Blocks in a row, as a denoiser has them."""

    def __init__(self, *, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Passing:
    """A model with compiled blocks, and how many of their calls torch saw."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        [region] = regions.find("t", model, strategy="regional", wanted=["Block"]).regions
        regions.compile_in_place([region], OPTIONS)
        self.blocks = [Watched(block) for block in model.blocks]

    @property
    def evaluated(self) -> int:
        return sum(block.evaluated for block in self.blocks)

    def is_right(self, rows: int = 2) -> bool:
        x = torch.ones(rows, 4)
        got, want = self.model(x), self.model.first(x)
        for block in self.blocks:
            want = block.call._eager(want)
        return torch.equal(got, want)


@pytest.fixture
def passing() -> Passing:
    """A model whose calls are known, in a run of its own."""
    found = Passing(Model())
    for _ in range(3):
        assert found.is_right()
    assert found.evaluated == 1 + len(found.blocks)  # the first one compiles, and the second one finds that
    inductor.run_for(inductor.Run())
    for block in found.blocks:
        block.evaluated = 0
    return found


def test_in_another_run_one_block_is_evaluated_for_all_that_are_alike(passing):
    for _ in range(3):
        assert passing.is_right()
    assert [block.evaluated for block in passing.blocks] == [1, 0, 0]
    inductor.run_for(inductor.Run())
    assert passing.is_right()
    assert passing.evaluated == 2


@pytest.mark.parametrize("several", [False, True], ids=["one graph", "several graphs"])
def test_after_the_one_that_is_evaluated_no_other_block_looks_for_itself(passing, several):
    """Code that only looks up and puts together has changed none of them, whichever of several ran."""
    # What is compiled is put among the globals of the file, so that all is found out anew.
    for rows in (3, 3, 2, 2) if several else ():
        assert passing.is_right(rows)
    inductor.run_for(inductor.Run())
    looks = []
    for number, block in enumerate(passing.blocks):
        guards = block.call._guards
        guards.look = lambda number=number, look=guards.look: looks.append(number) or look()
    before = passing.evaluated
    assert passing.is_right()
    assert passing.evaluated == before + 1
    assert looks == []


def test_a_block_with_an_attribute_that_others_have_in_their_class_is_evaluated_for_itself(passing, monkeypatch):
    """What is changed in the class goes for them alone, so neither says anything of the other."""
    monkeypatch.setattr(Helper, "more", 1.0, raising=False)
    passing.blocks[1].module.helper.more = 1.0
    for _ in range(3):
        assert passing.is_right()
    inductor.run_for(inductor.Run())
    for block in passing.blocks:
        block.evaluated = 0
    assert passing.is_right()
    assert [block.evaluated for block in passing.blocks] == [1, 1, 0]


def test_what_is_changed_between_two_passes_counts_at_once(passing):
    assert passing.is_right()
    for number, change in enumerate(CHANGES.values()):
        if "precision" not in list(CHANGES)[number]:
            change(passing.blocks[number % 3].module)
            assert passing.is_right(), list(CHANGES)[number]


def test_what_a_hook_changes_between_two_blocks_counts_at_once(passing):
    assert passing.is_right()
    last = passing.blocks[2].module
    hook = passing.model.blocks[0].register_forward_hook(lambda *_: setattr(last, "scale", last.scale + 1))
    for _ in range(3):
        got, x = passing.model(torch.ones(2, 4)), passing.model.first(torch.ones(2, 4))
        for block in passing.blocks:
            x = block.module.forward(x)
        assert torch.equal(got, x)
    hook.remove()
    assert passing.is_right()


class Changing(nn.Linear):
    """Of somebody's own, in the place of a library's; changes a block while the model runs."""

    def forward(self, x):
        self.others[0].scale += 1
        return super().forward(x)


@pytest.mark.parametrize("own", ["class", "forward", "hook", "hook of the model"])
def test_where_other_code_runs_between_blocks_each_looks_for_itself(passing, own):
    assert passing.is_right()
    last, first = passing.blocks[2].module, passing.model.first

    def change(*_):
        last.scale += 1

    if own == "class":
        Changing.__module__ = "somebody_s"
        Changing.forward.__module__ = "somebody_s"
        first.__class__ = Changing
        vars(first)["others"] = [last]
    elif own == "forward":
        first.forward = lambda x: (change(), nn.Linear.forward(first, x))[1]
    elif own == "hook":
        first.register_forward_hook(change)
    else:
        passing.model.register_forward_pre_hook(change)
    for _ in range(3):
        got = passing.model(torch.ones(2, 4))
        x = nn.Linear.forward(first, torch.ones(2, 4))
        for block in passing.blocks:
            x = block.module.forward(x)
        assert torch.equal(got, x)


class State:
    def __init__(self) -> None:
        self.number = 0.0


class Counter(nn.Module):
    """Changes what another block depends on, in some of its calls."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.state = state

    def forward(self, x, up=False):
        if up:
            self.state.number = self.state.number + 1.0
        return self.linear(x)


class Reader(nn.Module):
    def __init__(self, state: State) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.state = state

    def forward(self, x):
        return self.linear(x) + self.state.number


class Counted(nn.Module):
    """Calls a block twice, which another one changes meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        state = State()
        self.counter, self.reader = Counter(state), Reader(state)

    def forward(self, x, up=False):
        return self.reader(self.counter(self.reader(x), up))


@pytest.mark.parametrize("warm", [1, 2, 4])
def test_what_a_block_changes_in_another_one_counts_in_the_same_pass(warm):
    model = Counted()
    found = [regions.Region("t", type(block).__name__, [block], model) for block in (model.counter, model.reader)]
    regions.compile_in_place(found, OPTIONS)
    x = torch.ones(2, 4)
    for up in (False, True, False, True, True):
        for _ in range(warm):
            before = model.reader.state.number
            got = model(x, up)
            want = model.counter.linear(model.reader.linear(x) + before)
            assert torch.equal(got, model.reader.linear(want) + model.reader.state.number)
        inductor.run_for(inductor.Run())


class Listed(list):
    pass


def factory(default: float):
    def multiply(x, factor=default):
        return x * factor

    multiply.scale = 1.0
    return multiply


BETWEEN = {
    "contents of a kind of list": (lambda block: Listed([1.0, 2.0]), lambda block: block.more.__setitem__(1, 7.0)),
    "an attribute of a parameter": (lambda block: None, lambda block: setattr(block.inner[0].weight, "scale", 5.0)),
    "an attribute of an argument": (lambda block: None, None),
    "a function's defaults": (lambda block: factory(2.0), lambda block: setattr(block.more, "__defaults__", (5.0,))),
    "a function's attribute": (lambda block: factory(2.0), lambda block: setattr(block.more, "scale", 5.0)),
}


class Depending(Block):
    def forward(self, x):
        y = self.inner(x)
        if isinstance(self.more, list):
            y = y * self.more[1]
        elif self.more is not None:
            y = self.more(y) * self.more.scale
        if getattr(x, "tag", False):
            y = y + 1
        return y * getattr(self.inner[0].weight, "scale", 1.0)


@pytest.mark.parametrize("within_a_run", [True, False])
@pytest.mark.parametrize(("more", "change"), BETWEEN.values(), ids=BETWEEN)
def test_what_only_one_of_two_blocks_is_changed_in_counts(more, change, within_a_run):
    """The other one's guards say nothing of it."""
    model = Model(blocks=2)
    model.blocks = nn.ModuleList(Depending() for _ in range(2))
    for block in model.blocks:
        block.more = more(block)
    regions.compile_in_place([regions.Region("t", "Depending", list(model.blocks), model)], OPTIONS)
    x = torch.ones(2, 4)
    for _ in range(5):
        model(x)
    if not within_a_run:
        inductor.run_for(inductor.Run())
    if change is not None:
        change(model.blocks[1])
    for _ in range(3):
        if change is None:
            x = torch.ones(2, 4)
            x.tag = True
            got, want = model.blocks[1](x), Depending.forward(model.blocks[1], x)
        else:
            got, want = model(x), model.first(x)
            for block in model.blocks:
                want = Depending.forward(block, want)
        assert torch.equal(got, want)


def user_s(function):
    function.__module__ = "somebody_s"
    return function


class Calling(Model):
    """Calls what somebody put into it, or among its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper()
        self.helper.call = None

    def forward(self, x, call=None):
        x = self.blocks[0](self.first(x))
        for function in (self.helper.call, call):
            if function is not None:
                x = function(x)
        return self.blocks[2](self.blocks[1](x))


@pytest.mark.parametrize("place", ["a helper", "an argument"])
def test_code_of_somebody_s_that_the_model_calls_may_change_blocks(place):
    model = Calling()
    passing = Passing(model)
    x = torch.ones(2, 4)

    @user_s
    def call(x):
        model.blocks[2].scale += 1
        return x

    given = [call] if place == "an argument" else []
    for _ in range(4):
        model(x)
    inductor.run_for(inductor.Run())
    if not given:
        model.helper.call = call
    for _ in range(4):
        got, want = model(x, *given), model.first(x)
        for block in passing.blocks:
            want = block.call._eager(want)
        assert torch.equal(got, want)


def test_old_weights_are_free_at_once(passing):
    """Whoever loads others may have no room for both."""
    assert passing.is_right()
    old = [weakref.ref(block.module.inner[0].weight) for block in passing.blocks]
    others = {name: torch.ones_like(value) for name, value in passing.model.state_dict().items()}
    passing.model.load_state_dict(others, assign=True)
    assert [reference() for reference in old] == [None] * 3
    assert passing.is_right()


def test_nothing_that_was_replaced_is_kept_where_a_hook_has_each_block_look_for_itself(passing):
    assert passing.is_right()
    old = weakref.ref(passing.blocks[0].module.inner[0])
    passing.model.register_forward_hook(lambda *_: None)
    passing.blocks[0].module.inner[0] = nn.Linear(4, 4)
    for _ in range(3):
        assert passing.is_right()
    gc.collect()
    assert old() is None


def test_a_model_that_changes_in_each_pass_is_looked_at_no_more():
    """Its blocks are, each in its own calls."""
    passing = Passing(Model())
    for number in range(40):
        passing.model.first.note = number
        assert passing.is_right()
    assert passing.model._compiled_call_impl._changes > 16
    evaluated = passing.evaluated
    assert passing.is_right()
    assert passing.evaluated == evaluated


def test_a_model_that_is_left_uncompiled_is_itself_again(passing):
    [region] = regions.find("t", passing.model, strategy="regional", wanted=["Block"]).regions
    regions.leave_uncompiled([region])
    assert passing.model._compiled_call_impl is None
    assert all(block._compiled_call_impl is None for block in passing.model.blocks)


CHANGES = {
    "attribute": lambda block: setattr(block, "scale", 2.0),
    "attribute of an object": lambda block: setattr(block.helper, "added", 5.0),
    "item of a dictionary": lambda block: block.helper.table.update(a=1.0),
    "item of a list": lambda block: block.terms.__setitem__(1, 4.0),
    "set": lambda block: block.names.add("y"),
    "another object": lambda block: setattr(block, "helper", type("Other", (Helper,), {"added": 2.0})()),
    "another module": lambda block: block.inner.__setitem__(0, nn.Linear(4, 4)),
    "a module where none was": lambda block: block.rest.append(nn.Linear(4, 4)),
    "one more module": lambda block: block.inner.append(nn.Linear(4, 4)),
    "another parameter": lambda block: setattr(block.inner[0], "weight", nn.Parameter(torch.ones(4, 4))),
    "no parameter": lambda block: setattr(block.inner[0], "bias", None),
    "training": lambda block: block.eval(),
    "precision": lambda block: block.to(torch.bfloat16),
    "gradients": lambda block: block.requires_grad_(False),
    "strides": lambda block: setattr(block.inner[0].weight, "data", block.inner[0].weight.data.t()),
    "class": lambda block: setattr(block.inner[0], "__class__", Doubling),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_changed_within_a_run_counts_at_once(watched, change):
    change(watched.module)
    assert watched.is_right(torch.ones(2, 4))
    assert watched.evaluated == 3


def test_a_global_of_the_module_s_file_that_is_changed_within_a_run_counts_at_once(watched, monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert watched.is_right(torch.ones(2, 4))
    assert watched.evaluated == 3


CALLS = {
    "another shape": ((torch.ones(3, 4),), {}),
    "another dtype": ((torch.ones(2, 4, dtype=torch.float64),), {}),
    "one that wants gradients": ((torch.ones(2, 4, requires_grad=True),), {}),
    "one more tensor": ((torch.ones(2, 4), torch.ones(2, 4)), {}),
    "a tensor by name": ((torch.ones(2, 4),), {"more": torch.ones(2, 4)}),
    "a number": ((torch.ones(2, 4), 2), {}),
    "the number as another type": ((torch.ones(2, 4), 1.5), {}),
    "a flag": ((torch.ones(2, 4),), {"flag": True}),
    "a dictionary": ((torch.ones(2, 4), {"t": (torch.ones(2, 4),)}), {}),
}


@pytest.mark.parametrize(("args", "kwargs"), CALLS.values(), ids=CALLS)
def test_another_kind_of_call_is_known_by_itself(watched, args, kwargs):
    if args[0].dtype is torch.float64:
        watched.module.double()
    # Compiles and is known no sooner than that has been done once.
    for evaluated in (3, 4, 4):
        assert watched.is_right(*args, **kwargs)
        assert watched.evaluated == evaluated


def test_kinds_in_turn_each_get_their_own_code(watched):
    """Torch keeps the code of all of them in one list; whose guards accept a call decides what is remembered."""
    kinds = [((torch.randn(2, 4),), {"flag": flag}) for flag in (False, True)]
    kinds += [((torch.randn(size, 4),), {}) for size in (3, 5, 7)]
    for args, kwargs in kinds:
        assert watched.is_right(*args, **kwargs)
    for _ in range(3):
        inductor.run_for(inductor.Run())
        for args, kwargs in [*kinds, *reversed(kinds)]:
            assert watched.is_right(*args, **kwargs)
    # Once each to compile, or to find what is there, and once in each of three runs.
    assert watched.evaluated == 2 + len(kinds) + 3 * len(kinds)


def test_instances_that_differ_each_get_their_own_code():
    """They are of one class, and torch keeps the code of all of them in one list."""
    modules = [Block() for _ in range(4)]
    for number, module in enumerate(modules):
        module.scale = float(number % 2 + 1)
    blocks = [Watched(*modules), *map(Watched, modules[1:])]
    for _ in range(4):
        assert all(block.is_right(torch.ones(2, 4)) for block in blocks)
    # Two graphs, each compiled by one, which finds it the next time, and found by another.
    assert [block.evaluated for block in blocks] == [2, 2, 1, 1]


def test_a_module_that_changes_itself_is_evaluated_each_time():
    watched = Watched(Counting())
    for calls in range(1, 9):
        got = watched.module(torch.ones(2, 4))
        assert torch.equal(got, watched.module.linear(torch.ones(2, 4)) * (1.0 if calls % 2 else 2.0))
        assert watched.module.calls == watched.evaluated == calls


ODD = {
    "an object": lambda block: Helper(),
    "a named tuple": lambda block: Pair(torch.ones(2, 4)),
    "a subclass of tensors": lambda block: torch.ones(2, 4).as_subclass(Odd),
    "a parameter": lambda block: nn.Parameter(torch.ones(2, 4)),
    "a conjugate": lambda block: torch.ones(2, 4, dtype=torch.complex64).conj(),
    "a negative view": lambda block: torch._neg_view(torch.ones(2, 4)),
    "a sparse tensor": lambda block: torch.ones(2, 4).to_sparse(),
    "one of its own": lambda block: block.own,
    "a dictionary without names": lambda block: {1: torch.ones(2, 4)},
}


class Pair(NamedTuple):
    tensor: torch.Tensor


class Odd(torch.Tensor):
    pass


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_a_call_with_odd_arguments_is_not_remembered(odd):
    block = Block()
    block.own = torch.ones(2, 4)
    watched = Watched(block)
    guards = watched.call._guards
    assert guards.find(flat((torch.ones(2, 4),), {})) is not None
    assert guards.find(flat((torch.ones(2, 4),), {"more": [odd(block)]})) is None
    assert guards.find(flat((torch.ones(2, 4),), {})) is not None


@pytest.mark.parametrize(
    "mode",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        torch.enable_grad,
        lambda: torch.inference_mode(False),
        lambda: torch.device("cpu"),
    ],
    ids=["autocast", "gradients", "no inference mode", "default device"],
)
def test_another_of_torch_s_modes_counts_at_once(watched, mode):
    x = torch.ones(2, 4)
    with mode():
        assert watched.is_right(x)
        assert watched.evaluated == 3
    assert watched.is_right(x)


def slotted(block: Block) -> None:
    block.helper.more = Slotted()


def closed(block: Block) -> None:
    block.helper.more = (lambda value: lambda: value)(1)


def partial(block: Block) -> None:
    block.forward = functools.partial(Block.forward, block)


def applied(block: Block) -> None:
    block.helper.more = functools.partial(max, 1)


def hooked(block: Block) -> None:
    block.inner.register_forward_hook(lambda module, args, output: output)


def large(block: Block) -> None:
    block.helper.more = [{} for _ in range(2000)]


def deep(block: Block) -> None:
    block.helper.more = []
    for _ in range(900):
        block.helper.more = [block.helper.more]


def queued(block: Block) -> None:
    block.helper.more = collections.deque([1])


def proxied(block: Block) -> None:
    block.helper.more = weakref.proxy(block)


def foreign(block: Block) -> None:
    block.helper.more = argparse.Namespace()


def generating(block: Block) -> None:
    block.helper.more = torch.Generator()


def from_nowhere(block: Block) -> None:
    block.helper.more = lambda: None
    block.helper.more.__module__ = None


def touchy(block: Block) -> None:
    class Touchy:
        __module__ = __name__

        @property
        def __dict__(self):
            raise ValueError("do not look")

    block.helper.more = Touchy()


@pytest.mark.parametrize(
    "change",
    [
        slotted,
        closed,
        partial,
        applied,
        hooked,
        large,
        deep,
        queued,
        proxied,
        foreign,
        from_nowhere,
        touchy,
        generating,
    ],
)
def test_what_cannot_be_watched_is_evaluated_each_time(change):
    block = Block()
    change(block)
    watched = Watched(block)
    for _ in range(4):
        assert watched.is_right(torch.ones(2, 4))
    assert watched.evaluated == 4


def test_a_module_of_another_origin_is_evaluated_each_time(monkeypatch):
    """What it depends on cannot be known: the contents of a global list, say."""
    monkeypatch.setattr("warmstart.guards.LIBRARIES", ("torch", "diffusers", "warmstart"))
    watched = Watched(Block())
    for _ in range(4):
        assert watched.is_right(torch.ones(2, 4))
    assert watched.evaluated == 4


def test_blocks_of_diffusers_are_remembered(monkeypatch):
    monkeypatch.setattr("warmstart.guards.LIBRARIES", ("torch", "diffusers", "warmstart"))
    block = FluxSingleTransformerBlock(dim=16, num_attention_heads=2, attention_head_dim=8)
    quantize.quantize({"t": block}, "int8", "cpu")
    watched = Watched(block)
    given = {"hidden_states": torch.randn(1, 4, 16), "encoder_hidden_states": torch.randn(1, 2, 16)}
    given |= {"temb": torch.randn(1, 16), "image_rotary_emb": (torch.ones(6, 8), torch.zeros(6, 8))}
    for _ in range(4):
        got, want = watched.module(**given), watched.call._eager(**given)
        assert all(torch.equal(have, need) for have, need in zip(got, want, strict=True))
    assert watched.evaluated == 2


def test_in_a_mode_each_call_is_evaluated(watched):
    x = torch.ones(2, 4)
    for evaluated in (3, 4):
        with torch.device("cpu"):
            assert watched.is_right(x)
        assert watched.evaluated == evaluated
    find = watched.call._guards.find
    assert find(flat((x,), {})) is not None
    torch.vmap(lambda one: one if find(flat((one,), {})) is None else pytest.fail("remembered"))(x)


def test_a_module_that_changes_in_each_call_is_soon_looked_at_no_more(watched):
    for number in range(40):
        watched.module.helper.table["step"] = number
        assert watched.is_right(torch.ones(2, 4))
    assert watched.call._guards._forward is None


def test_without_a_run_each_call_is_evaluated(monkeypatch):
    monkeypatch.setattr("warmstart.inductor._runs", 0)
    watched = Watched(Block())
    for _ in range(3):
        assert watched.is_right(torch.ones(2, 4))
    assert watched.evaluated == 3


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("stance", ["eager_on_recompile", "force_eager"])
def test_what_torch_ran_uncompiled_without_a_word_is_not_taken_for_compiled(watched, stance, several):
    x = torch.ones(2, 4)
    if several:
        watched.module(torch.ones(5, 4))
    with torch.compiler.set_stance(stance):
        for _ in range(3):
            assert watched.is_right(x, flag=True)
    assert all("flag" not in signature for signature in map(str, watched.call._guards._known))
    assert watched.is_right(x, flag=True)
    assert watched.is_right(x)


def test_a_call_of_another_thread_meanwhile_is_not_taken_for_this_one(watched):
    """Which code torch used is asked of torch after the call."""
    x = torch.ones(2, 4)
    watched.module(x, flag=True)
    inductor.run_for(inductor.Run())
    guards = watched.call._guards
    asked = guards.find(flat((x,), {}))
    watched.call._compiled(x)
    watched.call._compiled(x, flag=True)  # the other thread's, which puts its code in front
    guards.called(asked, flat((x,), {}), (x,), {})
    assert watched.is_right(x)
    assert watched.is_right(x, flag=True)


def test_too_many_kinds_are_forgotten(watched, monkeypatch):
    monkeypatch.setattr("warmstart.guards._MOST_KINDS", 2)
    guards = watched.call._guards
    sizes = (3, 5, 7, 9)
    for size in sizes:  # torch puts what it compiles among the globals of the file
        watched.module(torch.ones(size, 4))
    counts = []
    for size in sizes:
        for _ in range(3):
            assert watched.is_right(torch.ones(size, 4))
        counts.append(guards._kinds)
        assert guards._kinds == sum(map(len, guards._known.values()))
    assert counts == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("mode", "fullgraph", "remembers"),
    [
        ("default", True, True),
        ("max-autotune-no-cudagraphs", True, True),
        # What follows a graph break is compiled code only if torch calls it.
        ("default", False, False),
        # Recorded graphs of a GPU: what torch does round the call was not tried without it.
        ("reduce-overhead", True, False),
        ("max-autotune", True, False),
    ],
)
def test_only_where_all_of_a_call_is_in_its_code(mode, fullgraph, remembers):
    options = CompileOptions(mode=mode, dynamic=False, fullgraph=fullgraph, recompile_limit=8)
    assert options.remembers_guards is remembers


def test_what_ran_uncompiled_is_not_remembered_as_compiled(watched):
    """A kind of call that no graph covers, where none may be made."""
    with inductor.no_more_graphs(inductor.Missing.REFUSED):
        for evaluated in (3, 4):
            assert watched.is_right(torch.ones(9, 4))
            assert watched.evaluated == evaluated
    assert watched.call._guards._kinds == 1


def test_a_version_of_torch_without_these_parts_evaluates_each_time(monkeypatch):
    monkeypatch.setattr("warmstart.guards._HAS_PARTS", False)
    watched = Watched(Block())
    for _ in range(3):
        assert watched.is_right(torch.ones(2, 4))
    assert watched.evaluated == 3


def test_a_python_whose_versions_do_not_count_is_found_out(monkeypatch):
    assert guards._versions_count()
    monkeypatch.setattr(guards, "_dict_version", lambda attributes: 1)
    assert not guards._versions_count()


def test_a_watch_follows_what_refers_to_itself():
    block = Block()
    block.helper.itself = [block.helper, block]
    watch = _Watch([_Walk(block)])
    assert watch.unchanged()
    block.helper.itself.append(1)
    assert not watch.unchanged()


def test_nothing_of_a_call_is_kept(watched):
    tensor = torch.ones(2, 4)
    gone = weakref.ref(tensor)
    watched.module(tensor)
    watched.module(torch.ones(2, 4), {"t": (tensor,)})
    del tensor
    gc.collect()
    assert gone() is None


def test_a_call_that_fails_in_the_remembered_code_is_the_region_s(watched, monkeypatch):
    """By that the boot knows which part to serve uncompiled."""

    def fail(*_):
        raise ValueError("in the code")

    guards, x = watched.call._guards, torch.ones(2, 4)
    watched.module(x)
    [[known]] = guards._known.values()
    known.direct = known.direct._replace(graph=fail)
    with pytest.raises(ValueError, match="in the code"):
        watched.module(x)
    assert watched.call._region.broke

"""Regions and the wrapping of their calls; finding blocks is tested beside, compiling for real in tests/boot."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from warmstart import arguments, regions
from warmstart.inductor import Counts
from warmstart.regions import CompileOptions, Part, Region


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def found(model: nn.Module) -> list[Region]:
    return regions.find("t", model, strategy="regional").regions


def test_a_part_has_a_region_for_each_class_of_blocks():
    part = regions.find("t", Model(), strategy="regional")
    assert [(region.name, len(region.modules)) for region in part.regions] == [("t.Block", 3)]
    assert part.how == "as the lists of Model repeat them"


def test_whole_takes_the_part_itself():
    part = regions.find("t", Model(), strategy="whole", wanted=["Block"])
    assert [(region.name, len(region.modules)) for region in part.regions] == [("t.Model", 1)]


def test_a_part_without_a_wanted_class_has_no_region_and_says_so():
    part = regions.find("t", Model(), strategy="regional", wanted=["Nothing"])
    assert (part.regions, part.outcome) == ([], "uncompiled")
    assert "Model holds no module of class Nothing" in part.failed


@pytest.mark.parametrize(
    ("called", "failed", "outcome", "words"),
    [
        ((1, 1), ("", ""), "compiled", ""),
        ((1, 0), ("", ""), "partly", "Two: no planned request calls it"),
        ((1, 1), ("", "a graph break"), "partly", "Two: a graph break"),
        ((0, 0), ("", ""), "uncompiled", "One: no planned request calls it; Two: no planned request calls it"),
        ((1, 0), ("a graph break", ""), "uncompiled", "One: a graph break; Two: no planned request calls it"),
    ],
)
def test_a_part_says_what_of_it_is_compiled(called, failed, outcome, words):
    both = [
        Region("t", name, [], calls=n, failed=why) for name, n, why in zip(("One", "Two"), called, failed, strict=True)
    ]
    part = Part("t", both, "")
    assert (part.outcome, part.failed) == (outcome, words)


def test_compile_leaves_names_types_and_state_dict_alone_and_copies():
    model = Model()
    before = list(model.state_dict()), [type(module) for module in model.modules()]
    regions.compile_in_place(found(model), OPTIONS)
    assert (list(model.state_dict()), [type(module) for module in model.modules()]) == before
    copy.deepcopy(model)


OPTIONS = CompileOptions(mode="default", dynamic=False, fullgraph=True, recompile_limit=16)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch):
    """A model whose regions call, in place of a compiled function, one that notes its arguments."""
    model, seen = Model(), []

    def fake(function, **options):
        def run(x):
            seen.append((x, options))
            return function(x) + model.error

        return run

    monkeypatch.setattr(torch, "compile", fake)
    model.error = 0.0
    [region] = found(model)
    regions.compile_in_place([region], OPTIONS)
    return model, region, seen


def test_each_call_gets_canonical_strides_and_is_counted(compiled):
    model, region, seen = compiled
    sliced = torch.randn(1, 8, 4)[:, 2:6]
    model(sliced)
    assert region.calls == 3
    assert all(x.stride() == (16, 4, 1) for x, _ in seen)
    assert seen[0][1]["recompile_limit"] == 16


def test_an_eager_region_does_not_call_what_was_compiled(compiled):
    model, region, seen = compiled
    region.eager = True
    model(torch.randn(1, 4, 4))
    assert not seen


@pytest.mark.parametrize(("error", "fine"), [(0.0, True), (0.5, False), (float("nan"), False)])
def test_the_check_compares_the_next_call_with_eager(compiled, error, fine):
    model, region, _ = compiled
    model.error = error
    regions.check_next_call([region])
    model(torch.randn(1, 4, 4))
    assert len(region.differences) == 1
    assert (region.differences[0] <= region.tolerance) is fine


def test_canonical_keeps_values_and_goes_into_tuples():
    base = torch.arange(24.0).reshape(2, 3, 4)
    view = base.transpose(0, 1)
    tensor, (inner, other), number = arguments.canonical((view, [view, "text"], 3))
    assert torch.equal(tensor, view)
    assert torch.equal(inner, view)
    assert tensor.is_contiguous()
    assert (other, number) == ("text", 3)
    # What is contiguous already is not copied.
    assert arguments.canonical(base).data_ptr() == base.data_ptr()


def test_canonical_gives_sizes_of_one_the_implied_stride_and_leaves_what_has_it():
    plain, odd = torch.zeros(1, 4, 4), torch.zeros(1, 8, 4)[:, 2:6]
    assert (odd.is_contiguous(), odd.stride()) == (True, (32, 4, 1))
    assert arguments.canonical(odd).stride() == (16, 4, 1)
    assert arguments.canonical(plain) is plain
    assert arguments.canonical(torch.zeros(0, 3)).stride() == (3, 1)
    assert arguments.canonical(torch.tensor(1.0)).stride() == ()


def test_canonical_gives_one_tensor_twice_as_two_objects():
    """Dynamo guards on two arguments' being one object, so a self-attention would need a graph of its own."""
    tensor = torch.zeros(2, 3)
    first, [second], named = arguments.canonical((tensor, [tensor], {"again": tensor}))
    assert len({id(first), id(second), id(named["again"])}) == 3
    assert {item.data_ptr() for item in (first, second, named["again"])} == {tensor.data_ptr()}


def test_canonical_leaves_lists_and_dictionaries_the_caller_s_own():
    """The video autoencoders keep what they saw of earlier frames in a list that they are given."""
    view = torch.arange(24.0).reshape(2, 3, 4).transpose(0, 1)
    kept, named = [None, view], {"scale": view, "other": [view]}
    assert arguments.canonical(kept) is kept
    assert arguments.canonical(named) is named
    for tensor in (kept[1], named["scale"], named["other"][0]):
        assert torch.equal(tensor, view)
        assert tensor.is_contiguous()
    assert kept[0] is None


def test_the_check_gives_eager_what_was_given_before_the_module_wrote_into_it():
    class Counting(nn.Module):
        def forward(self, x, seen):
            seen.append(x)
            return {"sum": sum(seen), "seen": (len(seen), None)}

    region = Region("t", "Counting", [Counting()])
    module, region.checking = region.modules[0], True
    call = regions._Call(region, module, module._call_impl, regions._Meter([region], 1, lambda: None))
    seen = [torch.ones(2)]
    call(torch.ones(2), seen)
    assert len(seen) == 2
    assert region.differences == [0.0]


def test_hooks_run_outside_what_is_compiled(compiled):
    """transformers collects hidden states by hooks, which torch cannot trace."""
    model, _, seen = compiled
    told = []
    handle = model.blocks[0].register_forward_hook(lambda module, args, output: told.append(output))
    model(torch.randn(1, 4, 4))
    assert (len(told), len(seen)) == (1, 3)
    assert "forward" not in vars(model.blocks[0])
    handle.remove()
    model(torch.randn(1, 4, 4))
    assert (len(told), len(seen)) == (1, 6)


def test_what_torch_cannot_trace_runs_uncompiled_from_then_on(compiled, monkeypatch):
    model, region, seen = compiled

    def break_graph(x):
        raise torch._dynamo.exc.Unsupported("a call of print")

    monkeypatch.setattr(model.blocks[0]._compiled_call_impl, "_compiled", break_graph)
    x = torch.randn(1, 4, 4)
    expected = x
    for block in model.blocks:
        expected = block._call_impl(expected)
    assert torch.equal(model(x), expected)
    assert region.failed == region.uncovered == "Unsupported: a call of print"
    assert seen == []


def test_what_cannot_be_compiled_is_left_as_it_was(compiled):
    model, region, seen = compiled
    regions.leave_uncompiled([region])
    model(torch.randn(1, 4, 4))
    assert (seen, region.calls) == ([], 0)


def test_at_the_limit_of_graphs_no_more_are_made(compiled, monkeypatch):
    model, region, _ = compiled
    allowed = []
    monkeypatch.setattr(regions.inductor, "no_more_graphs", lambda: contextlib.nullcontext(allowed.append("no more")))
    call = region.modules[0]._compiled_call_impl
    call._note(Counts(graphs=OPTIONS.recompile_limit - 1))
    model(torch.randn(1, 4, 4))
    assert (allowed, region.full) == ([], 0)
    call._note(Counts(graphs=1))
    model(torch.randn(1, 4, 4))
    assert (len(allowed), region.full) == (3, OPTIONS.recompile_limit)
    # An attempt that failed leaves nothing: its graphs are gone.
    region.forget()
    model(torch.randn(1, 4, 4))
    assert (len(allowed), region.full) == (3, 0)


def test_the_limit_is_one_for_all_regions_of_a_class_as_torch_s_is(compiled, monkeypatch):
    _, region, _ = compiled
    other = Region("another part", "Block", [Block()], counts=Counts(graphs=OPTIONS.recompile_limit - 1))
    third = Region("another part", "Model", [Model()])
    meter = regions._Meter([region, other, third], OPTIONS.recompile_limit, lambda: None)
    meter.limit_reached(Block)
    assert [item.full for item in (region, other, third)] == [0, 0, 0]
    region.counts = Counts(graphs=1)
    meter.limit_reached(Block)
    assert [item.full for item in (region, other, third)] == [OPTIONS.recompile_limit, OPTIONS.recompile_limit, 0]


def test_the_check_tells_the_speed_of_both_and_writes_into_nothing(compiled):
    model, region, seen = compiled
    regions.check_next_call([region])
    model(torch.randn(1, 4, 4))
    [speed] = region.speeds
    assert min(speed) > 0
    # One call of each of three blocks, and three more of the first, on copies.
    assert len(seen) == 6


def test_a_speed_that_would_cost_a_compile_is_not_told(compiled, monkeypatch):
    model, region, _ = compiled
    first = model.blocks[0]._compiled_call_impl
    calls = []

    def refuse_copies(x):
        calls.append(x)
        if len(calls) > 1:
            raise RuntimeError("Detected recompile when torch.compile stance is 'fail_on_recompile'. filename: 'a'")
        return model.blocks[0]._call_impl(x)

    monkeypatch.setattr(first, "_compiled", refuse_copies)
    regions.check_next_call([region])
    model(torch.randn(1, 4, 4))
    assert region.speeds == []
    assert region.differences == [0.0]
    assert region.uncovered == ""


def test_a_call_that_torch_refuses_runs_uncompiled_and_says_why(compiled, monkeypatch):
    model, region, _ = compiled
    model.error = 1.0
    monkeypatch.setattr(regions.inductor, "no_more_graphs", contextlib.nullcontext)
    told = (
        "Detected recompile when torch.compile stance is 'fail_on_recompile'. filename: 'a'\n  - 0/1: tensor 'x' size"
    )

    def refuse(x):
        raise RuntimeError(told)

    first = model.blocks[0]._compiled_call_impl
    monkeypatch.setattr(first, "_compiled", refuse)
    x = torch.randn(1, 4, 4)
    assert torch.equal(first(x), model.blocks[0]._call_impl(x))
    assert region.uncovered == "tensor 'x' size"


def test_another_error_of_a_region_is_not_taken_for_a_refusal(compiled, monkeypatch):
    model, region, _ = compiled

    def fail(x):
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(model.blocks[0]._compiled_call_impl, "_compiled", fail)
    with pytest.raises(RuntimeError, match="the disk is full"):
        model(torch.randn(1, 4, 4))
    assert region.uncovered == region.failed == ""
    assert region.broke


def test_a_forward_that_is_replaced_after_the_compile_runs_as_it_is(compiled) -> None:
    """As diffusers' caches do (`enable_cache`), which skip blocks whose input has hardly changed."""
    model = Model()
    [region] = found(model)
    regions.compile_in_place([region], OPTIONS)
    x = torch.ones(1, 4)
    model(x)
    first = model.blocks[0]
    assert region.uncovered == ""
    first.forward = lambda x: x * 0
    assert torch.equal(first(x), x * 0)
    assert region.uncovered == "the forward of a Block was replaced"
    del first.forward
    region.uncovered = ""
    assert torch.equal(first(x), first.linear(x))
    assert region.uncovered == ""

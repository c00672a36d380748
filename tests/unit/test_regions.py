"""Finding regions and wrapping their calls; compiling for real is tested in tests/boot."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from warmstart import regions
from warmstart.regions import CompileOptions, RegionsError


class Block(nn.Module):
    def __init__(self, inner: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if inner:
            self.inner = Block()

    def forward(self, x):
        return self.linear(x)


class Other(Block):
    pass


class Model(nn.Module):
    def __init__(self, *, declared: list[str] | None = None, inner: bool = False) -> None:
        super().__init__()
        if declared is not None:
            self._repeated_blocks = declared
        self.blocks = nn.ModuleList(Block(inner) for _ in range(3))
        self.others = nn.ModuleList([Other()])
        self.mixed = nn.ModuleList([nn.Linear(4, 4), nn.SiLU()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def names(model: nn.Module, **options) -> dict[str, int]:
    found = regions.find("transformer", model, **({"strategy": "regional"} | options))
    return {region.name: len(region.modules) for region in found}


def test_declared_blocks_are_the_regions():
    assert names(Model(declared=["Other"])) == {"transformer.Other": 1}


def test_a_declared_class_that_does_not_occur_is_left_out():
    assert names(Model(declared=["Other", "Absent"])) == {"transformer.Other": 1}


def test_without_a_declaration_homogeneous_lists_tell():
    assert names(Model()) == {"transformer.Block": 3}


def test_wanted_classes_come_first():
    assert names(Model(declared=["Block"]), wanted=["Other"]) == {"transformer.Other": 1}


def test_a_region_inside_a_region_is_the_outer_one_s():
    assert names(Model(inner=True)) == {"transformer.Block": 3}


def test_whole_takes_the_part_itself():
    assert names(Model(), strategy="whole") == {"transformer.Model": 1}


@pytest.mark.parametrize(("model", "wanted"), [(Model(), ["Nothing"]), (nn.Sequential(nn.Linear(1, 1)), [])])
def test_no_region_is_an_error_that_says_what_to_set(model, wanted):
    with pytest.raises(RegionsError, match="set WARMSTART_REGIONS to one of"):
        names(model, wanted=wanted)


def test_compile_leaves_names_types_and_state_dict_alone_and_copies():
    model = Model()
    before = list(model.state_dict()), [type(module) for module in model.modules()]
    regions.compile_in_place(regions.find("t", model, strategy="regional"), OPTIONS)
    assert (list(model.state_dict()), [type(module) for module in model.modules()]) == before
    copy.deepcopy(model)


OPTIONS = CompileOptions(mode="default", dynamic=False, fullgraph=True, recompile_limit=16)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch):
    """A model whose regions call, in place of a compiled function, one that notes its arguments."""
    model, seen = Model(), []

    def fake(module: nn.Module, **options) -> None:
        def run(x):
            seen.append((x, options))
            return module._call_impl(x) + model.error

        module._compiled_call_impl = run

    monkeypatch.setattr(nn.Module, "compile", fake)
    model.error = 0.0
    found = regions.find("t", model, strategy="regional")
    regions.compile_in_place(found, OPTIONS)
    return model, found[0], seen


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
    tensor, (inner, other), number = regions.canonical((view, [view, "text"], 3))
    assert torch.equal(tensor, view)
    assert torch.equal(inner, view)
    assert tensor.is_contiguous()
    assert (other, number) == ("text", 3)
    # What is contiguous already is not copied.
    assert regions.canonical(base).data_ptr() == base.data_ptr()


def test_what_cannot_be_compiled_is_left_as_it_was(compiled):
    model, region, seen = compiled
    regions.leave_uncompiled([region])
    model(torch.randn(1, 4, 4))
    assert (seen, region.calls) == ([], 0)


def test_at_the_limit_of_graphs_no_more_are_made(compiled, monkeypatch):
    model, region, _ = compiled
    allowed = []
    monkeypatch.setattr(regions.inductor, "no_more_graphs", lambda: contextlib.nullcontext(allowed.append("no more")))
    meter = model.blocks[0]._compiled_call_impl._meter
    meter.graphs[Block] = OPTIONS.recompile_limit - 1
    model(torch.randn(1, 4, 4))
    assert (allowed, region.full) == ([], 0)
    meter.graphs[Block] += 1
    model(torch.randn(1, 4, 4))
    assert (len(allowed), region.full) == (3, OPTIONS.recompile_limit)


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
    assert region.uncovered == ""

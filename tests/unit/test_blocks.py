"""Which modules are the blocks: those declared, else those that lists repeat, else the whole."""

import pytest
import torch
from torch import nn

from warmstart import blocks
from warmstart.blocks import BlocksError


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)


class Other(Block):
    pass


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def model(**children: nn.Module) -> nn.Module:
    made = Outer(nn.Identity())
    for name, child in children.items():
        setattr(made, name, child)
    return made


def repeated(count: int, kind: type[nn.Module] = Block, width: int = 4) -> nn.ModuleList:
    return nn.ModuleList(kind(width) for _ in range(count))


def found(module: nn.Module, *wanted: str) -> dict[str, int]:
    return {name: len(group) for name, group in blocks.find(module, wanted).groups.items()}


def test_blocks_that_diffusers_declares_come_first():
    module = model(a=repeated(3), b=repeated(1, Other))
    module._repeated_blocks = ["Other", "Absent"]
    assert found(module) == {"Other": 1}
    assert blocks.find(module).how == "as Outer declares"


def test_of_what_transformers_never_splits_the_repeated_count():
    """CLIP names its embeddings too, which occur once."""
    module = model(a=repeated(3), embeddings=Other())
    module._no_split_modules = {"Block", "Other"}
    assert found(module) == {"Block": 3}


def test_a_declaration_that_fits_nothing_is_passed_over():
    module = model(a=repeated(3))
    module._repeated_blocks = module._no_split_modules = ["Absent"]
    assert found(module) == {"Block": 3}


def test_a_part_of_several_models_has_the_blocks_that_each_declares():
    """As several ControlNets in one, or one block in each level."""
    nets = [model(a=repeated(count, Other)) for count in (2, 3)]
    for net in nets:
        net._repeated_blocks = ["Other"]
    assert found(model(nets=nn.ModuleList(nets))) == {"Other": 5}
    levels = [model(a=repeated(1)), model(a=repeated(1))]
    for level in levels:
        level._no_split_modules = ["Block"]
    assert found(model(levels=nn.ModuleList(levels))) == {"Block": 2}


@pytest.mark.parametrize(
    "nested",
    [
        repeated(3),
        nn.Sequential(*repeated(3)),
        nn.ModuleDict({str(index): Block() for index in range(3)}),
        nn.ModuleList([nn.ModuleList([Block()]), nn.ModuleList([Block()]), nn.ModuleDict({"a": Block()})]),
        nn.ModuleList([Outer(repeated(3)), Block(), Outer(Block())]),
    ],
)
def test_without_a_declaration_lists_tell_however_nested(nested):
    count = sum(isinstance(module, Block) for module in nested.modules())
    assert found(model(a=nested, mixed=nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.SiLU()]))) == {
        "Block": count
    }


def test_two_classes_that_take_turns_are_both_blocks():
    assert found(model(a=nn.ModuleList(kind() for kind in (Block, Other) * 3))) == {"Block": 3, "Other": 3}


def test_small_blocks_beside_large_ones_are_not_worth_a_graph():
    assert found(model(a=repeated(3, Block, 64), b=repeated(3, Other, 4))) == {"Block": 3}


def test_a_block_inside_a_block_is_the_outer_one_s():
    assert found(model(a=nn.ModuleList(Outer(repeated(3)) for _ in range(3)))) == {"Outer": 3}


def levels(*blocks: nn.Module) -> nn.Module:
    return model(levels=nn.ModuleList(blocks))


def test_where_most_blocks_differ_those_inside_them_count():
    """As the levels of a VAE's decoder, of which two are equal and the others are not."""
    insides = [repeated(3, width=8), repeated(3, width=8), repeated(3, width=6), repeated(3)]
    assert found(levels(*map(Outer, insides))) == {"Block": 12}


def test_where_all_blocks_differ_the_whole_is_the_block():
    module = levels(Block(8), Block(8), Block(6), Block(4))
    assert found(module) == {"Outer": 1}
    assert "WARMSTART_REGIONS may name Block" in blocks.find(module).how


def test_a_module_without_lists_is_compiled_as_a_whole():
    assert found(nn.Linear(2, 2)) == {"Linear": 1}
    assert blocks.find(nn.Linear(2, 2)).how == "as a whole"


def test_wanted_classes_come_before_declared_ones_and_may_be_the_module_s_own():
    module = model(a=repeated(3), b=repeated(1, Other))
    module._repeated_blocks = ["Block"]
    assert found(module, "Other") == {"Other": 1}
    assert found(module, "Outer") == {"Outer": 1}


def test_a_wanted_class_that_does_not_occur_is_refused_with_those_that_do():
    with pytest.raises(BlocksError, match="set WARMSTART_REGIONS to some of: Block, Outer, SiLU"):
        found(model(a=repeated(2), b=nn.Sequential(nn.SiLU())), "Nothing")


def test_finding_reads_no_weights():
    with torch.device("meta"):
        assert found(model(a=repeated(3))) == {"Block": 3}

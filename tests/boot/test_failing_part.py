"""A part whose compile fails in every boot costs the other parts nothing: they come from the cache, boot after boot."""

import pytest
from booting import HEADER, rebuild, warnings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# The denoiser's block computes something else where it is compiled.
BEFORE = """
import dataclasses
import predict
import torch
from diffusers.models.attention import FeedForward

first = predict.request("7", "1:1", 1, 1, 1.0, 0)
PLAN = [dataclasses.replace(first, inputs={**first.inputs, "output_type": "latent"})]
forward = FeedForward.forward

def drifting(self, *args):
    return forward(self, *args) + (1.0 if torch.compiler.is_compiling() else 0.0)

FeedForward.forward = drifting
"""
SETTINGS = {
    "WARMSTART_PARTS": "text_encoder,transformer",
    "WARMSTART_REGIONS": "CLIPEncoderLayer,FluxTransformerBlock",
}


@pytest.fixture(scope="module")
def boots(boot, tmp_path_factory):
    """Three boots after each other over one store, each with the bundles there were after it."""
    store = tmp_path_factory.mktemp("failing") / "store"
    told = []
    for _ in range(3):
        booted = boot(store, before=BEFORE, environment=SETTINGS)
        told.append((booted, {*store.rglob("*.tar.zst")}))
    return told


def test_the_first_boot_is_cold_and_serves_the_part_uncompiled(boots):
    first = boots[0][0]
    assert first.report["outcome"] == "cold"
    assert "differs from its eager self" in first.report["reason"]
    # What the part's attempt compiled is counted too, and no graph of this boot passes for one from a cache.
    assert (first.counts["fx_hits"], first.counts["fx_misses"]) == (0, 2)
    assert [(part["name"], part["outcome"]) for part in first.report["parts"]] == [
        ("text_encoder", "compiled"),
        ("transformer", "uncompiled"),
    ]


@pytest.mark.parametrize("number", [1, 2])
def test_later_boots_are_warm_set_nothing_aside_and_publish_nothing(boots, number):
    (booted, bundles), (_, before) = boots[number], boots[0]
    assert booted.report["outcome"] == "warm"
    assert (booted.counts["fx_misses"], booted.counts["kernels_built"]) == (0, 0)
    assert warnings(booted.report) == []
    assert "transformer is not compiled" in booted.report["reason"]
    assert {region["name"]: region["graphs"] for region in booted.report["regions"]} == {
        "text_encoder.CLIPEncoderLayer": 1,
        "transformer.FluxTransformerBlock": 1,
    }
    assert bundles == before


def test_damaged_bundles_beside_such_a_part_are_set_aside_once(boot, boots, tmp_path):
    """They broke the encoder, which compiles well without them; that the denoiser does not says nothing for them."""
    broken = tmp_path / "store"
    for number, packed in enumerate(boots[-1][1]):
        (work := tmp_path / str(number)).mkdir()
        rebuild(packed, broken / packed.parent.relative_to(packed.parents[2]), work)
    healing = boot(broken, before=BEFORE, environment=SETTINGS)
    assert healing.report["outcome"] == "cold"
    assert any("set aside" in warning for warning in healing.report["warnings"])
    assert any("noted as broken" in warning for warning in healing.report["warnings"])
    healed = boot(broken, before=BEFORE, environment=SETTINGS)
    assert (healed.report["outcome"], warnings(healed.report)) == ("warm", [])
    assert (healed.counts["fx_misses"], healed.counts["kernels_built"]) == (0, 0)
    assert "transformer is not compiled" in healed.report["reason"]
    assert {part["name"]: part["outcome"] for part in healed.report["parts"]}["text_encoder"] == "compiled"


# Two parts of one class, whose modules share a code object, and so what torch has made of it. The first compile fails.
TWINS = """
import torch
import warmstart
from torch._inductor.graph import GraphLowering

def twin():
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()).requires_grad_(False)

torch.manual_seed(0)
first, second = twin(), twin()
x = torch.randn(4, 16)
LOAD = lambda: warmstart.OwnModel({"first": first, "second": second}, run=lambda request: second(first(x)))
PLAN = [warmstart.Request("one", {})]
run, seen = GraphLowering.run, []

def fail_once(self, *args):
    seen.append(self)
    if len(seen) == 1:
        raise RuntimeError("too much")
    return run(self, *args)

GraphLowering.run = fail_once
"""
DIFFERENCE = """
result = model(PLAN[0])
wanted = second._call_impl(first._call_impl(x))
answer = [(result.outputs[0] - wanted).abs().max().item(), result.graphs, result.reason]
"""


def test_a_part_of_the_same_class_is_compiled_all_the_same(boot, store):
    environment = {"WARMSTART_STRATEGY": "whole", HEADER: "0"}
    booted = boot(store, before=TWINS, after=DIFFERENCE, environment=environment)
    assert {part["name"]: part["outcome"] for part in booted.report["parts"]} == {
        "first": "uncompiled",
        "second": "compiled",
    }
    assert "RuntimeError: too much" in booted.report["reason"]
    assert (booted.report["outcome"], booted.counts["fx_hits"]) == ("cold", 0)
    difference, graphs, reason = booted.after
    assert (difference < 1e-5, graphs, reason) == (True, 0, "")

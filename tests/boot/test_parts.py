"""Each part of a model has its own outcome: one that cannot be compiled, or is not called, costs the others nothing."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# The denoiser is one graph no more, the encoder of tokens adds something where it is compiled, and nothing is decoded.
BEFORE = """
import dataclasses
import predict
import torch
from diffusers.models.attention import FeedForward
from transformers.models.t5.modeling_t5 import T5LayerFF

first = predict.request("7", "1:1", 1, 1, 1.0, 0)
PLAN = [dataclasses.replace(first, inputs={**first.inputs, "output_type": "latent"})]
denoise, encode = FeedForward.forward, T5LayerFF.forward

def broken(self, *args):
    torch._dynamo.graph_break()
    return denoise(self, *args)

def drifting(self, *args):
    return encode(self, *args) + (1.0 if torch.compiler.is_compiling() else 0.0)

FeedForward.forward, T5LayerFF.forward = broken, drifting

# What becomes of a part is decided before and after Inductor, so that it need not build a kernel.
compiled = torch.compile
torch.compile = lambda function, **options: compiled(function, backend="eager", **options)
"""
AFTER = """
result = model(PLAN[0])
answer = [result.reason, result.graphs, [region.name for region in model._regions if not region.eager]]
"""
SETTINGS = {
    "WARMSTART_PARTS": "transformer,text_encoder,text_encoder_2,vae",
    "WARMSTART_REGIONS": "FluxTransformerBlock,CLIPEncoderLayer,T5Block,Decoder",
}


@pytest.fixture(scope="module")
def booted(boot, tmp_path_factory):
    return boot(tmp_path_factory.mktemp("parts") / "store", before=BEFORE, after=AFTER, environment=SETTINGS)


def test_a_part_that_cannot_be_compiled_leaves_the_others_compiled(booted):
    parts = {part["name"]: part for part in booted.report["parts"]}
    assert booted.report["outcome"] == "cold"
    assert (parts["text_encoder"]["outcome"], parts["text_encoder"]["reason"]) == ("compiled", "")
    assert parts["transformer"]["outcome"] == parts["text_encoder_2"]["outcome"] == "uncompiled"
    assert "FluxTransformerBlock: Unsupported" in parts["transformer"]["reason"]
    assert "T5Block differs from its eager self" in parts["text_encoder_2"]["reason"]
    assert booted.after == ["", 0, ["text_encoder.CLIPEncoderLayer", "vae.Decoder"]]


def test_a_part_that_nothing_calls_is_told_in_the_outcome_s_reason(booted):
    assert "vae is not compiled (Decoder: no planned request calls it)" in booted.report["reason"]
    assert "  part       vae is UNCOMPILED: Decoder: no planned request calls it" in booted.log

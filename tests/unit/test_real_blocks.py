"""The blocks of real model classes in the sizes that are published, built without memory."""

import diffusers
import pytest
import torch
import transformers
from torch import nn

from warmstart import blocks


def found(module: nn.Module) -> dict[str, int]:
    return {name: len(group) for name, group in blocks.find(module).groups.items()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("FluxTransformer2DModel", {"FluxSingleTransformerBlock": 38, "FluxTransformerBlock": 19}),
        ("SD3Transformer2DModel", {"JointTransformerBlock": 18}),
        ("UNet2DConditionModel", {"BasicTransformerBlock": 16}),
        ("PixArtTransformer2DModel", {"BasicTransformerBlock": 28}),
        ("SanaTransformer2DModel", {"SanaTransformerBlock": 20}),
        ("LTXVideoTransformer3DModel", {"LTXVideoTransformerBlock": 28}),
        ("WanTransformer3DModel", {"WanTransformerBlock": 40}),
        ("QwenImageTransformer2DModel", {"QwenImageTransformerBlock": 60}),
        ("ZImageTransformer2DModel", {"ZImageTransformerBlock": 34}),
        # These declare nothing.
        ("FluxControlNetModel", {"FluxSingleTransformerBlock": 38, "FluxTransformerBlock": 19}),
        ("SD3ControlNetModel", {"JointTransformerBlock": 18}),
        ("PriorTransformer", {"BasicTransformerBlock": 20}),
    ],
)
def test_denoisers_of_diffusers(name, expected):
    with torch.device("meta"):
        assert found(getattr(diffusers, name)()) == expected


def test_a_decoder_of_stable_diffusion_has_its_residual_blocks():
    """Its four levels are of one class, and two of them are equal."""
    widths = (128, 256, 512, 512)
    with torch.device("meta"):
        vae = diffusers.AutoencoderKL(
            block_out_channels=widths, layers_per_block=2, up_block_types=("UpDecoderBlock2D",) * 4,
            down_block_types=("DownEncoderBlock2D",) * 4,
        )  # fmt: skip
    assert found(vae.decoder) == {"ResnetBlock2D": 14}


@pytest.mark.parametrize(
    ("model", "config", "expected"),
    [
        ("LlamaForCausalLM", transformers.LlamaConfig(), {"LlamaDecoderLayer": 32}),
        ("Qwen3ForCausalLM", transformers.Qwen3Config(), {"Qwen3DecoderLayer": 32}),
        ("Gemma3ForCausalLM", transformers.Gemma3TextConfig(), {"Gemma3DecoderLayer": 26}),
        ("MixtralForCausalLM", transformers.MixtralConfig(), {"MixtralDecoderLayer": 32}),
        ("CLIPTextModel", transformers.CLIPTextConfig(), {"CLIPEncoderLayer": 12}),
        ("T5EncoderModel", transformers.T5Config(), {"T5Block": 6}),
        ("CLIPVisionModel", transformers.CLIPVisionConfig(), {"CLIPEncoderLayer": 12}),
        ("SiglipVisionModel", transformers.SiglipVisionConfig(), {"SiglipEncoderLayer": 12}),
    ],
)
def test_decoders_encoders_and_vision_towers_of_transformers(model, config, expected):
    with torch.device("meta"):
        assert found(getattr(transformers, model)(config)) == expected

"""LoRA files for the default model, and what they do to it: booted by warmstart, and in plain diffusers with peft."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import predict
import warmstart

WEIGHTS = Path(__file__).resolve().parent.parent / "weights" / "transformer" / "diffusion_pytorch_model.safetensors"
RANK = 8
# Layers of the region that boots compile here, others of its block, and one that is in no block.
LAYERS = {
    "a": ("ff.net.0.proj", "ff.net.2", "attn.to_q", "attn.to_out.0"),
    "b": ("ff.net.2", "ff_context.net.2", "proj_mlp", "x_embedder"),
}
RANKS = {"a": 4, "b": RANK}
# One after the other, with none in between and at the end.
SWAPS: list[list[tuple[str, float]]] = [
    [("a", 1.0)], [("a", 0.4)], [("b", 1.0)], [], [("b", 0.5)], [("a", 1.0)], [("a", 0.7), ("a", 0.3)], [],
]  # fmt: skip


def layer_shapes() -> dict[str, list[int]]:
    """Shapes (out, in) of the transformer's matrices by layer."""
    with safe_open(WEIGHTS, framework="pt") as file:
        named = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118  it is no dictionary
    return {name.removesuffix(".weight"): shape for name, shape in named.items() if len(shape) == 2}


def tensors(which: str) -> dict[str, torch.Tensor]:
    """A LoRA that changes what is drawn, as diffusers names its tensors."""
    generator = torch.Generator().manual_seed(ord(which))
    found = {}
    for layer, (height, width) in layer_shapes().items():
        if layer.endswith(LAYERS[which]):
            for name, shape in (("lora_A", (RANKS[which], width)), ("lora_B", (height, RANKS[which]))):
                found[f"transformer.{layer}.{name}.weight"] = 0.1 * torch.randn(shape, generator=generator)
            found[f"transformer.{layer}.alpha"] = torch.tensor(2.0 * RANKS[which])
    return found


def write(folder: Path) -> None:
    """Writes both LoRAs as a user would have them."""
    for which in RANKS:
        save_file(tensors(which), folder / f"{which}.safetensors")


def request(folder: Path, swap: list[tuple[str, float]]) -> warmstart.Request:
    """A planned request with LoRAs."""
    plain = predict.request("a handwritten seven", "1:1", 1, 2, 1.0, 3)
    loras = tuple(warmstart.Lora(folder / f"{which}.safetensors", scale) for which, scale in swap)
    return warmstart.Request(plain.label, {**plain.inputs, "output_type": "np"}, plain.seeds, loras)


def plain(folder: Path, swap: list[tuple[str, float]]) -> Any:
    """What diffusers draws by its own means, uncompiled: (height, width, 3)."""
    import diffusers

    from warmstart.models.diffusers import DiffusersModel

    pipeline = diffusers.FluxPipeline.from_pretrained("weights", local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    names = [f"{index}" for index in range(len(swap))]
    for name, (which, _) in zip(names, swap, strict=True):
        pipeline.load_lora_weights(str(folder), weight_name=f"{which}.safetensors", adapter_name=name)
    if names:
        pipeline.set_adapters(names, [scale for _, scale in swap])
    with torch.inference_mode():
        return DiffusersModel.of(pipeline).run(request(folder, []))[0]


def compare(model: warmstart.Served, folder: Path) -> list[dict[str, Any]]:
    """Asks a booted model for each swap: how far it is from plain diffusers, from no LoRA, and what it compiled."""
    none = plain(folder, [])
    answers = []
    for swap in SWAPS:
        result, expected = model(request(folder, swap)), plain(folder, swap)
        answers.append(
            {
                "swap": swap,
                "error": float(abs(result.outputs[0] - expected).max()),
                "change": float(abs(result.outputs[0] - none).max()),
                "graphs": result.graphs,
                "reason": result.reason,
            }
        )
    return answers

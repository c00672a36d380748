"""What is asked of pipelines of many families, to tell whether graphs are shared. Loads no torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

import warmstart

SHORT, LONG = "seven", "three and four and five and six and seven"


@dataclass(frozen=True)
class Family:
    """A pipeline class and the kinds of request that tell whether graphs are shared."""

    build: str
    """The function of tests/family_models.py that makes it."""
    several: str = "num_images_per_prompt"
    """Its argument for several outputs of one prompt."""
    guidance: dict[str, tuple[float, float]] = field(default_factory=lambda: {"guidance_scale": (1.0, 4.0)})
    """Its argument for guidance: off and on."""
    sizes: tuple[dict[str, int], dict[str, int]] = ({"width": 32, "height": 32}, {"width": 48, "height": 32})
    inputs: dict[str, Any] = field(default_factory=dict)
    """What every request has besides."""
    settings: dict[str, str] = field(default_factory=dict)
    """Variables that it needs to boot compiled."""
    note: str = ""
    """Why a cell of its row in docs/families.md is not what it is elsewhere."""


def plan(name: str) -> list[warmstart.Request]:
    """What is warmed: two sizes, one and two outputs, guidance off and on, a short and a long prompt."""
    one, two = FAMILIES[name].sizes
    return [
        request(name, "first", SHORT, one, 1, 0),
        request(name, "wide, guided", SHORT, two, 1, 1),
        request(name, "two, guided, long", LONG, one, 2, 1),
        request(name, "wide, two, long", LONG, two, 2, 0),
    ]


def others(name: str) -> list[warmstart.Request]:
    """What the same graphs must serve too: other sums of these, and numbers that were not planned."""
    one, two = FAMILIES[name].sizes
    return [
        request(name, "first", LONG, two, 1, 0),
        request(name, "two, guided, long", SHORT, two, 3, 1),
        request(name, "wide, two, long", "nine and eight", one, 4, 0),
    ]


def request(name: str, label: str, prompt: str, size: dict[str, int], outputs: int, on: int) -> warmstart.Request:
    """One request, in the words of the family's pipeline."""
    family = FAMILIES[name]
    guidance = {argument: values[on] for argument, values in family.guidance.items()}
    inputs = {"prompt": prompt, "num_inference_steps": 2, "output_type": "np", family.several: outputs}
    return warmstart.Request(label, inputs | size | guidance | family.inputs, seeds=tuple(range(outputs)))


def order(name: str, model: Path) -> dict[str, Any]:
    """What tests/booting.py's Boot is told: boot that model with that plan, then ask all of it and more."""
    start = "import sys\nsys.path.insert(0, 'tests')\nimport families\n"
    return {
        "before": f"{start}PLAN = families.plan({name!r})",
        "after": f"answer = families.compare(model, families.plan({name!r}) + families.others({name!r}))",
        "environment": {"WARMSTART_MODEL": str(model), **FAMILIES[name].settings},
    }


def compare(model: warmstart.Served, requests: list[warmstart.Request]) -> dict[str, Any]:
    """Asks a booted model compiled and uncompiled: the largest relative difference, what compiled, what was refused."""
    difference, graphs, reasons = 0.0, 0, []
    for item in requests:
        result = model(item)
        graphs += result.graphs
        reasons += [result.reason] if result.reason else []
        for region in model._regions:
            region.eager, eager = True, region.eager
        expected = model(item).outputs
        for region in model._regions:
            region.eager = eager
        for got, want in zip(result.outputs, expected, strict=True):
            difference = max(difference, float(abs(got - want).max() / abs(want).max()))
    return {"difference": difference, "graphs": graphs, "reasons": reasons, "asked": len(requests)}


PICTURE = Image.new("RGB", (32, 32), (200, 100, 50))
"""To start from."""

FAMILIES = {
    "FluxPipeline": Family("flux", inputs={"max_sequence_length": 16}),
    "StableDiffusion3Pipeline": Family("sd3", inputs={"max_sequence_length": 16}),
    "StableDiffusionPipeline": Family("sd"),
    "StableDiffusionXLPipeline": Family("sdxl"),
    "PixArtSigmaPipeline": Family(
        "pixart", inputs={"max_sequence_length": 16, "use_resolution_binning": False, "clean_caption": False}
    ),
    "SanaPipeline": Family(
        "sana",
        inputs={
            "max_sequence_length": 16,
            "use_resolution_binning": False,
            "clean_caption": False,
            "complex_human_instruction": None,
        },
        sizes=({"width": 64, "height": 64}, {"width": 96, "height": 64}),
    ),
    "LTXPipeline": Family(
        "ltx",
        several="num_videos_per_prompt",
        inputs={"max_sequence_length": 16},
        sizes=({"width": 32, "height": 32, "num_frames": 9}, {"width": 64, "height": 32, "num_frames": 17}),
    ),
    # Its autoencoder would take most of the time, and LTX's makes videos too.
    "WanPipeline": Family(
        "wan",
        several="num_videos_per_prompt",
        inputs={"max_sequence_length": 16, "output_type": "latent"},
        sizes=({"width": 32, "height": 32, "num_frames": 5}, {"width": 48, "height": 32, "num_frames": 9}),
    ),
    "QwenImagePipeline": Family(
        "qwen", guidance={"true_cfg_scale": (1.0, 4.0)}, inputs={"max_sequence_length": 128, "negative_prompt": "x"}
    ),
    "ZImagePipeline": Family("zimage", guidance={"guidance_scale": (0.0, 4.0)}, inputs={"max_sequence_length": 128}),
    "FluxImg2ImgPipeline": Family(
        "flux_image",
        inputs={"max_sequence_length": 16, "image": PICTURE, "strength": 1.0},
    ),
    "FluxControlNetPipeline": Family(
        "flux_control",
        inputs={"max_sequence_length": 16, "control_image": PICTURE},
    ),
    "StableDiffusionImg2ImgPipeline": Family("sd_image", inputs={"image": PICTURE, "strength": 1.0}, sizes=({}, {})),
    "StableDiffusionControlNetPipeline": Family("sd_control", inputs={"image": PICTURE}),
}

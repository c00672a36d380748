"""What pipelines and language models of many families are asked, to tell whether graphs are shared. Loads no torch."""

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

    def plan(self) -> list[warmstart.Request]:
        """What is warmed: two sizes, one and two outputs, guidance off and on, a short and a long prompt."""
        one, two = self.sizes
        return [
            self.request("first", SHORT, one, 1, 0),
            self.request("wide, guided", SHORT, two, 1, 1),
            self.request("two, guided, long", LONG, one, 2, 1),
            self.request("wide, two, long", LONG, two, 2, 0),
        ]

    def others(self) -> list[warmstart.Request]:
        """What the same graphs must serve too: other sums of these, and numbers that were not planned."""
        one, two = self.sizes
        return [
            self.request("first", LONG, two, 1, 0),
            self.request("two, guided, long", SHORT, two, 3, 1),
            self.request("wide, two, long", "nine and eight", one, 4, 0),
        ]

    def request(self, label: str, prompt: str, size: dict[str, int], outputs: int, on: int) -> warmstart.Request:
        """One request, in the words of the family's pipeline."""
        guidance = {argument: values[on] for argument, values in self.guidance.items()}
        inputs = {"prompt": prompt, "num_inference_steps": 2, "output_type": "np", self.several: outputs}
        return warmstart.Request(label, inputs | size | guidance | self.inputs, seeds=tuple(range(outputs)))


@dataclass(frozen=True)
class Decoder:
    """A causal language model: lengths of prompts that are planned, and texts of every length within them."""

    build: str
    settings: dict[str, str] = field(default_factory=dict)
    note: str = ""

    def plan(self) -> list[warmstart.Request]:
        """What is warmed: three lengths that prompts are padded to, the first of them that of each further token."""
        lengths = {"prompt": "", "cache_tokens": 96, "max_new_tokens": 2}
        return [warmstart.Request(f"up to {size}", {**lengths, "prefill": size}) for size in (1, 8, 64)]

    def others(self) -> list[warmstart.Request]:
        """Prompts of one token, of a few and of many; texts up to the end of the buffers."""
        return [
            warmstart.Request("any", {"prompt": prompt, "max_new_tokens": tokens, "temperature": 0.0})
            for prompt, tokens in (("a", 1), ("abc", 24), ("7" * 40, 12), ("7" * 60, 35))
        ]


def order(name: str, model: Path) -> dict[str, Any]:
    """What tests/booting.py's Boot is told: boot that model with that plan, then ask all of it and more."""
    start = "import sys\nsys.path.insert(0, 'tests')\nimport families\n"
    return {
        "before": f"{start}family = families.FAMILIES[{name!r}]\nPLAN = family.plan()",
        "after": "answer = families.compare(model, family.plan() + family.others())",
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
            difference = max(difference, apart(got, want))
    return {"difference": difference, "graphs": graphs, "reasons": reasons, "asked": len(requests)}


def apart(got: Any, want: Any) -> float:
    """The largest difference relative to the largest value; of texts whether there is one."""
    if isinstance(got, str):
        return float(got != want)
    return float(abs(got - want).max() / abs(want).max())


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
    "LlamaForCausalLM": Decoder("llama"),
    "Qwen3ForCausalLM": Decoder("qwen3"),
    "Gemma3ForCausalLM": Decoder("gemma3"),
    "MixtralForCausalLM": Decoder("mixtral"),
}

"""The Predictor that Cog serves. To serve your own model, edit SHAPES, `request` and the inputs of `run`.

All that can be asked for is planned: `setup` warms each shape at each number of outputs, so no prediction waits for a
compile.
"""

import random
import tempfile
from collections import deque
from pathlib import Path as LocalPath

from cog import BaseRunner, Input, Path

import warmstart

# Aspect ratio -> width and height of the picture that the model draws, in pixels.
SHAPES = {"1:1": (64, 64), "3:2": (96, 64), "2:3": (64, 96)}
MAX_OUTPUTS = 4


def request(prompt: str, aspect_ratio: str, outputs: int, steps: int, guidance: float, seed: int) -> warmstart.Request:
    """Says in the pipeline's own words what one prediction asks for."""
    width, height = SHAPES[aspect_ratio]
    return warmstart.Request(
        label=f"{aspect_ratio} x{outputs}",
        seeds=tuple(range(seed, seed + outputs)),
        inputs={
            "prompt": prompt,
            "negative_prompt": "",
            "width": width,
            "height": height,
            "num_images_per_prompt": outputs,
            "num_inference_steps": steps,
            "true_cfg_scale": guidance,
            "max_sequence_length": 16,
        },
    )


def plan() -> list[warmstart.Request]:
    """One request for each kind that a user can make; steps, guidance, seed and prompt need no graphs of their own."""
    return [
        request("a handwritten seven", shape, outputs, steps=2, guidance=2.0, seed=0)
        for shape in SHAPES
        for outputs in range(1, MAX_OUTPUTS + 1)
    ]


class Predictor(BaseRunner):
    def setup(self) -> None:
        """Loads, compiles and warms the model."""
        self.model = warmstart.boot(plan(), sources=[__file__])
        # Folders of the latest predictions. Cog reads their files and leaves them; the oldest is removed below.
        self.folders: deque[tempfile.TemporaryDirectory[str]] = deque()

    def run(
        self,
        prompt: str = Input(default="a handwritten seven", description="The digit to draw, in words or as a figure."),
        aspect_ratio: str = Input(
            default="1:1", choices=["1:1", "3:2", "2:3"], description="Width to height of the picture."
        ),
        num_outputs: int = Input(default=1, ge=1, le=4, description="How many pictures to draw."),
        num_inference_steps: int = Input(
            default=8, ge=1, le=50, description="Denoising steps. Fewer are faster; beyond 8 little changes."
        ),
        guidance: float = Input(
            default=1.0,
            ge=1.0,
            le=5.0,
            description="How strictly to follow the prompt. Above 1 every step runs the model twice.",
        ),
        seed: int | None = Input(
            default=None,
            ge=0,
            le=4294967295,
            description="The same seed and inputs draw the same picture. Left out, one is drawn and logged.",
        ),
        upscale: int = Input(default=4, ge=1, le=16, description="Enlarge the picture this many times."),
        output_format: str = Input(default="webp", choices=["webp", "png", "jpg"], description="Format of the files."),
        output_quality: int = Input(
            default=90, ge=1, le=100, description="Quality of webp and jpg files; png is lossless and ignores it."
        ),
    ) -> list[Path]:
        """Draws pictures of handwritten digits."""
        # JSON has one kind of number: 2.0 passes for an integer, and arrives as a float.
        num_outputs, num_inference_steps, upscale = int(num_outputs), int(num_inference_steps), int(upscale)
        seed = random.randrange(2**32) if seed is None else int(seed)  # noqa: S311
        print(f"seed: {seed}")
        result = self.model(request(prompt, aspect_ratio, num_outputs, num_inference_steps, guidance, seed))
        if result.reason:
            print(result.reason)
        self.record_metric("model_seconds", result.seconds)
        self.record_metric("graphs_compiled", result.graphs)
        self.folders.append(tempfile.TemporaryDirectory(prefix="prediction-"))
        if len(self.folders) > 4:
            self.folders.popleft().cleanup()
        files = [LocalPath(self.folders[-1].name) / f"{index}.{output_format}" for index in range(len(result.outputs))]
        for image, file in zip(result.outputs, files, strict=True):
            image.resize((image.width * upscale, image.height * upscale)).save(file, quality=int(output_quality))
        return [Path(file) for file in files]

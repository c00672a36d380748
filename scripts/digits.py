"""The handwritten digits behind the default model: who may learn from which, and how a drawing is read.

Knows scikit-learn's `load_digits`, Pillow, and how to call a finished pipeline. Does not know how the
model is trained. `_train_default_weights.py` and the tests share this file, so that the split between
what the generator learns from and what judges it is written down once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SHAPES = {"1:1": (64, 64), "3:2": (96, 64), "2:3": (64, 96)}  # name -> (width, height) in pixels
DEFAULT_STEPS = 8  # 4 are read as well, but resemble one another more
MAX_SEQUENCE_LENGTH = 16  # T5 tokens per prompt; the pipeline's own default, 512, is 30 times the work
CELL = 8  # pixels of a drawing per pixel of an original digit, in each direction
SPLIT_SEED = 20260101


@dataclass(frozen=True)
class Half:
    """One half of the digits: `images` (n, 8, 8) float in 0..1, `labels` (n,) int, `rows` of `load_digits`."""

    images: np.ndarray
    labels: np.ndarray
    rows: np.ndarray


@lru_cache(maxsize=1)
def halves() -> tuple[Half, Half]:
    """Return `(generator, judge)`: two disjoint halves with the same share of every digit."""
    data = load_digits()
    rows = np.arange(len(data.target))
    ours, theirs = train_test_split(rows, test_size=0.5, random_state=SPLIT_SEED, stratify=data.target)
    images = (data.images / 16.0).astype(np.float32)
    generator, judge = (Half(images[part], data.target[part], part) for part in (np.sort(ours), np.sort(theirs)))
    return generator, judge


def to_picture(image: np.ndarray) -> Image.Image:
    """Enlarge one (8, 8) digit in 0..1 to a 64x64 RGB picture, as the generator draws them."""
    grey = Image.fromarray(np.uint8(np.round(image * 255)))
    return grey.resize((8 * CELL, 8 * CELL), Image.Resampling.BICUBIC).convert("RGB")


def to_features(picture: Image.Image) -> np.ndarray:
    """Reduce a picture of any size to the 64 numbers in 0..16 that `load_digits` uses.

    Only the centred square counts: in a wide or a tall picture the digit stands there.
    """
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    square = picture.convert("L").crop((left, top, left + side, top + side))
    small = square.resize((8, 8), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float32).reshape(64) / 255 * 16


@lru_cache(maxsize=1)
def classifiers() -> dict[str, Any]:
    """Two unlike classifiers, fitted on the judge's half only; `svc` is the one that decides."""
    half = halves()[1]
    features = np.stack([to_features(to_picture(image)) for image in half.images])
    return {
        "svc": SVC(C=10.0, gamma="scale").fit(features, half.labels),
        "trees": ExtraTreesClassifier(300, random_state=0).fit(features, half.labels),
    }


def read_digits(pictures: Sequence[Image.Image], classifier: str = "svc") -> list[int]:
    """Read one digit from each picture, whatever its shape and size."""
    if not pictures:
        return []
    features = np.stack([to_features(picture) for picture in pictures])
    return [int(digit) for digit in classifiers()[classifier].predict(features)]


def draw(
    pipeline: Any,
    prompts: Sequence[str],
    seeds: Sequence[int],
    shape: str = "1:1",
    steps: int = DEFAULT_STEPS,
    guidance: float = 1.0,
    batch: int = 20,
    on_batch: Callable[[int], object] = lambda pictures: None,
) -> list[Image.Image]:
    """Draw one picture per prompt, each from its own seed, so that a picture does not depend on its batch."""
    import torch

    width, height = SHAPES[shape]
    pictures: list[Image.Image] = []
    for start in range(0, len(prompts), batch):
        part = list(prompts[start : start + batch])
        generators = [torch.Generator("cpu").manual_seed(s) for s in seeds[start : start + batch]]
        pictures += pipeline(
            part,
            negative_prompt=[""] * len(part),
            true_cfg_scale=guidance,
            width=width,
            height=height,
            num_inference_steps=steps,
            max_sequence_length=MAX_SEQUENCE_LENGTH,
            generator=generators,
        ).images
        on_batch(len(part))
    return pictures


def share_read(pictures: Sequence[Image.Image], digits: Sequence[int], classifier: str = "svc") -> float:
    """The share of pictures from which the classifier reads the digit that was asked for."""
    read = read_digits(pictures, classifier)
    return float(np.mean([seen == asked for seen, asked in zip(read, digits, strict=True)]))

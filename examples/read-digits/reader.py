"""A small network that reads one handwritten digit; knows pixels and digits, nothing of how it is served."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

SIDE = 8


class Block(nn.Module):
    """One residual step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to what it is given, (batch, width)."""
        return x + self.narrow(nn.functional.gelu(self.widen(self.norm(x))))


class Reader(nn.Module):
    """Scores of the ten digits for pictures of 8 x 8 pixels."""

    def __init__(self, width: int = SIDE * SIDE, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.scores = nn.Linear(width, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Reads pixels from 0 to 1, (batch, 64); returns scores, (batch, 10)."""
        x = pixels
        for block in self.blocks:
            x = block(x)
        return self.scores(x)


def pixels(file: str | Path) -> torch.Tensor:
    """The picture in a file as pixels from 0 to 1, ink at 1, (1, 64)."""
    picture = Image.open(file).convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    values = np.asarray(picture, dtype=np.float32).reshape(1, -1) / 255
    # Most of a picture is paper.
    return torch.from_numpy(1 - values if np.median(values) > 0.5 else values)

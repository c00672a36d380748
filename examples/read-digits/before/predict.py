"""Reads a handwritten digit from a picture."""

import torch
from cog import BaseRunner, Input, Path
from reader import Reader, pixels
from safetensors.torch import load_file


class Predictor(BaseRunner):
    def setup(self) -> None:
        """Loads the model."""
        self.reader = Reader()
        self.reader.load_state_dict(load_file("reader.safetensors"))
        self.reader.eval()

    def run(self, image: Path = Input(description="A picture of one digit.")) -> str:
        """Reads a digit."""
        with torch.inference_mode():
            scores = self.reader(pixels(image))
        return str(int(scores.argmax()))

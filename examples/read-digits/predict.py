"""Reads a handwritten digit from a picture."""

import torch
from cog import BaseRunner, Input, Path
from reader import Reader, pixels
from safetensors.torch import load_file

import warmstart


class Predictor(BaseRunner):
    def setup(self) -> None:
        """Loads the model."""
        plan = [warmstart.Request("a picture", {"image": "seven.png"})]
        self.model = warmstart.boot(plan, sources=[__file__, "reader.py"], load=self._load)

    def _load(self) -> warmstart.OwnModel:
        self.reader = Reader()
        self.reader.load_state_dict(load_file("reader.safetensors"))
        self.reader.eval()
        return warmstart.OwnModel({"reader": self.reader}, run=lambda request: self._read(**request.inputs))

    def run(self, image: Path = Input(description="A picture of one digit.")) -> str:
        """Reads a digit."""
        return self.model(warmstart.Request("a picture", {"image": str(image)})).outputs[0]

    def _read(self, image: str) -> str:
        with torch.inference_mode():
            scores = self.reader(pixels(image))
        return str(int(scores.argmax()))

"""What of a request is a fact of the cache's key: the same in every process, and nothing that needs no graph."""

import numpy as np
import pytest
import torch
from PIL import Image

from warmstart.models import Request


class Plain:
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("a prompt", None),
        (["a prompt", "another"], "[text, text]"),
        (64, "64"),
        (None, "None"),
        ((0.5, 1), "[0.5, 1]"),
        (torch.randn(1, 8, 32), "torch.float32[1, 8, 32]"),
        (np.zeros((2, 3), np.float32), "float32[2, 3]"),
        (Image.new("RGB", (64, 32)), "RGB[64, 32]"),
        ({"scale": 0.5, "a": [torch.zeros(2)]}, "{a: [torch.float32[2]], scale: 0.5}"),
        (Plain(), "Plain"),
    ],
)
def test_a_fact_says_what_decides_graphs_and_no_more(value, words):
    assert Request("kind", {"input": value}).graph_facts() == ("kind: " if words is None else f"kind: input={words}")

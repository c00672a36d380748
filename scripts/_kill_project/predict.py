"""The Predictor that scripts/_kills.py boots and kills; knows the sizes it plans and where to say what.

Every planned size has graphs of its own (WARMSTART_DYNAMIC=false), so that a boot is a row of small compiles, each
followed by a save. It leaves a trace: a line for each phase that begins or ends, written at once, so that whoever
kills the boot knows what it was in.
"""

import contextlib
import os
from collections.abc import Iterator

from cog import BaseRunner, Input

import warmstart
from warmstart.cache import Cache, Persisted, Restored
from warmstart.report import Stopwatch
from warmstart.served import Served

SIDE_PIXELS = 16  # of what the transformer calls one token


def trace(line: str) -> None:
    """Append a line; what was written before a kill stays."""
    with open(os.environ["WARMSTART_TEST_TRACE"], "a") as file:  # noqa: PTH123
        file.write(line + "\n")


def restore(self: Cache, deadline_s: float, of=Cache.restore) -> Restored:
    """Stand in for Cache.restore, which runs beside the phases; say which version it is for."""
    trace(f"={self._key.version_digest}")
    trace("+restoring")
    restored = of(self, deadline_s)
    trace("-restoring")
    return restored


def persist(self: Cache, deadline_s: float, of=Cache.persist) -> Persisted:
    """Stand in for Cache.persist, which runs beside the phases too."""
    trace("+saving")
    saved = of(self, deadline_s)
    trace("-saving")
    return saved


def rehearse(self: Served, asked: warmstart.Request, of=Served.rehearse) -> None:
    """Stand in for Served.rehearse, which answers a planned request during the boot."""
    trace("+request")
    of(self, asked)
    trace("-request")


@contextlib.contextmanager
def phase(self: Stopwatch, name: str, of=Stopwatch.phase) -> Iterator[None]:
    """Stand in for Stopwatch.phase."""
    trace(f"+{name}")
    with of(self, name):
        yield
    trace(f"-{name}")


def request(tokens: int, steps: int) -> warmstart.Request:
    """Return a request for a picture of so many tokens in a row."""
    return warmstart.Request(
        label=f"{tokens} tokens",
        seeds=(tokens,),
        inputs={
            "prompt": "a handwritten seven",
            "negative_prompt": "",
            "width": tokens * SIDE_PIXELS,
            "height": SIDE_PIXELS,
            "num_images_per_prompt": 1,
            "num_inference_steps": steps,
            "true_cfg_scale": 1.0,
            "max_sequence_length": 16,
        },
    )


class Predictor(BaseRunner):
    def setup(self) -> None:
        """Boot with the sizes that the environment names."""
        trace("+setup")
        Stopwatch.phase = phase
        Cache.restore = restore
        Cache.persist = persist
        Served.rehearse = rehearse
        self.sizes = [int(size) for size in os.environ["WARMSTART_TEST_SIZES"].split(",")]
        self.model = warmstart.boot([request(size, 1) for size in self.sizes], sources=[__file__])
        trace("+ready")

    def run(self, repeat: int = Input(default=1, ge=1)) -> list[str]:
        """Draw each planned picture, the whole row `repeat` times, and return the last ones' pixels in hexadecimal."""
        trace("+prediction")
        for _ in range(repeat):
            drawn = [self.model(request(size, 4)).outputs[0].tobytes().hex() for size in self.sizes]
        trace("-prediction")
        return drawn

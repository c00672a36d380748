"""The Predictor of a language model. To serve your own, edit PREFILLS, CACHE_TOKENS and the inputs of `run`.

All that can be asked for is planned: prompts are padded to one of PREFILLS, and one graph makes all further tokens, so
no prediction waits for a compile. cog-text.yaml serves it.
"""

import random
from collections.abc import Sequence

from cog import BaseRunner, ConcatenateIterator, Input, streaming

import warmstart

# Lengths in tokens to which prompts are padded. The first is that of an empty prompt, and of each further token's step.
PREFILLS = (1, 16, 64, 256)
# Room for a prompt and what follows it; the model's own limit is 512.
CACHE_TOKENS = 512


def request(
    prompt: str, max_new_tokens: int, temperature: float, top_p: float, seed: int, stop: Sequence[str] = ()
) -> warmstart.Request:
    """Says what one prediction asks for; by the prompt's length it is a case of one of the planned requests."""
    inputs = {"prompt": prompt, "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p}
    return warmstart.Request("by its length", inputs | {"stop": stop}, seeds=(seed,))


def plan() -> list[warmstart.Request]:
    """One request for each length of prompts; what follows them needs no graphs of its own, however long."""
    lengths = {"cache_tokens": CACHE_TOKENS, "max_new_tokens": 2}
    return [
        warmstart.Request(f"prompt of up to {prefill} tokens", {"prompt": "", "prefill": prefill, **lengths})
        for prefill in PREFILLS
    ]


class Predictor(BaseRunner):
    def setup(self) -> None:
        """Loads, compiles and warms the model."""
        self.model = warmstart.boot(plan(), sources=[__file__])

    @streaming
    def run(
        self,
        prompt: str = Input(default="The with statement", description="The text to go on from. It may be empty."),
        max_new_tokens: int = Input(
            default=128, ge=1, le=256, description="Most tokens to write, some 3 letters each."
        ),
        temperature: float = Input(
            default=0.7, ge=0.0, le=2.0, description="How freely to choose: 0 always takes the likeliest token."
        ),
        top_p: float = Input(
            default=0.95, ge=0.01, le=1.0, description="Choose among the likeliest tokens of this much probability."
        ),
        stop_sequences: str = Input(
            default="", description="End before the first of these. Several are separated by commas."
        ),
        seed: int | None = Input(
            default=None,
            ge=0,
            le=4294967295,
            description="The same seed and inputs write the same text. Left out, one is drawn and logged.",
        ),
    ) -> ConcatenateIterator[str]:
        """Writes text in the manner of Python's documentation."""
        # JSON has one kind of number: 2.0 passes for an integer, and arrives as a float.
        seed = random.randrange(2**32) if seed is None else int(seed)  # noqa: S311
        print(f"seed: {seed}")
        stop = stop_sequences.split(",")
        text = self.model.stream(request(prompt, int(max_new_tokens), temperature, top_p, seed, stop))
        yield from text
        result = text.result()
        if result.reason:
            print(result.reason)
        self.record_metric("tokens", text.tokens)
        self.record_metric("tokens_per_second", text.tokens / result.seconds)
        self.record_metric("graphs_compiled", result.graphs)

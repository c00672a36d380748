"""What a model family must offer, and what is asked of it; one module here per family. Knows nothing of caches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn


class ModelError(RuntimeError):
    """The model itself cannot be loaded or run. It fails the boot, since no cache and no compiler is to blame."""


class RequestError(ValueError):
    """The model cannot answer this request; the text says why, and what to ask for."""


@dataclass(frozen=True)
class Lora:
    """LoRA weights that a request is to be answered with; WARMSTART_LORA_RANK makes room for such."""

    source: str | Path | Mapping[str, Tensor]
    """A safetensors file, a directory as peft writes it, or tensors by the names that such a file has."""
    scale: float = 1.0
    """How strongly it counts: 0 is not at all, 1 as it was trained."""


@dataclass(frozen=True)
class Request:
    """One call of the model, in the words of its own pipeline."""

    label: str
    """Names the kind of request, "1:1 x4" say. Requests of one label need the same graphs."""
    inputs: Mapping[str, Any]
    """Keyword arguments of the pipeline's `__call__`; of a language model, what `CausalModel` says."""
    seeds: tuple[int, ...] = (0,)
    """One seed per output, so that each picture is the same whatever its neighbours are."""
    loras: tuple[Lora, ...] = ()
    """What this request alone is answered with; several add up. They need no graphs of their own."""

    def graph_facts(self) -> str:
        """What of this request may decide its graphs: all but texts, seeds, and what tensors and pictures hold."""
        numbers = {name: value for name, value in self.inputs.items() if not isinstance(value, str)}
        return f"{self.label}: " + ", ".join(f"{name}={_fact(value)}" for name, value in sorted(numbers.items()))


def _fact(value: Any) -> str:
    """A value in words that are the same in each process: of tensors, arrays and pictures type and size alone."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_fact(item)}" for name, item in sorted(value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_fact, value))}]"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    if hasattr(value, "mode") and hasattr(value, "size"):
        return f"{value.mode}{list(value.size)}"
    # An address is another one in each process.
    return type(value).__qualname__ if " at 0x" in repr(value) else repr(value)


@dataclass(frozen=True)
class Result:
    """What a request gave and what it cost."""

    outputs: list[Any]
    """The pictures, or lists of a video's, in the order of the seeds; of a language model the text."""
    seconds: float
    graphs: int = 0
    """Graphs that were compiled while the request waited: 0, unless it was not planned."""
    reason: str = field(default="")
    """Why it took a slower way than a planned request's; empty if it did not."""


class Model(Protocol):
    """A loaded model."""

    def parts(self) -> dict[str, nn.Module]:
        """All components that may be compiled, by name."""

    def default_parts(self) -> tuple[str, ...]:
        """Names of the components that are compiled unless the operator chooses."""

    def label(self, request: Request) -> str:
        """The label of the planned request that this one is a case of, if there is one."""

    def run(self, request: Request) -> list[Any]:
        """Answers one request."""


class LoraModel(Model, Protocol):
    """A loaded model whose LoRA files have names of their own; that of others name a part and its layer."""

    def lora_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a LoRA file by part and layer, "transformer.proj_out.lora_A.weight"."""


class TextModel(Model, Protocol):
    """A loaded model that writes text."""

    def stream(self, request: Request) -> Iterator[str]:
        """Answers one request piece by piece, the same pieces for the same seed."""


def family(source: str, plan: Sequence[Request]) -> str:
    """Which module here loads a model: "diffusers", or "causal" for a language model.

    Args:
        source: a directory, or a hub id.
        plan: the requests that are planned. What is at the hub is a language model if they are such a one's: the key is
            made before anything is asked of the hub, which it may do without.

    Raises:
        ModelError: the directory is neither.
    """
    directory = Path(source)
    if not directory.is_dir():
        return "causal" if any("prefill" in request.inputs for request in plan) else "diffusers"
    if (directory / "model_index.json").exists():
        return "diffusers"
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        names = config["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        names = None
    if isinstance(names, list) and any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        return "causal"
    raise ModelError(
        f"the model directory {source!r} has neither the model_index.json of a diffusers pipeline nor a config.json"
        f" that names the architecture of a language model (it names {names or 'none'}), so it is not known how to load"
        " it; check WARMSTART_MODEL."
    )

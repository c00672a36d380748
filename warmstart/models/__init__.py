"""What a model family must offer, and what is asked of it; one module here per family. Knows nothing of caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn


class ModelError(RuntimeError):
    """The model itself cannot be loaded or run. It fails the boot, since no cache and no compiler is to blame."""


@dataclass(frozen=True)
class Request:
    """One call of the model, in the words of its own pipeline."""

    label: str
    """Names the kind of request, "1:1 x4" say. Requests of one label need the same graphs."""
    inputs: Mapping[str, Any]
    """Keyword arguments of the pipeline's `__call__`."""
    seeds: tuple[int, ...] = (0,)
    """One seed per output, so that each picture is the same whatever its neighbours are."""

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
    """The pictures, or lists of a video's, in the order of the seeds."""
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

    def run(self, request: Request) -> list[Any]:
        """Answers one request."""

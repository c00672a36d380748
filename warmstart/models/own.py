"""A model that the Predictor loads by its own code: what of it is compiled, how it answers. Knows nothing of caches."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from warmstart.models import Model, ModelError, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn


class OwnModel:
    """Any model, by the modules that are to be compiled and a function that answers a request with them.

    Args:
        parts: the modules by names of one's own. They must be those that `run` calls.
        run: answers one request. A list is its outputs, anything else its one output.
    """

    def __init__(self, parts: Mapping[str, nn.Module], *, run: Callable[[Request], Any]) -> None:
        self._parts = dict(parts)
        self._run = run

    def parts(self) -> dict[str, nn.Module]:
        """The modules that were named."""
        return self._parts

    def default_parts(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(self._parts)

    def label(self, request: Request) -> str:
        """What the Predictor says."""
        return request.label

    def run(self, request: Request) -> list[Any]:
        """Answers one request."""
        outputs = self._run(request)
        return outputs if isinstance(outputs, list) else [outputs]


def adopt(loaded: Any, device: str) -> Model:
    """What the Predictor's own code loaded, as a model.

    Args:
        loaded: an `OwnModel`, another object with the methods of `Model`, or a diffusers pipeline.
        device: "cpu", "cuda" or "cuda:N", where it has to be, as the cache's key says so.

    Raises:
        ModelError: it is none of these, or it is elsewhere.
    """
    model = loaded
    # Who made a pipeline has imported diffusers.
    if "diffusers" in sys.modules and isinstance(loaded, sys.modules["diffusers"].DiffusionPipeline):
        model = importlib.import_module("warmstart.models.diffusers").DiffusersModel.of(loaded)
    if lacking := [
        name for name in ("parts", "default_parts", "label", "run") if not callable(getattr(model, name, None))
    ]:
        raise ModelError(
            f"load= gave {type(loaded).__name__}, which has no {lacking[0]}(), so it is not known what to compile of it"
            " and how it answers; return warmstart.OwnModel({'a name': the module}, run=the function that answers)."
        )
    found: Model = model
    for name, module in found.parts().items():
        kinds = {parameter.device.type for parameter in module.parameters()}
        # accelerate's hooks bring a part to the device when it is called.
        if kinds and not kinds & {device.partition(":")[0], "meta"} and not hasattr(module, "_hf_hook"):
            raise ModelError(
                f"load= left {name!r} on {', '.join(sorted(kinds))}, and the compiled code is kept for {device};"
                f" move it there, or set WARMSTART_DEVICE={min(kinds)}."
            )
    return found

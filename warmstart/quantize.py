"""Weights of linear layers kept in 8 bits. Knows modules; neither pipelines, nor how anything is compiled.

Weight-only: a layer computes in the model's precision, with a weight that is made from 8 bits on the way. Torch sees
plain tensors, so nothing of its cache depends on another library's tensor classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from warmstart.models import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping


class _Format(NamedTuple):
    dtype: torch.dtype
    largest: float
    """The largest weight of each row is kept as this."""


FORMATS = {"int8": _Format(torch.int8, 127.0), "fp8": _Format(torch.float8_e4m3fn, 448.0)}
"""By the names that WARMSTART_QUANTIZE has for them."""

# Triton makes kernels of this type from Ada and Hopper on.
_FP8_CAPABILITY = (8, 9)


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is kept in 8 bits, with a scale for each row. Made of a plain one, in place."""

    quantized: Tensor
    """(out, in), int8 or float8_e4m3fn"""
    scale: Tensor
    """(out, 1), float32: in half precision its rounding would be as large as that of the weights."""
    precision: torch.dtype

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """(out, in), in the model's precision; made anew each time, also for whoever only asks for its type."""
        return (self.quantized.float() * self.scale).to(self.precision)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return linear(x, self.weight, self.bias)


def quantize(parts: Mapping[str, nn.Module], how: str, device: str) -> int:
    """Keeps the weights of all plain linear layers in 8 bits, in place; returns how many layers that are.

    Args:
        parts: components of the model by name.
        how: "int8" or "fp8".
        device: "cpu", "cuda" or "cuda:N", where they are.

    Raises:
        ModelError: the device cannot compute with that, or there is no layer that could be kept so.
    """
    _check_device(how, device)
    layers = {
        f"{part}.{name}": layer
        for part, module in parts.items()
        for name, layer in module.named_modules()
        if type(layer) is nn.Linear
    }
    if not layers:
        raise ModelError(
            f"WARMSTART_QUANTIZE is {how}, and {', '.join(parts)} has no plain linear layer that could be kept so;"
            " unset it, or name other components in WARMSTART_PARTS."
        )
    for name, layer in layers.items():
        _keep(name, layer, FORMATS[how])
    return len(layers)


def _check_device(how: str, device: str) -> None:
    if how != "fp8" or not device.startswith("cuda"):
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _FP8_CAPABILITY:
        raise ModelError(
            f"WARMSTART_QUANTIZE is fp8, and {torch.cuda.get_device_name(device)} has compute capability"
            f" {'.'.join(map(str, capability))}, for which no kernel can be made of it (8.9 is needed); set it to int8."
        )


def _keep(name: str, layer: nn.Linear, to: _Format) -> None:
    weight = layer.weight.detach()
    if weight.is_meta or "forward" in vars(layer) or not weight.is_floating_point() or type(weight) is not Tensor:
        raise ModelError(
            f"{name!r} is offloaded, wrapped by a hook or quantised already, so its weight cannot be kept in 8 bits;"
            " load the model whole on its device and unquantised, or unset WARMSTART_QUANTIZE."
        )
    if not weight.isfinite().all():
        raise ModelError(
            f"{name!r} has weights that are no numbers (NaN or infinite), which have no scale; the files are damaged:"
            " fetch them anew."
        )
    rows = weight.float()
    # A row of zeros has any scale.
    scale = rows.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny * to.largest) / to.largest
    kept = rows / scale
    kept = (kept if to.dtype.is_floating_point else kept.round()).clamp(-to.largest, to.largest).to(to.dtype)
    del layer.weight
    # The class is changed and not the module, so that whoever holds it, a hook or a list of modules, still does.
    layer.__class__ = QuantizedLinear
    values: dict[str, Any] = {"quantized": kept, "scale": scale}
    for attribute, tensor in values.items():
        layer.register_buffer(attribute, tensor)
    layer.precision = weight.dtype  # type: ignore[assignment]

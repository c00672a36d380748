"""Slots for LoRA weights in a model's linear layers. Knows modules; neither pipelines, nor how anything is compiled.

A slot is part of what is compiled, and empty until a request names a LoRA. Then the weights are copied into it, so that
another LoRA, another scale and none at all run the same graphs.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from warmstart import lora_files
from warmstart.models import ModelError, RequestError
from warmstart.quantize import QuantizedLinear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from warmstart.lora_files import Factors
    from warmstart.models import Lora

# Size of what fills the slots while the boot compiles and checks: enough for the check to see a broken slot, too little
# to upset the model.
_NOISE = 0.01


class LoraLinear(nn.Linear):
    """A linear layer with a slot: `y = W x + b + up (down x)`. Made of a plain one, in place."""

    lora_down: Tensor
    """(rank, in)"""
    lora_up: Tensor
    """(out, rank), times all scales, so that a scale is a value and no constant of the graph."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return super().forward(x) + linear(linear(x, self.lora_down), self.lora_up)


class LoraQuantizedLinear(LoraLinear, QuantizedLinear):
    """The same with a weight in 8 bits; the slot is in the model's precision."""


_WITH_SLOT = {nn.Linear: LoraLinear, QuantizedLinear: LoraQuantizedLinear}


@dataclass(frozen=True, eq=False)
class Fitted:
    """LoRAs that were found to fit, with all that is to be copied; made by `Slots.read`."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """By slot (rank, in) and (out, rank), in the slot's precision, several LoRAs one after the other."""
    identity: object
    """Equal for the same files at the same scales; None where that is not known."""


NOTHING = Fitted({}, ())


class Slots:
    """The slots of a model.

    Args:
        layers: by part and name, "transformer.proj_out", the layers with a slot.
        rank: width of each slot.
        names: of all modules of the same parts, so that errors can tell a layer without a slot from one of another
            model.
        convert: gives the tensors of a file the names of parts and layers.
    """

    def __init__(
        self,
        layers: Mapping[str, LoraLinear],
        *,
        rank: int,
        names: frozenset[str],
        convert: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    ) -> None:
        self.layers = layers
        self.rank = rank
        self._names = names
        self._convert = convert
        self._held: Fitted | None = None

    def read(self, loras: Sequence[Lora]) -> Fitted:
        """Reads LoRAs and tries whether they fit; changes nothing.

        Raises:
            RequestError: one cannot be read or does not fit: its layers, its shapes, or the rank of all together.
        """
        if not loras:
            return NOTHING
        identity, held = _identity(loras), self._held
        if held is not None and identity is not None and held.identity == identity:
            return held
        found: dict[str, list[tuple[Lora, Factors]]] = collections.defaultdict(list)
        for lora in loras:
            for name, factors in lora_files.read(lora, self._convert).items():
                self._check(lora, name, factors)
                found[name].append((lora, factors))
        return Fitted({name: self._joined(name, several) for name, several in found.items()}, identity)

    def put(self, fitted: Fitted) -> None:
        """Copies LoRAs into the slots in place of what was there."""
        if fitted is self._held:
            return
        # Until all is copied nothing is known to be in place: a prediction may be cancelled in between, and the next
        # one then copies anew.
        self._held = None
        with torch.no_grad():
            for name, layer in self.layers.items():
                layer.lora_down.zero_()
                layer.lora_up.zero_()
                if name in fitted.pairs:
                    down, up = fitted.pairs[name]
                    layer.lora_down[: down.shape[0]].copy_(down)
                    layer.lora_up[:, : up.shape[1]].copy_(up)
        self._held = fitted

    def fill(self) -> None:
        """Puts noise into the slots, the same in each process, so that a check of the model is one of them too."""
        self._held = None
        generator = torch.Generator("cpu").manual_seed(0)
        with torch.no_grad():
            for layer in self.layers.values():
                for tensor in (layer.lora_down, layer.lora_up):
                    tensor.copy_(torch.randn(tensor.shape, generator=generator) * _NOISE)

    def _check(self, lora: Lora, name: str, factors: Factors) -> None:
        said = lora_files.name_of(lora)
        if name not in self.layers:
            raise RequestError(f"the LoRA {said} changes {name!r}, {self._why_none(name)}")
        layer = self.layers[name]
        got, wanted = (factors.up.shape[0], factors.down.shape[1]), (layer.out_features, layer.in_features)
        if got != wanted:
            raise RequestError(
                f"the LoRA {said} was made for a {name!r} of shape {got} (out, in), which is {wanted} in this model, so"
                " it belongs to another model or size; give one that was trained on this one."
            )

    def _why_none(self, name: str) -> str:
        part = name.partition(".")[0]
        parts = sorted({slot.partition(".")[0] for slot in self.layers})
        if not any(known.startswith(f"{part}.") for known in self._names):
            return (
                f"and there are slots in {', '.join(parts)} only; name its part in WARMSTART_PARTS, or save the LoRA"
                " without it."
            )
        if name not in self._names:
            return "which this model does not have, so it belongs to another model; give one that was trained on this."
        return (
            "which has no slot, so it would be left out; name it in WARMSTART_LORA_TARGETS if it is a linear layer, or"
            " save the LoRA without it."
        )

    def _joined(self, name: str, several: Sequence[tuple[Lora, Factors]]) -> tuple[Tensor, Tensor]:
        """What several LoRAs add together is what one adds whose rank is the sum of theirs."""
        ranks = [factors.rank for _, factors in several]
        who = " and ".join(lora_files.name_of(lora) for lora, _ in several)
        if sum(ranks) > self.rank:
            raise RequestError(
                f"the rank of {who} is {' + '.join(map(str, ranks))} at {name!r}, and the slots have rank"
                f" {self.rank}, which the compiled code is made for; set WARMSTART_LORA_RANK={sum(ranks)} or more (the"
                " first boot with it compiles), or give LoRAs of a smaller rank."
            )
        dtype = self.layers[name].lora_up.dtype
        down = torch.cat([factors.down.to(dtype) for _, factors in several])
        up = torch.cat([(factors.up.float() * factors.scale).to(dtype) for _, factors in several], dim=1)
        if not (down.isfinite().all() and up.isfinite().all()):
            raise RequestError(
                f"the LoRA {who} has numbers at {name!r} that {str(dtype).removeprefix('torch.')} cannot hold (NaN or"
                " infinite, at this scale), which would spoil every output; give another file, or a smaller scale."
            )
        return down, up


def attach(
    parts: Mapping[str, nn.Module],
    *,
    rank: int,
    targets: Sequence[str] = (),
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> Slots:
    """Gives linear layers a slot each, before anything is compiled; their names, weights and state dict stay.

    Args:
        parts: components of the model by name.
        rank: width of the slots.
        targets: names of the layers, or what their names end in ("to_q", "ff.net.2"); all plain linear layers if empty.
        convert: as for `Slots`.

    Raises:
        ModelError: nothing has such a name, or what has it can hold no slot.
    """
    found = {f"{part}.{name}": layer for part, module in parts.items() for name, layer in module.named_modules()}
    plain = {name: layer for name, layer in found.items() if type(layer) in _WITH_SLOT}
    chosen = {name: layer for name, layer in plain.items() if _is_meant(name, targets)}
    if lacking := [target for target in targets if not any(_is_meant(name, [target]) for name in chosen)]:
        endings = sorted({name.rpartition(".")[2] for name in plain})
        raise ModelError(
            f"WARMSTART_LORA_TARGETS names {lacking[0]!r}, and no plain linear layer of {', '.join(parts)} is called"
            f" that, so no LoRA could change it; the names of those end in: {', '.join(endings)}."
        )
    if not chosen:
        raise ModelError(
            f"WARMSTART_LORA_RANK is {rank}, and {', '.join(parts)} has no plain linear layer that could hold a LoRA;"
            " unset it, or name other components in WARMSTART_PARTS."
        )
    for name, layer in chosen.items():
        _give_slot(name, layer, rank)
    return Slots(dict(_as_slots(chosen)), rank=rank, names=frozenset(found), convert=convert)


def _give_slot(name: str, layer: nn.Module, rank: int) -> None:
    assert isinstance(layer, nn.Linear)  # noqa: S101  as each class with a slot is
    weight = layer.weight
    # What loads a layer when it is called, or wraps it otherwise, has put a forward of its own before the class's.
    if weight.is_meta or "forward" in vars(layer):
        raise ModelError(
            f"{name!r} is offloaded or wrapped by a hook, so a LoRA slot in it would not be used; load the model whole"
            " on its device, or unset WARMSTART_LORA_RANK."
        )
    # The class is changed and not the module, so that whoever holds it, a hook or a list of parameters, still does.
    layer.__class__ = _WITH_SLOT[type(layer)]
    place: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    layer.register_buffer("lora_down", torch.zeros(rank, layer.in_features, **place), persistent=False)
    layer.register_buffer("lora_up", torch.zeros(layer.out_features, rank, **place), persistent=False)


def _as_slots(layers: Mapping[str, nn.Module]) -> Iterator[tuple[str, LoraLinear]]:
    for name, layer in layers.items():
        if isinstance(layer, LoraLinear):
            yield name, layer


def _is_meant(name: str, targets: Sequence[str]) -> bool:
    return not targets or any(name == target or name.endswith(f".{target}") for target in targets)


def _identity(loras: Sequence[Lora]) -> object:
    """What tells whether the same files were asked for before, unchanged, at the same scales."""
    try:
        return tuple((_state(lora.source), float(lora.scale)) for lora in loras)
    except (OSError, TypeError, ValueError, OverflowError):
        return None


def _state(source: object) -> tuple[object, ...]:
    if isinstance(source, Mapping):
        raise TypeError("what tensors hold now, they may not hold at the next request")
    path = Path(str(source))
    files = sorted(path.glob("adapter_*")) if path.is_dir() else [path, path.with_name("adapter_config.json")]
    stats = [(file.absolute(), file.stat()) for file in files if file.exists()]
    # The time of change too, which nobody can set back.
    return tuple((place, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino) for place, stat in stats)

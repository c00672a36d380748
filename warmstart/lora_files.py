"""Files of LoRA weights: from a file, or tensors, to the two factors of each layer. Knows no module and no pipeline."""

from __future__ import annotations

import contextlib
import json
import math
import numbers
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from warmstart.models import RequestError
from warmstart.report import sentence

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from warmstart.models import Lora

# The names of both factors in the files of peft, kohya and several ages of diffusers.
_FACTOR = re.compile(
    r"(.+?)\.(lora_A|lora_B|lora_down|lora_up|lora(?:_linear_layer)?\.(?:down|up))(?:\.default)?\.weight"
)
_UP = ("lora_B", "lora_up", "lora.up", "lora_linear_layer.up")
_ALPHA = re.compile(r"(.+?)(?:\.lora_A|\.lora\.down)?(?:\.weight)?\.alpha")
# diffusers still gives attention's layers the names that they had in its early UNets, in what kohya saved for Stable
# Diffusion: "attn1.processor.to_q_lora.down" for a factor of "attn1.to_q".
_IN_PROCESSOR = re.compile(r"\.processor\.(to_[qkv]|to_out)_lora\.")
# What peft's options of a LoRA change, other than its scale: none of it is a sum of two products.
_OTHER_KINDS = ("use_dora", "lora_bias", "use_bdlora", "use_qalora", "alora_invocation_tokens", "layer_replication")
# Ways to begin that take something out of the model's own weights, so that the two factors are not all there is.
_OTHER_STARTS = ("pissa", "olora", "corda", "loftq")
# A pattern is a name, or names with an "or" between; others could take for ever to match.
_PLAIN_PATTERN = re.compile(r"[\w.\-^$|\\]*")


@dataclass(frozen=True)
class Factors:
    """What one LoRA adds to one linear layer: `up @ down`, times its own scale."""

    down: Tensor
    """(rank, in)"""
    up: Tensor
    """(out, rank)"""
    scale: float

    @property
    def rank(self) -> int:
        """Width between the two."""
        return self.down.shape[0]


@dataclass
class _Parts:
    down: Tensor | None = None
    up: Tensor | None = None
    alpha: float | None = None


@dataclass(frozen=True)
class _Raw:
    """A file's tensors, and peft's options by the part of the model that they are about ("" is all)."""

    tensors: dict[str, Tensor]
    options: dict[str, dict[str, Any]] = field(default_factory=dict)


def name_of(lora: Lora) -> str:
    """What errors call it."""
    if isinstance(lora.source, Mapping):
        return "given as tensors"
    return repr(str(lora.source).rpartition("/")[2][:100])


def read(lora: Lora, convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> dict[str, Factors]:
    """The factors of each layer, by part and layer: "transformer.proj_out".

    Args:
        lora: a file, a directory as peft writes it, or tensors by name; and how strongly it is to count.
        convert: gives tensors of any format the names of the model's own parts and layers.

    Raises:
        RequestError: it cannot be read, or is something other than LoRA weights of linear layers.
    """
    try:
        return _read(lora, convert)
    except RequestError:
        raise
    # The boundary: a stranger's file. Whatever it makes Python raise, that file is what is wrong.
    except Exception as error:
        # Without the path that an OSError tells: who asks need not know where the server keeps files.
        cause = (isinstance(error, OSError) and error.strerror) or sentence(error)
        raise RequestError(
            f"the LoRA {name_of(lora)} cannot be used ({cause}), so the request cannot be answered as it was"
            " asked; give a safetensors file, or a directory, as peft or diffusers save it."
        ) from error


def _read(lora: Lora, convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> dict[str, Factors]:
    # NumPy's numbers are real ones too.
    if not (isinstance(lora.scale, (int, float, numbers.Real)) and math.isfinite(lora.scale)):
        raise RequestError(
            f"the LoRA {name_of(lora)} has scale {lora.scale!r}, which no weight can be multiplied with; give a finite"
            " number, 1 for the LoRA as it was trained."
        )
    raw = _Raw(dict(lora.source)) if isinstance(lora.source, Mapping) else _open(lora, Path(lora.source))
    try:
        tensors = convert(raw.tensors)
    # Converting is guessing at the habits of many trainers; whatever it raises means that this is none that is known.
    except Exception as error:
        raise RequestError(
            f"the LoRA {name_of(lora)} is in no format that is known for this model ({sentence(error)}), so it cannot"
            " be said what it changes; save it as diffusers or peft do."
        ) from error
    return {
        layer: Factors(pair.down, pair.up, _scale(lora, layer, pair, raw.options))
        for layer, pair in _paired(lora, tensors).items()
        if pair.down is not None and pair.up is not None
    }


def _open(lora: Lora, path: Path) -> _Raw:
    if path.is_dir():
        path = path / "adapter_model.safetensors"
    if not path.is_file():
        raise RequestError(
            f"the LoRA {name_of(lora)} is not there ({path.name or 'nothing'} is no file), so the request cannot be"
            " answered as it was asked; check the path, which must be one on this machine."
        )
    if not os.access(path, os.R_OK):
        raise RequestError(
            f"the LoRA {name_of(lora)} may not be read by this process, so the request cannot be answered as it was"
            " asked; give the server the right to read it."
        )
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dictionary
            options = _by_part(json.loads((file.metadata() or {}).get("lora_adapter_metadata", "{}")))
    except (SafetensorError, OSError, ValueError, AttributeError) as error:
        raise RequestError(
            f"the LoRA {name_of(lora)} cannot be read as safetensors ({sentence(error)}), and other formats can run"
            " code when they are read; give a whole .safetensors file."
        ) from error
    # peft keeps alpha beside the weights.
    beside = path.with_name("adapter_config.json")
    if beside.is_file():
        options[""] = _peft_options(lora, beside)
    return _Raw(tensors, options)


def _peft_options(lora: Lora, path: Path) -> dict[str, Any]:
    options: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        options = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(options, dict):
        raise RequestError(
            f"the LoRA {name_of(lora)} has an {path.name} beside it that is no JSON object, and which says how strongly"
            " the weights count; save the LoRA anew, or take that file away."
        )
    return options


def _by_part(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Options as diffusers writes them, {"transformer.r": 4}, by part."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        part, _, option = name.partition(".")
        parts.setdefault(part, {})[option] = value
    return parts


def _paired(lora: Lora, tensors: dict[str, Tensor]) -> dict[str, _Parts]:
    pairs: dict[str, _Parts] = {}
    for old, tensor in tensors.items():
        name = _IN_PROCESSOR.sub(lambda found: f".{found[1].replace('to_out', 'to_out.0')}.lora.", old)
        if (alpha := _ALPHA.fullmatch(name)) and tensor.numel() == 1:
            pairs.setdefault(alpha[1], _Parts()).alpha = float(tensor)
        elif (factor := _FACTOR.fullmatch(name)) and tensor.ndim == 2:
            pair = pairs.setdefault(factor[1], _Parts())
            if factor[2] in _UP:
                pair.up = tensor
            else:
                pair.down = tensor
        else:
            raise RequestError(
                f"the LoRA {name_of(lora)} holds {name!r}, shape {tuple(tensor.shape)}, which is neither factor of a"
                " linear layer's LoRA, and to leave it out would change what the file means; only plain LoRA of linear"
                " layers can be loaded, no DoRA, LoKr, convolutions, norms or biases."
            )
    for layer, pair in pairs.items():
        if pair.down is None or pair.up is None or not pair.down.shape[0] == pair.up.shape[1] > 0:
            shapes = [None if item is None else tuple(item.shape) for item in (pair.down, pair.up)]
            raise RequestError(
                f"the LoRA {name_of(lora)} has for {layer!r} the factors {shapes[0]} and {shapes[1]}, which cannot be"
                " multiplied; the file is damaged or incomplete: save or download it anew."
            )
    if not pairs:
        raise RequestError(
            f"the LoRA {name_of(lora)} holds no LoRA weights, so it would change nothing; check that it is not another"
            " file of the model."
        )
    return pairs


def _other_kind(said: dict[str, Any]) -> str:
    """What of a LoRA's options makes it more than two factors; "" if nothing does."""
    start = str(said.get("init_lora_weights") or "").lower()
    if start.startswith(_OTHER_STARTS):
        return f"init_lora_weights={start}"
    return next((kind for kind in _OTHER_KINDS if said.get(kind)), "")


def _scale(lora: Lora, layer: str, pair: _Parts, options: dict[str, dict[str, Any]]) -> float:
    """The LoRA's own scale of a layer, alpha over rank, times the one that is asked for."""
    part, _, name = layer.partition(".")
    said = options.get(part) or options.get("") or {}
    if other := _other_kind(said):
        raise RequestError(
            f"the LoRA {name_of(lora)} was made with {other}, which is more than the two factors that can be loaded;"
            " train or export it without."
        )
    assert pair.down is not None  # noqa: S101  _paired has seen to it
    rank = pair.down.shape[0]
    # The longest pattern first, as an exact name is longer than what it ends in.
    patterns = sorted((said.get("alpha_pattern") or {}).items(), key=lambda item: -len(item[0]))
    if odd := next((pattern for pattern, _ in patterns if not _PLAIN_PATTERN.fullmatch(pattern)), ""):
        raise RequestError(
            f"the LoRA {name_of(lora)} has alpha_pattern {odd[:100]!r}, which is more than names of layers, and might"
            " take for ever to match; name the layers one by one."
        )
    special = (value for pattern, value in patterns if re.fullmatch(rf"(.*\.)?({pattern})", name))
    alpha = pair.alpha if pair.alpha is not None else next(special, said.get("lora_alpha", rank))
    return float(lora.scale) * float(alpha) / (math.sqrt(rank) if said.get("use_rslora") else rank)

"""Any diffusers pipeline, of pictures or video: load it, name its parts, run one request. Knows nothing of caches."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import diffusers.utils.logging
import torch
import transformers.utils.logging
from diffusers import DiffusionPipeline

from warmstart.models import ModelError, Request

if TYPE_CHECKING:
    from torch import Tensor, nn

# The components that run once per denoising step; everything else runs once per picture.
_DENOISERS = ("transformer", "transformer_2", "unet", "prior", "controlnet")
# What decodes: of an autoencoder this part of it runs when a picture, a video or a sound is made.
_DECODERS = ("vae", "vqvae", "vqgan", "movq")


class DiffusersModel:
    """A pipeline on its device.

    Args:
        source: a directory in diffusers layout, or a hub id.
        revision: commit or tag of a hub id.
        device: "cpu", "cuda" or "cuda:N".
        dtype: name of the precision in torch, "bfloat16" say.

    Raises:
        ModelError: the pipeline cannot be loaded.
    """

    def __init__(self, source: str, *, revision: str, device: str, dtype: str) -> None:
        _quiet()
        try:
            # diffusers ships no types.
            load: Any = DiffusionPipeline.from_pretrained
            pipeline = load(
                source,
                revision=revision or None,
                dtype=getattr(torch, dtype),
                # Weights that are pickles can run code when they are read.
                use_safetensors=True,
                local_files_only=Path(source).is_dir(),
            )
        # Loading runs code of many libraries; whatever it raises means that there is no model.
        except Exception as error:
            remedy = "and whether the directory is a complete diffusers model"
            if not Path(source).is_dir():
                remedy = "the revision, the network and HF_TOKEN; or have it in the image by scripts/fetch_weights"
            raise ModelError(
                f"the model {source!r} cannot be loaded ({type(error).__name__}: {error}); without it there is nothing"
                f" to serve. Check WARMSTART_MODEL, {remedy}."
            ) from error
        pipeline.set_progress_bar_config(disable=True)
        self._pipeline: Any = pipeline.to(device)

    @classmethod
    def of(cls, pipeline: DiffusionPipeline) -> Self:
        """A pipeline that somebody else loaded, as it is and where it is."""
        model = cls.__new__(cls)
        model._pipeline = pipeline
        return model

    def parts(self) -> dict[str, nn.Module]:
        """The pipeline's modules by name; of an autoencoder the decoder."""
        found = {
            name: module for name, module in self._pipeline.components.items() if isinstance(module, torch.nn.Module)
        }
        decoders = {name: getattr(found[name], "decoder", None) for name in _DECODERS if name in found}
        return found | {name: module for name, module in decoders.items() if isinstance(module, torch.nn.Module)}

    def default_parts(self) -> tuple[str, ...]:
        """The denoisers."""
        return tuple(name for name in _DENOISERS if name in self.parts())

    def label(self, request: Request) -> str:
        """What the Predictor says."""
        return request.label

    def lora_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """LoRA weights by component and layer; diffusers knows the formats of its own ages and of other trainers."""
        convert: Any = getattr(self._pipeline, "lora_state_dict", None)
        if convert is None:
            return tensors
        # It would leave these out with a warning.
        if dora := [name for name in tensors if "dora_scale" in name]:
            raise ModelError(f"{dora[0]} is of DoRA")
        options = {"unet_config": self._pipeline.unet.config} if hasattr(self._pipeline, "unet") else {}
        if "return_alphas" in inspect.signature(convert).parameters:
            options["return_alphas"] = True
        converted = convert(dict(tensors), **options)
        # Some pipelines return the scales besides.
        found, alphas = converted if isinstance(converted, tuple) else (converted, None)
        return {**found, **{name: torch.as_tensor(alpha) for name, alpha in (alphas or {}).items()}}

    def run(self, request: Request) -> list[Any]:
        """Makes the outputs of one request in the order of its seeds: PIL images, of a video a list of them."""
        # On the CPU whatever the device is, so that a seed means the same picture on every machine's generator.
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in request.seeds]
        # A pipeline's result has what it makes as its first field: `images`, `frames`, `audios`, `image_embeds`.
        return list(self._pipeline(**request.inputs, generator=generators)[0])


def _quiet() -> None:
    """Keeps bars and a hint about torchvision, which no picture needs here, out of the setup log."""
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers.utils.import_utils").setLevel(logging.ERROR)

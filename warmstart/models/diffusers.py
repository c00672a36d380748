"""Any diffusers pipeline that makes pictures: load it, name its parts, run one request. Knows nothing of caches."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers.utils.logging
import torch
import transformers.utils.logging
from diffusers import DiffusionPipeline

from warmstart.models import ModelError, Request

if TYPE_CHECKING:
    from torch import nn

# The components that run once per denoising step; everything else runs once per picture.
_DENOISERS = ("transformer", "transformer_2", "unet", "prior")


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
            raise ModelError(
                f"the model {source!r} cannot be loaded ({type(error).__name__}: {error}); without it there is nothing"
                " to serve. Check WARMSTART_MODEL and that the directory is a complete diffusers model."
            ) from error
        pipeline.set_progress_bar_config(disable=True)
        self._pipeline: Any = pipeline.to(device)

    def parts(self) -> dict[str, nn.Module]:
        """The pipeline's modules by name; of a VAE the decoder, which is what runs when a picture is made."""
        found = {
            name: module for name, module in self._pipeline.components.items() if isinstance(module, torch.nn.Module)
        }
        if "vae" in found and isinstance(decoder := getattr(found["vae"], "decoder", None), torch.nn.Module):
            found["vae"] = decoder
        return found

    def default_parts(self) -> tuple[str, ...]:
        """The denoisers."""
        return tuple(name for name in _DENOISERS if name in self.parts())

    def label(self, request: Request) -> str:
        """What the Predictor says."""
        return request.label

    def run(self, request: Request) -> list[Any]:
        """Makes the pictures of one request, as PIL images in the order of its seeds."""
        # On the CPU whatever the device is, so that a seed means the same picture on every machine's generator.
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in request.seeds]
        return list(self._pipeline(**request.inputs, generator=generators).images)


def _quiet() -> None:
    """Keeps bars and a hint about torchvision, which no picture needs here, out of the setup log."""
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("transformers.utils.import_utils").setLevel(logging.ERROR)

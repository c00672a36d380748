"""Which key a boot here and now would use, and what the settings left to be found out; knows no cache and no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from warmstart import key
from warmstart.key import Key
from warmstart.models import family
from warmstart.settings import Settings, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from warmstart.models import Request

# Modules whose code decides the graphs, beside that of the model's family. A change in any other of ours leaves
# compiled code as good as it was.
_GRAPH_SOURCES = ("blocks.py", "inductor.py", "lora.py", "quantize.py", "regions.py")


# Of a model that load= loads, no more is known before it is loaded.
_BY_SOURCES = "as the sources say"


def current_key(
    plan: Sequence[Request],
    *,
    sources: Sequence[str] = (),
    load: Callable[[], object] | None = None,
    settings: Settings | None = None,
) -> Key:
    """The key that a boot here and now would use. Needs no torch, and reads no weights beyond their headers.

    Args:
        plan: as for `boot`, as the others are.
        sources: with `load`, all that tells one model from another.
        load: only whether there is one counts; it is not called.
        settings: in place of those in the environment.

    Raises:
        SettingsError: a setting cannot be used.
        KeyFactError: a fact cannot be read, a damaged weights file say.
        ModelError: the model is of no known family.
    """
    settings = settings or Settings.from_environment()
    chosen = device(settings)
    environment = key.environment_facts(
        device=chosen, threads=settings.threads, visible_devices=settings.visible_devices, compiler=settings.compiler
    )
    return Key(environment, _version_facts(plan, sources, settings, chosen, own=load is not None))


def _version_facts(
    plan: Sequence[Request], sources: Sequence[str], settings: Settings, on: str, *, own: bool
) -> dict[str, str]:
    package = Path(__file__).parent
    ours = (*_GRAPH_SOURCES, f"models/{'own' if own else family(settings.model, plan)}.py")
    code = [Path(source) for source in sources] + [package / name for name in ours]
    return {
        "model": _model_by_sources(sources, settings) if own else _model_version(settings),
        "code": key.source_digest(code),
        "diffusers": key.installed("diffusers"),
        "transformers": key.installed("transformers"),
        "dtype": _BY_SOURCES if own else dtype(settings, on),
        "quantization": settings.quantize,
        "strategy": settings.strategy,
        "regions": ", ".join(settings.regions) or "found",
        "parts": ", ".join(settings.parts) or "denoisers",
        "lora": _lora(settings),
        "mode": settings.mode,
        "dynamic": str(dynamic(settings, plan)).lower(),
        "fullgraph": str(settings.fullgraph).lower(),
        "torch options": ", ".join(f"{name}={value}" for name, value in settings.torch_options) or "none",
        "plan": "; ".join(request.graph_facts() for request in plan) or "none",
    }


def _lora(settings: Settings) -> str:
    if not settings.lora_rank:
        return "none"
    return f"rank {settings.lora_rank} in {', '.join(settings.lora_targets) or 'all linear layers'}"


def _model_by_sources(sources: Sequence[str], settings: Settings) -> str:
    if not sources and not settings.model_version:
        raise key.KeyFactError(
            "The model is loaded by load=, and neither sources= nor WARMSTART_MODEL_VERSION tells it from another, so"
            " both would have one key. Pass sources=[__file__], and the files that its architecture is read from."
        )
    return settings.model_version or _BY_SOURCES


def _model_version(settings: Settings) -> str:
    settings.check_model()
    if settings.model_version:
        return settings.model_version
    if Path(settings.model).is_dir():
        return key.model_version(Path(settings.model))
    if not settings.model_revision:
        raise SettingsError(
            f"WARMSTART_MODEL is the hub id {settings.model!r} without WARMSTART_MODEL_REVISION, so the model could"
            " change between boots while the cache's key stays the same; set it to a commit of that repository."
        )
    return hashlib.sha256(f"{settings.model}@{settings.model_revision}".encode()).hexdigest()


def device(settings: Settings) -> str:
    """The device that the settings mean."""
    if settings.device != "auto":
        return settings.device
    # /dev/nvidiactl is there if a driver is loaded and given to this container. torch is not asked: that takes
    # seconds, and the live directory must be chosen before it is imported.
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def dtype(settings: Settings, on: str) -> str:
    """The precision that the settings mean on a device."""
    if settings.dtype != "auto":
        return settings.dtype
    return "float32" if on == "cpu" else "bfloat16"


def dynamic(settings: Settings, plan: Sequence[Request]) -> bool:
    """Whether sizes are symbols in the graphs.

    One planned shape needs no symbol; several share one graph per region rather than having one each.
    """
    return len(plan) > 1 if settings.dynamic == "auto" else settings.dynamic == "true"

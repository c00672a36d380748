"""Runs setup() of the Predictor that cog.yaml names, with another function where it boots; knows no store."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _openapi

import warmstart


class PredictorError(Exception):
    """The Predictor cannot be loaded, or its setup() does not boot."""


def setup(root: Path, boot: Callable[..., Any], config: str = _openapi.CONFIG) -> None:
    """Import the Predictor as the server does and run its setup, with `boot` in place of warmstart.boot.

    Warmstart's settings in `config` hold from here on, unless this process has its own.

    Raises:
        PredictorError: its file is no Python file, or setup() boots nothing.
        Exception: whatever its author's code raises.
    """
    called = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        called.append(True)
        return boot(*args, **kwargs)

    file, name = _openapi.target(root, config=config)
    os.environ.update(_openapi.environment(root, config))
    # A Predictor may take it from the package, or from the module that the package's function of this name hides.
    places = [warmstart, sys.modules["warmstart.boot"]]
    before = [place.boot for place in places]  # type: ignore[attr-defined]
    for place in places:
        place.boot = watched  # type: ignore[attr-defined]
    try:
        getattr(_load(file), name)().setup()
    finally:
        for place, original in zip(places, before, strict=True):
            place.boot = original  # type: ignore[attr-defined]
    if not called:
        raise PredictorError(
            f"setup() of {name} in {file.name} does not call warmstart.boot(), so it compiles nothing. Call it there."
        )


def _load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise PredictorError(
            f"{file} is no Python file, so it cannot be loaded. Correct the line run: of Cog's configuration."
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module

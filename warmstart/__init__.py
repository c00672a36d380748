"""Cog predictors that boot already compiled.

A Predictor calls `boot(plan, sources=[__file__])` in `setup()` and the returned `Served` in `run()`. Importing this
package loads neither torch nor the model.
"""

from __future__ import annotations

from warmstart.boot import boot
from warmstart.identity import current_key
from warmstart.models import Lora, Request, RequestError, Result
from warmstart.models.own import OwnModel
from warmstart.served import Served, Stream, UnplannedRequestError
from warmstart.settings import Settings, SettingsError

__all__ = [
    "Lora",
    "OwnModel",
    "Request",
    "RequestError",
    "Result",
    "Served",
    "Settings",
    "SettingsError",
    "Stream",
    "UnplannedRequestError",
    "boot",
    "current_key",
]

"""What the operator may set; the only module that reads the environment. Knows no torch and nothing of the model."""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmstart.trust import MIN_SECRET_CHARACTERS, Secrets

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "WARMSTART_"

# A slot of this rank is as large as most layers themselves, so more is a slip.
_MAX_LORA_RANK = 1024

# Variables by which torch and attention are configured. They change what is compiled, so they are facts of the key ...
_TORCH_PREFIXES = (
    "TORCHINDUCTOR_",
    "TORCHDYNAMO_",
    "TORCH_COMPILE_",
    "TRITON_",
    "NVIDIA_TF32_OVERRIDE",
    "DIFFUSERS_ATTN_",
)
# ... except those which only say where things lie, how many workers there are or what is logged.
_NOT_FACTS = frozenset(
    {
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "TORCHINDUCTOR_WORKER_START",
        "TORCHINDUCTOR_WORKER_LOGPATH",
        "TORCH_COMPILE_DEBUG",
        "TORCH_COMPILE_DEBUG_DIR",
        "TRITON_CACHE_DIR",
        "TRITON_DUMP_DIR",
        "TRITON_HOME",
    }
)


# Values that somebody who knows torch would expect, and what became of trying them.
_TRIED = {
    ("WARMSTART_STRATEGY", "hierarchical"): (
        " Torch 2.13's nested_compile_region was tried for that: it gave wrong pictures for some blocks, without an"
        " error (docs/decisions.md)."
    )
}


class SettingsError(ValueError):
    """A setting has a value that cannot be used; the text names the variable, the value and what is allowed."""


def _setting(default: Any, doc: str, *, choices: tuple[str, ...] = (), minimum: float | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"doc": doc, "choices": choices, "minimum": minimum})


@dataclass(frozen=True)
class Settings:
    """Validated settings. Each field is the variable `WARMSTART_<NAME>`; docs/settings.md has a row for each."""

    model: str = _setting(
        "weights", "Directory in diffusers or, of a language model, transformers layout; or a hub id of a pipeline."
    )
    model_revision: str = _setting("", "Commit or tag of a hub model. Needed with a hub id.")
    model_version: str = _setting("", "Names the model version in the cache's key, in place of the derived one.")
    device: str = _setting("auto", "auto, cpu, cuda or cuda:N.")
    dtype: str = _setting(
        "auto", "Precision. auto: bfloat16 on a GPU, else float32.", choices=("auto", "float32", "bfloat16", "float16")
    )
    quantize: str = _setting(
        "none",
        "Keep the weights of linear layers in 8 bits, as whole numbers or as floating-point ones.",
        choices=("none", "int8", "fp8"),
    )
    compile: str = _setting(
        "auto",
        "auto serves eager if compiling fails, required makes that a setup error, off never compiles.",
        choices=("auto", "required", "off"),
    )
    strategy: str = _setting(
        "regional",
        "regional compiles the repeated block once; whole compiles each part as one graph.",
        choices=("regional", "whole"),
    )
    regions: tuple[str, ...] = _setting((), "Class names of the regions, comma-separated, in place of the found ones.")
    parts: tuple[str, ...] = _setting((), "Components to compile, comma-separated, in place of the denoisers.")
    lora_rank: int = _setting(
        0, "Room for LoRA weights in the linear layers, so that requests can name some; 0 makes none.", minimum=0
    )
    lora_targets: tuple[str, ...] = _setting(
        (), "Layers with that room, by what their names end in, comma-separated, in place of all linear ones."
    )
    mode: str = _setting(
        "default",
        "torch.compile's mode.",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    dynamic: str = _setting(
        "auto",
        "Sizes in the graphs. auto: fixed if one shape is planned, else symbolic.",
        choices=("auto", "true", "false"),
    )
    fullgraph: bool = _setting(True, "Refuse graph breaks inside a region.")
    unplanned: str = _setting(
        "eager",
        "A request that needs a graph which warm-up did not make: eager, compile it now, or reject.",
        choices=("eager", "compile", "reject"),
    )
    setup_budget_s: float = _setting(0.0, "Stop warming further requests after this long; 0 is no limit.", minimum=0)
    cache_url: str = _setting("cache", "Store to restore from and publish to: a directory or an object-store URL.")
    cache_secret: Secrets = _setting(  # noqa: RUF009  this makes a field, and secrets never change
        Secrets(),
        "Signs bundles; others are then refused. Two, the new one first, while it is changed.",
    )
    restore_deadline_s: float = _setting(60.0, "Longest wait for the stores at boot.", minimum=0)
    persist_deadline_s: float = _setting(60.0, "Longest wait for one save.", minimum=0)
    stop_grace_s: float = _setting(
        5.0, "Longest that a stopping process takes to save what is unsaved; then it is lost.", minimum=0
    )
    max_bundle_bytes: int = _setting(
        4_000_000_000, "Most bytes that one version's bundles hold together, unpacked.", minimum=1
    )
    live_dir: str = _setting("", "Where compiled code lives while the process runs, in place of a directory per key.")
    self_check: bool = _setting(True, "Compare each region with its eager self at boot.")
    report_path: str = _setting("", "File to write the boot report to, as JSON.")
    trace_dir: str = _setting("", "Directory for torch's trace of all compiles, and for tlparse's report of it.")

    torch_cache_dir: str = ""
    """TORCHINDUCTOR_CACHE_DIR as the platform or the user set it."""
    torch_options: tuple[tuple[str, str], ...] = ()
    """Torch's own variables which change what is compiled, sorted."""
    threads: int = 1
    """CPU threads of one operation; compiled CPU kernels are made for this number."""
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES, or None where it is not set."""
    compiler: str | None = None
    """CXX, or None where it is not set."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Reads and validates all settings.

        Raises:
            SettingsError: a value cannot be used, or a variable with our prefix is not a setting.
        """
        fields = {PREFIX + field.name.upper(): field for field in public_fields()}
        values: dict[str, Any] = {}
        for variable, text in sorted(environment.items()):
            # WARMSTART_TEST_... belongs to the tests of whoever copies the template.
            if not variable.startswith(PREFIX) or variable.startswith(PREFIX + "TEST_"):
                continue
            if variable not in fields:
                raise SettingsError(_unknown(variable, fields))
            # An empty value is an unset one, so that a deploy file can name a variable and leave it alone.
            if text.strip():
                values[fields[variable].name] = _parse(variable, text.strip(), fields[variable])
        settings = cls(**values, **_surroundings(environment))
        settings._check()
        return settings

    def _check(self) -> None:
        if self.device not in ("auto", "cpu", "cuda") and not self.device.removeprefix("cuda:").isdecimal():
            raise SettingsError(_bad("WARMSTART_DEVICE", self.device, "auto, cpu, cuda or cuda:N"))

        if self.lora_rank > _MAX_LORA_RANK:
            raise SettingsError(_bad("WARMSTART_LORA_RANK", str(self.lora_rank), f"0 to {_MAX_LORA_RANK}"))
        if self.lora_targets and not self.lora_rank:
            raise SettingsError(
                f"WARMSTART_LORA_TARGETS is {','.join(self.lora_targets)!r}, but WARMSTART_LORA_RANK is 0, so no layer"
                " gets room for LoRA weights and it would have no effect; set WARMSTART_LORA_RANK too, or unset it."
            )

    def check_model(self) -> None:
        """Refuses a model that is nowhere; not asked where the Predictor loads its own.

        Raises:
            SettingsError: WARMSTART_MODEL is neither a directory nor a hub id.
        """
        if not Path(self.model).is_dir() and not _is_hub_id(self.model):
            raise SettingsError(
                f"WARMSTART_MODEL is {self.model!r}, which is no directory under {Path.cwd()} and no hub id"
                " (owner/name), so there is nothing to load; put the model there or name another directory."
            )


def public_fields() -> list[dataclasses.Field[Any]]:
    """The fields that are settings, in order; the others are read from the surroundings."""
    return [field for field in dataclasses.fields(Settings) if "doc" in field.metadata]


def _surroundings(environment: Mapping[str, str]) -> dict[str, Any]:
    options = {
        name: value
        for name, value in environment.items()
        if name.startswith(_TORCH_PREFIXES) and name not in _NOT_FACTS and value
    }
    return {
        "torch_cache_dir": environment.get("TORCHINDUCTOR_CACHE_DIR", ""),
        "torch_options": tuple(sorted(options.items())),
        "threads": _threads(environment),
        "visible_devices": environment.get("CUDA_VISIBLE_DEVICES"),
        "compiler": environment.get("CXX") or None,
    }


def _threads(environment: Mapping[str, str]) -> int:
    """As many as OpenMP would take: OMP_NUM_THREADS (its first level), else the cores this process may use."""
    first = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    # More than any machine has is a slip, and torch would not take it.
    if first.isdecimal() and 0 < int(first) <= 4096:
        return int(first)
    return len(os.sched_getaffinity(0))


def _parse(variable: str, text: str, field: dataclasses.Field[Any]) -> Any:
    if choices := field.metadata["choices"]:
        if text not in choices:
            tried = _TRIED.get((variable, text), "")
            raise SettingsError(f"{_bad(variable, text, ', '.join(choices))}{tried}")
        return text
    if isinstance(field.default, bool):
        return _parse_bool(variable, text)
    if isinstance(field.default, (int, float)):
        return _parse_number(variable, text, type(field.default), field.metadata["minimum"])
    if isinstance(field.default, Secrets):
        return _parse_secrets(variable, text)
    if isinstance(field.default, tuple):
        return tuple(item.strip() for item in text.split(",") if item.strip())
    return text


def _parse_bool(variable: str, text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise SettingsError(_bad(variable, text, "true or false"))
    return words[text.lower()]


def _parse_number(variable: str, text: str, kind: type[int] | type[float], minimum: float) -> float:
    # Seconds end where the clock's arithmetic would overflow, after thirty years.
    name, maximum = ("a whole number", 10**15) if kind is int else ("a number", 10**9)
    allowed = f"{name} of at least {minimum:g} and at most {maximum:g}"
    try:
        value = kind(text)
    except ValueError:
        raise SettingsError(_bad(variable, text, allowed)) from None
    # Written so that "nan" is refused too.
    if not minimum <= value <= maximum:
        raise SettingsError(_bad(variable, text, allowed))
    return value


def _parse_secrets(variable: str, text: str) -> Secrets:
    """One or two, separated by a comma or a line break; an error says nothing of what they are."""
    found = [item.strip() for item in text.replace("\n", ",").split(",") if item.strip()]
    try:
        return Secrets(*(found or [""]))  # a lone comma is a mistake, not a wish for no signatures
    except ValueError as error:
        raise SettingsError(
            f"{variable} holds {error}; allowed: one secret of at least {MIN_SECRET_CHARACTERS} characters without a"
            " comma, or two with a comma between them. `openssl rand -hex 32` makes one."
        ) from None


def _bad(variable: str, value: str, allowed: str) -> str:
    return f"{variable} is {value!r}, which cannot be used; allowed: {allowed}. Correct or unset it."


def _unknown(variable: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(variable, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "docs/settings.md lists all settings."
    return f"{variable} is set, but there is no such setting, so it would have no effect; {hint}"


def _is_hub_id(model: str) -> bool:
    owner, slash, name = model.partition("/")
    return bool(slash and owner and name) and "/" not in name and not model.startswith((".", "~"))

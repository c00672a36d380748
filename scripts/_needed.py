"""Chooses which files of a model repository a boot would load; knows names and layouts, no network and no disk."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

# What a component's directory holds besides weights: configs, tokenizers, schedulers, chat templates. Code (*.py) is
# left out, as a boot never runs a model's own.
TEXTS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# The names under which diffusers and transformers look for weights; other safetensors are adapters and the like.
NAMES = ("diffusion_pytorch_model", "model", "pytorch_model")
WEIGHTS = re.compile(r"(?P<name>[^.]+?)(?:\.(?P<variant>[\w-]+?))?(?:-\d{5}-of-\d{5})?(?P<suffix>\.safetensors|\.bin)")
# Indexes, which come with the weights that they are of, and what belongs to other runtimes.
UNUSED = re.compile(r"\.index\.|onnx|openvino|coreml")
INDEX = re.compile(r"(?P<name>[^.]+)(?P<suffix>\.safetensors|\.bin)\.index(?:\.(?P<variant>[\w-]+))?\.json")


class NeededError(Exception):
    """What the repository holds cannot be loaded; the text says what is there and what to ask for."""


def needed(
    files: Iterable[str], read: Callable[[str], bytes], *, variant: str = "", allow_pickle: bool = False
) -> dict[str, str]:
    """Return the path of each needed file, and the path that it gets.

    The two differ for a variant, `model.fp16.safetensors` say, which gets the name that is loaded by default.

    Args:
        files: paths of all files.
        read: gives the bytes of one of them, of an index say.
        variant: of the weights, "fp16" say, where a component has it.
        allow_pickle: take weights that are pickles where there are no others.

    Raises:
        NeededError: it is no model that can be loaded, or its weights are pickles.
    """
    files = sorted(files)
    licences = {path: path for path in files if "/" not in path and path.upper().startswith(("LICENSE", "NOTICE"))}
    if "model_index.json" in files:
        index = _json("model_index.json", read)
        names = [name for name, value in index.items() if isinstance(value, list) and all(value)]
        chosen = {"model_index.json": "model_index.json"}
        for name in names:
            inside = [path for path in files if path.startswith(f"{name}/")]
            chosen |= _component(name, inside, read, variant, allow_pickle)
        return chosen | licences
    if "config.json" in files:
        return _component("", [path for path in files if "/" not in path], read, variant, allow_pickle) | licences
    raise NeededError(
        f"it holds neither model_index.json nor config.json ({_some(files)}), so it is no model in the layout of"
        " diffusers or transformers; look for a repository that has it, or convert the checkpoint"
    )


def filtered(chosen: dict[str, str], files: Iterable[str], include: list[str], exclude: list[str]) -> dict[str, str]:
    """Return what is chosen with all that matches a pattern of `include` and without what matches one of `exclude`."""
    wanted = chosen | {path: path for path in files if path not in chosen and _matches(path, include)}
    return {path: place for path, place in wanted.items() if not _matches(path, exclude)}


def _matches(path: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _component(
    name: str, files: list[str], read: Callable[[str], bytes], variant: str, allow_pickle: bool
) -> dict[str, str]:
    texts = [path for path in files if path.endswith(TEXTS) and not UNUSED.search(path)]
    chosen = dict(zip(texts, texts, strict=True))
    suffixes = (".safetensors", ".bin") if allow_pickle else (".safetensors",)
    for suffix in suffixes:
        if weights := _weights(name, files, read, variant, suffix):
            return chosen | weights
    if pickles := [path for path in files if path.endswith(PICKLES)]:
        raise NeededError(
            f"{name or 'it'} has weights as pickles only ({_some(pickles)}), which can run code when they are read;"
            " look for a revision with safetensors, or add --allow-pickle if you trust it and load it yourself"
        )
    if any(PurePosixPath(path).name == "config.json" for path in files):
        raise NeededError(f"{name or 'it'} has a config.json and no safetensors beside it ({_some(files)})")
    return chosen


def _weights(
    component: str, files: list[str], read: Callable[[str], bytes], variant: str, suffix: str
) -> dict[str, str]:
    """The weights of one format and of the variant, or of none where the component does not have the variant."""
    found: dict[str, list[str]] = {}
    for path in files:
        name = PurePosixPath(path).name
        match = WEIGHTS.fullmatch(name) or INDEX.fullmatch(name)
        if match and match["name"] in NAMES and match["suffix"] == suffix:
            found.setdefault(match["variant"] or "", []).append(path)
    if not found:
        return {}
    taken = variant if variant in found else ""
    if taken not in found:
        raise NeededError(
            f"{component or 'it'} has weights of the variants {', '.join(sorted(found))} only; choose one with"
            " --variant"
        )
    paths = found[taken]
    if whole := [path for path in paths if "-of-" not in path and not path.endswith(".json")]:
        return {path: _plain(path, taken) for path in whole[:1]}
    chosen: dict[str, str] = {}
    for index in [path for path in paths if path.endswith(".json")][:1]:
        parts = set(_json(index, read).get("weight_map", {}).values())
        folder = PurePosixPath(index).parent
        chosen = {(folder / part).as_posix(): (folder / part).as_posix() for part in parts}
        if missing := sorted(set(chosen) - set(files)):
            raise NeededError(f"its {index} names {missing[0]}, which is not there; the revision is incomplete")
        # It names its parts by their own names, so only the index itself has to be where it is looked for.
        chosen[index] = _plain(index, taken)
    if not chosen:
        raise NeededError(f"{_some(paths)} is in parts without an index, so it cannot be loaded; choose --revision")
    return chosen


def _plain(path: str, variant: str) -> str:
    folder, slash, name = path.rpartition("/")
    return folder + slash + (name.replace(f".{variant}.", ".") if variant else name)


def _json(path: str, read: Callable[[str], bytes]) -> dict:
    try:
        value = json.loads(read(path))
    except ValueError as error:
        raise NeededError(f"its {path} is not JSON ({error}), so what it needs cannot be told") from error
    if not isinstance(value, dict):
        raise NeededError(f"its {path} is not a JSON object, so what it needs cannot be told")
    return value


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "") if paths else "no files"

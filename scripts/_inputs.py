"""Turns `-i name=value` into a request's inputs by the schema; knows JSON schemas, neither the server nor files' use.

Values are strings on a command line and get the type that the schema gives the input, as in Cog's own command.
What the server would refuse is refused here already, before anything is started, with what would be accepted.
"""

from __future__ import annotations

import base64
import difflib
import json
import mimetypes
import re
from pathlib import Path
from typing import Any

KINDS = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "a text"}
KINDS |= {"array": "a list", "object": "a JSON object"}


class InputError(Exception):
    """The inputs do not fit the schema. The message has a line for each problem, with what is accepted."""


def parse(pairs: list[str], document: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs that `pairs` ("name=value") give, or raise InputError naming all that is wrong with them."""
    known = properties(document)
    problems: list[str] = []
    given: dict[str, list[str]] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            problems.append(f"{pair!r} names no value. Write -i name=value, or -i name=@file for a file.")
        elif name not in known:
            problems.append(_unknown(name, list(known)))
        else:
            quoted = len(value) > 1 and value[0] == value[-1] == '"'
            given.setdefault(name, []).append(value[1:-1] if quoted else value)
    inputs = {}
    for name, values in given.items():
        try:
            inputs[name] = _coerced(name, values, known[name])
            _check(name, inputs[name], known[name])
        except InputError as problem:
            problems.append(str(problem))
    for name in document["components"]["schemas"]["Input"].get("required", []):
        if name not in given:
            problems.append(f"Input {name} is missing and has no default. Add -i {name}=...")
    if problems:
        raise InputError("\n".join(problems))
    return inputs


def properties(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the inputs' schemas by name, each with its choices, which the document keeps apart, filled in."""
    schemas = document["components"]["schemas"]
    found = {}
    for name, prop in schemas["Input"]["properties"].items():
        merged = dict(prop)
        for part in merged.pop("allOf", []):
            merged = {**schemas[part["$ref"].rpartition("/")[2]], **merged}
        found[name] = merged
    return found


def _unknown(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"There is no input {name!r}.{hint} The inputs are: {', '.join(known) or 'none'}."


def _coerced(name: str, values: list[str], prop: dict[str, Any]) -> Any:
    """Return the value that the strings stand for; one given several times is a list."""
    if len(values) > 1:
        return [_scalar(name, value, prop.get("items", {})) for value in values]
    value = values[0]
    if prop.get("type") == "array" and not value.startswith("@"):
        listed = _json(value)
        return listed if isinstance(listed, list) else [_scalar(name, value, prop["items"])]
    if prop.get("type") == "array":
        return [_scalar(name, value, prop["items"])]
    return _scalar(name, value, prop)


def _scalar(name: str, value: str, prop: dict[str, Any]) -> Any:
    """Return one value; a string that does not fit the type is returned as it is, for the check to name."""
    if value.startswith("@"):
        return data_url(name, Path(value[1:]))
    for kind in [member.get("type") for member in prop.get("anyOf", [prop])]:
        parsed = value if kind == "string" else _json(value)
        if _is(parsed, kind):
            return parsed
    return value


def _json(text: str) -> Any:
    """Return what a JSON text stands for, or the text itself if it is none; NaN and infinities are none."""
    try:
        return json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text


def data_url(name: str, path: Path) -> str:
    """Return a file as the server takes it."""
    try:
        content = path.expanduser().read_bytes()
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"Input {name}: the file {path} cannot be read: {why}. Check the path.") from None
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _is(value: Any, kind: str | None) -> bool:
    """Tell whether a value is of a JSON type. In Python True is an int; in JSON it is not."""
    if isinstance(value, bool):
        return kind == "boolean"
    types: dict[str | None, tuple[type, ...]] = {
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "array": (list,),
        "object": (dict,),
    }
    return isinstance(value, types.get(kind, ()))


def _check(name: str, value: Any, prop: dict[str, Any]) -> None:
    """Raise InputError unless the value fits its schema."""
    shown = f"{name}={value if isinstance(value, str) and len(value) < 60 else json.dumps(value)[:60]}"
    choices = prop.get("enum")
    if choices is not None:
        if value not in choices:
            raise InputError(f"{shown} is not offered. Choose one of: {', '.join(str(choice) for choice in choices)}.")
        return
    kinds = [member.get("type") for member in prop.get("anyOf", [prop])]
    if not any(_is(value, kind) for kind in kinds):
        raise InputError(
            f"{shown} is not {' or '.join(KINDS.get(str(kind), str(kind)) for kind in kinds)}.{_range(prop)}"
        )
    if isinstance(value, list):
        for item in value:
            _check(name, item, prop.get("items", {}))
    if isinstance(value, (int, float)):
        low, high = prop.get("minimum", value), prop.get("maximum", value)
        if not low <= value <= high:
            raise InputError(f"{shown} is out of range.{_range(prop)}")
    if isinstance(value, str):
        _check_text(shown, value, prop)


def _check_text(shown: str, value: str, prop: dict[str, Any]) -> None:
    shortest, longest = prop.get("minLength", 0), prop.get("maxLength", len(value))
    if not shortest <= len(value) <= longest:
        raise InputError(f"{shown} has {len(value)} characters; {shortest} to {longest} are accepted.")
    if "pattern" in prop and not re.search(prop["pattern"], value):
        raise InputError(f"{shown} does not match the pattern {prop['pattern']}, which the model asks for.")


def _range(prop: dict[str, Any]) -> str:
    """Return a sentence on the accepted range, with a space before it, or nothing if there is none."""
    low, high = prop.get("minimum"), prop.get("maximum")
    if low is None and high is None:
        return ""
    if low is None or high is None:
        return f" Give {high} or less." if low is None else f" Give {low} or more."
    return f" Give a value from {low} to {high}."

"""Writes the schema that `cog build` writes, from the text of predict.py; knows Python's syntax and Cog's rules.

The server in the container checks every request against `.cog/openapi_schema.json`; without that file it lets
anything through. `cog build` makes it by reading predict.py, which it never runs, so this module does the same:
what cannot be read from the text alone is an error here as it is there. Where Cog would quietly drop or misread
something (a bound that is not a literal, a string with escapes), this is an error too, since the image would then
accept requests that its author meant to refuse.

It does not know the server, and follows no import: base classes and output models must be in predict.py itself.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any, NoReturn

CONFIG = "cog.yaml"
PRIMITIVES: dict[str, dict[str, Any]] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "Path": {"type": "string", "format": "uri"},
    "File": {"type": "string", "format": "uri"},
    "Secret": {"type": "string", "format": "password", "writeOnly": True, "x-cog-secret": True},
    "Any": {"type": "object"},
    "dict": {"type": "object"},
    "Dict": {"type": "object"},
}
FILE_TYPES = ("Path", "File", "Secret")
# Input()'s arguments and the keywords that they become.
BOUNDS = {"ge": "minimum", "le": "maximum", "min_length": "minLength", "max_length": "maxLength"}
TEXTS = {"regex": "pattern", "accept": "x-cog-accept"}
INPUT_TYPES = "str, int, float, bool, Path, File, Secret, dict, list[...] of one of these, and any of them `| None`"
OUTPUT_TYPES = (
    "str, int, float, bool, Path, dict, dict[str, ...], list[...], Iterator[...], ConcatenateIterator[str] "
    "and classes derived from BaseModel in the same file"
)
CHOICES = (
    "a list literal, the name of one at the top of the file, list(NAME.keys()), list(NAME.values()) or a sum of these"
)


class SchemaError(Exception):
    """predict.py cannot be read as Cog reads it; the message names file and line, the construct and the remedy."""


def target(root: Path, stub: str = "", config: str = CONFIG) -> tuple[Path, str]:
    """Return the file and the class that serve requests.

    Args:
        root: the project.
        stub: both, such as "predict.py:Predictor"; the line `run:` of `config` when left out.
        config: Cog's configuration, the file that its CLI takes as -f.
    """
    if not stub:
        stub = _run_line(root / config)
    file, colon, name = stub.partition(":")
    if not (file and colon and name.isidentifier()):
        raise SchemaError(f'{stub!r} does not name what serves requests. Write it as in "predict.py:Predictor".')
    return root / file, name


def _run_line(cog_yaml: Path) -> str:
    try:
        text = cog_yaml.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SchemaError(f"{cog_yaml} cannot be read: {error}. It says which class serves requests.") from None
    match = re.search(r"""^(?:run|predict):\s*["']?([^"'#\s]+)["']?\s*(?:#.*)?$""", text, re.MULTILINE)
    if match is None:
        raise SchemaError(
            f'{cog_yaml} has no line such as run: "predict.py:Predictor". Add it; it names what is served.'
        )
    return match[1]


def environment(root: Path, config: str) -> dict[str, str]:
    """Return warmstart's own variables of `environment:`, less those that this process has set otherwise.

    What else the image sets is for the image: where torch keeps its files there is no business of this machine.
    """
    found = re.findall(r"^ +- [\"']?(WARMSTART_[A-Z_]+)=([^\"'\n]*)", (root / config).read_text(), re.MULTILINE)
    return {name: value.strip() for name, value in found if name not in os.environ}


def write(root: Path, stub: str = "", config: str = CONFIG) -> Path:
    """Write `.cog/openapi_schema.json` of the project at `root`, whole or not at all, and return its path."""
    document = json.dumps(schema(*target(root, stub, config)), indent=2)
    path = root / ".cog" / "openapi_schema.json"
    path.parent.mkdir(exist_ok=True)
    # A server may be starting beside us: it reads the old file or the new one, never half of one.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".schema", delete=False) as temporary:
        temporary.write(document)
    Path(temporary.name).replace(path)
    return path


def schema(predict_py: Path, class_name: str) -> dict[str, Any]:
    """Return the OpenAPI document of a Predictor.

    Args:
        predict_py: the file; it is parsed and never imported.
        class_name: the class with `run()` (or the older `predict()`), or a function of that name.

    Raises:
        SchemaError: Cog could not build this, or would build something else than it says.
    """
    module = _Module(predict_py)
    function, is_method = module.function(class_name)
    properties, enums = _inputs(module, function, is_method)
    inputs: dict[str, Any] = {"title": "Input", "type": "object", "properties": properties}
    required = [name for name, prop in properties.items() if prop.pop("required")]
    if required:
        inputs["required"] = required
    if function.returns is None:
        module.fail(function, f"{function.name}() has no return type", f"Say what it returns: {OUTPUT_TYPES}.")
    output = {"title": "Output", **_output_type(module, function.returns, ())}
    streaming = any(_name(decorator) == "streaming" for decorator in function.decorator_list)
    return _document(inputs, output, enums, streaming)


class _Module:
    """predict.py, parsed: its top-level constants and classes, and the places to report."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.source = path.read_text()
            if "\0" in self.source:  # Python's own error names no line
                line = self.source.partition("\0")[0].count("\n") + 1
                raise SchemaError(f"{path.name}:{line}: the file holds a NUL byte, so it is no text. Remove it there.")
            self.tree = ast.parse(self.source)
        except (OSError, UnicodeDecodeError) as error:
            raise SchemaError(f"{path} cannot be read: {error}. Correct `run:` in cog.yaml.") from None
        except SyntaxError as error:
            raise SchemaError(f"{path.name}:{error.lineno}: {error.msg}. Cog parses this file; correct it.") from None
        self.constants: dict[str, ast.expr] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.base_models = {"BaseModel"}
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom):
                self.base_models |= {name.asname or name.name for name in node.names if name.name == "BaseModel"}
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self.constants[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                self.constants[node.target.id] = node.value

    def function(self, name: str) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]:
        """Return the function that serves requests and whether it is a method."""
        is_method = name in self.classes
        found = _functions(self.classes[name].body if is_method else self.tree.body)
        for candidate in ("run", "predict") if is_method else (name,):
            if candidate in found:
                return found[candidate], is_method
        where = f"class {name} has no run() of its own" if is_method else f"there is no class {name}"
        return self.fail(self.classes.get(name), where, "cog.yaml names it as what serves requests. Define it here.")

    def text(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.source, node) or ""

    def fail(self, node: ast.AST | None, what: str, remedy: str) -> NoReturn:
        line = getattr(node, "lineno", 1)
        raise SchemaError(f"{self.path.name}:{line}: {what}. {remedy}")

    def literal(self, node: ast.expr, what: str, remedy: str) -> Any:
        """Return the value of a literal, as Cog reads it, or fail with `what` and `remedy`."""
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return [self.literal(item, what, remedy) for item in node.elts]
        if isinstance(node, ast.Dict):
            keys = [self.literal(key or node, what, remedy) for key in node.keys]
            return dict(zip(keys, [self.literal(value, what, remedy) for value in node.values], strict=True))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.literal(node.operand, what, remedy)
            if type(value) in (int, float):
                return -value
        if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, type(None))):
            return self._constant(node)
        return self.fail(node, f"{what} is `{self.text(node)}`, which cannot be read without running the file", remedy)

    def _constant(self, node: ast.Constant) -> Any:
        text, value = self.text(node), node.value
        if isinstance(value, str):
            quoted = re.fullmatch(r"r?('''|\"\"\"|'|\")(.*)\1", text, re.DOTALL)
            if quoted is None or quoted[2] != value:
                remedy = "Cog takes what stands between the quotes as it is; write one string without escapes or parts."
                self.fail(node, f"the string {text.splitlines()[0]} reads differently in Cog than in Python", remedy)
        if isinstance(value, float):
            return int(value) if value.is_integer() else value  # 1.0 is written as 1, as Cog does
        return value

    def value(self, node: ast.expr, what: str, remedy: str) -> Any:
        """Return the value of a literal or of a name that is one at the top of the file."""
        if isinstance(node, ast.Name) and node.id in self.constants:
            node = self.constants[node.id]
        return self.literal(node, what, remedy)

    def choices(self, node: ast.expr, what: str) -> list[Any]:
        """Return the list that a `choices=` expression stands for."""
        remedy = f"Cog accepts {CHOICES}."
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.choices(node.left, what) + self.choices(node.right, what)
        listed = re.fullmatch(r"list\((\w+)\.(keys|values)\(\)\)", self.text(node))
        if listed and isinstance(self.constants.get(listed[1]), ast.Dict):
            mapping = self.literal(self.constants[listed[1]], f"{listed[1]}, in {what},", remedy)
            return list(getattr(mapping, listed[2])())
        is_name = isinstance(node, ast.Name) and isinstance(self.constants.get(node.id), (ast.List, ast.Tuple))
        if not is_name and not isinstance(node, ast.List):
            self.fail(node, f"{what} is `{self.text(node)}`, which Cog cannot read", remedy)
        return list(self.value(node, what, remedy))


def _functions(body: list[ast.stmt]) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {node.name: node for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def _name(node: ast.AST) -> str:
    """Return the last part of a possibly dotted name, also of what is called or subscripted; else ""."""
    while isinstance(node, (ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _title(name: str) -> str:
    return " ".join(part[:1].upper() + part[1:] for part in name.split("_"))


# --- Inputs -------------------------------------------------------------------------------------------------------


def _inputs(
    module: _Module, function: ast.FunctionDef | ast.AsyncFunctionDef, is_method: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the properties, each with a key `required` still in it, and the enums of their choices."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    pairs = list(zip(positional, defaults, strict=True))[1 if is_method else 0 :]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    extra = arguments.vararg or arguments.kwarg
    if extra:
        module.fail(extra, f"{function.name}() takes *{extra.arg}", "Cog offers named inputs only; name each of them.")
    properties: dict[str, Any] = {}
    enums: dict[str, Any] = {}
    for order, (argument, default) in enumerate(pairs):
        properties[argument.arg] = _input(module, argument, default, enums) | {"x-order": order}
    return properties, enums


def _input(module: _Module, argument: ast.arg, default: ast.expr | None, enums: dict[str, Any]) -> dict[str, Any]:
    """Return the property of one argument; its choices, if any, go into `enums`."""
    name = argument.arg
    if argument.annotation is None:
        module.fail(argument, f"input {name} has no type", f"Cog accepts {INPUT_TYPES}.")
    kind = _input_type(module, argument.annotation, name)
    given = _keywords(module, name, default)
    prop: dict[str, Any] = {"title": _title(name), **kind}
    if "choices" in given:
        enums[name] = _enum(module, name, kind, given["choices"])
        prop = {"allOf": [{"$ref": f"#/components/schemas/{name}"}]}
    nullable = kind.get("nullable", False)
    has_default = "default" in given
    if has_default:
        remedy = "Cog accepts a literal or the name of one at the top of the file."
        value = module.value(given["default"], f"the default of {name}", remedy)
        # An optional credential is the one type whose None Cog takes for a default without `| None`.
        nullable = nullable or (value is None and kind.get("x-cog-secret", False))
        if value is None and not nullable:
            remedy = f"Cog then makes {name} required; write `{module.text(argument.annotation)} | None`."
            module.fail(given["default"], f"input {name} has the default None but its type has no None", remedy)
        prop["default"] = value
    if nullable:
        prop["nullable"] = True
    prop["required"] = not has_default and ("anyOf" in kind or not nullable)
    return prop | _constraints(module, name, kind, given)


def _enum(module: _Module, name: str, kind: dict[str, Any], node: ast.expr) -> dict[str, Any]:
    if kind.get("type") not in ("string", "integer", "number", "boolean"):
        module.fail(
            node, f"input {name} has choices and is no single value", "Cog accepts choices for str, int and float."
        )
    values = module.choices(node, f"choices of {name}")
    return {"title": name, "description": "An enumeration.", "enum": values, "type": kind["type"]}


def _keywords(module: _Module, name: str, default: ast.expr | None) -> dict[str, ast.expr]:
    """Return what `= Input(...)` says, by keyword; a plain default is the keyword `default`."""
    if default is None:
        return {}
    if not isinstance(default, ast.Call):
        return {"default": default}
    if _name(default) != "Input" or default.args or any(keyword.arg is None for keyword in default.keywords):
        remedy = "Cog reads the keywords of Input(...) where it is called, and drops anything else."
        module.fail(default, f"input {name} is set to `{module.text(default).splitlines()[0]}`", remedy)
    given = {keyword.arg: keyword.value for keyword in default.keywords if keyword.arg}
    known = {"default", "description", "choices", "deprecated", *BOUNDS, *TEXTS}
    unknown = sorted(set(given) - known)
    if unknown:
        module.fail(default, f"input {name} has {unknown[0]}=", f"Cog's Input accepts {', '.join(sorted(known))}.")
    return given


def _constraints(module: _Module, name: str, kind: dict[str, Any], given: dict[str, ast.expr]) -> dict[str, Any]:
    """Return what else Input(...) says. Cog drops what is no literal here, and then refuses nothing."""
    found: dict[str, Any] = {}
    remedy = "Cog accepts a literal here and quietly drops anything else."
    for argument, keyword in (BOUNDS | TEXTS).items():
        if argument in given:
            found[keyword] = module.literal(given[argument], f"{argument} of {name}", remedy)
    if found and "anyOf" in kind:
        module.fail(given[next(iter(given))], f"input {name} has bounds and more than one type", "Give it one type.")
    if "x-cog-accept" in found and kind.get("format") != "uri":
        module.fail(given["accept"], f"input {name} has accept= and is no file", "Make it a Path, or drop accept.")
    if "description" in given:
        found["description"] = module.value(given["description"], f"the description of {name}", remedy)
    if "deprecated" in given and module.literal(given["deprecated"], f"deprecated of {name}", remedy):
        found["deprecated"] = True
    return found


def _input_type(module: _Module, node: ast.expr, name: str) -> dict[str, Any]:
    """Return the schema of an input's type."""
    node = _unquoted(module, node)
    members = _members(module, node)
    if len(members) > 1 or _name(node) in ("Optional", "Union"):
        return _union(module, node, members, name)
    if isinstance(node, ast.Subscript):
        if _name(node) in ("list", "List"):
            items = _input_type(module, node.slice, name)
            if items.get("type") != "array" and "anyOf" not in items and "nullable" not in items:
                return {"type": "array", "items": items}
        if _name(node) in ("dict", "Dict"):
            return {"type": "object"}
        if _name(node) == "Annotated" and isinstance(node.slice, ast.Tuple):
            return _input_type(module, node.slice.elts[0], name)
    elif _name(node) in PRIMITIVES:
        return dict(PRIMITIVES[_name(node)])
    return module.fail(node, f"input {name} has the type `{module.text(node)}`", f"Cog accepts {INPUT_TYPES}.")


def _union(module: _Module, node: ast.expr, members: list[ast.expr], name: str) -> dict[str, Any]:
    """Return the schema of `A | None`, Optional[A], `A | B` and `A | B | None`."""
    kept = [member for member in members if not _is_none(member)]
    nullable = len(kept) < len(members) or _name(node) == "Optional"
    kinds = [_input_type(module, member, name) for member in kept]
    if len(kinds) == 1:
        return kinds[0] | ({"nullable": True} if nullable else {})
    if not kinds or any(_name(part) in FILE_TYPES for member in kept for part in ast.walk(member)):
        module.fail(
            node, f"input {name} has the type `{module.text(node)}`", "In a union Cog accepts plain JSON types only."
        )
    mark = {"nullable": True} if nullable else {}
    return {"anyOf": [kind | mark for kind in kinds], **mark}


def _members(module: _Module, node: ast.expr) -> list[ast.expr]:
    """Return the members of a union in either notation; of anything else, itself."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _members(module, node.left) + _members(module, node.right)
    if isinstance(node, ast.Subscript) and _name(node) in ("Optional", "Union"):
        return list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    return [node]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _unquoted(module: _Module, node: ast.expr) -> ast.expr:
    """Return the type that a quoted annotation names."""
    if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        return node
    try:
        inner = ast.parse(node.value, mode="eval").body
    except SyntaxError:
        module.fail(node, f"`{module.text(node)}` is no type", f"Cog accepts {INPUT_TYPES}.")
    return ast.copy_location(inner, node)


# --- Output -------------------------------------------------------------------------------------------------------


def _output_type(module: _Module, node: ast.expr, within: tuple[str, ...]) -> dict[str, Any]:
    """Return the schema of an output's type; `within` names the models round it, so that a cycle ends."""
    node = _unquoted(module, node)
    name = _name(node)
    if isinstance(node, ast.Subscript):
        return _generic_output(module, node, name, within)
    if name in module.classes and isinstance(node, ast.Name):
        return {"type": "object"} if name in within else _model(module, module.classes[name], (*within, name))
    if name in ("list", "List"):
        return {"type": "array", "items": {"type": "object"}}
    if name in PRIMITIVES:
        return dict(PRIMITIVES[name])
    return module.fail(
        node, f"the output type `{module.text(node)}` is not one that Cog accepts", f"Use {OUTPUT_TYPES}."
    )


def _generic_output(module: _Module, node: ast.Subscript, name: str, within: tuple[str, ...]) -> dict[str, Any]:
    inner = node.slice
    if name in ("dict", "Dict") and isinstance(inner, ast.Tuple) and len(inner.elts) == 2:
        return {"type": "object", "additionalProperties": _output_type(module, inner.elts[1], within)}
    if name in ("list", "List"):
        return {"type": "array", "items": _output_type(module, inner, within)}
    if name in ("Iterator", "AsyncIterator"):
        return {"type": "array", "items": _output_type(module, inner, within), "x-cog-array-type": "iterator"}
    if name in ("ConcatenateIterator", "AsyncConcatenateIterator") and _name(inner) == "str":
        display = {"x-cog-array-type": "iterator", "x-cog-array-display": "concatenate"}
        return {"type": "array", "items": {"type": "string"}, **display}
    return module.fail(
        node, f"the output type `{module.text(node)}` is not one that Cog accepts", f"Use {OUTPUT_TYPES}."
    )


def _model(module: _Module, model: ast.ClassDef, within: tuple[str, ...]) -> dict[str, Any]:
    """Return the schema of a class derived from BaseModel."""
    if not any(_name(base) in module.base_models for base in model.bases):
        module.fail(model, f"the output class {model.name} does not derive from BaseModel", f"Use {OUTPUT_TYPES}.")
    properties: dict[str, Any] = {}
    required = []
    for field in model.body:
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        name, members = field.target.id, _members(module, field.annotation)
        kept = [member for member in members if not _is_none(member)]
        optional = len(kept) < len(members) or _name(field.annotation) == "Optional"
        kind = _output_type(module, kept[0] if len(kept) == 1 else field.annotation, within)
        properties[name] = kind | {"title": _title(name)} | ({"nullable": True} if optional else {})
        if not optional and field.value is None:
            required.append(name)
    return {"type": "object", "properties": properties} | ({"required": required} if required else {})


# --- The document -------------------------------------------------------------------------------------------------


def _document(inputs: dict[str, Any], output: dict[str, Any], enums: dict[str, Any], streaming: bool) -> dict[str, Any]:
    return {
        "openapi": "3.0.2",
        "info": {"title": "Cog", "version": importlib.metadata.version("cog")},
        "paths": _paths(streaming),
        "components": {"schemas": {"Input": inputs, "Output": output, **enums, **_envelopes(), **_errors()}},
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(title: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {"title": title, "type": "object", "properties": properties}


def _text(title: str, **more: Any) -> dict[str, Any]:
    return {"title": title, "type": "string", **more}


def _envelopes() -> dict[str, Any]:
    """Return the schemas round input and output, the same for every model."""
    times = {name: _text(_title(name), format="date-time") for name in ("created_at", "started_at", "completed_at")}
    texts = {name: _text(_title(name)) for name in ("id", "version", "status", "error", "logs")}
    metrics = {"metrics": {"title": "Metrics", "type": "object"}}
    answer = {"input": _ref("Input"), "output": _ref("Output"), **texts, **times, **metrics}
    states = ["starting", "processing", "succeeded", "canceled", "failed"]
    return {
        "PredictionRequest": _object("PredictionRequest", {"id": _text("Id"), "input": _ref("Input")}),
        "PredictionResponse": _object("PredictionResponse", answer),
        "Status": _text("Status", description="An enumeration.", enum=states),
    }


def _errors() -> dict[str, Any]:
    place = {"title": "Location", "type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}
    problem = _object("ValidationError", {"loc": place, "msg": _text("Message"), "type": _text("Error Type")})
    detail = {"title": "Detail", "type": "array", "items": _ref("ValidationError")}
    return {
        "HTTPValidationError": _object("HTTPValidationError", {"detail": detail}),
        "ValidationError": problem | {"required": ["loc", "msg", "type"]},
    }


def _json(description: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": content}}}


def _paths(streaming: bool) -> dict[str, Any]:
    """Return the end points, as Cog lists them."""
    done, refused = _json("Successful Response", {}), _json("Validation Error", _ref("HTTPValidationError"))
    predict: dict[str, Any] = {
        "summary": "Predict",
        "description": "Run a single prediction on the model",
        "operationId": "predict_predictions_post",
        "requestBody": {"content": {"application/json": {"schema": _ref("PredictionRequest")}}},
        "responses": {"200": _json("Successful Response", _ref("PredictionResponse")), "422": refused},
    }
    if streaming:
        predict["x-cog-streaming"] = True
    identifier = {"required": True, "schema": _text("Prediction ID"), "name": "prediction_id", "in": "path"}
    cancel = {
        "summary": "Cancel",
        "operationId": "cancel_predictions__prediction_id__cancel_post",
        "parameters": [identifier | {"schema": _text(_title("prediction_id"))}],
        "responses": {"200": done, "422": refused},
    }
    root = {"summary": "Root", "operationId": "root__get", "responses": {"200": done}}
    health = {"summary": "Healthcheck", "operationId": "healthcheck_health_check_get", "responses": {"200": done}}
    return {
        "/": {"get": root},
        "/health-check": {"get": health},
        "/predictions": {"post": predict},
        "/predictions/{prediction_id}/cancel": {"post": cancel},
    }

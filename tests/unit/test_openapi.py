"""The schema written from predict.py's text: what Cog's own generator writes, and what it would drop is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from _openapi import SchemaError, schema, target, write

HEADER = """\
from collections.abc import Iterator
from pathlib import Path as LocalPath
from typing import Any, Optional, Union
import cog
from cog import BaseModel, BaseRunner, ConcatenateIterator, Input, Path, Secret
SIZES = {"small": (64, 64), "large": (128, 128)}
NAMES = ["a", "b"]
LEVELS: list[int] = [1, 2]
LIMIT = 7
TOLD = "told at the top"
DRAWN = list(SIZES)
"""


def module(tmp_path: Path, run: str, header: str = HEADER) -> Path:
    file = tmp_path / "predict.py"
    file.write_text(f"{header}\nclass Predictor(BaseRunner):\n{run}\n        raise SystemExit('this file was run')\n")
    return file


def of_input(tmp_path: Path, declaration: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the property that one input gets and all component schemas."""
    file = module(tmp_path, f"    def run(self, {declaration}) -> str:")
    schemas = schema(file, "Predictor")["components"]["schemas"]
    (prop,) = schemas["Input"]["properties"].values()
    return prop, schemas


def of_output(tmp_path: Path, annotation: str, header: str = HEADER) -> dict[str, Any]:
    file = module(tmp_path, f"    def run(self) -> {annotation}:", header)
    output: dict[str, Any] = schema(file, "Predictor")["components"]["schemas"]["Output"]
    return output


@pytest.mark.parametrize(
    ("declaration", "expected"),
    [
        ("x: str", {"title": "X", "type": "string"}),
        ("num_outputs: int", {"title": "Num Outputs", "type": "integer"}),
        ("x: float = 1.0", {"title": "X", "type": "number", "default": 1}),
        ("x: bool = False", {"title": "X", "type": "boolean", "default": False}),
        ("x: Path", {"title": "X", "type": "string", "format": "uri"}),
        ("x: cog.Path", {"title": "X", "type": "string", "format": "uri"}),
        ("x: dict", {"title": "X", "type": "object"}),
        ("x: list[Path]", {"title": "X", "type": "array", "items": {"type": "string", "format": "uri"}}),
        ('x: "list[str]"', {"title": "X", "type": "array", "items": {"type": "string"}}),
        ("x: int | None = Input(default=None)", {"title": "X", "type": "integer", "nullable": True, "default": None}),
        ("x: Optional[int] = None", {"title": "X", "type": "integer", "nullable": True, "default": None}),
        ("x: Union[str, None] = Input()", {"title": "X", "type": "string", "nullable": True}),
        (
            "x: int = Input(default=LIMIT, ge=-1, le=9)",
            {"title": "X", "type": "integer", "default": 7, "minimum": -1, "maximum": 9},
        ),
        (
            "x: float = Input(default=-0.5, ge=-1.5, le=2.0)",
            {"title": "X", "type": "number", "default": -0.5, "minimum": -1.5, "maximum": 2},
        ),
        (
            'x: str = Input(default="a", min_length=1, max_length=5, regex=r"^\\w+$")',
            {"title": "X", "type": "string", "default": "a", "minLength": 1, "maxLength": 5, "pattern": "^\\w+$"},
        ),
        (
            "x: str = Input(default='a', description=TOLD, deprecated=True)",
            {"title": "X", "type": "string", "default": "a", "description": "told at the top", "deprecated": True},
        ),
        (
            'x: Path = Input(accept="image/*")',
            {"title": "X", "type": "string", "format": "uri", "x-cog-accept": "image/*"},
        ),
        ("x: list[int] = [1, 2]", {"title": "X", "type": "array", "items": {"type": "integer"}, "default": [1, 2]}),
        ("x: str | float", {"title": "X", "anyOf": [{"type": "string"}, {"type": "number"}]}),
        (
            "x: str | int | None = None",
            {
                "title": "X",
                "anyOf": [{"type": "string", "nullable": True}, {"type": "integer", "nullable": True}],
                "nullable": True,
                "default": None,
            },
        ),
        ("x: Secret", {"title": "X", "type": "string", "format": "password", "writeOnly": True, "x-cog-secret": True}),
        (
            "x: Secret = Input(default=None)",
            {
                "title": "X",
                "type": "string",
                "format": "password",
                "writeOnly": True,
                "x-cog-secret": True,
                "nullable": True,
                "default": None,
            },
        ),
    ],
)
def test_an_input_becomes_a_property(tmp_path: Path, declaration: str, expected: dict[str, Any]) -> None:
    prop, _ = of_input(tmp_path, declaration)
    assert prop == {**expected, "x-order": 0}


def test_a_number_without_a_fraction_is_written_without_one(tmp_path: Path) -> None:
    """As Cog writes it; to Python the two are equal, in the file they differ."""
    prop, _ = of_input(tmp_path, "x: float = Input(default=1.0, le=2.0)")
    assert json.dumps(prop) == '{"title": "X", "type": "number", "default": 1, "maximum": 2, "x-order": 0}'


@pytest.mark.parametrize(
    ("declaration", "required"),
    [
        ("x: str", True),
        ("x: str = Input(description='no default')", True),
        ("x: str | int | None", True),
        ("x: str = 'a'", False),
        ("x: str | None", False),
        ("x: Optional[str] = Input()", False),
        ("x: Secret = Input(default=None)", False),
    ],
)
def test_an_input_is_required_unless_it_has_a_default_or_may_be_none(
    tmp_path: Path, declaration: str, required: bool
) -> None:
    _, schemas = of_input(tmp_path, declaration)
    assert schemas["Input"].get("required", []) == (["x"] if required else [])


@pytest.mark.parametrize(
    ("choices", "values", "kind"),
    [
        ('["a", "b"]', ["a", "b"], "str"),
        ("NAMES", ["a", "b"], "str"),
        ("list(SIZES.keys())", ["small", "large"], "str"),
        ("LEVELS", [1, 2], "int"),
        ('NAMES + ["c"] + list(SIZES.keys())', ["a", "b", "c", "small", "large"], "str"),
    ],
)
def test_choices_become_an_enumeration_that_the_property_refers_to(
    tmp_path: Path, choices: str, values: list[Any], kind: str
) -> None:
    prop, schemas = of_input(tmp_path, f"x: {kind} = Input(choices={choices}, description='d')")
    assert prop == {"allOf": [{"$ref": "#/components/schemas/x"}], "description": "d", "x-order": 0}
    expected = {"str": "string", "int": "integer"}[kind]
    assert schemas["x"] == {"title": "x", "description": "An enumeration.", "enum": values, "type": expected}


def test_inputs_keep_the_order_of_the_signature(tmp_path: Path) -> None:
    file = module(tmp_path, "    def run(self, b: int, a: str = 'x', *, c: bool = True) -> str:")
    properties = schema(file, "Predictor")["components"]["schemas"]["Input"]["properties"]
    assert [(name, prop["x-order"]) for name, prop in properties.items()] == [("b", 0), ("a", 1), ("c", 2)]
    assert schema(file, "Predictor")["components"]["schemas"]["Input"]["required"] == ["b"]


MODEL = HEADER + "class Box(BaseModel):\n    label: str\n    score: Optional[float] = None\n    parent: 'Box' = None\n"


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        ("str", {"type": "string"}),
        ("list[Path]", {"type": "array", "items": {"type": "string", "format": "uri"}}),
        (
            "dict[str, list[int]]",
            {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "integer"}}},
        ),
        ("Iterator[str]", {"type": "array", "items": {"type": "string"}, "x-cog-array-type": "iterator"}),
        (
            "ConcatenateIterator[str]",
            {
                "type": "array",
                "items": {"type": "string"},
                "x-cog-array-type": "iterator",
                "x-cog-array-display": "concatenate",
            },
        ),
        ("Any", {"type": "object"}),
        (
            "Box",
            {
                "type": "object",
                "properties": {
                    "label": {"title": "Label", "type": "string"},
                    "score": {"title": "Score", "type": "number", "nullable": True},
                    "parent": {"title": "Parent", "type": "object"},
                },
                "required": ["label"],
            },
        ),
    ],
)
def test_an_output_type_becomes_a_schema(tmp_path: Path, annotation: str, expected: dict[str, Any]) -> None:
    assert of_output(tmp_path, annotation, MODEL) == {"title": "Output", **expected}


@pytest.mark.parametrize(
    ("declaration", "said"),
    [
        ("x", "input x has no type"),
        ("x: numpy.ndarray", "input x has the type `numpy.ndarray`"),
        ("x: LocalPath", "input x has the type `LocalPath`"),
        ("x: list[int | None]", "input x has the type `list[int | None]`"),
        ("x: Path | str", "In a union Cog accepts plain JSON types only"),
        ("x: int = Input(default=None)", "Cog then makes x required; write `int | None`"),
        ("x: int = Input(5)", "Cog reads the keywords of Input(...)"),
        ("x: int = some_default()", "input x is set to `some_default()`"),
        ("x: int = Input(**{'default': 1})", "Cog reads the keywords of Input(...)"),
        ("x: int = Input(default=1, minimum=0)", "input x has minimum=. Cog's Input accepts accept, choices"),
        ("x: list[str] = Input(default_factory=list)", "input x has default_factory="),
        ("x: int = Input(default=2 * LIMIT)", "the default of x is `2 * LIMIT`, which cannot be read without running"),
        ("x: int = Input(default=1, ge=LIMIT)", "ge of x is `LIMIT`, which cannot be read without running the file"),
        (
            "x: str = Input(choices=list(SIZES))",
            "choices of x is `list(SIZES)`, which Cog cannot read. Cog accepts a list",
        ),
        ("x: str = Input(choices=DRAWN)", "choices of x is `DRAWN`, which Cog cannot read"),
        ("x: str = Input(choices=('a', 'b'))", "choices of x is `('a', 'b')`, which Cog cannot read"),
        ("x: list[str] = Input(choices=NAMES)", "input x has choices and is no single value"),
        ("x: str | int = Input(min_length=2)", "input x has bounds and more than one type"),
        ("x: str = Input(accept='image/*')", "input x has accept= and is no file"),
        ("x: str = 'a\\tb'", "reads differently in Cog than in Python"),
        ("x: str = Input(description='a' 'b')", "reads differently in Cog than in Python"),
        ("*x: int", "run() takes *x. Cog offers named inputs only"),
    ],
)
def test_what_cog_cannot_read_or_would_drop_is_refused(tmp_path: Path, declaration: str, said: str) -> None:
    with pytest.raises(SchemaError, match=re.escape(said)) as caught:
        of_input(tmp_path, declaration)
    line = HEADER.count("\n") + 3
    assert str(caught.value).startswith(f"predict.py:{line}: "), "the error says where"


@pytest.mark.parametrize(
    "annotation", ["str | None", "Optional[str]", "torch.Tensor", "ConcatenateIterator[int]", "None"]
)
def test_an_output_that_cog_refuses_is_refused(tmp_path: Path, annotation: str) -> None:
    with pytest.raises(SchemaError, match=r"the output type .* is not one that Cog accepts"):
        of_output(tmp_path, annotation)


def test_an_output_model_may_derive_from_a_renamed_base(tmp_path: Path) -> None:
    header = HEADER + "from pydantic import BaseModel as Other\nclass Box(Other):\n    label: str\n"
    assert of_output(tmp_path, "Box", header)["required"] == ["label"]
    with pytest.raises(SchemaError, match="the output class Box does not derive from BaseModel"):
        of_output(tmp_path, "Box", HEADER + "class Box:\n    label: str\n")


def test_a_missing_return_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"run\(\) has no return type"):
        schema(module(tmp_path, "    def run(self):"), "Predictor")


def test_the_class_must_be_there_with_a_run_of_its_own(tmp_path: Path) -> None:
    file = module(tmp_path, "    def other(self) -> str:")
    with pytest.raises(SchemaError, match="there is no class Predictr"):
        schema(file, "Predictr")
    with pytest.raises(SchemaError, match=r"class Predictor has no run\(\) of its own"):
        schema(file, "Predictor")


def test_run_is_preferred_to_predict(tmp_path: Path) -> None:
    older = "    def predict(self, old: str) -> str:\n        return old\n"
    file = module(tmp_path, f"{older}    async def run(self, new: str) -> str:")
    assert list(schema(file, "Predictor")["components"]["schemas"]["Input"]["properties"]) == ["new"]


def test_a_syntax_error_is_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "predict.py"
    file.write_text("class Predictor:\n    def run(self) -> str\n")
    with pytest.raises(SchemaError, match=r"predict\.py:2: expected ':'"):
        schema(file, "Predictor")


def test_a_nul_byte_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "predict.py"
    file.write_bytes(b"import cog\nx = '\0'\n")
    with pytest.raises(SchemaError, match=r"predict\.py:2: the file holds a NUL byte"):
        schema(file, "Predictor")


def test_the_document_has_the_end_points_and_only_references_that_exist(tmp_path: Path) -> None:
    document = schema(module(tmp_path, "    def run(self, x: str = Input(choices=NAMES)) -> str:"), "Predictor")
    assert document["openapi"] == "3.0.2"
    expected = {
        "/": "get",
        "/health-check": "get",
        "/predictions": "post",
        "/predictions/{prediction_id}/cancel": "post",
    }
    assert {path: next(iter(methods)) for path, methods in document["paths"].items()} == expected
    assert list(document["components"]["schemas"]) == [
        "Input",
        "Output",
        "x",
        "PredictionRequest",
        "PredictionResponse",
        "Status",
        "HTTPValidationError",
        "ValidationError",
    ]
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert references <= set(document["components"]["schemas"])


@pytest.mark.parametrize("decorator", ["@cog.streaming", "@streaming", "@cog.streaming()"])
def test_streaming_is_advertised_when_asked_for(tmp_path: Path, decorator: str) -> None:
    file = module(tmp_path, f"    {decorator}\n    def run(self) -> Iterator[str]:")
    assert schema(file, "Predictor")["paths"]["/predictions"]["post"]["x-cog-streaming"] is True


@pytest.mark.parametrize(
    "line",
    ['run: "predict.py:Predictor"', "run: predict.py:Predictor  # what is served", "predict: 'predict.py:Predictor'"],
)
def test_the_schema_is_written_for_what_cog_yaml_runs(tmp_path: Path, line: str) -> None:
    module(tmp_path, "    def run(self, x: str) -> str:")
    (tmp_path / "cog.yaml").write_text(f"build:\n  python_version: '3.11'\n\n{line}\n")
    (tmp_path / ".cog").mkdir()
    (tmp_path / ".cog" / "openapi_schema.json").write_text("an older one")
    path = write(tmp_path)
    assert json.loads(path.read_text()) == schema(tmp_path / "predict.py", "Predictor")
    assert [file.name for file in path.parent.iterdir()] == ["openapi_schema.json"], "nothing is left behind"


def test_a_cog_yaml_that_serves_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="cannot be read"):
        target(tmp_path)
    (tmp_path / "cog.yaml").write_text("build:\n  gpu: true\n")
    with pytest.raises(SchemaError, match="has no line such as run:"):
        target(tmp_path)
    with pytest.raises(SchemaError, match=r"'predict\.py' does not name what serves requests"):
        target(tmp_path, "predict.py")

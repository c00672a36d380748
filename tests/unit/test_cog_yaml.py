"""cog.yaml holds what Cog accepts, and agrees with the requirements, pyproject.toml, predict.py and torch.

The rules are those of Cog's published configuration schema and of its build, as far as this project uses them.
"""

import ast
import getpass
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
COG_YAML = ROOT / "cog.yaml"
COG_TEXT_YAML = ROOT / "cog-text.yaml"

REQUIREMENTS = ("requirements.txt", "requirements-local.txt", "requirements-dev.txt")
TOP_KEYS = {"build", "image", "model", "run", "predict", "train", "concurrency", "environment", "weights"}
BUILD_KEYS = {
    "cuda", "cudnn", "gpu", "python_version", "python_packages", "pre_install", "python_requirements",
    "system_packages", "sdk_version", "run",
}  # fmt: skip
# Names that the build refuses in `environment`: it sets them itself, or the platform does.
REFUSED_NAMES = re.compile(
    r"PATH|LD_LIBRARY_PATH|LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|PYTHONUNBUFFERED|HF_ENDPOINT"
    r"|HF_HUB_ENABLE_HF_TRANSFER|(R8|REPLICATE|CUDA|NVIDIA|NV|PGET|KUBERNETES)_.*"
)
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)")


def problems(config: dict[str, Any]) -> list[str]:
    """Return what Cog would refuse or warn about, one sentence each."""
    found = [f"unknown key {key}" for key in config.keys() - TOP_KEYS]
    if "run" in config and "predict" in config:
        found.append("run and predict exclude each other")
    if "predict" in config:
        found.append("predict is deprecated")
    if not re.fullmatch(r"[^:\s]+\.py:[A-Za-z_]\w*", str(config.get("run", ""))):
        found.append("run is not file.py:Name")
    build = config.get("build")
    if not isinstance(build, dict):
        return [*found, "build is missing"]
    return found + build_problems(build) + environment_problems(config.get("environment") or [])


def build_problems(build: dict[str, Any]) -> list[str]:
    found = [f"unknown key build.{key}" for key in build.keys() - BUILD_KEYS]
    if not isinstance(build.get("gpu", False), bool):
        found.append("build.gpu is not true or false")
    for key in ("cuda", "cudnn", "python_version", "python_requirements", "sdk_version"):
        # A bare 3.10 in YAML is the number 3.1, so versions must be quoted although the schema takes numbers.
        if key in build and not isinstance(build[key], str):
            found.append(f"build.{key} is not a string")
    if not re.fullmatch(r"3\.(10|11|12|13)(\.\d+)?", str(build.get("python_version", ""))):
        found.append("build.python_version is not one that Cog builds")
    if "cuda" in build and not re.fullmatch(r"\d+\.\d+(\.\d+)?", str(build["cuda"])):
        found.append("build.cuda is not a minor or patch version")
    if "python_packages" in build:
        found.append("build.python_packages is deprecated")
    for key in ("system_packages", "run", "pre_install"):
        entries = build.get(key) or []
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            found.append(f"build.{key} is not a list of strings")
    return found


def environment_problems(entries: list[Any]) -> list[str]:
    found, names = [], set()
    for entry in entries:
        match = ASSIGNMENT.fullmatch(entry) if isinstance(entry, str) else None
        if match is None:
            found.append(f"environment entry {entry!r} is not NAME=value")
            continue
        if REFUSED_NAMES.fullmatch(match[1]):
            found.append(f"environment sets {match[1]}, which Cog reserves")
        if match[1] in names:
            found.append(f"environment sets {match[1]} twice")
        names.add(match[1])
    return found


def pins(name: str) -> dict[str, str]:
    """Return `package -> exact version` of a requirements file; any other kind of line is an error."""
    found: dict[str, str] = {}
    for line in (ROOT / name).read_text().splitlines():
        line = line.split(" #")[0].strip()
        if not line or line.startswith(("#", "-r ")):
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)(\[[a-z0-9,]+\])?==([A-Za-z0-9.]+)", line)
        assert match, f"{name}: {line!r} is not name==version; an image must be the same on every build"
        package = re.sub(r"[._-]+", "-", match[1]).lower()
        assert package not in found, f"{name} pins {package} twice"
        found[package] = match[3]
    return found


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    loaded = yaml.safe_load(COG_YAML.read_text())
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_cog_accepts_it(config: dict[str, Any]) -> None:
    assert problems(config) == []


def test_the_language_model_s_image_differs_in_what_it_serves_alone(config: dict[str, Any]) -> None:
    text = yaml.safe_load(COG_TEXT_YAML.read_text())
    assert problems(text) == []
    assert text.pop("run") == "predict_text.py:Predictor"
    assert text["environment"].pop() == "WARMSTART_MODEL=weights-text"
    assert text == {key: value for key, value in config.items() if key != "run"}


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("gpus",), True, "unknown key gpus"),
        (("predict",), "predict.py:Predictor", "run and predict exclude each other"),
        (("run",), "predict.py", "run is not file.py:Name"),
        (("build", "cudas"), "13.0", "unknown key build.cudas"),
        (("build", "gpu"), "yes please", "build.gpu is not true or false"),
        (("build", "python_version"), 3.1, "build.python_version is not a string"),
        (("build", "python_version"), "3.9", "build.python_version is not one that Cog builds"),
        (("build", "cuda"), "13", "build.cuda is not a minor or patch version"),
        (("build", "python_packages"), ["torch==2.13.0"], "build.python_packages is deprecated"),
        (("build", "system_packages"), "g++", "build.system_packages is not a list of strings"),
        (("environment",), ["CUDA_MODULE_LOADING=LAZY"], "environment sets CUDA_MODULE_LOADING, which Cog reserves"),
        (("environment",), ["PATH=/opt/bin"], "environment sets PATH, which Cog reserves"),
        (("environment",), ["9A=1"], "environment entry '9A=1' is not NAME=value"),
        (("environment",), ["A=1", "A=2"], "environment sets A twice"),
    ],
)
def test_the_check_notices(path: tuple[str, ...], value: object, problem: str) -> None:
    config = yaml.safe_load(COG_YAML.read_text())
    target = config
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    assert problem in problems(config)


@pytest.mark.parametrize("cog_yaml", [COG_YAML, COG_TEXT_YAML])
def test_run_names_a_class_with_setup_and_run(cog_yaml: Path) -> None:
    file, name = yaml.safe_load(cog_yaml.read_text())["run"].split(":")
    tree = ast.parse((ROOT / file).read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    assert name in classes
    methods = {node.name for node in classes[name].body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert {"setup", "run"} <= methods
    assert "predict" not in methods, "Cog deprecates predict() in favour of run()"


def test_the_requirements_file_exists_and_pins_exactly(config: dict[str, Any]) -> None:
    assert config["build"]["python_requirements"] == "requirements.txt"
    needed = {"torch", "diffusers", "transformers", "zstandard", "obstore", "nvidia-ml-py"}
    assert needed <= pins("requirements.txt").keys()


def test_the_local_server_is_the_image_s(config: dict[str, Any]) -> None:
    sdk = config["build"]["sdk_version"]
    assert pins("requirements-local.txt") == {"cog": sdk, "coglet": sdk}


def test_the_image_s_requirements_leave_cog_to_sdk_version() -> None:
    """`cog build` drops cog and coglet from the file and warns at length."""
    assert not {"cog", "coglet"} & pins("requirements.txt").keys()


def test_no_package_is_pinned_in_two_files() -> None:
    names = [name for file in REQUIREMENTS for name in pins(file)]
    assert len(names) == len(set(names))


def test_requirements_name_no_index() -> None:
    """An index URL would fix the build to one accelerator and one network."""
    for file in REQUIREMENTS:
        lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
        assert not [line for line in lines if "://" in line or line.startswith(("-i", "-f", "--"))]


def test_library_dependencies_accept_the_pins(pyproject: dict[str, Any]) -> None:
    pinned = pins("requirements.txt")
    extras = pyproject["project"]["optional-dependencies"]
    wanted = [*pyproject["project"]["dependencies"], *(entry for entries in extras.values() for entry in entries)]
    for requirement in wanted:
        match = re.fullmatch(r"([a-z0-9-]+)(.*)", requirement)
        assert match
        assert SpecifierSet(match[2]).contains(pinned[match[1]]), requirement


def test_python_version_is_one_version_everywhere(config: dict[str, Any], pyproject: dict[str, Any]) -> None:
    version = config["build"]["python_version"]
    assert SpecifierSet(pyproject["project"]["requires-python"]).contains(version)
    assert pyproject["tool"]["mypy"]["python_version"] == version
    assert pyproject["tool"]["ruff"]["target-version"] == "py" + version.replace(".", "")
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yaml").read_text())
    images = {job["container"]["image"] for job in workflow["jobs"].values()}
    assert all(image.startswith(f"python:{version}-") for image in images), images


def test_the_workflow_runs_the_command_that_people_run() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yaml").read_text())
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands == [".ci/run"]


def test_a_gpu_image_has_its_cuda_version_named(config: dict[str, Any]) -> None:
    """The CLI refuses to choose an image for a torch that it does not know, unless CUDA is named."""
    assert config["build"]["gpu"] is True
    assert config["build"]["cuda"] == "13.0"


def test_the_image_has_a_compiler(config: dict[str, Any]) -> None:
    """Without one a fully warm boot dies in Inductor's check, although nothing is compiled."""
    assert {"g++", "clang", "build-essential"} & set(config["build"]["system_packages"])


def test_the_cache_directory_is_torch_s_own_choice_for_root(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setattr(getpass, "getuser", lambda: "root")
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/tmp")
    environment = dict(entry.split("=", 1) for entry in config["environment"])
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()


def test_warmstart_alone_decides_where_triton_keeps_its_files(config: dict[str, Any]) -> None:
    """Outside the Inductor directory Triton's kernels would be missing from every bundle."""
    names = {entry.split("=", 1)[0] for entry in config["environment"]}
    assert "TRITON_CACHE_DIR" not in names

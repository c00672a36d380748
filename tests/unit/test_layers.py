"""Each module knows only what the design lets it know, and the check that says so can say no."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from project_tree import ROOT, commands

HEAVY = ("torch", "triton", "diffusers", "transformers", "accelerate")
# May load the frameworks, each in its own time; everything else must not, since the boot sets Inductor's
# environment before torch is there, and `scripts/cache` answers in a moment.
MAY_BE_HEAVY = {
    "arguments", "blocks", "direct", "guards", "inductor", "lora", "lora_files", "matmul", "models", "quantize",
    "regions", "toolchain", "warmup",
}  # fmt: skip

ONE_WAY = "Imports flow one way"
LIGHT = "load without torch"
NO_COG = "Only predict.py knows Cog"
LEAVES = "bundle knows bytes only"
STORES = "store and cache know bundles"
COMPILERS = "What compiles does not know how anything is cached"
BLOCKS = "regions finds blocks in any module"
PIPELINES = "Only models knows pipelines"


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    wide = {**os.environ, "COLUMNS": "200"}  # or long contract names are wrapped
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=root, env=wide, capture_output=True, text=True, timeout=120
    )


def top_modules() -> list[str]:
    return sorted(
        {path.stem for path in (ROOT / "warmstart").glob("*") if path.suffix == ".py" or path.name == "models"}
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the library to break."""
    shutil.copytree(ROOT / "warmstart", tmp_path / "warmstart", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_contracts_hold() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("settings", "import torch", LIGHT),
        ("key", "from torch.version import cuda", LIGHT),
        ("bundle", "import transformers", LIGHT),
        ("store", "import diffusers", LIGHT),
        ("cache", "import triton", LIGHT),
        ("report", "import torch", LIGHT),
        ("report", "import warmstart.inductor", ONE_WAY),
        ("settings", "import warmstart.key", ONE_WAY),
        ("key", "import warmstart.store", ONE_WAY),
        ("key", "import warmstart.models", ONE_WAY),
        ("key", "import warmstart.bundle", ONE_WAY),
        ("bundle", "import warmstart.key", ONE_WAY),
        ("bundle", "import warmstart.settings", LEAVES),
        ("key", "import warmstart.settings", LEAVES),
        ("store", "import warmstart.inductor", STORES),
        ("cache", "import warmstart.settings", STORES),
        ("inductor", "import warmstart.models", ONE_WAY),
        ("inductor", "import warmstart.store", ONE_WAY),
        ("models/__init__", "import warmstart.cache", ONE_WAY),
        ("regions", "import warmstart.models", BLOCKS),
        ("regions", "import warmstart.store", COMPILERS),
        ("regions", "import warmstart.warmup", ONE_WAY),
        ("regions", "import diffusers", PIPELINES),
        ("warmup", "import warmstart.cache", ONE_WAY),
        ("lora_files", "import warmstart.lora", ONE_WAY),
        ("lora", "import warmstart.store", COMPILERS),
        ("lora", "import diffusers", PIPELINES),
        ("warmup", "import warmstart.key", COMPILERS),
        ("served", "import warmstart.boot", ONE_WAY),
        ("boot", "import diffusers", PIPELINES),
        ("warmup", "import warmstart.boot", ONE_WAY),
        ("boot", "import cog", NO_COG),
    ],
)
def test_a_forbidden_import_is_noticed(copy: Path, module: str, line: str, contract: str) -> None:
    path = copy / "warmstart" / f"{module}.py"
    path.write_text(path.read_text() + f"\n{line}\n")
    done = lint(copy)
    assert done.returncode != 0
    broken = [shown for shown in done.stdout.splitlines() if shown.endswith("BROKEN")]
    assert any(contract in shown for shown in broken), done.stdout


def test_a_new_module_must_be_given_a_place(copy: Path) -> None:
    (copy / "warmstart" / "newcomer.py").write_text('"""Nobody has said what this may know."""\n')
    done = lint(copy)
    assert done.returncode != 0
    assert "newcomer" in done.stdout


@pytest.mark.parametrize("module", ["", *(name for name in top_modules() if name not in MAY_BE_HEAVY | {"__init__"})])
def test_it_loads_without_the_frameworks(module: str) -> None:
    """Asked of a fresh process, since import-linter sees written imports only."""
    name = f"warmstart.{module}".rstrip(".")
    code = f"import sys, {name}; print(*[heavy for heavy in {HEAVY!r} if heavy in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").split(".")[0])
    return names


def test_only_predict_py_imports_cog() -> None:
    files = [*(ROOT / "warmstart").rglob("*.py"), *(ROOT / "scripts").glob("*.py"), *commands()]
    assert [path.name for path in files if imported(path) & {"cog", "coglet"}] == []
    assert "cog" in imported(ROOT / "predict.py")


def environment_reads(tree: ast.AST) -> list[int]:
    """Return the lines that read a variable. Assigning to one, or copying them all for a child, is something else."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            reads = re.fullmatch(r"(os\.)?(getenv|environ\.(get|items|values|setdefault))", ast.unparse(node.func))
        elif isinstance(node, ast.Subscript):
            reads = isinstance(node.ctx, ast.Load) and is_environment(node.value)
        elif isinstance(node, ast.Compare):
            reads = any(is_environment(side) for side in node.comparators)
        else:
            continue
        if reads:
            lines.append(node.lineno)
    return lines


def is_environment(node: ast.expr) -> bool:
    return ast.unparse(node) in {"os.environ", "environ"}


def test_one_module_reads_the_environment() -> None:
    """A setting read elsewhere is in no table, is validated by nobody and may be read too late."""
    readers = {
        path.relative_to(ROOT).as_posix(): lines
        for path in sorted((ROOT / "warmstart").rglob("*.py"))
        if (lines := environment_reads(ast.parse(path.read_text())))
    }
    assert readers.keys() <= {"warmstart/settings.py"}, readers


@pytest.mark.parametrize(
    ("code", "reads"),
    [
        ("os.environ['A']", True),
        ("os.environ.get('A')", True),
        ("os.getenv('A')", True),
        ("'A' in os.environ", True),
        ("os.environ.setdefault('A', '1')", True),
        ("os.environ['A'] = '1'", False),
        ("dict(os.environ)", False),
    ],
)
def test_reading_the_environment_is_recognised(code: str, reads: bool) -> None:
    assert bool(environment_reads(ast.parse(code))) is reads

"""A project that loads its own model in its own way, with warmstart installed beside it: cold, then warm.

The server is the image's own, and warmstart is what pip installs from this repository, not the working tree.
"""

import base64
import difflib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from _server import Server
from booting import warnings

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "read-digits"


def test_no_more_than_ten_lines_are_added() -> None:
    before, after = ((EXAMPLE / name).read_text().splitlines() for name in ("before/predict.py", "predict.py"))
    changed = [line for line in difflib.ndiff(before, after) if line.startswith(("+", "-"))]
    assert [line for line in changed if line.startswith("-")] == []
    assert 0 < len(changed) <= 10


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install` of this repository installs, without the packages it asks for."""
    place = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source")  # setuptools writes beside what it builds from
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "warmstart", source / "warmstart", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "--target", place, source], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return place


def test_pip_installs_the_library_whole_and_nothing_else(installed: Path) -> None:
    there = {path.relative_to(installed).as_posix() for path in installed.rglob("*.py")}
    assert there == {path.relative_to(ROOT).as_posix() for path in (ROOT / "warmstart").rglob("*.py")}
    assert {path.name.partition("-")[0] for path in installed.iterdir()} == {"warmstart"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("project") / "read-digits"
    shutil.copytree(EXAMPLE, place, ignore=shutil.ignore_patterns("__pycache__", "before"))
    return place


@pytest.fixture
def environment(installed: Path, tmp_path: Path) -> dict[str, str | None]:
    (tmp_path / "tmp").mkdir()
    return {
        "PYTHONPATH": str(installed),
        "TMPDIR": str(tmp_path / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": None,
        "WARMSTART_CACHE_URL": str(tmp_path / "store"),
        "WARMSTART_DEVICE": "cpu",
        "WARMSTART_MODEL": None,
    }


def seven() -> dict[str, str]:
    return {"image": "data:image/png;base64," + base64.b64encode((EXAMPLE / "seven.png").read_bytes()).decode()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_boots_cold_then_warm_and_reads_a_seven(project: Path, environment, tmp_path: Path) -> None:
    reports = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        with Server(project, environment=environment | {"TMPDIR": str(tmp_path / name)}) as server:
            reports.append(server.setup_report())
            answer = server.predict(seven()).body
        assert answer["output"] == "7"
    cold, warm = reports
    assert (cold["outcome"], warm["outcome"]) == ("cold", "warm"), warm["reason"]
    [region] = warm["regions"]
    assert (region["name"], region["modules"], region["graphs"]) == ("reader.Block", 4, 1)
    assert (warm["counts"]["fx_misses"], warm["counts"]["kernels_built"]) == (0, 0)
    assert warm["counts"]["fx_hits"] == warm["counts"]["graphs"] == 1
    assert warnings(warm) == []

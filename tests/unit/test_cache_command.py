"""scripts/cache as a user runs it: what it prints, its exit status, and that it changes no store."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from artifacts import ROOT, TREE, contents, fill, key, packed

from warmstart.store import DirectoryStore

PREDICT = """
import warmstart

class Predictor:
    def setup(self):
        request = warmstart.Request(label="one", inputs={"width": 64})
        try:
            self.model = warmstart.boot([request], sources=[__file__])
        except Exception:
            raise SystemExit("the boot was not stopped")
"""
MODEL = {
    "weights/model_index.json": b"{}",
    "cog.yaml": b'run: "predict.py:Predictor"\n',
    "predict.py": PREDICT.encode(),
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with the least that a key needs."""
    root = fill(tmp_path / "project", MODEL)
    (root / "scripts").mkdir()
    for name in ("cache", "_venv.py", "_openapi.py"):
        shutil.copy(ROOT / "scripts" / name, root / "scripts" / name)
    for name in ("requirements.txt", "requirements-local.txt"):
        (root / name).write_text("")
    (root / "warmstart").symlink_to(ROOT / "warmstart")
    return root


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    """A store with two bundles of one key."""
    one = DirectoryStore(tmp_path / "store")
    for number, files in enumerate((TREE, {"ab/1": b"1"})):
        made = packed(fill(tmp_path / f"made-{number}", files), tmp_path / "out")
        one.publish(key(), made.path, made.name)
    return one


def run(project: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WARMSTART_")}
    return subprocess.run(
        [sys.executable, project / "scripts/cache", *arguments],
        cwd=project.parent, env=clean | environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_ls_shows_keys_facts_and_bundles(project: Path, store: DirectoryStore) -> None:
    before = contents(Path(store.location))
    done = run(project, "ls", "--store", store.location)
    assert done.returncode == 0, done.stderr
    assert f"{key().environment_digest[:12]}/{key().version_digest[:12]}" in done.stdout
    assert "    dtype: bf16\n" in done.stdout
    assert all(f"bundle {item.name[:12]} " in done.stdout for item in store.bundles(key()))
    assert contents(Path(store.location)) == before


def test_ls_as_json_is_one_document(project: Path, store: DirectoryStore) -> None:
    [row] = json.loads(run(project, "ls", "--json", "--store", store.location).stdout)["stores"]
    [listed] = row["keys"]
    assert listed["facts"] == {"environment": dict(key().environment), "version": dict(key().version)}
    assert [item["name"] for item in listed["bundles"]] == [item.name for item in store.bundles(key())]


def test_a_store_is_found_from_where_the_user_is(project: Path, store: DirectoryStore) -> None:
    assert "1 keys" in run(project, "ls", "--store", "store").stdout


def test_without_store_it_looks_where_a_boot_does(project: Path, store: DirectoryStore) -> None:
    shutil.copytree(store.location, project / "cache")
    done = run(project, "ls", "--json", WARMSTART_CACHE_URL=store.location)
    rows = json.loads(done.stdout)["stores"]
    assert [(row["location"], len(row["keys"])) for row in rows] == [("cache", 1), (store.location, 1)]


def test_verify_names_what_is_damaged(project: Path, store: DirectoryStore) -> None:
    whole = run(project, "verify", "--store", store.location)
    assert (whole.returncode, whole.stdout) == (0, "All 2 bundles are whole.\n")
    assert whole.stderr.count(": ok\n") == 2
    bad = store.bundles(key())[0].name
    [path] = Path(store.location).rglob(f"{bad}.tar.zst")
    path.write_bytes(path.read_bytes()[:-1])
    done = run(project, "verify", "--store", store.location)
    assert (done.returncode, done.stdout) == (1, "Something is damaged.\n")
    [line] = [line for line in done.stderr.splitlines() if not line.endswith(": ok")]
    assert bad[:12] in line
    assert "not those that were published" in line
    rows = json.loads(run(project, "verify", "--json", "--store", store.location).stdout)
    assert rows["ok"] is False
    assert {item["name"]: item["ok"] for item in rows["stores"][0]["keys"][0]["bundles"]}[bad] is False


def test_explain_uses_the_key_that_the_predictor_boots_with(project: Path, store: DirectoryStore) -> None:
    miss = json.loads(run(project, "explain", "--json", "--store", store.location).stdout)
    assert miss["hit"] is False
    assert "nearest stored key differs" in miss["text"]
    facts = miss["key"]["facts"]["version"]
    assert "width=64" in json.dumps(facts), "the plan is the Predictor's"
    made = Path(store.location) / miss["key"]["environment"] / miss["key"]["version"]
    shutil.copytree(next(Path(store.location).glob("*/*/")), made)
    hit = run(project, "explain", "--store", store.location)
    assert hit.returncode == 0, hit.stderr
    assert f"Hit: {store.location} holds 2 bundles" in hit.stdout
    other = run(project, "explain", "--store", store.location, WARMSTART_DTYPE="float16")
    assert "Miss:" in other.stdout


def test_explain_loads_no_torch(project: Path) -> None:
    told = "import atexit, sys\natexit.register(lambda: print('torch' in sys.modules))\n"
    (project / "predict.py").write_text(PREDICT + told)
    done = run(project, "explain")
    assert done.stdout.endswith("\nFalse\n"), done.stderr


@pytest.mark.parametrize(
    ("predict", "says"),
    [
        ("class Predictor:\n    def setup(self):\n        pass\n", "does not call warmstart.boot()"),
        ("class Predictor:\n    def setup(self):\n        1 / 0\n", "fails before it boots (ZeroDivisionError"),
        ("import nowhere_to_be_found\n", "fails before it boots (ModuleNotFoundError"),
        ("x = 1\n", "fails before it boots (AttributeError"),
    ],
)
def test_a_predictor_without_a_key_is_a_sentence(project: Path, predict: str, says: str) -> None:
    (project / "predict.py").write_text(predict)
    done = run(project, "explain")
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        ((), {}, "usage: scripts/cache"),
        (("prune",), {}, "invalid choice"),
        (("ls",), {"WARMSTART_DTYPE": "float7"}, "WARMSTART_DTYPE is 'float7'"),
    ],
)
def test_wrong_usage_is_told(project: Path, arguments: tuple[str, ...], environment: dict[str, str], says: str) -> None:
    done = run(project, *arguments, **environment)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_store_that_cannot_be_read_is_told(project: Path) -> None:
    done = run(project, "ls", "--store", "ftp://host/x")
    assert done.returncode == 1
    assert "which names no store" in done.stderr


def test_help_shows_examples(project: Path) -> None:
    done = run(project, "--help")
    assert done.returncode == 0
    assert "scripts/cache explain" in done.stdout

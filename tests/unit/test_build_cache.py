"""scripts/build_cache: what it asks of a boot, what it makes of the report, and that a check changes no store."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from artifacts import ROOT, TREE, contents, fill, packed
from loading import load_command

import warmstart
from warmstart.report import Outcome
from warmstart.store import DirectoryStore

PREDICT = """
import warmstart

class Predictor:
    def setup(self):
        request = warmstart.Request(label="one", inputs={"width": 64})
        try:
            warmstart.boot([request], sources=[__file__])
        except ZeroDivisionError:
            raise
        except Exception as error:
            raise SystemExit("an error of the boot reached the Predictor") from error
"""
PROJECT = {
    "weights/model_index.json": b"{}",
    "cog.yaml": b'run: "predict.py:Predictor"\n',
    "predict.py": PREDICT.encode(),
}
PUBLISHED = {"outcome": "published", "reason": "published 3 files", "bytes": 2_000_000, "skipped": ()}
FAILED = {"outcome": "failed", "reason": "the disk is full", "bytes": 0, "skipped": ()}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the least that a key needs, as the current directory."""
    root = fill(tmp_path / "project", PROJECT)
    monkeypatch.chdir(root)
    monkeypatch.setitem(sys.modules, "predict", ModuleType("predict"))  # put back what the command leaves there
    for name in [name for name in os.environ if name.startswith("WARMSTART_")]:
        monkeypatch.delenv(name)
    return root


@pytest.fixture(scope="module")
def command() -> ModuleType:
    return load_command("build_cache")


@dataclasses.dataclass
class Boots:
    """Stands in for warmstart.boot: notes what it is asked and reports what a test says."""

    outcome: Outcome = Outcome.COLD
    saves: tuple[dict, ...] = (PUBLISHED,)
    calls: list[SimpleNamespace] = dataclasses.field(default_factory=list)
    waits: list[float] = dataclasses.field(default_factory=list)

    def __call__(self, plan, *, sources, settings, load=None, publish=True) -> SimpleNamespace:
        live_there = bool(settings.live_dir) and Path(settings.live_dir).is_dir()
        call = SimpleNamespace(
            plan=plan, sources=sources, settings=settings, load=load, publish=publish, live_there=live_there
        )
        self.calls.append(call)
        report = SimpleNamespace(outcome=self.outcome, reason="because of this", persisted=list(self.saves))
        return SimpleNamespace(report=report, save=self.waits.append)


@pytest.fixture
def boots(monkeypatch: pytest.MonkeyPatch) -> Boots:
    fake = Boots()
    monkeypatch.setattr(warmstart, "boot", fake)
    return fake


def stored(place: Path, tmp_path: Path, **settings: str) -> DirectoryStore:
    """A store with a bundle for the project's key, under the given settings."""
    request = warmstart.Request(label="one", inputs={"width": 64})
    chosen = warmstart.Settings.from_environment(dict(os.environ) | settings)
    made = packed(fill(tmp_path / "made", TREE), tmp_path / "out")
    store = DirectoryStore(place)
    store.publish(warmstart.current_key([request], sources=["predict.py"], settings=chosen), made.path, made.name)
    return store


# --- Building --------------------------------------------------------------------------------------------------------


def test_a_build_fills_cache_and_fails_if_nothing_compiles(command, project, boots, capsys) -> None:
    assert command.main([], project) == 0
    [call] = boots.calls
    assert (call.settings.cache_url, call.settings.compile, call.publish) == ("cache", "required", True)
    assert "cold boot, 1 new bundles (2.0 MB) in cache" in capsys.readouterr().err
    assert boots.waits == [call.settings.persist_deadline_s]


def test_a_build_fills_the_store_that_is_named_where_the_user_is(
    command, project, boots, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(["--url", "elsewhere"], project) == 0
    assert command.main(["--url", "s3://bucket/prefix"], project) == 0
    assert [call.settings.cache_url for call in boots.calls] == [str(tmp_path / "elsewhere"), "s3://bucket/prefix"]


def test_a_build_copies_what_it_found_in_cache_to_the_store_that_is_named(
    command, project, boots, tmp_path, capsys
) -> None:
    """The boot publishes nothing of that, since it has it already."""
    stored(project / "cache", tmp_path, OMP_NUM_THREADS="77")
    held = stored(project / "cache", tmp_path).keys()
    [here] = [item for item in held if item.facts.environment["cpu threads"] != "77"]
    elsewhere = tmp_path / "elsewhere"
    assert command.main(["--url", str(elsewhere)], project) == 0
    assert f"1 bundles of cache/ copied to {elsewhere}." in capsys.readouterr().err
    [copied] = DirectoryStore(elsewhere).keys()
    assert copied.facts == here.facts
    assert command.main(["--url", str(elsewhere)], project) == 0
    assert command.main([], project) == 0
    assert "copied" not in capsys.readouterr().err


def test_a_build_copies_from_a_cache_that_has_lost_its_facts(command, project, boots, tmp_path) -> None:
    """As a boot restores from it."""
    stored(project / "cache", tmp_path)
    for path in (project / "cache").rglob("*.json"):
        path.unlink()
    assert command.main(["--url", str(tmp_path / "elsewhere")], project) == 0
    assert len(list((tmp_path / "elsewhere").rglob("*.tar.zst"))) == 1


def test_a_build_tells_of_what_the_boot_did_without(command, project, boots, tmp_path, capsys) -> None:
    stored(project / "cache", tmp_path)
    [bundle] = (project / "cache").rglob("*.tar.zst")
    bundle.write_bytes(bundle.read_bytes()[:100])
    assert command.main(["--url", str(tmp_path / "elsewhere")], project) == 0
    assert f"bundle {bundle.name[:12]} of cache" in capsys.readouterr().err


def test_a_build_whose_store_cannot_be_written_has_failed(command, project, boots, tmp_path, capsys) -> None:
    stored(project / "cache", tmp_path)
    (tmp_path / "file").write_text("no directory")
    assert command.main(["--url", str(tmp_path / "file")], project) == 1
    assert f"what cache/ holds could not be copied to {tmp_path / 'file'}" in capsys.readouterr().err


def test_a_predictor_that_loads_its_own_model_needs_no_weights(command, project, boots, capsys) -> None:
    shutil.rmtree(project / "weights")
    predict = (project / "predict.py").read_text()
    (project / "predict.py").write_text(predict.replace("sources=[__file__]", "sources=[__file__], load=int"))
    assert command.main([], project) == 0
    assert boots.calls[0].load is int
    assert command.main(["--check"], project) == 1
    assert "a boot here would be cold" in capsys.readouterr().err


def test_another_configuration_names_another_predictor_and_its_model(command, project, boots, monkeypatch) -> None:
    fill(project, {"cog-other.yaml": b"environment:\n  - WARMSTART_MODEL=others\n\nrun: other.py:Predictor\n"})
    fill(project, {"other.py": PREDICT.replace("one", "two").encode(), "others/model_index.json": b"{}"})
    monkeypatch.setitem(sys.modules, "other", ModuleType("other"))
    monkeypatch.setenv("WARMSTART_MODEL", "put back at the end")
    monkeypatch.delenv("WARMSTART_MODEL")
    assert command.main(["-f", "cog-other.yaml"], project) == 0
    assert boots.calls[0].plan[0].label == "two"
    assert boots.calls[0].settings.model == "others"
    assert command.main([], project) == 0
    assert boots.calls[1].plan[0].label == "one"


def test_a_build_that_ends_eager_has_failed(command, project, boots, capsys, monkeypatch) -> None:
    monkeypatch.setenv("WARMSTART_COMPILE", "auto")
    boots.outcome, boots.saves = Outcome.EAGER, ()
    assert command.main([], project) == 1
    assert boots.calls[0].settings.compile == "auto"
    assert "nothing was compiled: because of this" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("saves", "status", "says"),
    [
        (
            ({"outcome": "failed", "reason": "the disk is full", "bytes": 0, "skipped": ()}, PUBLISHED),
            0,
            "1 new bundle",
        ),
        (
            (PUBLISHED, {"outcome": "failed", "reason": "the disk is full", "bytes": 0, "skipped": ()}),
            1,
            "disk is full",
        ),
        ((PUBLISHED | {"skipped": ("2 files were not kept",)},), 1, "2 files were not kept"),
        (({"outcome": "nothing_new", "reason": "all kept", "bytes": 0, "skipped": ()},), 0, "0 new bundles (0.0 MB)"),
    ],
)
def test_what_is_not_in_the_store_is_a_failure(command, project, boots, capsys, saves, status, says) -> None:
    boots.saves = saves
    assert command.main([], project) == status
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["from warmstart import boot", "from warmstart.boot import boot", "import warmstart; boot = warmstart.boot"]
)
def test_a_predictor_may_boot_several_models_and_keep_none(command, project, boots, capsys, line) -> None:
    (project / "predict.py").write_text(
        f"{line}\nfrom warmstart import Request\nclass Predictor:\n    def setup(self):\n"
        "        for size in (1, 2):\n            boot([Request('one', {'width': size})], sources=[__file__])\n"
    )
    assert command.main([], project) == 0
    assert len(boots.calls) == 2
    assert capsys.readouterr().err.count("cold boot, 1 new bundles") == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "class Predictor:\n    def setup(self):\n        1 / 0\n",
            "nothing was built: ZeroDivisionError",
        ),
        ("class Predictor:\n    def setup(self):\n        pass\n", "does not call warmstart.boot(), so it compiles"),
        ("import nowhere_to_be_found\n", "nothing was built: ModuleNotFoundError"),
    ],
)
def test_what_is_wrong_with_the_predictor_is_a_sentence(command, project, boots, capsys, text, says) -> None:
    (project / "predict.py").write_text(text)
    assert command.main([], project) == 1
    assert says in capsys.readouterr().err


def test_a_wrong_setting_is_a_sentence(command, project, boots, capsys, monkeypatch) -> None:
    (project / "predict.py").write_text(PREDICT.replace("except Exception as error", "except KeyError as error"))
    monkeypatch.setenv("WARMSTART_DTYPE", "float7")
    assert command.main([], project) == 1
    assert "nothing was built: WARMSTART_DTYPE is 'float7'" in capsys.readouterr().err


# --- Checking --------------------------------------------------------------------------------------------------------


def test_a_check_does_not_boot_where_nothing_can_fit(command, project, boots, capsys, tmp_path) -> None:
    other = stored(tmp_path / "store", tmp_path, OMP_NUM_THREADS="77")
    assert command.main(["--check", "--url", other.location], project) == 1
    assert boots.calls == []
    told = capsys.readouterr().err
    assert "a boot here would be cold. Miss: no bundle for this key" in told
    assert 'environment: cpu threads is "' in told


@pytest.mark.parametrize(("outcome", "status"), [(Outcome.WARM, 0), (Outcome.PARTIAL, 1), (Outcome.EAGER, 1)])
@pytest.mark.parametrize("version", ["", "a sibling"])
def test_a_check_boots_from_the_stores_alone_and_publishes_nothing(
    command, project, boots, capsys, tmp_path, outcome, status, version
) -> None:
    store = stored(tmp_path / "store", tmp_path, WARMSTART_MODEL_VERSION=version)
    before = contents(tmp_path / "store")
    boots.outcome, boots.saves = outcome, ()
    assert command.main(["--check", "--url", store.location], project) == status
    [call] = boots.calls
    assert (call.publish, call.live_there, call.settings.cache_url) == (False, True, store.location)
    assert call.settings.compile == "auto"
    assert not Path(call.settings.live_dir).exists()
    assert f"{outcome.value}: because of this" in capsys.readouterr().err
    assert contents(tmp_path / "store") == before


def test_a_check_looks_into_the_store_that_a_boot_here_would(command, project, boots, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WARMSTART_CACHE_URL", stored(tmp_path / "store", tmp_path).location)
    boots.outcome = Outcome.WARM
    assert command.main(["--check"], project) == 0
    assert boots.calls[0].settings.cache_url == str(tmp_path / "store")


def test_a_check_leaves_a_store_that_cannot_be_read_to_the_boot(command, project, boots) -> None:
    boots.outcome = Outcome.COLD
    assert command.main(["--check", "--url", "ftp://host/x"], project) == 1
    assert len(boots.calls) == 1


# --- For real --------------------------------------------------------------------------------------------------------


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """The project itself, with one planned request."""
    root = tmp_path / "template"
    for name in ("scripts", "warmstart", "weights"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("requirements*.txt"), ROOT / "cog.yaml"]:
        shutil.copy(path, root)
    one = "\n\ndef plan() -> list[warmstart.Request]:\n    return [request('7', '1:1', 1, 1, 1.0, 0)]\n"
    (root / "predict.py").write_text((ROOT / "predict.py").read_text() + one)
    return root


def run(template: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    place = template.parent / "tmp"
    place.mkdir(exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("WARMSTART_", "TORCH"))}
    clean |= {"TMPDIR": str(place), "WARMSTART_REGIONS": "FeedForward", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, template / "scripts" / "build_cache", *arguments]
    return subprocess.run(command, cwd=template, env=clean | environment, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_store_that_was_built_passes_the_check_and_another_machine_does_not(template: Path) -> None:
    built = run(template)
    assert built.returncode == 0, built.stderr
    before = contents(template / "cache")
    assert any(path.endswith(".tar.zst") for path in before)

    same = run(template, "--check")
    assert same.returncode == 0, same.stderr
    assert "scripts/build_cache: warm: 1 graphs from the cache, 0 compiled, 0 kernels built" in same.stderr

    # Any other boot would publish what it used under the new version.
    pushed = run(template, "--check", WARMSTART_MODEL_VERSION="next")
    assert pushed.returncode == 0, pushed.stderr
    assert "inherited from version" in pushed.stderr

    other = run(template, "--check", OMP_NUM_THREADS="2")
    assert other.returncode == 1
    assert 'cpu threads is "2" here, "1" there' in other.stderr
    assert contents(template / "cache") == before
    # Nothing of the checks is left on this machine either.
    assert [path.name for path in (template.parent / "tmp").glob("warmstart-check-*")] == []

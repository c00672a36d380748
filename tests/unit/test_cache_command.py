"""scripts/cache as a user runs it: what it prints, its exit status, and what it changes."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import _upkeep
import pytest
from artifacts import ROOT, TREE, contents, fill, key, packed

from warmstart.cache import size
from warmstart.store import BROKEN, DirectoryStore

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
    for name in ("cache", "_upkeep.py", "_venv.py", "_openapi.py", "_predictor.py", "_location.py", "_signals.py"):
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


def run_unheard(project: Path, *arguments: str, unbuffered: str) -> subprocess.CompletedProcess[str]:
    """Nobody reads what it prints; `| head -0`."""
    reader, writer = os.pipe()
    os.close(reader)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WARMSTART_")}
    done = subprocess.run(
        [sys.executable, project / "scripts/cache", *arguments],
        cwd=project.parent, env=clean | {"PYTHONUNBUFFERED": unbuffered}, stdout=writer, stderr=subprocess.PIPE,
        text=True, timeout=300,
    )  # fmt: skip
    os.close(writer)
    return done


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_enough_ends_it_without_a_word(project: Path, store: DirectoryStore, unbuffered: str) -> None:
    done = run_unheard(project, "ls", "--store", store.location, unbuffered=unbuffered)
    assert (done.returncode, done.stderr) == (141, "")


def test_what_was_found_damaged_is_told_by_the_status_if_nobody_reads(project: Path, store: DirectoryStore) -> None:
    [bundle, _] = store.bundles(key())
    (path,) = Path(store.location).rglob(f"{bundle.name}*.zst")
    path.write_bytes(path.read_bytes()[:-1])
    assert run_unheard(project, "verify", "--json", "--store", store.location, unbuffered="").returncode == 1


def test_without_an_output_it_works_as_ever(project: Path, store: DirectoryStore) -> None:
    command = f"exec {shlex.join([sys.executable, str(project / 'scripts/cache')])} ls --store {store.location} >&-"
    done = subprocess.run(["sh", "-c", command], cwd=project.parent, stderr=subprocess.PIPE, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


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
    assert [(other["bundles"], "version: " in other["differs"]) for other in miss["stored"]] == [(2, True)]
    facts = miss["key"]["facts"]["version"]
    assert "width=64" in json.dumps(facts), "the plan is the Predictor's"
    made = Path(store.location) / miss["key"]["environment"] / miss["key"]["version"]
    shutil.copytree(next(Path(store.location).glob("*/*/")), made)
    hit = run(project, "explain", "--store", store.location)
    assert hit.returncode == 0, hit.stderr
    assert f"Hit: {store.location} holds 2 bundles" in hit.stdout
    assert "Stored keys, nearest first:" in hit.stdout
    other = run(project, "explain", "--store", store.location, WARMSTART_DTYPE="float16")
    assert "Miss:" in other.stdout


def test_explain_takes_the_predictor_of_another_configuration(project: Path, store: DirectoryStore) -> None:
    fill(project, {"other.py": PREDICT.replace('"width": 64', '"width": 65').encode()})
    fill(project, {"cog-other.yaml": b'run: "other.py:Predictor"\n'})
    done = [
        run(project, "explain", "--json", "--store", store.location, *more) for more in ((), ("-f", "cog-other.yaml"))
    ]
    plans = [json.loads(each.stdout)["key"]["facts"]["version"]["plan"] for each in done]
    assert ["width=65" in plan for plan in plans] == [False, True]


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
        (("shrink",), {}, "invalid choice"),
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


# --- What changes stores ---------------------------------------------------------------------------------------------


def json_of(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_compact_packs_each_version_into_one(project: Path, store: DirectoryStore) -> None:
    old = {item.name for item in store.bundles(key())}
    [row] = json_of(run(project, "compact", "--json", "--store", store.location))["stores"][0]["keys"]
    assert (row["outcome"], row["covered"], row["name"] in old) == ("compacted", 2, False)
    assert {item.name for item in store.bundles(key())} == {*old, row["name"]}
    again = run(project, "compact", "--store", store.location)
    assert again.stdout == "0 bundles were packed into others, 0 were removed.\n"
    assert "there is no need" in again.stderr


def test_compact_says_what_it_could_not_do(project: Path, store: DirectoryStore) -> None:
    next(Path(store.location).rglob("version.json")).unlink()
    done = run(project, "compact", "--store", store.location)
    assert done.returncode == 1
    assert "its key's facts are missing or not those of its digests; the next boot of that version" in done.stderr


def test_prune_removes_what_it_is_told_to(project: Path, store: DirectoryStore) -> None:
    before = contents(Path(store.location))
    dry = run(project, "prune", "--keep", "0", "--dry-run", "--store", store.location)
    assert dry.returncode == 0, dry.stderr
    assert "1 of 1 versions would go" in dry.stdout
    assert "would go, " in dry.stderr
    assert ", last published 20" in dry.stderr
    assert contents(Path(store.location)) == before
    assert "0 of 1 versions went" in run(project, "prune", "--older-than", "1", "--store", store.location).stdout
    done = json_of(run(project, "prune", "--max-bytes", "1kB", "--json", "--store", store.location))
    assert [item["bundles"] for item in done["stores"][0]["removed"]] == [2]
    assert contents(Path(store.location)) == {}


def test_prune_spares_the_version_that_a_boot_here_would_use(project: Path, store: DirectoryStore) -> None:
    ours = json_of(run(project, "explain", "--json", "--store", store.location))["key"]
    made = Path(store.location) / ours["environment"] / ours["version"]
    shutil.copytree(next(Path(store.location).glob("*/*/")), made)
    run(project, "prune", "--keep", "0", "--store", store.location)
    assert [path.name for path in Path(store.location).glob("*/*/")] == [ours["version"]]
    (project / "predict.py").write_text("nothing = here\n")
    refused = run(project, "prune", "--keep", "0", "--store", store.location)
    assert (refused.returncode, "its key cannot be told" in refused.stderr) == (2, True)
    assert made.exists(), "whose version this is cannot be told, so nothing goes"
    run(project, "prune", "--keep", "0", "--current-too", "--store", store.location)
    assert not made.exists()


def test_push_and_pull_copy_between_cache_and_another_store(project: Path, store: DirectoryStore) -> None:
    pulled = json_of(run(project, "pull", "--from", "store", "--json"))
    assert {item["name"] for item in pulled["copied"]} == {item.name for item in store.bundles(key())}
    assert DirectoryStore(project / "cache").bundles(key()) == store.bundles(key())
    pushed = run(project, "push", "--to", "elsewhere")
    assert pushed.stdout.startswith("2 bundles ("), pushed.stderr
    assert DirectoryStore(project.parent / "elsewhere").bundles(key()) == store.bundles(key())
    assert run(project, "push", "--to", "elsewhere").stdout.startswith("0 bundles (0 B) from cache to ")
    [path] = (project.parent / "elsewhere").rglob(f"{store.bundles(key())[0].name}*")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    bad = run(project, "pull", "--from", "elsewhere", "--store", "third")
    assert (bad.returncode, "1 were left behind" in bad.stdout) == (1, True)
    assert "left behind: bundle " in bad.stderr


def test_an_empty_source_is_rather_a_mistake(project: Path) -> None:
    done = run(project, "pull", "--from", "misspelt")
    assert done.returncode == 1
    assert f"{project.parent}/misspelt holds no bundles" in done.stderr


def test_with_a_secret_unsigned_bundles_are_damaged_and_none_is_told(project: Path, store: DirectoryStore) -> None:
    secret = {"WARMSTART_CACHE_SECRET": "hunter2-" * 4}
    done = run(project, "verify", "--store", store.location, **secret)
    assert (done.returncode, done.stderr.count("has no signature")) == (1, 2)
    pushed = run(project, "push", "--store", store.location, "--to", "elsewhere", **secret)
    assert (pushed.returncode, pushed.stderr.count("left behind")) == (1, 2)
    short = run(project, "ls", "--store", store.location, WARMSTART_CACHE_SECRET="hunter2")
    assert short.returncode == 2
    assert all("hunter2" not in one.stdout + one.stderr for one in (done, pushed, short))


def test_a_store_that_others_can_write_to_is_told(project: Path, store: DirectoryStore) -> None:
    Path(store.location).chmod(0o777)
    for arguments in (("ls",), ("verify",), ("compact",), ("prune", "--keep", "1"), ("push", "--to", "elsewhere")):
        done = run(project, *arguments, "--store", store.location)
        assert done.returncode == 1
        assert f"chmod go-w {store.location}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("prune",), "needs to be told what goes: --older-than DAYS, --keep N or --max-bytes SIZE"),
        (("prune", "--keep", "-1"), "not a whole number of at least 0"),
        (("prune", "--keep", "x"), "--keep"),
        (("prune", "--older-than", "nan"), "not a number of at least 0"),
        (("prune", "--max-bytes", "lots"), "not a size such as 500MB"),
        (("push",), "--to"),
        (("pull", "--from", "a", "--store", "b", "--store", "c"), "--store may be given once"),
    ],
)
def test_wrong_usage_of_these_is_told(project: Path, arguments: tuple[str, ...], says: str) -> None:
    done = run(project, *arguments)
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("1500", 1500), ("500MB", 500_000_000), ("2 GB", 2 * 10**9), ("1.5GiB", 3 << 29), ("10k", 10_000)],
)
def test_sizes_are_read_as_people_write_them(text: str, value: int) -> None:
    assert _upkeep.size_bytes(text) == value


@pytest.mark.parametrize("place", ["", " ", "~nobody-of-that-name/store"])
def test_a_location_that_is_none_is_wrong_usage(project: Path, place: str) -> None:
    for command in (["ls", "--store", place], ["push", "--to", place]):
        done = run(project, *command)
        assert done.returncode == 2, done.stdout
        assert "Traceback" not in done.stderr
        assert "location" in done.stderr.lower() or "cannot be resolved" in done.stderr


def test_verify_of_nothing_asks_whether_the_location_is_right(project: Path, tmp_path: Path) -> None:
    done = run(project, "verify", "--store", str(tmp_path / "misspelt"))
    assert "No bundle was found in" in done.stdout
    assert "whole" not in done.stdout


# --- What may not be read, and signals -------------------------------------------------------------------------------


def run_without_privilege(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command without root's right to read what modes forbid."""
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"] if os.geteuid() == 0 else []
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WARMSTART_")}
    return subprocess.run(
        [*drop, sys.executable, project / "scripts/cache", *arguments],
        cwd=project.parent, env=clean, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize("command", ["ls", "explain", "verify", "compact"])
@pytest.mark.parametrize("place", ["", "*/", "*/*/"], ids=["store", "environment", "version"])
def test_a_directory_that_may_not_be_read_is_told(
    project: Path, store: DirectoryStore, command: str, place: str
) -> None:
    if command == "explain":
        ours = json_of(run(project, "explain", "--json", "--store", store.location))["key"]
        [held] = Path(store.location).glob("*/*/")
        shutil.copytree(held, Path(store.location) / ours["environment"] / ours["version"])
        shutil.rmtree(held.parent)
    [folder] = Path(store.location).glob(place) if place else [Path(store.location)]
    folder.chmod(0)
    done = run_without_privilege(project, command, "--store", store.location)
    folder.chmod(0o755)
    assert done.returncode == 1, done.stdout
    assert f"cannot be read or written by the user {os.geteuid()}" in done.stderr
    assert "chmod -R a+rX" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bundle_that_may_not_be_read_is_named_and_the_others_count(project: Path, store: DirectoryStore) -> None:
    bad, good = (item.name for item in store.bundles(key()))
    [path] = Path(store.location).rglob(f"{bad}.tar.zst")
    path.chmod(0)
    done = run_without_privilege(project, "verify", "--store", store.location)
    assert (done.returncode, done.stdout) == (1, "Something is damaged.\n")
    [line] = [line for line in done.stderr.splitlines() if not line.endswith(": ok")]
    assert bad[:12] in line
    assert "Permission denied" in line
    pushed = run_without_privilege(project, "push", "--store", store.location, "--to", "elsewhere")
    assert (pushed.returncode, "1 were left behind" in pushed.stdout) == (1, True)
    assert f"left behind: bundle {bad[:12]} of {store.location}: it cannot be read: " in pushed.stderr
    assert [item.name for item in DirectoryStore(project.parent / "elsewhere").bundles(key())] == [good]


def test_what_a_compaction_removes_meanwhile_is_not_damaged(project: Path, store: DirectoryStore) -> None:
    gone = store.bundles(key())[0].name
    removing = (
        "import pathlib\nfrom warmstart.store import DirectoryStore as Store\nreal = Store.fetch\n"
        "def fetch(self, key, item, into):\n"
        f"    [path.unlink() for path in pathlib.Path({store.location!r}).rglob('{gone}.*')]\n"
        "    real(self, key, item, into)\n"
        "Store.fetch = fetch\n"
    )
    done = run_changed(project, removing, "cache", "verify", "--store", store.location)
    out, errors = done.communicate(timeout=300)
    assert (done.returncode, out) == (0, "All 1 bundles are whole.\n"), errors
    assert "it was removed meanwhile" in errors


def run_changed(project: Path, change: str, script: str, *arguments: str, **more: str) -> subprocess.Popen[str]:
    """Starts a script in a process in which something was replaced before."""
    # These tests may run under nohup themselves, which ignores the signal for all that it starts.
    code = "import runpy, signal, sys\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    code += f"{change}\nsys.argv = {[script, *arguments]!r}\n"
    code += f"runpy.run_path({str(project / 'scripts' / script)!r}, run_name='__main__')"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WARMSTART_")}
    places = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=project.parent, env=clean | {"PYTHONPATH": places} | more,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("cache", ["verify", "--store", "store"]),
        ("cache", ["compact", "--store", "store"]),
        ("cache", ["push", "--store", "store", "--to", "elsewhere"]),
        ("build_cache", ["--check"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_a_signal_leaves_no_temporary_directory(
    project: Path, store: DirectoryStore, script: str, arguments: list[str], number: int
) -> None:
    shutil.copy(ROOT / "scripts" / "build_cache", project / "scripts" / "build_cache")
    (project / "predict.py").write_text(
        "import time\nclass Predictor:\n    def setup(self):\n        print('ready', flush=True)\n"
        "        try:\n            time.sleep(300)\n        except Exception:\n            pass\n"
    )
    waiting = (
        "import time\nfrom warmstart import bundle\n"
        "bundle.unpack = bundle.stage = lambda *_: (print('ready', flush=True), time.sleep(300))\n"
    )
    place = project.parent / "tmp"
    place.mkdir()
    process = run_changed(project, waiting, script, *arguments, TMPDIR=str(place))
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        assert len(list(place.iterdir())) == 1
        process.send_signal(number)
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 128 + number, errors
    assert list(place.iterdir()) == []
    assert "Traceback" not in errors


def test_nohup_goes_on_without_its_terminal(project: Path, store: DirectoryStore) -> None:
    change = "import os, signal\nfrom warmstart import bundle\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    change += "real = bundle.unpack\nbundle.unpack = lambda *a: (os.kill(os.getpid(), signal.SIGHUP), real(*a))\n"
    process = run_changed(project, change, "cache", "verify", "--store", store.location)
    out, errors = process.communicate(timeout=300)
    assert (process.returncode, out) == (0, "All 2 bundles are whole.\n"), errors


def test_bundles_noted_as_broken_are_shown_and_pruned(project: Path, store: DirectoryStore) -> None:
    bad, good = store.bundles(key())
    store.write_note(key(), bad.name, BROKEN, "2026-11-30 05:00 UTC: InductorError: no")
    shown = run(project, "ls", "--store", store.location).stdout
    assert f"bundle {bad.name[:12]} {size(bad.size_bytes)}, broken: 2026-11-30 05:00 UTC: InductorError: no\n" in shown
    assert f"bundle {good.name[:12]} {size(good.size_bytes)}\n" in shown
    dry = run(project, "prune", "--keep", "9", "--dry-run", "--store", store.location)
    assert f"bundle {bad.name[:12]}: would go, it is noted as broken" in dry.stderr
    assert store.bundles(key()) == [bad, good]
    assert run(project, "prune", "--keep", "9", "--store", store.location).returncode == 0
    assert store.bundles(key()) == [good]

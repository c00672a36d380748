"""Surroundings that a container may have: each boot in them ends ready, draws the right picture and says why."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from _server import Server
from booting import ONE, ROOT, SEVEN, SMALL, TWO, Boot, Booted, warnings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TMPFS = 'mount -t tmpfs -o size=64m,mode=1777,{options} tmpfs "{at}"'
# All that can be written becomes read-only; what a test mounts afterwards is not.
READ_ONLY = """while read -r _ at _; do case "$at" in /proc*|/sys*|/dev|/dev/pts|/dev/mqueue) ;;
*) mount -o remount,bind,ro "$at";; esac; done </proc/self/mounts"""


def room(*lines: str) -> list[str]:
    """The command that runs another after the lines, in mounts of its own."""
    assert os.geteuid() == 0, "these tests mount file systems, so they run as root, as in continuous integration"
    return ["unshare", "--mount", "sh", "-ec", "\n".join([*lines, 'exec "$@"']), "sh"]


def limited(*lines: str) -> list[str]:
    """As a user who owns nothing, since root has no limits; reading is allowed wherever the interpreter lies."""
    read = ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]
    user = ["setpriv", "--reuid=4242", "--regid=4242", "--clear-groups", *read]
    return [*user, "sh", "-ec", "\n".join([*lines, 'exec "$@"']), "sh"]


@pytest.fixture(scope="module")
def boot(tmp_path_factory) -> Boot:
    return Boot(tmp_path_factory.mktemp("boots"))


@pytest.fixture(scope="module")
def store(boot, tmp_path_factory) -> Path:
    """A store with the small plan's bundle; the boot that filled it ran with the umask that lets everybody write."""
    place = tmp_path_factory.mktemp("filled") / "store"
    assert boots(boot, place, wrap=["sh", "-c", 'umask 000; exec "$@"', "sh"]).report["outcome"] == "cold"
    return place


@pytest.fixture(scope="module")
def right(boot, store, tmp_path_factory) -> dict[bool, list]:
    """The picture of a compiled and of an uncompiled boot, by whether it is eager."""
    off = boots(boot, tmp_path_factory.mktemp("eager"), environment={"WARMSTART_COMPILE": "off"})
    warm = boots(boot, store)
    assert (off.report["outcome"], warm.report["outcome"]) == ("eager", "warm")
    return {True: off.pictures, False: warm.pictures}


def boots(boot, store, environment=None, **options) -> Booted:
    environment = {**SMALL, **(environment or {})}
    return boot(store, draw=SEVEN, **{"before": ONE, **options}, environment=environment)


@pytest.fixture
def tell(boot, store, right):
    """Boots, sees that the picture is right, and returns the outcome and all that the report says in words."""

    def run(*, into=store, **options) -> tuple[str, str, Booted]:
        booted = boots(boot, into, **options)
        if live := booted.report["facts"]["live_dir"]:
            # Some are in the machine's own /tmp.
            shutil.rmtree(live, ignore_errors=True)
            Path(f"{live}.lock").unlink(missing_ok=True)
        outcome = booted.report["outcome"]
        assert booted.pictures == right[outcome == "eager"]
        assert "Traceback" not in booted.log
        return outcome, "\n".join([booted.report["reason"], *booted.report["warnings"]]), booted

    return run


# --- where code cannot be loaded ---


def test_a_temporary_directory_mounted_noexec_is_passed_over(tell):
    refused = [TMPFS.format(at=at, options="noexec") for at in ("/var/tmp", "$TMPDIR")]
    lines = ["mount --bind /tmp /tmp", "mount -o remount,bind,ro /tmp", *refused, 'mkdir "$TMPDIR/own"']
    lines += [TMPFS.format(at="$TMPDIR/own", options="exec"), 'export HOME="$TMPDIR/own"']
    outcome, words, booted = tell(wrap=room(*lines))
    assert outcome == "warm"
    assert words.count("code cannot be loaded from there: is it mounted noexec?") == 2
    assert "/own/.cache/warmstart-0/" in booted.report["facts"]["live_dir"]


def test_where_code_can_be_loaded_from_nowhere_the_boot_is_eager_and_names_each_place(tell):
    lines = [READ_ONLY, TMPFS.format(at="$TMPDIR", options="noexec"), TMPFS.format(at="/dev/shm", options="noexec")]
    outcome, words, _ = tell(wrap=room(*lines))
    assert outcome == "eager"
    assert "there is no place for compiled code: not /" in words
    assert "not /dev/shm (code cannot be loaded from there: is it mounted noexec?)" in words
    assert "not /var/tmp (Read-only file system)" in words


# --- a root that cannot be written ---


def test_a_read_only_root_with_a_temporary_directory_is_warm_and_cannot_publish(tell, store, tmp_path):
    lines = [READ_ONLY, TMPFS.format(at="$TMPDIR", options="exec")]
    copy = shutil.copytree(store, tmp_path / "store")
    assert tell(wrap=room(*lines), into=copy)[:1] == ("warm",)
    # A plan of its own, so that there is something to publish.
    environment = {"WARMSTART_DYNAMIC": "false", "WARMSTART_SETUP_BUDGET_S": "0.01"}
    _, _, booted = tell(wrap=room(*lines), into=copy, before=TWO, environment=environment)
    failed = [saved["reason"] for saved in booted.report["persisted"] if saved["outcome"] == "failed"]
    assert failed
    assert all("Read-only file system" in reason for reason in failed)
    [warning] = [warning for warning in booted.report["warnings"] if "not all is saved" in warning]
    assert failed[-1] in warning


def test_where_nothing_can_be_written_the_boot_is_eager_and_still_answers(tell):
    outcome, words, _ = tell(wrap=room(READ_ONLY))
    assert outcome == "eager"
    assert words.count("Read-only file system") >= 3


def test_the_server_on_a_read_only_root_is_warm_and_answers(store, project, tmp_path):
    # The server, coglet 0.23.1, writes there whatever TMPDIR says; without it every prediction fails.
    lines = ["mkdir -p /tmp/coglet", READ_ONLY]
    lines += [TMPFS.format(at=at, options="exec") for at in ("$TMPDIR", "/tmp/coglet")]
    with served(project, store, tmp_path, wrap=tuple(room(*lines))) as server:
        assert server.setup_report()["outcome"] == "warm"
        answer = server.predict({"prompt": "7", "seed": 1})
    assert answer.body["status"] == "succeeded", answer.body


# --- who runs it ---


def test_the_server_of_a_user_without_account_home_or_name_is_warm_and_answers(store, project, tmp_path):
    user = ("unshare", "--user", "--map-user=4242", "--map-group=4242")
    environment = {"HOME": None, "USER": None, "LOGNAME": None}
    with served(project, store, tmp_path, wrap=user, environment=environment) as server:
        report = server.setup_report()
        answer = server.predict({"prompt": "7", "seed": 1})
    assert (report["outcome"], warnings(report)) == ("warm", [])
    assert answer.body["status"] == "succeeded", answer.body


def test_a_home_that_is_a_file_and_a_user_without_name_compile(tell, tmp_path):
    (tmp_path / "home").write_text("")
    nobody = {"HOME": str(tmp_path / "home"), "USER": None, "LOGNAME": None}
    wrap = ["sh", "-c", 'umask 077; exec "$@"', "sh"]
    outcome, words, _ = tell(into=tmp_path / "store", environment=nobody, as_user=4242, wrap=wrap)
    assert (outcome, words.count("\n")) == ("cold", 0)


def test_a_directory_of_our_name_that_another_user_made_is_not_used(tell):
    lines = ["mkdir $TMPDIR/warmstart-0", "chown 4242 $TMPDIR/warmstart-0"]
    outcome, _, booted = tell(wrap=room(*lines))
    assert outcome == "warm"
    assert "/warmstart-0-" in booted.report["facts"]["live_dir"]


def test_a_set_directory_with_a_part_that_another_user_made_is_replaced(tell):
    # Not in pytest's own directory, which it keeps from other users.
    with tempfile.TemporaryDirectory() as folder:
        preset = Path(folder, "preset")
        (preset / "fxgraph").mkdir(parents=True)
        for path in (Path(folder), preset):
            path.chmod(0o777)
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(preset), "HOME": None}
        outcome, words, _ = tell(wrap=limited(), environment=environment)
    assert outcome == "warm"
    assert "its fxgraph belongs to user 0, not to this one" in words


# --- little room ---


@pytest.mark.parametrize("size", ["1m", "6m", "70m"])
def test_a_small_temporary_directory_never_makes_the_boot_fail_nor_the_store_bad(tell, store, tmp_path, size):
    """Too small for the choice, for what the compile needs, for what is restored beside the reserve."""
    copy = shutil.copytree(store, tmp_path / "store")
    small = f'mount -t tmpfs -o size={size},mode=1777 tmpfs "$TMPDIR"'
    outcome, words, _ = tell(wrap=room(small), into=copy)
    assert outcome == {"1m": "warm"}.get(size, outcome)
    if size == "1m":
        assert "No space left on device" in words
    assert tell(into=copy)[0] == "warm"


def test_a_full_store_and_a_full_disk_for_the_report_are_warnings(tell, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    left = "import os, pathlib\nanswer = sorted(path.name for path in pathlib.Path(os.environ['FULL']).rglob('*.*'))"
    environment = {"WARMSTART_REPORT_PATH": "/dev/full", "FULL": str(full)}
    wrap = room(f"mount -t tmpfs -o size=32k,mode=700 tmpfs {full}")
    outcome, words, booted = tell(wrap=wrap, into=full / "store", environment=environment, after=left)
    assert outcome == "cold"
    assert "nothing was published to" in words
    assert "the report cannot be written to WARMSTART_REPORT_PATH: [Errno 28]" in words
    # Facts at most: no part of a bundle, under its own or a temporary name.
    assert set(booted.after) <= {"environment.json", "version.json"}


# --- few of everything ---


def test_one_core_and_no_shared_memory_compile(tell, tmp_path):
    lines = ["mount -t tmpfs -o size=4k,ro tmpfs /dev/shm"]
    outcome, words, _ = tell(wrap=[*room(*lines), "taskset", "-c", "0"], into=tmp_path / "store")
    assert (outcome, words.count("\n")) == ("cold", 0)


def test_few_files_and_no_core_dumps_are_enough(tell):
    assert tell(wrap=[*limited(), "prlimit", "--nofile=64", "--core=0"])[0] == "warm"


@pytest.mark.parametrize("stored", [True, False])
def test_without_a_thread_or_process_to_be_had_for_the_compile_the_boot_is_right(tell, store, tmp_path, stored):
    """From the climb on: before it the libraries that load the weights need threads themselves."""
    before = """
import resource
from warmstart.boot import _Boot
climb = _Boot._climb
def limit(*arguments):
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    return climb(*arguments)
_Boot._climb = limit
"""
    # The tokenizer's own pool of threads would end the model, compiled or not.
    alone = {"TOKENIZERS_PARALLELISM": "false"}
    into = store if stored else tmp_path / "nothing"
    outcome, words, _ = tell(wrap=limited(), into=into, before=ONE + before, environment=alone)
    assert outcome == "eager"
    assert "the compile failed" in words


def test_a_log_that_nobody_reads_costs_its_lines_only(tell):
    """Closed input, and an output whose reader is gone."""
    broken = "\nimport os\nKEPT = os.dup(1)\nread, write = os.pipe()\nos.close(read)\nos.dup2(write, 1)"
    outcome, _, booted = tell(before=ONE + broken + "\nos.close(0)", after="os.dup2(KEPT, 1)\nanswer = 1")
    assert (outcome, booted.after) == ("warm", 1)


# --- where temporary files go ---


@pytest.mark.parametrize("name", ["none", "a b", "ä'ö", "long"])
def test_an_odd_temporary_directory_is_used_or_replaced(tell, tmp_path, name):
    odd = tmp_path / name
    if name == "long":
        # The longest path that a system call takes has 4095 bytes.
        while (left := 4000 - len(str(odd))) > 0:
            odd /= "y" * min(200, left)
    if name != "none":
        odd.mkdir(parents=True)
    outcome, words, _ = tell(environment={"TMPDIR": str(odd)})
    assert outcome == "warm"
    said = {"a b": "there is a space or a quote in the path", "ä'ö": "there is a space", "long": "File name too long"}
    assert said.get(name, "") in words


@pytest.fixture
def project(tmp_path) -> Path:
    """This project with the small plan."""
    root = tmp_path / "project"
    root.mkdir()
    for name in ("warmstart", "cog.yaml"):
        (root / name).symlink_to(ROOT / name)
    small = "[request('7', '1:1', 1, 1, 1.0, 0)]"
    (root / "predict.py").write_text((ROOT / "predict.py").read_text().replace("boot(plan(),", f"boot({small},"))
    return root


def served(project: Path, store: Path, place: Path, environment=None, **options) -> Server:
    temporary = place / "tmp"
    temporary.mkdir(mode=0o777)
    settings = {"WARMSTART_MODEL": str(ROOT / "weights"), "WARMSTART_CACHE_URL": str(store), "TMPDIR": str(temporary)}
    settings |= {"TORCHINDUCTOR_CACHE_DIR": None, "HOME": str(temporary), **SMALL}
    return Server(project, environment={**settings, **(environment or {})}, namespace=True, **options)

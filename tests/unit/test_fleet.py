"""Eight processes on one store: four publish, three restore, one compacts without grace. Nobody loses a file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from artifacts import LIMITS, ROOT, contents, key

from warmstart.cache import Cache, RestoreOutcome
from warmstart.compaction import compact
from warmstart.store import open_store
from warmstart.trust import Secrets

ROUNDS = 20
PUBLISHERS = ("a", "b", "c", "d")
SECRET = "a-secret-of-some-length"

# Each publisher writes a file of its own and one that all write, then notes it in its journal. What the journals hold
# when a restore begins, that restore must bring.
MEMBER = """
import os, pathlib, shutil, sys
from artifacts import LIMITS, contents, fill, key
from warmstart.cache import Cache
from warmstart.compaction import compact
from warmstart.store import open_store
from warmstart.trust import Secrets

role, name, location, secret, work, rounds = sys.argv[1:]
work = pathlib.Path(work)
store = open_store(location, Secrets(*filter(None, [secret])))

def rounds_until_done():
    for number in range(10_000):
        done = (work / "done").exists()
        yield number
        if done:
            return

def publish():
    live = work / f"live-{name}"
    one = Cache([store], store, key(), live, LIMITS)
    for number in range(int(rounds)):
        fill(live, {f"{name}/{number}": f"{name}{number}".encode() * 50, f"all/{number}": b"%d" % number * 50})
        saved = one.persist(1500)
        assert saved.outcome.value == "published", saved
        with (work / f"journal-{name}").open("a") as journal:
            journal.write(f"{name}/{number}\\nall/{number}\\n")

def restore():
    for number in rounds_until_done():
        wanted = {line for path in work.glob("journal-*") for line in path.read_text().splitlines()}
        live = work / f"live-{name}-{number}"
        got = Cache([store], None, key(), live, LIMITS).restore(1500)
        assert got.outcome.value in ("restored", "nothing"), got
        found = contents(live)
        assert wanted <= set(found), (sorted(wanted - set(found)), got)
        for path, content in found.items():
            folder, _, last = path.partition("/")
            assert content == (last if folder == "all" else folder + last).encode() * 50, path
        shutil.rmtree(live)

def compact_all():
    outcomes = [compact(store, key(), work, LIMITS, grace_s=0).outcome.value for _ in rounds_until_done()]
    assert "compacted" in outcomes and "failed" not in outcomes, outcomes

{"publish": publish, "restore": restore, "compact": compact_all}[role]()
"""


def start(role: str, name: str, location: str, secret: str, work: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'unit'}"}
    command = [sys.executable, "-c", MEMBER, role, name, location, secret, str(work), str(ROUNDS)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(member: subprocess.Popen[str]) -> None:
    _, errors = member.communicate(timeout=1500)
    assert member.returncode == 0, errors


@pytest.mark.timeout(1800)  # 14 s on an idle core, 486 s at a load of 20 on two cores
@pytest.mark.parametrize(
    ("kind", "secret"),
    [
        ("directory", ""),
        ("directory", SECRET),
        pytest.param("s3", SECRET, marks=pytest.mark.slow),
        pytest.param("s3_gateway", SECRET, marks=pytest.mark.slow),
    ],
    ids=["directory", "directory signed", "s3 signed", "gateway signed"],
)
def test_every_restore_is_whole_and_nothing_is_lost(
    kind: str, secret: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    location = str(tmp_path / "store") if kind == "directory" else request.getfixturevalue(kind)
    work = tmp_path / "work"
    work.mkdir()
    publishers = [start("publish", name, location, secret, work) for name in PUBLISHERS]
    others = [start("restore", f"r{number}", location, secret, work) for number in range(3)]
    others.append(start("compact", "k", location, secret, work))
    try:
        for member in publishers:
            finish(member)
        (work / "done").touch()
        for member in others:
            finish(member)
    finally:
        for member in (*publishers, *others):
            member.kill()
            member.communicate()
    store = open_store(location, Secrets(*filter(None, [secret])))
    wanted = {f"{name}/{number}": f"{name}{number}".encode() * 50 for name in PUBLISHERS for number in range(ROUNDS)}
    wanted |= {f"all/{number}": b"%d" % number * 50 for number in range(ROUNDS)}
    for live in (tmp_path / "many", tmp_path / "one"):
        done = Cache([store], None, key(), live, LIMITS).restore(1500)
        assert done.outcome is RestoreOutcome.RESTORED, done.reason
        assert contents(live) == wanted
        for _ in range(2):
            compact(store, key(), work, LIMITS, grace_s=0)
        assert len(store.bundles(key())) == 1

"""Boots killed at random moments over one store lose nothing but time: the kill matrix, small, and its own eyesight."""

import hashlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from _kills import (
    MOMENTS,
    PLACES,
    SIZES,
    TARGETS,
    WEIGHTS,
    Audit,
    Campaign,
    Kill,
    Left,
    Violation,
    beside,
    in_namespace,
    namespace_of,
    phase_of,
)

from warmstart import bundle
from warmstart.bundle import SUFFIX, TEMPORARY_PREFIX, Limits
from warmstart.key import Key
from warmstart.store import DirectoryStore

SEED = 20
KILLS, PER_CHAPTER = 12, 4


@pytest.fixture
def campaign(model_dir: Path, tmp_path: Path) -> Campaign:
    return Campaign(tmp_path, model_dir, SEED, lambda line: print(line, flush=True))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_boots_killed_at_random_lose_nothing(campaign: Campaign) -> None:
    campaign.run(KILLS, PER_CHAPTER)
    assert len(campaign.kills) == KILLS
    assert {item.place for item in campaign.kills} == set(PLACES)
    assert {item.target for item in campaign.kills} == set(TARGETS)
    # Each chapter ends with a boot that has all from the store, and found what killed boots had left there before.
    assert [(item.outcome, item.found) for item in campaign.left[1::2]] == [("warm", SIZES)] * len(PLACES)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_boots_beside_each_other_that_die_at_random_leave_a_warm_host(campaign: Campaign) -> None:
    campaign.draw_eager(1)
    beside(campaign, campaign.place(0, "kept"), 6, 4)
    assert campaign.kills
    assert campaign.left[-1].outcome == "warm"


# --- The matrix sees what it is there to see -------------------------------------------------------------------------


@pytest.fixture
def audit(tmp_path: Path) -> Audit:
    """A store with one bundle, looked at once."""
    live = tmp_path / "live"
    (live / "fxgraph" / "ab" / "key").mkdir(parents=True)
    (live / "fxgraph" / "ab" / "key" / "graph").write_bytes(b"a graph")
    entries = [found for path in bundle.scan(live) if (found := bundle.entry(live, path))]
    packed = bundle.pack(live, entries, tmp_path, Limits())
    DirectoryStore(tmp_path / "store").publish(KEY, packed.path, packed.name)
    seen = Audit(tmp_path / "store")
    seen.look()
    return seen


KEY = Key({"device": "a"}, {"model": "b"})


def folder(audit: Audit) -> Path:
    return audit.store / KEY.environment_digest / KEY.version_digest


def test_graphs_are_counted(audit: Audit) -> None:
    assert audit.graphs(KEY.version_digest) == 1
    assert audit.graphs("another") == 0


def test_a_lost_bundle_is_seen(audit: Audit) -> None:
    next(folder(audit).glob(f"*{SUFFIX}")).unlink()
    with pytest.raises(Violation, match="lost 1 files, fxgraph/ab/key/graph for one"):
        audit.look()


def test_a_bundle_cut_short_is_seen(audit: Audit) -> None:
    path = next(folder(audit).glob(f"*{SUFFIX}"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Violation, match="not what its name says"):
        audit.look()


def test_facts_cut_short_are_seen(audit: Audit) -> None:
    (folder(audit) / "version.json").write_text("{")
    with pytest.raises(Violation, match="no facts that give its name"):
        audit.look()


def test_a_temporary_file_is_counted_and_any_other_is_seen(audit: Audit) -> None:
    temporary = folder(audit) / f"{TEMPORARY_PREFIX}x.tmp"
    temporary.write_text("half")
    audit.look()
    assert audit.litter() == [temporary]
    (folder(audit) / "half").write_text("half")
    with pytest.raises(Violation, match="neither a bundle's nor a temporary one"):
        audit.look()


@pytest.mark.parametrize(
    ("trace", "phase"),
    [
        ("", "start"),
        ("+setup", "setup"),
        ("+setup +key", "key"),
        ("+setup +key -key +restoring +imports", "restore"),
        ("+setup +key -key +restoring +imports -restoring", "imports"),
        ("+setup +warm-up +request", "compile 1"),
        ("+setup +warm-up +request +saving", "saving"),
        ("+setup +warm-up +request +saving -saving -request +request", "compile 2"),
        ("+setup +warm-up +request -request +verify +request", "verify"),
        ("+setup +warm-up -warm-up +workers -workers +ready", "ready"),
        ("+setup +ready +prediction", "prediction"),
        ("+setup +ready +prediction -prediction", "ready"),
    ],
)
def test_a_trace_tells_what_a_boot_was_in(trace: str, phase: str) -> None:
    assert phase_of(trace.split()) == phase


def test_processes_of_a_container_are_found_from_outside() -> None:
    command = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", "sleep 600 & wait"]
    with subprocess.Popen(command) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        ends = time.monotonic() + 60
        while not (name := namespace_of(int((children.read_text().split() or ["0"])[0]))):
            assert time.monotonic() < ends
        while len(in_namespace(name)) < 2:
            assert time.monotonic() < ends
        assert namespace_of(os.getpid()) == ""
        process.send_signal(signal.SIGKILL)
    while in_namespace(name):
        assert time.monotonic() < ends


class Told(Campaign):
    """A campaign that has drawn and booted already."""

    def __init__(self, work: Path) -> None:
        super().__init__(work, work, 0, lambda line: None)
        self.at = self.place(0, "kept")
        self.pictures = ["101010"] * SIZES
        self._eager = dict.fromkeys(self.at.sizes, "121212")
        self.audit.look = lambda: None  # type: ignore[method-assign]
        self.audit.held = {"v": {(f"fxgraph/a/{number}/g", "") for number in range(SIZES)}}

    def report(self, outcome: str, found: int) -> dict:
        counts = {"fx_hits": found, "fx_misses": SIZES - found}
        return {"outcome": outcome, "reason": "so", "counts": counts, "boot_s": 1.0, "facts": {"version": "v"}}


@pytest.mark.parametrize(
    ("outcome", "found", "held", "said"),
    [
        ("eager", 0, 0, "is eager: so"),
        ("partial", 1, 2, "held 2 graphs, and the boot found 1"),
        ("partial", SIZES, SIZES, "held every graph, and the boot was partial"),
    ],
)
def test_a_boot_that_falls_short_is_seen(tmp_path: Path, outcome: str, found: int, held: int, said: str) -> None:
    told = Told(tmp_path)
    with pytest.raises(Violation, match=said):
        told.judge(told.at, told.report(outcome, found), told.pictures, held)


def test_wrong_pictures_are_seen(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.judge(told.at, told.report("cold", 0), told.pictures, 0)
    with pytest.raises(Violation, match="not those of its first compiled boot"):
        told.judge(told.at, told.report("warm", SIZES), ["101011", *told.pictures[1:]], SIZES)
    with pytest.raises(Violation, match="differs from the uncompiled one by 3 grey steps"):
        told.judge(told.at, told.report("warm", SIZES), ["0f1010", *told.pictures[1:]], SIZES)


def test_graphs_that_were_not_saved_are_seen(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.audit.held["v"].pop()
    with pytest.raises(Violation, match=f"left {SIZES - 1} of {SIZES} graphs"):
        told.judge(told.at, told.report("warm", SIZES), told.pictures, 0)


def test_old_litter_goes_with_the_next_save_and_new_litter_stays(audit: Audit, tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, tmp_path, 0, lambda line: None)
    for place in (folder(audit), folder(audit).parent):
        (place / f"{TEMPORARY_PREFIX}x.tmp").write_text("half")
    store = DirectoryStore(audit.store)
    name = next(folder(audit).glob(f"*{SUFFIX}")).name.removesuffix(SUFFIX)
    store.publish(KEY, folder(audit) / f"{name}{SUFFIX}", name)
    assert len(audit.litter()) == 2, "another process may be writing it"
    campaign.litter_goes()
    assert audit.litter() == []
    assert hashlib.sha256((folder(audit) / f"{name}{SUFFIX}").read_bytes()).hexdigest() == name


@pytest.mark.parametrize("harm", ["", "the store lost 2 files"])
def test_the_command_fails_on_harm_and_says_how_to_repeat_it(
    command, model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    module = command("kill_matrix")

    def run(campaign: Campaign, options) -> None:
        campaign.kills.append(Kill(0, "kept", "worker", "any", "compile 2", litter=1))
        campaign.left.append(Left(0, "kept", "partial", 1, 1, 3, 9.0))
        if harm:
            raise Violation(harm)

    monkeypatch.setattr(module, "run", run)
    assert module.main(["--kills", "1", "--seed", "5", "--json", "--model", str(model_dir)]) == (1 if harm else 0)
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[2].split() == ["compile", "1", "1"]
    assert "kept 1/1/3" in lines[5]
    assert json.loads(lines[-1])["violation"] == harm
    repeat = "scripts/kill_matrix --kills 1 --per-chapter 12 --seed 5 --beside 0 --boots 40"
    assert (repeat in said.err) is bool(harm)


def test_the_command_refuses_what_is_no_model(command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("kill_matrix").main(["--model", str(tmp_path)]) == 2
    assert "holds no model" in capsys.readouterr().err


def test_every_moment_has_a_weight() -> None:
    assert MOMENTS.keys() == WEIGHTS.keys()

"""Bundles whose files broke a compile: noted beside them, passed over by every reader, and healed by better ones."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from artifacts import LIMITS, TREE, contents, fill, key, packed

from warmstart import boot as boot_function
from warmstart import compaction, inductor, upkeep
from warmstart.cache import Cache, PersistOutcome, Restored, RestoreOutcome, explain, usable
from warmstart.leftover import Leftover
from warmstart.live import LiveDirectory
from warmstart.store import BROKEN, COVERED, DirectoryStore, SignedStore, Store, open_store
from warmstart.trust import Secrets

LONG_S = 300.0
# The package has the function of that name in place of the module.
boot_module = sys.modules[boot_function.__module__]
SECRET = "0123456789abcdef"


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def publish(store: Store, place: Path, files: dict[str, bytes]) -> str:
    made = packed(fill(place / f"made-{len(list(place.iterdir()))}", files), place / "out")
    store.publish(key(), made.path, made.name)
    return made.name


def boot(store: Store, live: Path, *others: Store) -> tuple[Cache, RestoreOutcome]:
    cache = Cache([*others, store], store, key(), live, LIMITS)
    return cache, cache.restore(LONG_S).outcome


def names(found: list) -> set[str]:
    return {item.name for item in found}


@pytest.mark.parametrize("signed", [False, True])
def test_a_condemned_bundle_is_passed_over_and_what_was_made_instead_is_used(tmp_path: Path, signed: bool) -> None:
    store = open_store(str(tmp_path / "store"), Secrets(SECRET) if signed else None)
    assert isinstance(store, SignedStore) == signed
    bad = publish(store, tmp_path, TREE)
    cache, outcome = boot(store, tmp_path / "a")
    assert outcome is RestoreOutcome.RESTORED
    good = publish(store, tmp_path, {**TREE, "ab/kernel.py": b"right"})
    assert "noted as broken" in cache.condemn({good}, "InductorError: no", LONG_S)
    assert "InductorError: no" in (store.note(key(), bad, BROKEN) or "")
    restored = Cache([store], None, key(), tmp_path / "b", LIMITS).restore(LONG_S)
    assert (restored.outcome, restored.bundles) == (RestoreOutcome.PARTIAL, 1)
    assert "a boot noted that its files break the compile" in restored.reason
    assert contents(tmp_path / "b")["ab/kernel.py"] == b"right"
    assert names(usable(store, key())[0]) == {good}


def test_where_all_are_broken_the_next_boot_says_why_it_is_cold(store: DirectoryStore, tmp_path: Path) -> None:
    bad = publish(store, tmp_path, TREE)
    store.write_note(key(), bad, BROKEN, "")
    restored = Cache([store], None, key(), tmp_path / "live", LIMITS).restore(LONG_S)
    assert restored.outcome is RestoreOutcome.FAILED
    assert f"bundle {bad[:12]}" in restored.reason
    assert "a boot noted that its files break the compile" in explain(key(), [store])
    assert contents(tmp_path / "live") == {}


def test_without_something_better_nothing_is_condemned(store: DirectoryStore, tmp_path: Path) -> None:
    """A machine on which no save succeeds, or all make the same bytes, cannot make others cold."""
    bad = publish(store, tmp_path, TREE)
    cache, _ = boot(store, tmp_path / "live")
    assert cache.condemn(set(), "why", LONG_S) == ""
    assert cache.condemn({bad}, "why", LONG_S) == ""
    assert store.note(key(), bad, BROKEN) is None


def test_making_the_same_bundle_again_acquits_it(store: DirectoryStore, tmp_path: Path) -> None:
    bundle = publish(store, tmp_path, TREE)
    store.write_note(key(), bundle, BROKEN, "a bad machine")
    cache, outcome = boot(store, tmp_path / "live")
    assert outcome is RestoreOutcome.FAILED
    fill(tmp_path / "live", TREE)
    saved = cache.persist(LONG_S)
    assert (saved.outcome, saved.name) == (PersistOutcome.PUBLISHED, bundle)
    assert boot(store, tmp_path / "next")[1] is RestoreOutcome.RESTORED


def test_a_note_in_one_store_counts_for_all(store: DirectoryStore, tmp_path: Path) -> None:
    """What an image ships broken stays broken there; the store that boots publish to knows better."""
    shipped = DirectoryStore(tmp_path / "shipped")
    bad = publish(shipped, tmp_path, {**TREE, "ab/kernel.py": b"wrong"})
    publish(store, tmp_path, {**TREE, "ab/kernel.py": b"right"})
    publish(store, tmp_path, {**TREE, "ab/kernel.py": b"wrong"})
    store.write_note(key(), bad, BROKEN, "")
    for number in range(5):  # whichever list comes first
        boot(store, tmp_path / f"live-{number}", shipped)
        assert contents(tmp_path / f"live-{number}")["ab/kernel.py"] == b"right"


def test_a_compaction_takes_nothing_from_a_broken_bundle_nor_believes_that_it_covers(
    store: DirectoryStore, tmp_path: Path
) -> None:
    bad = publish(store, tmp_path, {"ab/only-broken": b"x"})
    good = [publish(store, tmp_path, {f"ab/{number}": b"y"}) for number in (1, 2)]
    store.write_note(key(), bad, BROKEN, "")
    store.write_note(key(), good[0], COVERED, json.dumps({"by": bad}))
    done = compaction.compact(store, key(), tmp_path, LIMITS, grace_s=0)
    boot(store, tmp_path / "live")
    assert done.covered == 2
    assert contents(tmp_path / "live") == {"ab/1": b"y", "ab/2": b"y"}


def test_a_copy_leaves_broken_bundles_behind_and_a_prune_removes_them(store: DirectoryStore, tmp_path: Path) -> None:
    bad, good = publish(store, tmp_path, {"ab/1": b"x"}), publish(store, tmp_path, {"ab/2": b"y"})
    store.write_note(key(), bad, BROKEN, "")
    other = DirectoryStore(tmp_path / "other")
    upkeep.copy(store, other, lambda line: None)
    assert names(other.bundles(key())) == {good}
    [version] = upkeep.versions(store)
    assert names(upkeep.broken(version)) == {bad}
    upkeep.remove_broken(store, version)
    assert [(file.name, file.suffix) for file in store.files(key())] == [(good, ".tar.zst")]


@pytest.mark.parametrize("case", ["healed", "other files too", "fails again", "inherited"])
def test_a_boot_condemns_only_what_it_knows_to_be_guilty(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    bad = publish(store, tmp_path, {"ab/1": b"broken"})
    retry = LiveDirectory(tmp_path / "retry", "a new one")
    monkeypatch.setattr(boot_module, "set_aside", lambda live, name: (retry, []))
    monkeypatch.setattr(inductor, "forget", lambda: None)
    here = object.__new__(boot_module._Boot)
    here.key, here.stores, here.publish, here.parts, here.warnings, here.savers = key(), [store], True, [], [], []
    here.settings = SimpleNamespace(max_bundle_bytes=1 << 30, persist_deadline_s=LONG_S)
    here.leftover, here.ready = None, False
    if case == "other files too":
        here.leftover = Leftover(fill(tmp_path / "live", {"ab/theirs": b"x"}))
    here.cache, _ = boot(store, tmp_path / "live")
    inherited = "1234" if case == "inherited" else None
    here.restored = Restored(RestoreOutcome.RESTORED, "", bundles=1, inherited=inherited)
    if case == "inherited":
        here.cache._used = frozenset()

    def attempt(served: object, live: LiveDirectory) -> str:
        if here.cache is not None:
            fill(live.path, {"ab/1": b"right"})
            here.savers[-1].soon()
        return "again" if case == "fails again" else ""

    monkeypatch.setattr(here, "_attempt", attempt)
    here.live, here.found, here.trouble = LiveDirectory(tmp_path / "live", ""), True, ""
    here._without_what_fails(None, "InductorError: no")
    for saver in here.savers:
        assert saver.settle(LONG_S)
        saver.close()
    note = store.note(key(), bad, BROKEN)
    assert (note is not None) == (case == "healed")
    assert len(store.bundles(key())) == (1 if case == "other files too" else 2)
    if note is not None:
        assert "InductorError: no" in note
        assert "noted as broken" in here.warnings[-1], here.warnings
        boot(store, tmp_path / "next")
        assert contents(tmp_path / "next") == {"ab/1": b"right"}

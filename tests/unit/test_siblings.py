"""A version without bundles starts from its nearest sibling's, publishes what of these it used, and never fails."""

import os
import threading
from pathlib import Path

import pytest
from artifacts import GRAPH, LIMITS, TREE, contents, fill, key, packed

from warmstart import bundle
from warmstart.cache import Cache, PersistOutcome, Restored, RestoreOutcome, explain
from warmstart.key import Key
from warmstart.store import DirectoryStore, StoredKey, StoreError

LONG_S = 300.0  # a deadline that no test meets


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


@pytest.fixture
def live(tmp_path: Path) -> Path:
    return tmp_path / "live"


def publish(store: DirectoryStore, tmp_path: Path, files: dict[str, bytes], of: Key, at_s: int = 0) -> str:
    number = len(list(tmp_path.glob("made-*")))
    made = packed(fill(tmp_path / f"made-{number}", files), tmp_path / "out")
    store.publish(of, made.path, made.name)
    if at_s:
        [path] = Path(store.location).rglob(f"{of.version_digest}/{made.name}.tar.zst")
        os.utime(path, (at_s, at_s))
    return made.name


def restore(*stores: DirectoryStore, live: Path, deadline_s: float = LONG_S) -> Restored:
    return Cache(stores, None, key(), live, LIMITS).restore(deadline_s)


def held(store: DirectoryStore, of: Key, tmp_path: Path) -> set[str]:
    """The files that a version's bundles hold."""
    found: set[str] = set()
    for item in store.bundles(of):
        root = tmp_path / f"held-{item.name}"
        root.mkdir()
        store.fetch(of, item, root / "bundle")
        found |= {entry.path for entry in bundle.unpack(root / "bundle", item.name, root, LIMITS)}
    return found


def test_a_version_without_bundles_starts_from_its_sibling(store: DirectoryStore, tmp_path: Path, live: Path) -> None:
    old = key(dtype="fp32")
    publish(store, tmp_path, TREE, old)
    done = restore(store, live=live)
    assert contents(live) == TREE
    assert (done.outcome, done.inherited) == (RestoreOutcome.RESTORED, old.version_digest)
    assert (done.bundles, done.files, done.skipped) == (1, len(TREE), ())
    assert done.seconds > 0
    short = old.version_digest[:8]
    assert done.reason.startswith(f'inherited from version {short} (dtype is "bf16" here, "fp32" there): 1 bundle')
    assert explain(key(), [store]).endswith("A boot inherits what still fits.")


def test_a_version_with_a_bundle_of_its_own_inherits_nothing(store: DirectoryStore, tmp_path: Path, live: Path) -> None:
    publish(store, tmp_path, TREE, key(dtype="fp32"))
    publish(store, tmp_path, {"ab/own": b"own"}, key())
    done = restore(store, live=live)
    assert contents(live) == {"ab/own": b"own"}
    assert done.inherited is None


def test_a_version_whose_only_bundle_is_damaged_inherits(store: DirectoryStore, tmp_path: Path, live: Path) -> None:
    publish(store, tmp_path, TREE, key(dtype="fp32"))
    name = publish(store, tmp_path, {"ab/own": b"own"}, key())
    [path] = Path(store.location).rglob(f"{name}.tar.zst")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    done = restore(store, live=live)
    assert contents(live) == TREE
    assert (done.outcome, done.inherited) == (RestoreOutcome.PARTIAL, key(dtype="fp32").version_digest)
    assert "inherited from version" in done.reason
    assert name[:12] in done.reason


def test_another_environment_is_no_sibling(store: DirectoryStore, tmp_path: Path, live: Path) -> None:
    publish(store, tmp_path, TREE, key(device="other", dtype="fp32"))
    done = restore(store, live=live)
    assert (done.outcome, done.inherited) == (RestoreOutcome.NOTHING, None)
    assert contents(live) == {}
    assert "nearest stored key differs in its environment: device is" in explain(key(), [store])


def test_only_the_own_environment_is_listed(
    store: DirectoryStore, tmp_path: Path, live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, tmp_path, TREE, key(dtype="fp32"))
    asked: list[str | None] = []
    real = store.keys
    monkeypatch.setattr(store, "keys", lambda environment=None: asked.append(environment) or real(environment))
    restore(store, live=live)
    explain(key(), [store])
    assert asked == [key().environment_digest] * 2


def test_the_nearest_sibling_is_taken_from_whichever_store(store: DirectoryStore, tmp_path: Path, live: Path) -> None:
    shipped = DirectoryStore(tmp_path / "shipped")
    publish(store, tmp_path, {"ab/far": b"far"}, key(dtype="fp32", model="other"), at_s=2_000_000_000)
    publish(shipped, tmp_path, {"ab/near": b"near"}, key(dtype="fp32"), at_s=1_000_000_000)
    assert restore(shipped, store, live=live).inherited == key(dtype="fp32").version_digest
    assert contents(live) == {"ab/near": b"near"}


def test_a_sibling_in_two_stores_is_united(store: DirectoryStore, tmp_path: Path, live: Path) -> None:
    shipped = DirectoryStore(tmp_path / "shipped")
    publish(shipped, tmp_path, {"ab/1": b"1"}, key(dtype="fp32"))
    publish(store, tmp_path, {"ab/2": b"2"}, key(dtype="fp32"))
    assert restore(shipped, store, live=live).bundles == 2
    assert contents(live) == {"ab/1": b"1", "ab/2": b"2"}


@pytest.mark.parametrize("latest", ["fp16", "fp32", "fp64"])
def test_of_equally_near_siblings_the_latest_is_taken(
    store: DirectoryStore, tmp_path: Path, live: Path, latest: str
) -> None:
    for dtype in ("fp16", "fp32", "fp64"):
        at_s = 1_500_000_000 if dtype == latest else 1_400_000_000
        publish(store, tmp_path, {f"ab/{dtype}": b"x"}, key(dtype=dtype), at_s=at_s)
    restore(store, live=live)
    assert contents(live) == {f"ab/{latest}": b"x"}


def test_only_what_is_read_or_new_is_published(store: DirectoryStore, tmp_path: Path, live: Path) -> None:
    publish(store, tmp_path, TREE, key(dtype="fp32"))
    cache = Cache([store], store, key(), live, LIMITS)
    cache.restore(LONG_S)
    assert cache.persist().outcome is PersistOutcome.NOTHING_NEW
    (live / GRAPH).read_bytes()
    fill(live, {"ab/new": b"new"})
    assert cache.persist().outcome is PersistOutcome.PUBLISHED
    assert held(store, key(), tmp_path) == {GRAPH, "ab/new"}
    assert cache.persist().outcome is PersistOutcome.NOTHING_NEW
    # From now on the version has bundles of its own.
    assert restore(store, live=tmp_path / "next").inherited is None
    assert set(contents(tmp_path / "next")) == {GRAPH, "ab/new"}


def test_a_sibling_that_fails_is_a_reason(store: DirectoryStore, tmp_path: Path, live: Path) -> None:
    name = publish(store, tmp_path, TREE, key(dtype="fp32"))
    [path] = Path(store.location).rglob(f"{name}.tar.zst")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    done = restore(store, live=live)
    assert (done.outcome, done.inherited, contents(live)) == (RestoreOutcome.FAILED, None, {})
    assert "it holds no bundle for this key; nor from version" in done.reason
    assert name[:12] in done.reason


class Mute(DirectoryStore):
    """Answers for a key, and to a listing of all as it is told."""

    def __init__(self, answer) -> None:
        super().__init__(Path("mute"))
        self.answer = answer

    def keys(self, environment: str | None = None) -> list[StoredKey]:
        return self.answer()


def refuse() -> list[StoredKey]:
    raise StoreError("Access denied.")


def test_a_store_that_cannot_list_its_versions_costs_only_its_own(
    store: DirectoryStore, tmp_path: Path, live: Path
) -> None:
    publish(store, tmp_path, TREE, key(dtype="fp32"))
    done = restore(store, Mute(refuse), live=live)
    assert contents(live) == TREE
    assert done.outcome is RestoreOutcome.PARTIAL
    assert "mute did not list its versions (StoreError: Access denied)" in done.reason


def test_a_store_that_hangs_leaves_time_for_the_others(store: DirectoryStore, tmp_path: Path, live: Path) -> None:
    publish(store, tmp_path, TREE, key(dtype="fp32"))
    ends = threading.Event()
    try:
        done = restore(store, Mute(lambda: ends.wait(LONG_S) and []), live=live, deadline_s=6.0)
    finally:
        ends.set()
    assert contents(live) == TREE
    assert "1 of 2 stores did not list their versions in time" in done.reason


def compiled_by(compiler: str, **version: str) -> Key:
    return Key({"device": "cpu", "c++ compiler": compiler}, {"dtype": "bf16", **version})


def test_without_a_compiler_an_environment_that_lacks_only_that_stands_in(
    store: DirectoryStore, tmp_path: Path, live: Path
) -> None:
    here = compiled_by("none")
    publish(store, tmp_path, {"aa/other": b"o"}, Key({"device": "tpu", "c++ compiler": "gcc 12"}, here.version))
    publish(store, tmp_path, {"aa/near": b"n"}, compiled_by("gcc 11", dtype="fp32"))
    publish(store, tmp_path, TREE, compiled_by("gcc 12"))
    done = Cache([store], None, here, live, LIMITS).restore(LONG_S)
    assert contents(live) == TREE
    assert (done.outcome, done.inherited) == (RestoreOutcome.RESTORED, None)
    assert explain(here, [store]).startswith("Hit:")


def test_of_the_one_that_stands_in_another_version_is_inherited(
    store: DirectoryStore, tmp_path: Path, live: Path
) -> None:
    publish(store, tmp_path, TREE, compiled_by("gcc 12", dtype="fp32"))
    done = Cache([store], None, compiled_by("none"), live, LIMITS).restore(LONG_S)
    assert contents(live) == TREE
    assert done.inherited == compiled_by("gcc 12", dtype="fp32").version_digest


def test_where_a_compiler_is_another_ones_environment_is_another(
    store: DirectoryStore, tmp_path: Path, live: Path
) -> None:
    publish(store, tmp_path, TREE, compiled_by("gcc 12"))
    done = Cache([store], None, compiled_by("gcc 13"), live, LIMITS).restore(LONG_S)
    assert done.outcome is RestoreOutcome.NOTHING
    assert explain(compiled_by("gcc 13"), [store]).startswith("Miss:")

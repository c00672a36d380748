"""Compaction: many bundles become one, and nobody loses a file: not beside others, not at a crash, not by damage."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from artifacts import LIMITS, TREE, contents, fill, key, packed

from warmstart import cache
from warmstart.bundle import Limits
from warmstart.cache import Cache, PersistOutcome, RestoreOutcome
from warmstart.compaction import Compacted, CompactOutcome, LateError, compact
from warmstart.key import Key
from warmstart.store import COVERED, SIGNATURE, STALE_S, SUFFIX, Address, BundleInfo, DirectoryStore, Store, open_store
from warmstart.trust import Secrets

LONG_S = 300.0
SECRET = Secrets("a-secret-of-some-length")


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


NUMBERS = itertools.count()


def publish(store: Store, tmp_path: Path, files: dict[str, bytes]) -> str:
    made = packed(fill(tmp_path / f"made-{next(NUMBERS)}", files), tmp_path / "out")
    store.publish(key(), made.path, made.name)
    return made.name


def publish_many(store: Store, tmp_path: Path, count: int = 4) -> dict[str, bytes]:
    """Some bundles, which overlap; returns all their files."""
    files = {f"ab/{number}": b"%d" % number for number in range(count)}
    for path, content in files.items():
        publish(store, tmp_path, {path: content, "ab/all": b"all"})
    return files | {"ab/all": b"all"}


def run(store: Store, tmp_path: Path, *, grace_s: float = 0.0, **options: object) -> Compacted:
    place = tmp_path / "work"
    place.mkdir(exist_ok=True)
    done = compact(store, key(), place, LIMITS, grace_s=grace_s, **options)  # type: ignore[arg-type]
    assert list(place.iterdir()) == [], "no litter"
    return done


def names(store: Store, suffix: str = SUFFIX) -> set[str]:
    return {file.name for file in store.files(key()) if file.suffix == suffix}


def restored(store: Store, tmp_path: Path) -> dict[str, bytes]:
    """What a boot finds; it must be told of no trouble."""
    live = tmp_path / f"live-{next(NUMBERS)}"
    done = Cache([store], None, key(), live, LIMITS).restore(LONG_S)
    assert done.outcome is RestoreOutcome.RESTORED, done.reason
    return contents(live)


# --- What it does ----------------------------------------------------------------------------------------------------


def test_many_become_one_and_go_after_the_grace(store: DirectoryStore, tmp_path: Path) -> None:
    files = publish_many(store, tmp_path)
    old = names(store)
    done = run(store, tmp_path, grace_s=3600)
    assert (done.outcome, done.covered, done.removed) == (CompactOutcome.COMPACTED, 4, 0)
    assert names(store) == {*old, done.name}, "all stay for now"
    assert names(store, COVERED) == old
    assert restored(store, tmp_path) == files
    assert run(store, tmp_path, grace_s=3600).removed == 0
    again = run(store, tmp_path)
    assert (again.outcome, again.removed) == (CompactOutcome.NOTHING, 4)
    assert names(store) == {done.name}
    assert restored(store, tmp_path) == files


def test_few_enough_are_left_alone(store: DirectoryStore, tmp_path: Path) -> None:
    publish_many(store, tmp_path, 3)
    before = contents(Path(store.location))
    assert run(store, tmp_path, at_most=3).outcome is CompactOutcome.NOTHING
    assert contents(Path(store.location)) == before
    assert run(store, tmp_path, at_most=2).outcome is CompactOutcome.COMPACTED


def test_an_empty_store_is_nothing_to_compact(store: DirectoryStore, tmp_path: Path) -> None:
    assert run(store, tmp_path).outcome is CompactOutcome.NOTHING
    assert not Path(store.location).exists()


def test_of_two_files_with_one_path_the_later_stays(store: DirectoryStore, tmp_path: Path) -> None:
    later, earlier = publish(store, tmp_path, {"ab/1": b"tuned"}), publish(store, tmp_path, {"ab/1": b"first"})
    folder = Path(store.location) / key().environment_digest / key().version_digest
    os.utime(folder / f"{earlier}{SUFFIX}", (1000, 1000))
    os.utime(folder / f"{later}{SUFFIX}", (2000, 2000))
    run(store, tmp_path)
    run(store, tmp_path)
    assert restored(store, tmp_path) == {"ab/1": b"tuned"}


def test_what_does_not_fit_into_one_stays_beside_it(store: DirectoryStore, tmp_path: Path) -> None:
    files = publish_many(store, tmp_path, 3)
    large = {f"ab/large-{number}": os.urandom(3000) for number in range(2)}
    either = {publish(store, tmp_path, {path: content}) for path, content in large.items()}
    (tmp_path / "work").mkdir()
    small = Limits(max_raw_bytes=4000, reserve_bytes=0)
    done = compact(store, key(), tmp_path / "work", small, grace_s=0)
    assert (done.outcome, done.covered) == (CompactOutcome.COMPACTED, 4)
    assert "was left out: with it one bundle would pass 4000 bytes" in done.reason
    run(store, tmp_path, at_most=9)
    assert len(names(store)) == 2
    assert len(names(store) & either) == 1
    assert restored(store, tmp_path) == files | large


def test_a_bundle_that_is_too_large_alone_stays_too(store: DirectoryStore, tmp_path: Path) -> None:
    publish_many(store, tmp_path, 3)
    large = publish(store, tmp_path, {"ab/large": os.urandom(5000)})
    (tmp_path / "work").mkdir()
    done = compact(store, key(), tmp_path / "work", Limits(max_raw_bytes=4000, reserve_bytes=0), grace_s=0)
    assert (done.covered, f"bundle {large[:12]} was left out" in done.reason) == (3, True)


def test_a_damaged_bundle_is_left_out_and_stays(store: DirectoryStore, tmp_path: Path) -> None:
    publish_many(store, tmp_path, 3)
    bad = publish(store, tmp_path, TREE)
    damage(store, bad)
    done = run(store, tmp_path)
    assert (done.outcome, done.covered) == (CompactOutcome.COMPACTED, 3)
    assert f"bundle {bad[:12]} was left out: The bundle" in done.reason
    run(store, tmp_path, at_most=9)
    assert names(store) == {bad, done.name}


def damage(store: DirectoryStore, name: str) -> None:
    [path] = Path(store.location).rglob(f"{name}{SUFFIX}")
    path.write_bytes(path.read_bytes()[:-1] + b"x")


@pytest.mark.parametrize("fault", ["damaged", "gone", "too large here"])
def test_nothing_goes_unless_what_covers_it_can_be_had_whole(store: DirectoryStore, tmp_path: Path, fault: str) -> None:
    publish_many(store, tmp_path)
    old = names(store)
    cover = run(store, tmp_path).name
    limits = LIMITS
    if fault == "damaged":
        damage(store, cover)
    elif fault == "gone":
        store.remove(key(), cover, SUFFIX)
    else:
        limits = Limits(max_raw_bytes=10, reserve_bytes=0)
    done = compact(store, key(), tmp_path / "work", limits, grace_s=0, at_most=9)
    assert done.removed == 0
    assert old <= names(store)
    if fault != "gone":
        assert done.outcome is CompactOutcome.FAILED


def test_notes_that_lead_in_a_circle_count_for_nothing(store: DirectoryStore, tmp_path: Path) -> None:
    """Two compactors with two versions of zstd pack the same files under two names, and cover each other's bundle."""
    one, two, three = (publish(store, tmp_path, {"ab/1": b"%d" % number}) for number in range(3))
    for name, by in ((one, two), (two, one), (three, two)):
        store.write_note(key(), name, COVERED, '{"by": "' + by + '"}')
    assert run(store, tmp_path, at_most=9).removed == 0
    assert names(store) == {one, two, three}


@pytest.mark.parametrize("text", ["", "{", "null", "[]", '{"by": 1}', "[" * 4000, '{"by": "0"}', "\x00"])
def test_a_note_that_is_none_counts_for_nothing(store: DirectoryStore, tmp_path: Path, text: str) -> None:
    name = publish(store, tmp_path, TREE)
    store.write_note(key(), name, COVERED, text)
    assert run(store, tmp_path).removed == 0
    assert names(store) == {name}


def test_a_chain_of_covers_ends_at_the_last(store: DirectoryStore, tmp_path: Path) -> None:
    files = publish_many(store, tmp_path)
    run(store, tmp_path, grace_s=3600)
    files |= {"ab/new": b"new"}
    publish(store, tmp_path, {"ab/new": b"new"})
    last = run(store, tmp_path, grace_s=3600).name
    assert run(store, tmp_path).removed == 6
    assert names(store) == {last}
    assert restored(store, tmp_path) == files


def test_notes_without_their_bundle_go_when_old(store: DirectoryStore, tmp_path: Path) -> None:
    name = publish(store, tmp_path, TREE)
    folder = Path(store.location) / key().environment_digest / key().version_digest
    orphan, fresh = "0" * 64, "1" * 64
    for one, suffix in itertools.product((orphan, fresh, name), (SIGNATURE, COVERED)):
        store.write_note(key(), one, suffix, "x")
        if one != fresh:
            os.utime(folder / f"{one}{suffix}", (time.time() - STALE_S - 60,) * 2)
    run(store, tmp_path)
    assert names(store, SIGNATURE) == names(store, COVERED) == {fresh, name}, "a fresh one may await its bundle"


def test_old_notes_go_before_anything_is_fetched(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publisher that comes back with a removed bundle's name meanwhile would lose its new signature otherwise."""
    publish_many(store, tmp_path)
    run(store, tmp_path)
    store.write_note(key(), "0" * 64, SIGNATURE, "x")
    folder = Path(store.location) / key().environment_digest / key().version_digest
    os.utime(folder / f"{'0' * 64}{SIGNATURE}", (time.time() - STALE_S - 60,) * 2)
    steps: list[str] = []
    for name in ("fetch", "remove"):
        real = getattr(store, name)
        monkeypatch.setattr(store, name, lambda *args, name=name, real=real: steps.append(name) or real(*args))
    run(store, tmp_path)
    assert steps == ["remove", "fetch", *["remove"] * 4]


# --- A crash at any step, and others beside it -----------------------------------------------------------------------


class Dying(DirectoryStore):
    """Dies after a number of changes, each of which happened."""

    def __init__(self, root: Path, changes: int) -> None:
        super().__init__(root)
        self._left = changes

    def _count(self) -> None:
        self._left -= 1
        if self._left <= 0:
            raise KeyboardInterrupt

    def publish(self, key: Key, path: Path, name: str) -> bool:
        done = super().publish(key, path, name)
        self._count()
        return done

    def write_note(self, key: Address, name: str, suffix: str, text: str) -> None:
        super().write_note(key, name, suffix, text)
        self._count()

    def remove(self, key: Address, name: str, suffix: str) -> None:
        super().remove(key, name, suffix)
        self._count()


@pytest.mark.parametrize("changes", range(1, 10))
def test_a_crash_at_any_step_loses_nothing_and_is_made_good(
    store: DirectoryStore, tmp_path: Path, changes: int
) -> None:
    """One publication, four notes, four removals."""
    files = publish_many(store, tmp_path)
    dying = Dying(Path(store.location), changes)

    def crash() -> None:
        for _ in range(3):
            run(dying, tmp_path)

    with pytest.raises(KeyboardInterrupt):
        crash()
    assert restored(store, tmp_path) == files
    for _ in range(2):
        run(store, tmp_path)
    assert len(names(store)) == 1
    assert restored(store, tmp_path) == files


class Paused(DirectoryStore):
    """Stops before one kind of change until it is let go."""

    def __init__(self, root: Path, kind: str) -> None:
        super().__init__(root)
        self._kind, self.reached, self.let_go = kind, threading.Event(), threading.Event()

    def _wait(self, kind: str) -> None:
        if kind == self._kind:
            self.reached.set()
            assert self.let_go.wait(60)

    def publish(self, key: Key, path: Path, name: str) -> bool:
        self._wait("publish")
        return super().publish(key, path, name)

    def write_note(self, key: Address, name: str, suffix: str, text: str) -> None:
        self._wait("note")
        super().write_note(key, name, suffix, text)

    def remove(self, key: Address, name: str, suffix: str) -> None:
        self._wait("remove")
        super().remove(key, name, suffix)

    def fetch(self, key: Address, bundle: BundleInfo, into: Path) -> None:
        self._wait("fetch")
        super().fetch(key, bundle, into)


@pytest.mark.parametrize("kind", ["fetch", "publish", "note", "remove"])
@pytest.mark.parametrize("meanwhile", ["compact", "compact twice", "publish", "publish and compact"])
def test_two_at_once_lose_nothing(store: DirectoryStore, tmp_path: Path, kind: str, meanwhile: str) -> None:
    files = publish_many(store, tmp_path)
    if kind == "remove":
        run(store, tmp_path, grace_s=3600)
    paused = Paused(Path(store.location), kind)
    other = tmp_path / "other"
    other.mkdir()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            compact(paused, key(), other, LIMITS, grace_s=0)
        except BaseException as error:  # noqa: BLE001  reported below
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert paused.reached.wait(60)
    if "publish" in meanwhile:
        publish(store, tmp_path, {"ab/new": b"new"})
        files |= {"ab/new": b"new"}
    for _ in range({"compact": 1, "publish": 0}.get(meanwhile, 2)):
        run(store, tmp_path)
    assert restored(store, tmp_path) == files
    paused.let_go.set()
    thread.join()
    assert failed == []
    assert restored(store, tmp_path) == files
    for _ in range(3):
        run(store, tmp_path)
    assert len(names(store)) == 1
    assert restored(store, tmp_path) == files


def test_a_reader_in_the_middle_lists_again_as_often_as_it_must(store: DirectoryStore, tmp_path: Path) -> None:
    """Twice all it has listed is removed before it fetches."""
    files = publish_many(store, tmp_path)
    listings = itertools.count()

    class Moving(DirectoryStore):
        def bundles(self, key: Address) -> list[BundleInfo]:
            found = super().bundles(key)
            number = next(listings)
            if number < 3:
                files[f"cd/{number}"] = b"new"
                publish(store, tmp_path, {f"cd/{number}": b"new"})
                for _ in range(2):
                    run(store, tmp_path)
            return found

    assert restored(Moving(Path(store.location)), tmp_path) == files
    assert next(listings) == 4


# --- With a secret ---------------------------------------------------------------------------------------------------


def test_what_is_compacted_is_signed_and_unsigned_bundles_stay_out(tmp_path: Path) -> None:
    signed, plain = open_store(str(tmp_path / "store"), SECRET), open_store(str(tmp_path / "store"))
    files = publish_many(signed, tmp_path)
    evil = publish(plain, tmp_path, {"ab/evil": b"e"})
    done = run(signed, tmp_path)
    assert (done.covered, "has no signature" in done.reason) == (4, True)
    run(signed, tmp_path, at_most=9)
    assert names(plain) == {evil, done.name}
    live = tmp_path / "live"
    Cache([signed], None, key(), live, LIMITS).restore(LONG_S)
    assert contents(live) == files


# --- Of itself, at a save --------------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Waits for what saves do after they have answered."""
    monkeypatch.setattr(cache, "COMPACT_ABOVE", 3)

    def wait() -> None:
        for thread in threading.enumerate():
            if thread.name == "warmstart-persist":
                thread.join()

    yield wait
    wait()


def test_a_save_compacts_when_there_are_many(
    store: DirectoryStore, tmp_path: Path, told: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    live = tmp_path / "live"
    one = Cache([store], store, key(), live, LIMITS)
    for number in range(4):
        fill(live, {f"ab/{number}": b"%d" % number})
        assert one.persist(LONG_S).outcome is PersistOutcome.PUBLISHED
        told()
        assert len(names(store, COVERED)) == (4 if number == 3 else 0)
    assert "warmstart: 4 bundles of" in capsys.readouterr().out
    assert restored(store, tmp_path) == contents(live)
    assert one.persist(LONG_S).outcome is PersistOutcome.NOTHING_NEW, "what is new to the store is not new to us"


@pytest.mark.parametrize("name", ["environment.json", "version.json"])
def test_a_save_with_nothing_new_repairs_the_facts(
    store: DirectoryStore, tmp_path: Path, told: Callable[[], None], name: str
) -> None:
    publish(store, tmp_path, TREE)
    [facts] = Path(store.location).rglob(name)
    facts.write_bytes(b"{")
    one = Cache([store], store, key(), tmp_path / "live", LIMITS)
    one.restore(LONG_S)
    assert one.persist(LONG_S).outcome is PersistOutcome.NOTHING_NEW
    told()
    assert [item.facts for item in store.keys()] == [key()]  # noqa: SIM118  a store is no mapping


class Hanging(DirectoryStore):
    """Does not answer a compaction."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.let_go, self.asked = threading.Event(), threading.Semaphore(0)

    def files(self, key: Address) -> list:  # type: ignore[type-arg]
        if threading.current_thread().name == "warmstart-persist":
            self.asked.release()
            assert self.let_go.wait(60)
        return super().files(key)


def test_no_save_waits_for_a_compaction(tmp_path: Path, told: Callable[[], None]) -> None:
    store = Hanging(tmp_path / "store")
    one = Cache([], store, key(), fill(tmp_path / "live", {"ab/1": b"1"}), LIMITS)
    assert one.persist(LONG_S).outcome is PersistOutcome.PUBLISHED
    assert store.asked.acquire(timeout=60)
    fill(tmp_path / "live", {"ab/2": b"2"})
    assert one.persist(LONG_S).outcome is PersistOutcome.PUBLISHED
    store.let_go.set()
    told()
    assert not store.asked.acquire(blocking=False), "one at a time"


def test_a_compaction_that_fails_fails_no_save(
    store: DirectoryStore, tmp_path: Path, told: Callable[[], None], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(store, "files", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    one = Cache([], store, key(), fill(tmp_path / "live", TREE), LIMITS)
    assert one.persist(LONG_S).outcome is PersistOutcome.PUBLISHED
    told()
    assert "were not compacted: OSError, Input/output error" in capsys.readouterr().out


def test_the_deadline_ends_it_between_two_steps(store: DirectoryStore, tmp_path: Path) -> None:
    files = publish_many(store, tmp_path)
    with pytest.raises(LateError):
        run(store, tmp_path, deadline=time.monotonic() - 1)
    assert names(store, COVERED) == set()
    assert restored(store, tmp_path) == files

"""Restore and persist: union, deadlines, and that no trouble with a store reaches the caller or the live directory."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from artifacts import GRAPH, LIMITS, ROOT, TREE, contents, elf, entries, fill, key, named, packed

from warmstart import bundle, cache
from warmstart.bundle import BundleError, Entry, Limits
from warmstart.cache import Cache, Persisted, PersistOutcome, Restored, RestoreOutcome, explain, size
from warmstart.key import Key
from warmstart.store import STALE_S, Address, BundleInfo, DirectoryStore, Store, StoreError, open_store

LONG_S = 300.0  # a deadline that no test meets
SHORT_S = 0.3  # a deadline that a test waits out


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def publish(store: Store, tmp_path: Path, files: dict[str, bytes], of: Key | None = None) -> str:
    number = len(list(tmp_path.glob("made-*")))
    made = packed(fill(tmp_path / f"made-{number}", files), tmp_path / "out")
    store.publish(of or key(), made.path, made.name)
    return made.name


def publish_bytes(store: DirectoryStore, tmp_path: Path, data: bytes) -> str:
    path, name = named(tmp_path / "forged", data)
    store.publish(key(), path, name)
    return name


def restore(*sources: Store, live: Path, deadline_s: float = LONG_S, limits: Limits = LIMITS) -> Restored:
    return Cache(sources, None, key(), live, limits).restore(deadline_s)


def threads_of_restores() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("warmstart-restore")]


# --- Restore ---------------------------------------------------------------------------------------------------------


def test_all_bundles_of_all_sources_are_united(store: DirectoryStore, tmp_path: Path) -> None:
    shipped = DirectoryStore(tmp_path / "shipped")
    publish(shipped, tmp_path, {"ab/1": b"1", "ab/both": b"b"})
    publish(store, tmp_path, {"ab/2": b"2", "ab/both": b"b"})
    publish(store, tmp_path, TREE)
    publish(store, tmp_path, {"ab/other": b"o"}, of=key(dtype="fp32"))
    live = tmp_path / "live"
    done = restore(shipped, store, live=live)
    assert contents(live) == TREE | {"ab/1": b"1", "ab/2": b"2", "ab/both": b"b"}
    assert (done.outcome, done.bundles, done.files, done.skipped) == (RestoreOutcome.RESTORED, 3, len(TREE) + 3, ())
    assert done.bytes == sum(map(len, contents(live).values()))
    assert done.seconds > 0
    assert [path.name for path in live.iterdir() if path.name.startswith(".")] == []


def test_an_empty_store_has_nothing(store: DirectoryStore, tmp_path: Path) -> None:
    done = restore(store, live=tmp_path / "live")
    assert done.outcome is RestoreOutcome.NOTHING
    assert "holds no bundle for this key" in done.reason
    assert store.location in done.reason
    assert restore(live=tmp_path / "live").outcome is RestoreOutcome.NOTHING


def test_a_bundle_in_two_stores_is_restored_once(store: DirectoryStore, tmp_path: Path) -> None:
    other = DirectoryStore(tmp_path / "other")
    assert publish(store, tmp_path, TREE) == publish(other, tmp_path, TREE)
    done = restore(store, other, live=tmp_path / "live")
    assert (done.outcome, done.bundles, done.files) == (RestoreOutcome.RESTORED, 1, len(TREE))


def damage(store: DirectoryStore, name: str) -> Path:
    """Changes one byte of a bundle where it lies."""
    [path] = Path(store.location).rglob(f"{name}.tar.zst")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path


def test_a_damaged_bundle_costs_only_itself(store: DirectoryStore, tmp_path: Path) -> None:
    publish(store, tmp_path, {"ab/good": b"g"})
    bad = publish(store, tmp_path, TREE)
    damage(store, bad)
    forged = publish_bytes(store, tmp_path, b"not a bundle")
    done = restore(store, live=tmp_path / "live")
    assert contents(tmp_path / "live") == {"ab/good": b"g"}
    assert (done.outcome, done.bundles) == (RestoreOutcome.PARTIAL, 1)
    assert len(done.skipped) == 2
    assert all(bad[:12] in line or forged[:12] in line for line in done.skipped)
    assert "not those that were published" in done.reason


def test_only_damaged_bundles_are_a_failure_with_its_reason(store: DirectoryStore, tmp_path: Path) -> None:
    damage(store, publish(store, tmp_path, TREE))
    done = restore(store, live=tmp_path / "live")
    assert done.outcome is RestoreOutcome.FAILED
    assert "not those that were published" in done.reason
    assert contents(tmp_path / "live") == {}


def test_a_damaged_bundle_is_taken_from_the_next_store(store: DirectoryStore, tmp_path: Path) -> None:
    other = DirectoryStore(tmp_path / "other")
    name = publish(store, tmp_path, TREE)
    publish(other, tmp_path, TREE)
    damage(store, name)
    done = restore(store, other, live=tmp_path / "live")
    assert contents(tmp_path / "live") == TREE
    assert (done.outcome, done.bundles) == (RestoreOutcome.RESTORED, 1)


class Compacting(DirectoryStore):
    """Replaces all its bundles by another one between the first listing and the fetches."""

    def __init__(self, root: Path, path: Path, name: str) -> None:
        super().__init__(root)
        self.listings = 0
        self._compact = path, name

    def bundles(self, key: Address) -> list[BundleInfo]:
        self.listings += 1
        found = super().bundles(key)
        if self.listings == 1:
            for old in Path(self.location).rglob("*.tar.zst"):
                old.unlink()
            super().publish(globals()["key"](), *self._compact)
        return found


def test_bundles_that_vanish_into_another_are_found_there(tmp_path: Path) -> None:
    both = packed(fill(tmp_path / "both", {"ab/1": b"1", "ab/2": b"2"}), tmp_path / "out")
    store = Compacting(tmp_path / "store", both.path, both.name)
    publish(store, tmp_path, {"ab/1": b"1"})
    publish(store, tmp_path, {"ab/2": b"2"})
    done = restore(store, live=tmp_path / "live")
    assert contents(tmp_path / "live") == {"ab/1": b"1", "ab/2": b"2"}
    assert (done.outcome, done.bundles, store.listings) == (RestoreOutcome.RESTORED, 1, 2)


class Vanishing(DirectoryStore):
    """A bundle goes into another one while it is read, and that read fails as network file systems fail."""

    def __init__(self, root: Path, union: bundle.Bundle, error: Exception) -> None:
        super().__init__(root)
        self._union, self._error, self.listings = union, error, 0

    def bundles(self, key: Address) -> list[BundleInfo]:
        self.listings += 1
        return super().bundles(key)

    def fetch(self, key: Address, bundle: BundleInfo, into: Path) -> None:
        if bundle.name == self._union.name:
            super().fetch(key, bundle, into)
            return
        into.write_bytes(b"half")
        super().publish(globals()["key"](), self._union.path, self._union.name)
        self.remove(key, bundle.name, ".tar.zst")
        raise self._error


@pytest.mark.parametrize(
    "error", [OSError(116, "Stale file handle"), StoreError("Connection reset."), BundleError("x")]
)
def test_a_bundle_that_goes_while_it_is_read_is_found_in_what_covers_it(tmp_path: Path, error: Exception) -> None:
    both = packed(fill(tmp_path / "both", {"ab/1": b"1", "ab/2": b"2"}), tmp_path / "out")
    store = Vanishing(tmp_path / "store", both, error)
    publish(store, tmp_path, {"ab/1": b"1"})
    done = restore(store, live=tmp_path / "live")
    assert (done.outcome, done.bundles, done.skipped, store.listings) == (RestoreOutcome.RESTORED, 1, (), 2)
    assert contents(tmp_path / "live") == {"ab/1": b"1", "ab/2": b"2"}


def test_a_bundle_that_cannot_be_read_is_fetched_once_and_asked_about_once(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        damage(store, publish(store, tmp_path, {"ab/1": b"%d" % number * 100}))
    calls: list[str] = []
    for name in ("bundles", "fetch"):
        real = getattr(store, name)
        monkeypatch.setattr(store, name, lambda *args, name=name, real=real: calls.append(name) or real(*args))
    assert len(restore(store, live=tmp_path / "live").skipped) == 3
    assert sorted(calls) == ["bundles"] * 2 + ["fetch"] * 3


def test_a_damaged_bundle_is_taken_from_a_store_that_answers_later(store: DirectoryStore, tmp_path: Path) -> None:
    slow = Slow(tmp_path / "slow", "list")
    damage(store, publish(store, tmp_path, TREE))
    publish(slow, tmp_path, TREE)
    real = store.bundles
    asked = threading.Semaphore(0)
    store.bundles = lambda key: asked.release() or real(key)  # type: ignore[method-assign]

    def let_go() -> None:
        for _ in range(2):  # the second listing comes after the damage was seen
            asked.acquire()
        slow.let_go.set()

    helper = threading.Thread(target=let_go)
    helper.start()
    done = restore(store, slow, live=tmp_path / "live")
    helper.join()
    assert (done.outcome, done.bundles, done.skipped) == (RestoreOutcome.RESTORED, 1, ())
    assert contents(tmp_path / "live") == TREE


class Ghosts(DirectoryStore):
    """Lists, for ever, a bundle that is not there, as a stale network file system does."""

    listings = 0

    def bundles(self, key: Address) -> list[BundleInfo]:
        self.listings += 1
        return [*super().bundles(key), BundleInfo("0" * 64, 10)]


def test_a_bundle_that_is_listed_and_never_there_is_told(tmp_path: Path) -> None:
    store = Ghosts(tmp_path / "store")
    publish(store, tmp_path, TREE)
    done = restore(store, live=tmp_path / "live")
    assert (done.outcome, done.bundles, store.listings) == (RestoreOutcome.PARTIAL, 1, 2)
    assert "is listed, but is not there" in done.reason


class Panic(BaseException):
    """What a native library raises that gave up."""


class Broken(DirectoryStore):
    """Fails in every way that a store can."""

    def __init__(self, root: Path, error: BaseException, listing: bool) -> None:
        super().__init__(root)
        self._error, self._listing = error, listing

    def bundles(self, key: Address) -> list[BundleInfo]:
        if self._listing:
            raise self._error
        return super().bundles(key)

    def fetch(self, key: Address, bundle: BundleInfo, into: Path) -> None:
        into.write_bytes(b"half")
        raise self._error

    def publish(self, key: Key, path: Path, name: str) -> bool:
        raise self._error


ERRORS = [OSError(116, "Stale file handle"), ValueError("odd"), RuntimeError(), MemoryError(), Panic("gave up")]


@pytest.mark.parametrize("listing", [True, False])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_a_store_raises_is_a_reason(tmp_path: Path, error: BaseException, listing: bool) -> None:
    store, good = Broken(tmp_path / "store", error, listing), DirectoryStore(tmp_path / "good")
    publish(DirectoryStore(tmp_path / "store"), tmp_path, {"ab/1": b"1"})
    publish(good, tmp_path, {"ab/2": b"2"})
    done = restore(store, good, live=tmp_path / "live")
    assert (done.outcome, done.bundles) == (RestoreOutcome.PARTIAL, 1)
    assert (getattr(error, "strerror", None) or str(error) or type(error).__name__) in done.reason
    assert contents(tmp_path / "live") == {"ab/2": b"2"}
    alone = restore(store, live=tmp_path / "alone")
    assert (alone.outcome, contents(tmp_path / "alone")) == (RestoreOutcome.FAILED, {})
    saved = Cache([], store, key(), tmp_path / "live", LIMITS).persist(LONG_S)
    assert saved.outcome is PersistOutcome.FAILED
    assert contents(tmp_path / "live") == {"ab/2": b"2"}


def test_a_machine_out_of_threads_is_a_reason(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Cache([store], store, key(), fill(tmp_path / "live", TREE), LIMITS)
    with monkeypatch.context() as patch:
        patch.setattr(
            threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("can't start new thread"))
        )
        restored, saved = one.restore(LONG_S), one.persist(LONG_S)
    assert (restored.outcome, saved.outcome) == (RestoreOutcome.FAILED, PersistOutcome.FAILED)
    assert "can't start new thread" in restored.reason
    assert "can't start new thread" in saved.reason
    assert one.persist(LONG_S).outcome is PersistOutcome.PUBLISHED


def test_a_live_directory_that_cannot_be_is_a_reason(store: DirectoryStore, tmp_path: Path) -> None:
    publish(store, tmp_path, TREE)
    (tmp_path / "file").write_bytes(b"f")
    done = restore(store, live=tmp_path / "file/live")
    assert done.outcome is RestoreOutcome.FAILED
    assert "the live directory cannot be written (Not a directory)" in done.reason


def test_too_little_disk_is_a_reason(store: DirectoryStore, tmp_path: Path) -> None:
    publish(store, tmp_path, TREE)
    done = restore(store, live=tmp_path / "live", limits=Limits(reserve_bytes=1 << 60))
    assert done.outcome is RestoreOutcome.FAILED
    assert "are free where" in done.reason
    assert contents(tmp_path / "live") == {}


def test_a_versions_bundles_together_stay_within_the_limits(store: DirectoryStore, tmp_path: Path) -> None:
    for number in range(4):
        publish(store, tmp_path, {f"ab/{number}": os.urandom(1000)})
    limits = Limits(max_raw_bytes=2500, reserve_bytes=0)
    done = restore(store, live=tmp_path / "live", limits=limits)
    assert (done.outcome, done.bundles, len(done.skipped)) == (RestoreOutcome.PARTIAL, 2, 2)
    assert "WARMSTART_MAX_BUNDLE_BYTES" in done.reason
    few = restore(store, live=tmp_path / "few", limits=Limits(max_files=1, reserve_bytes=0))
    assert (few.bundles, len(contents(tmp_path / "few"))) == (1, 1)


def test_a_bundle_listed_as_too_large_is_not_fetched(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_bytes(store, tmp_path, os.urandom(5000))
    monkeypatch.setattr(DirectoryStore, "fetch", lambda *_: pytest.fail("fetched"))
    done = restore(store, live=tmp_path / "live", limits=Limits(max_raw_bytes=4000, reserve_bytes=0))
    assert "it has 5000 bytes, more than the 4000" in done.reason


def test_only_our_own_old_litter_is_removed(store: DirectoryStore, tmp_path: Path) -> None:
    names = (".warmstart-old/0", ".warmstart-new/0", ".strange/0", "ab/old")
    live = fill(tmp_path / "live", dict.fromkeys(names, b"x"))
    old = time.time() - STALE_S - 60
    for path in (live / ".warmstart-old", live / ".strange", live / "ab/old"):
        os.utime(path, (old, old))
    restore(store, live=live)
    assert set(contents(live)) == {".warmstart-new/0", ".strange/0", "ab/old"}


def test_files_that_two_bundles_share_count_once(store: DirectoryStore, tmp_path: Path) -> None:
    """While a compaction waits out its grace, each file is in two bundles."""
    publish(store, tmp_path, {"ab/1": b"1" * 400, "ab/2": b"2" * 400})
    publish(store, tmp_path, {"ab/1": b"1" * 400, "ab/2": b"2" * 400, "ab/3": b"3"})
    limits = Limits(max_files=3, max_raw_bytes=1000, reserve_bytes=0)
    assert restore(store, live=tmp_path / "live", limits=limits).outcome is RestoreOutcome.RESTORED
    one_less = Limits(max_files=2, reserve_bytes=0)
    done = restore(store, live=tmp_path / "less", limits=one_less)
    [line] = done.skipped
    assert "3 files are more than the 2 allowed" in line


def test_a_line_stays_a_line_however_many_were_skipped(store: DirectoryStore, tmp_path: Path) -> None:
    for number in range(6):
        publish(store, tmp_path, {"ab/1": b"%d" % number * 100})
    done = restore(store, live=tmp_path / "live", limits=Limits(max_raw_bytes=10, reserve_bytes=0))
    assert len(done.skipped) == 6
    assert done.reason.endswith("; 3 more were skipped")
    assert done.reason.count("was skipped: it has ") == 3


def test_room_is_asked_for_all_that_is_written_at_once(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has room for either bundle and not for both; while one is fetched, the other is refused."""
    asked, real = threading.Semaphore(0), bundle.check_room

    def check_room(*arguments: object) -> None:
        try:
            real(*arguments)  # type: ignore[arg-type]
        finally:
            asked.release()

    slow = Slow(Path(store.location), "fetched")
    for number in range(2):
        publish(slow, tmp_path, {f"ab/{number}": os.urandom(2000)})
    monkeypatch.setattr(bundle, "check_room", check_room)
    monkeypatch.setattr(bundle.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9999, 0, 3500))

    def let_go() -> None:
        for _ in range(2):
            asked.acquire()
        slow.let_go.set()

    helper = threading.Thread(target=let_go)
    helper.start()
    done = restore(slow, live=tmp_path / "live")
    helper.join()
    assert (done.outcome, done.bundles, len(done.skipped)) == (RestoreOutcome.PARTIAL, 1, 1)
    assert "3500 bytes are free where" in done.reason


# --- Deadlines -------------------------------------------------------------------------------------------------------


class Slow(DirectoryStore):
    """Answers one kind of question only when it is let go."""

    def __init__(self, root: Path, kind: str) -> None:
        super().__init__(root)
        self._kind, self.let_go, self.fetches = kind, threading.Event(), 0

    def _wait(self, kind: str) -> None:
        if kind == self._kind:
            self.let_go.wait()

    def bundles(self, key: Address) -> list[BundleInfo]:
        self._wait("list")
        return super().bundles(key)

    def fetch(self, key: Address, bundle: BundleInfo, into: Path) -> None:
        self.fetches += 1
        self._wait("fetch")
        if self._kind == "fetch":
            # As if it had just been about to write when the directory was removed.
            into.parent.mkdir(parents=True, exist_ok=True)
        super().fetch(key, bundle, into)
        self._wait("fetched")

    def publish(self, key: Key, path: Path, name: str) -> bool:
        self._wait("publish")
        return super().publish(key, path, name)


@pytest.fixture
def expire_after_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the deadline pass with the first bundle that is installed, however fast the machine is."""
    late_s, real_clock, real_install = [0.0], time.monotonic, bundle.install

    def install(*arguments: object) -> None:
        real_install(*arguments)  # type: ignore[arg-type]
        late_s[0] = 2 * LONG_S

    monkeypatch.setattr(bundle, "install", install)
    monkeypatch.setattr(cache.time, "monotonic", lambda: real_clock() + late_s[0])


def test_a_slow_restore_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache, "_PROGRESS_S", 0.01)
    slow = Slow(tmp_path / "slow", "fetch")
    publish(slow, tmp_path, {"ab/slow": b"s"})
    threading.Timer(1, slow.let_go.set).start()
    restore(slow, live=tmp_path / "live")
    said = capsys.readouterr().out
    assert "warmstart: restoring: 0 bundles in place, 0 B fetched of further ones, 1 answer to come" in said


@pytest.mark.usefixtures("expire_after_install")
@pytest.mark.parametrize("kind", ["list", "fetch", "fetched"])
def test_a_store_that_hangs_cannot_touch_the_live_directory_later(tmp_path: Path, kind: str) -> None:
    good, slow = DirectoryStore(tmp_path / "good"), Slow(tmp_path / "slow", kind)
    publish(good, tmp_path, {"ab/good": b"g"})
    for number in range(6):  # more than are fetched at once
        publish(slow, tmp_path, {"ab/slow": b"%d" % number})
    live = tmp_path / "live"
    done = restore(slow, good, live=live)
    at_the_deadline = contents(live)
    slow.let_go.set()
    for thread in threads_of_restores():
        thread.join()
    assert (done.outcome, done.bundles) == (RestoreOutcome.PARTIAL, 1), "the other store counts"
    assert "had not come after 300 s" in done.reason
    assert at_the_deadline == contents(live) == {"ab/good": b"g"}
    assert [path.name for path in live.iterdir()] == ["ab"], "late threads leave no litter"
    assert slow.fetches <= 4, "nothing is asked for after the deadline"


def test_an_answer_after_the_deadline_is_not_installed(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expire_after_install: None
) -> None:
    """Even one that already waits in line."""
    publish(store, tmp_path, {"ab/1": b"1"})
    publish(store, tmp_path, {"ab/2": b"2"})
    expiring = bundle.install

    def install(*arguments: object) -> None:
        for thread in threads_of_restores():
            thread.join()
        expiring(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(bundle, "install", install)
    done = restore(store, live=tmp_path / "live")
    assert (done.outcome, done.bundles) == (RestoreOutcome.PARTIAL, 1)
    assert len(contents(tmp_path / "live")) == 1


def test_without_time_nothing_is_restored(store: DirectoryStore, tmp_path: Path) -> None:
    publish(store, tmp_path, TREE)
    assert restore(store, live=tmp_path / "live", deadline_s=0).outcome is RestoreOutcome.FAILED
    for thread in threads_of_restores():
        thread.join()
    assert contents(tmp_path / "live") == {}


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A server that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        yield f"http://{host}:{port}"


def silent_environment(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
    }  # fmt: skip


SILENT = """
import pathlib, sys
from artifacts import fill, key
from warmstart.cache import Cache
from warmstart.store import open_store
live = fill(pathlib.Path(sys.argv[1]), {"ab/1": b"1"})
store = open_store("s3://bucket/prefix")
cache = Cache([store], store, key(), live)
print(cache.restore(0.3).outcome, cache.persist(0.3).outcome, cache.persist(0.3).reason, sep="|")
"""


def test_a_server_that_never_answers_keeps_nobody(silent_server: str, tmp_path: Path) -> None:
    """Neither the calls nor the end of the process."""
    environment = os.environ | silent_environment(silent_server)
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'unit'}"
    command = [sys.executable, "-c", SILENT, str(tmp_path / "live")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50)
    restored, persisted, again = done.stdout.split("|")
    assert (restored, persisted) == ("RestoreOutcome.FAILED", "PersistOutcome.FAILED"), done.stderr
    assert "an earlier save to s3://bucket/prefix has not ended within 0.3 s" in again
    assert done.returncode == 0


def test_a_save_that_hangs_is_pending_and_ends_by_itself(tmp_path: Path) -> None:
    slow = Slow(tmp_path / "slow", "publish")
    one = Cache([], slow, key(), fill(tmp_path / "live", TREE), LIMITS)
    late = one.persist(SHORT_S)
    assert (late.outcome, "stay pending" in late.reason) == (PersistOutcome.FAILED, True)
    assert "has not ended" in one.persist(SHORT_S).reason, "a second save waits its turn, no longer than it may"
    slow.let_go.set()
    assert one.persist(LONG_S).outcome is PersistOutcome.NOTHING_NEW, "what came late counts"
    assert len(slow.bundles(key())) == 1
    assert set(contents(tmp_path / "live")) == set(TREE)


def test_a_deadline_may_be_as_long_as_a_setting_allows(store: DirectoryStore, tmp_path: Path) -> None:
    one = Cache([store], store, key(), fill(tmp_path / "live", TREE), LIMITS)
    assert one.restore(9e14).outcome is RestoreOutcome.NOTHING
    assert one.persist(9e14).outcome is PersistOutcome.PUBLISHED


# --- Persist ---------------------------------------------------------------------------------------------------------


def test_only_what_no_bundle_has_is_published(store: DirectoryStore, tmp_path: Path) -> None:
    publish(store, tmp_path, TREE)
    live = tmp_path / "live"
    one = Cache([store], store, key(), live, LIMITS)
    one.restore(LONG_S)
    assert one.persist(LONG_S).outcome is PersistOutcome.NOTHING_NEW
    fill(live, {"ab/new": b"new", "ab/so.so": elf(), "ab/half.so": elf()[:100], "locks/x.lock": b"x"})
    done = one.persist(LONG_S)
    assert (done.outcome, done.files, done.bytes) == (PersistOutcome.PUBLISHED, 2, 3 + 4096)
    assert done.name in {item.name for item in store.bundles(key())}
    restore(store, live=tmp_path / "next")
    assert set(contents(tmp_path / "next")) == {*TREE, "ab/new", "ab/so.so"}
    assert one.persist(LONG_S).outcome is PersistOutcome.NOTHING_NEW
    fill(live, {"ab/half.so": elf()})
    assert one.persist(LONG_S).files == 1, "what was being written is published once it is whole"


def test_what_the_platform_put_there_is_published_too(store: DirectoryStore, tmp_path: Path) -> None:
    live = fill(tmp_path / "live", TREE)
    one = Cache([store], store, key(), live, LIMITS)
    assert one.restore(LONG_S).outcome is RestoreOutcome.NOTHING
    assert one.persist(LONG_S).files == len(TREE)


def test_a_changed_file_is_new_and_an_unchanged_one_is_not_read_again(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, tmp_path, TREE)
    live = tmp_path / "live"
    one = Cache([store], store, key(), live, LIMITS)
    one.restore(LONG_S)
    read: list[str] = []
    real = bundle.entry
    monkeypatch.setattr(bundle, "entry", lambda root, path: read.append(path) or real(root, path))
    one.persist(LONG_S)
    assert read == []
    fill(live, {GRAPH: b"tuned better"})
    assert one.persist(LONG_S).files == 1
    assert read == [GRAPH]
    (live / GRAPH).touch()
    assert one.persist(LONG_S).outcome is PersistOutcome.NOTHING_NEW
    assert read == [GRAPH, GRAPH]


def test_a_failed_save_is_made_good_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "store").write_bytes(b"a file where the store should be")
    store = DirectoryStore(tmp_path / "store")
    one = Cache([], store, key(), fill(tmp_path / "live", TREE), LIMITS)
    failed = one.persist(LONG_S)
    assert failed.outcome is PersistOutcome.FAILED
    assert "is a link or a file where a store has a directory" in failed.reason
    assert store.location in failed.reason
    (tmp_path / "store").unlink()
    assert one.persist(LONG_S).files == len(TREE)


def test_without_a_target_nothing_is_saved(tmp_path: Path) -> None:
    done = Cache([], None, key(), fill(tmp_path / "live", TREE), LIMITS).persist(LONG_S)
    assert done == Persisted(PersistOutcome.NO_TARGET, "no store is configured to publish to")


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (Limits(max_raw_bytes=2000, reserve_bytes=0), {"ab/small", "ab/middle"}),
        (Limits(max_file_bytes=600, reserve_bytes=0), {"ab/small"}),
        (Limits(max_files=1, reserve_bytes=0), {"ab/small"}),
    ],
)
def test_what_passes_the_limits_is_named_and_the_rest_is_kept(
    store: DirectoryStore, tmp_path: Path, limits: Limits, kept: set[str]
) -> None:
    live = fill(tmp_path / "live", {"ab/small": b"s", "ab/middle": os.urandom(1000), "ab/large": os.urandom(1500)})
    one = Cache([], store, key(), live, limits)
    done = one.persist(LONG_S)
    assert done.files == len(kept)
    [line] = done.skipped
    assert "the largest ab/large" in line
    assert "WARMSTART_MAX_BUNDLE_BYTES" in line
    again = one.persist(LONG_S)
    assert (again.outcome, again.skipped) == (PersistOutcome.NOTHING_NEW, (line,)), "the limit is the version's"
    restore(store, live=tmp_path / "next", limits=limits)
    assert set(contents(tmp_path / "next")) == kept


def test_saves_at_once_publish_each_file_once(store: DirectoryStore, tmp_path: Path) -> None:
    one = Cache([], store, key(), fill(tmp_path / "live", TREE), LIMITS)
    results: list[Persisted] = []
    savers = [threading.Thread(target=lambda: results.append(one.persist(LONG_S))) for _ in range(6)]
    for saver in savers:
        saver.start()
    for saver in savers:
        saver.join()
    assert sorted(done.outcome.value for done in results) == ["nothing_new"] * 5 + ["published"]
    assert len(store.bundles(key())) == 1


REPLICA = """
import pathlib, sys
from artifacts import LIMITS, fill, key
from warmstart.cache import Cache
from warmstart.store import open_store
store, live, name = open_store(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
cache = Cache([store], store, key(), live, LIMITS)
outcomes = set()
for number in range(15):
    outcomes.add(cache.restore(300).outcome.value)
    fill(live, {f"{name}/{number}": b"%d" % number * 5000, f"both/{number}": b"both%d" % number})
    outcomes.add(cache.persist(300).outcome.value)
sys.stdout.write("\\noutcomes: " + " ".join(outcomes) + "\\n")  # at once, beside a thread that tells of a compaction
"""


@pytest.mark.parametrize("shared", [True, False], ids=["one live directory", "a live directory each"])
def test_two_processes_at_once_lose_nothing(store: DirectoryStore, tmp_path: Path, shared: bool) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'unit'}"}
    replicas = [
        subprocess.Popen(
            [sys.executable, "-c", REPLICA, store.location, str(tmp_path / ("live" if shared else name)), name],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for name in ("a", "b")
    ]  # fmt: skip
    for replica in replicas:
        out, err = replica.communicate(timeout=120)
        [told] = [line for line in out.splitlines() if line.startswith("outcomes: ")]
        outcomes = set(told.split()[1:])
        assert outcomes <= {"nothing", "nothing_new", "published", "restored"}, err
        assert "published" in outcomes, err
    done = restore(store, live=tmp_path / "next")
    assert done.outcome is RestoreOutcome.RESTORED, done.reason
    wanted = {f"{name}/{number}": b"%d" % number * 5000 for name in "ab" for number in range(15)}
    wanted |= {f"both/{number}": b"both%d" % number for number in range(15)}
    assert contents(tmp_path / "next") == wanted


# --- In words --------------------------------------------------------------------------------------------------------


def test_explain_says_hit_and_where(store: DirectoryStore, tmp_path: Path) -> None:
    publish(store, tmp_path, TREE)
    empty = DirectoryStore(tmp_path / "empty")
    assert explain(key(), [empty, store]).startswith(f"Hit: {store.location} holds 1 bundle (")


@pytest.mark.parametrize("size_bytes", [0, 63, -1])
def test_explain_claims_no_hit_that_a_boot_would_not_get(
    store: DirectoryStore, tmp_path: Path, size_bytes: int
) -> None:
    name = publish(store, tmp_path, TREE)
    [path] = Path(store.location).rglob(f"{name}.tar.zst")
    path.write_bytes(path.read_bytes()[:size_bytes])
    text = explain(key(), [store])
    assert text.startswith("Miss: ")
    assert f"In {store.location} bundle {name[:12]} is damaged: " in text
    publish(store, tmp_path, {"ab/1": b"1"})
    text = explain(key(), [store])
    assert text.startswith(f"Hit: {store.location} holds 1 bundle (")
    assert f"bundle {name[:12]} is damaged: " in text


def test_explain_says_that_it_did_not_read_what_is_large(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, tmp_path, TREE)
    assert "not read" not in explain(key(), [store])
    monkeypatch.setattr(cache, "_EXPLAIN_READS_BYTES", 100)
    monkeypatch.setattr(store, "fetch", lambda *_: pytest.fail("fetched"))
    assert explain(key(), [store]).endswith("Their contents were not read; scripts/cache verify does that.")
    [path] = Path(store.location).rglob("*.tar.zst")
    monkeypatch.setattr(cache, "_EXPLAIN_READS_BYTES", -1)
    path.write_bytes(b"")
    assert "is damaged: it has 0 bytes" in explain(key(), [store])


def test_explain_names_the_fact_that_differs_from_the_nearest(store: DirectoryStore, tmp_path: Path) -> None:
    publish(store, tmp_path, TREE, of=key(dtype="fp32", device="cuda", model="other"))
    publish(store, tmp_path, TREE, of=key(dtype="fp32"))
    assert explain(key(), [store]) == (
        f"Miss: no bundle for this key in {store.location}. The nearest stored key differs in its"
        ' version: dtype is "bf16" here, "fp32" there. A boot inherits what still fits.'
    )


def test_explain_of_empty_stores_says_that_they_are(store: DirectoryStore) -> None:
    assert "No other key is stored there either" in explain(key(), [store])
    assert "none is configured" in explain(key(), [])


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB"), (12_345_678, "12.3 MB"), (5 << 40, "5.5e+03 GB")],
)
def test_sizes_are_for_people(count: int, text: str) -> None:
    assert size(count) == text


def test_nothing_here_needs_torch() -> None:
    code = "import sys, warmstart.cache, warmstart.key; print({'torch', 'triton', 'obstore'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_open_store_is_what_a_boot_uses(tmp_path: Path) -> None:
    one = Cache([], open_store(str(tmp_path / "s")), key(), fill(tmp_path / "live", TREE), LIMITS)
    assert one.persist(LONG_S).outcome is PersistOutcome.PUBLISHED
    assert cache.RestoreOutcome.RESTORED is restore(open_store(f"file://{tmp_path}/s"), live=tmp_path / "l").outcome
    assert len(entries(tmp_path / "l")) == len(TREE)


def test_a_save_of_many_files_looks_at_each_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, as seconds depend on the machine: once each file was compared with all others, for half a minute."""
    files, looks, look = 400, 0, Entry.__hash__

    def counted(item: Entry) -> int:
        nonlocal looks
        looks += 1
        return look(item)

    monkeypatch.setattr(Entry, "__hash__", counted)
    fill(tmp_path / "live", {f"ab/c{number}": b"%d" % number for number in range(files)})
    store = open_store(str(tmp_path / "store"))
    saved = Cache([store], store, key(), tmp_path / "live", LIMITS).persist(300)
    assert saved.files == files, saved.reason
    assert looks <= 20 * files

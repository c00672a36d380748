"""Restores and persists one live directory within deadlines; knows stores and bundles, not Inductor or models.

Nothing here raises for trouble with a cache: a boot without one is only slower. Whatever a store does, every call ends
at its deadline, and the live directory is touched by the calling thread alone, so a late answer cannot change it.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import queue
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from warmstart import bundle as bundles
from warmstart import siblings
from warmstart.bundle import TEMPORARY_PREFIX, BundleError, Entry, FileStat, Limits
from warmstart.compaction import CompactOutcome, compact
from warmstart.key import Key, nearest
from warmstart.store import STALE_S, Address, BundleInfo, Store
from warmstart.usage import Reads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

COMPACT_ABOVE = 16
"""A version with more bundles than this, each a request of its own at boot, gets one that holds them all."""

# A restore that says nothing for so long tells how far it is.
_PROGRESS_S = 5.0
_PARALLEL_PER_STORE = 4
_REMOVE_PASSES = 10
_TOLD = 3
_LONGEST_S = threading.TIMEOUT_MAX / 2  # what waits accept


class RestoreOutcome(enum.Enum):
    """What became of a restore."""

    RESTORED = "restored"
    """Every bundle found is in the live directory."""
    PARTIAL = "partial"
    """Some are; `skipped` says why others are not."""
    NOTHING = "nothing"
    """The stores answered and hold nothing for this key."""
    FAILED = "failed"
    """Nothing was restored, and `reason` says what went wrong."""


class PersistOutcome(enum.Enum):
    """What became of a save."""

    PUBLISHED = "published"
    NOTHING_NEW = "nothing_new"
    NO_TARGET = "no_target"
    FAILED = "failed"
    """Nothing was published; the files stay pending for the next call."""


@dataclass(frozen=True)
class Restored:
    """Outcome of a restore, a sentence saying why, and its size in raw bytes."""

    outcome: RestoreOutcome
    reason: str
    bundles: int = 0
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    skipped: tuple[str, ...] = ()
    inherited: str | None = None
    """Digest of the version whose bundles these are, if this one has none of its own."""


@dataclass(frozen=True)
class Persisted:
    """Outcome of a save, a sentence saying why, the bundle's name and its size in raw bytes."""

    outcome: PersistOutcome
    reason: str
    name: str = ""
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    skipped: tuple[str, ...] = ()


class Cache:
    """One live directory, the stores it is filled from, and the one that its new files go to."""

    def __init__(
        self, sources: Sequence[Store], target: Store | None, key: Key, live: Path, limits: Limits | None = None
    ) -> None:
        self._sources = tuple(sources)
        self._target = target
        self._key = key
        self._live = live
        self._limits = limits or Limits()
        self._kept: dict[tuple[str, str], int] = {}  # (path, sha256) -> bytes of what some bundle holds
        self._read: dict[str, tuple[FileStat, Entry]] = {}  # spares hashing a file again while its stat is the same
        self._inherited = Reads(live)
        self._saving = threading.Lock()
        self._compacting = threading.Lock()

    def restore(self, deadline_s: float) -> Restored:
        """Puts the union of all bundles that the sources hold for the key into the live directory.

        If there are none, those of the nearest sibling; of these only what is read from then on is published.
        """
        started = time.monotonic()
        ends = started + min(deadline_s, _LONGEST_S)
        self._key = siblings.standing_in(self._key, self._sources, (started + ends) / 2)
        own, entries = self._take(self._key, ends, deadline_s)
        self._remember(entries)
        self._kept |= {(item.path, item.sha256): item.size_bytes for item in entries}
        result = own if own.bundles or time.monotonic() >= ends else self._inherit(own, ends, deadline_s)
        return replace(result, seconds=time.monotonic() - started)

    def _inherit(self, own: Restored, ends: float, deadline_s: float) -> Restored:
        # Half of what is left, so that a store which hangs leaves time to fetch from the others.
        halfway = (time.monotonic() + ends) / 2
        sibling, unasked = siblings.find(self._key, self._sources, halfway)
        if sibling is None:
            return own
        found, entries = self._take(sibling.key, ends, deadline_s)
        self._remember(entries)
        self._inherited.watch(item.path for item in entries)
        skipped = own.skipped + unasked + found.skipped
        if not found.bundles:
            reason = f"{own.reason}; nor from {sibling}: {found.reason}"
            return replace(own, outcome=RestoreOutcome.FAILED, reason=reason, skipped=skipped)
        reason = f"inherited from {sibling}: {found.reason}"
        if problems := own.skipped + unasked:
            reason = f"{reason}, but {_told(problems)}"
        outcome = RestoreOutcome.PARTIAL if skipped else RestoreOutcome.RESTORED
        inherited = sibling.key.version_digest
        return replace(found, outcome=outcome, reason=reason, skipped=skipped, inherited=inherited)

    def _take(self, key: Key, ends: float, deadline_s: float) -> tuple[Restored, list[Entry]]:
        """Restores one key's bundles, this version's or a sibling's; also returns what was put in place."""
        try:
            self._live.mkdir(parents=True, exist_ok=True, mode=0o700)
            _remove_stale(self._live)
            staging = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=self._live))
        except OSError as error:
            reason = f"the live directory cannot be written ({error.strerror}), so nothing was restored into it"
            return Restored(RestoreOutcome.FAILED, reason), []
        work = _Restore(self._sources, key, self._live, self._limits, staging)
        try:
            work.run(ends)
        finally:
            work.abandon()
        return work.result(deadline_s), work.installed

    def persist(self, deadline_s: float = 60.0) -> Persisted:
        """Publishes the live directory's files that no bundle holds yet; safe from any thread."""
        started = time.monotonic()
        deadline_s = min(deadline_s, _LONGEST_S)
        if self._target is None:
            return Persisted(PersistOutcome.NO_TARGET, "no store is configured to publish to")
        # Packing and publishing run beside the caller: a store that hangs may keep them, but not the caller.
        if not self._saving.acquire(timeout=deadline_s):
            return _late(f"an earlier save to {self._target.location} has not ended", deadline_s, started)
        answer: queue.SimpleQueue[Persisted] = queue.SimpleQueue()
        work = threading.Thread(
            target=self._save, args=(self._target, started, deadline_s, answer), name="warmstart-persist", daemon=True
        )
        try:
            work.start()
        except RuntimeError as error:  # the container's limit of threads
            self._saving.release()
            return Persisted(PersistOutcome.FAILED, f"nothing was published, as {_cause(error)}")
        try:
            return answer.get(timeout=max(0.0, started + deadline_s - time.monotonic()))
        except queue.Empty:
            return _late(f"publishing to {self._target.location} did not end", deadline_s, started)

    def _remember(self, entries: Iterable[Entry]) -> None:
        for item in entries:
            found = bundles.stat_of(self._live, item.path)
            if found is not None and found.size_bytes == item.size_bytes:
                self._read[item.path] = found, item

    def _save(self, target: Store, started: float, deadline_s: float, answer: queue.SimpleQueue[Persisted]) -> None:
        try:
            result = self._publish_new(target, started)
        # The boundary, as in a restore: whatever a store or a disk does here must cost a cache, not a boot.
        except BaseException as error:  # noqa: BLE001
            reason = f"nothing was published to {target.location}: {_cause(error)}; it is tried again next time"
            result = Persisted(PersistOutcome.FAILED, reason, seconds=time.monotonic() - started)
        finally:
            self._saving.release()
        answer.put(result)
        # After the answer, and after the lock is free: neither this save nor the next one waits for it.
        if result.outcome is not PersistOutcome.FAILED:
            self._compact(target, started + deadline_s)

    def _compact(self, target: Store, deadline: float) -> None:
        """Keeps the version's bundles few, if there is time and no other thread is at it; says so if it did."""
        if time.monotonic() > deadline or not self._compacting.acquire(blocking=False):
            return
        try:
            done = compact(target, self._key, self._live, self._limits, at_most=COMPACT_ABOVE, deadline=deadline)
            if done.outcome is not CompactOutcome.NOTHING:
                print(f"warmstart: {done.reason}", flush=True)
        # The boundary, as in a save; what was published stays, and the next save tries again.
        except BaseException as error:  # noqa: BLE001
            print(f"warmstart: the bundles in {target.location} were not compacted: {_cause(error)}", flush=True)
        finally:
            self._compacting.release()

    def _publish_new(self, target: Store, started: float) -> Persisted:
        chosen, skipped = self._choose(self._new_entries())
        if not chosen:
            reason = "every file is in a bundle already" if not skipped else "the new files do not fit the limits"
            seconds = time.monotonic() - started
            return Persisted(PersistOutcome.NOTHING_NEW, reason, seconds=seconds, skipped=skipped)
        # Beside the files: a dot directory that no scan enters, on the disk that held the files anyway.
        with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=self._live, ignore_cleanup_errors=True) as place:
            packed = bundles.pack(self._live, chosen, Path(place), self._limits)
            new = target.publish(self._key, packed.path, packed.name)
        self._kept |= {(item.path, item.sha256): item.size_bytes for item in chosen}
        verb = "published" if new else "found already published"
        reason = f"{verb} {len(chosen)} files ({size(packed.raw_bytes)}) as {packed.name[:12]} in {target.location}"
        seconds = time.monotonic() - started
        outcome = PersistOutcome.PUBLISHED
        return Persisted(outcome, reason, packed.name, len(chosen), packed.raw_bytes, seconds, skipped)

    def _new_entries(self) -> list[Entry]:
        files = bundles.scan(self._live)
        self._read = {path: known for path, known in self._read.items() if path in files}
        for path, found in files.items():
            if path not in self._read or self._read[path][0] != found:
                self._read.pop(path, None)
                # None while a neighbour still writes it: it is new next time.
                if (item := bundles.entry(self._live, path)) is not None:
                    self._read[path] = found, item
        unused = self._inherited.unread()
        return [
            item
            for path, (_, item) in self._read.items()
            if (item.path, item.sha256) not in self._kept and path not in unused
        ]

    def _choose(self, entries: Sequence[Entry]) -> tuple[list[Entry], tuple[str, ...]]:
        """Takes what the limits of a version leave room for, small files first, since graphs are small and many."""
        left_bytes = self._limits.max_raw_bytes - sum(self._kept.values())
        left_files = self._limits.max_files - len(self._kept)
        chosen: list[Entry] = []
        for item in sorted(entries, key=lambda item: (item.size_bytes, item.path)):
            if item.size_bytes <= min(self._limits.max_file_bytes, left_bytes) and left_files:
                chosen.append(item)
                left_bytes -= item.size_bytes
                left_files -= 1
        kept = set(chosen)
        dropped = [item for item in entries if item not in kept]
        return chosen, (_dropped(dropped, self._limits),) if dropped else ()


def explain(key: Key, stores: Sequence[Store]) -> str:
    """Says whether a boot with this key would hit, and if not, what differs from the nearest key that is stored.

    Raises:
        OSError, StoreError: a store cannot be read.
    """
    others: list[Key] = []
    near: list[siblings.Sibling] = []
    refused = ""
    key = siblings.standing_in(key, stores, time.monotonic() + _LONGEST_S)
    for store in stores:
        found, doubt = usable(store, key)
        if doubt:
            refused = f"{refused} Those in {store.location} are refused: {doubt}."
        if found:
            total_bytes = sum(item.size_bytes for item in found)
            return f"Hit: {store.location} holds {_count(len(found), 'bundle')} ({size(total_bytes)}) for this key."
        held = store.keys()
        others += [item.facts for item in held if item.facts not in (None, key) and item.bundles]
        near += siblings.nearest(key, store, held)
    places = ", ".join(store.location for store in stores) or "any store, since none is configured"
    miss = f"Miss: no bundle for this key in {places}.{refused}"
    if sibling := siblings.best(near):
        differs = f"The nearest stored key differs in its version: {sibling.difference}."
        return f"{miss} {differs} A boot inherits what still fits."
    if (best := nearest(key, others)) is None:
        return f"{miss} No other key is stored there either, so the first boot is cold and fills it."
    return f"{miss} The nearest stored key differs in its {best[1]}."


def usable(store: Store, key: Address) -> tuple[list[BundleInfo], str]:
    """The bundles of a key that a boot would fetch, and why it would not fetch others, "" if there are none.

    Raises:
        OSError, StoreError: the store cannot be read.
    """
    doubts = {item: store.doubt(key, item.name) for item in store.bundles(key)}
    return [item for item, doubt in doubts.items() if not doubt], next(filter(None, doubts.values()), "")


def size(count_bytes: int) -> str:
    """Writes a number of bytes for people."""
    if count_bytes < 1000:
        return f"{count_bytes} B"
    value, unit = count_bytes / 1000, "kB"
    for larger in ("MB", "GB"):
        if value >= 999.5:
            value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


@dataclass(frozen=True)
class _Listed:
    source: int
    found: list[BundleInfo]


@dataclass(frozen=True)
class _Staged:
    source: int
    name: str
    folder: Path
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class _Failed:
    source: int
    name: str  # "" for a listing
    cause: str
    gone: bool


_Event = _Listed | _Staged | _Failed


@dataclass
class _Restore:
    """One restore: threads list, fetch and verify into a staging directory; the caller alone installs."""

    sources: Sequence[Store]
    key: Key
    live: Path
    limits: Limits
    staging: Path
    installed: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._slots = [threading.BoundedSemaphore(_PARALLEL_PER_STORE) for _ in self.sources]
        self._abandoned = threading.Event()
        self._numbers = itertools.count()
        self._running = 0
        self._elsewhere: dict[str, list[tuple[int, BundleInfo]]] = {}  # name -> other sources that have it
        self._listed: dict[int, set[str]] = {}
        self._missing: set[tuple[int, str]] = set()
        self._relisting: dict[int, bool] = {}  # source -> whether the listing under way is too old already
        self._done: set[str] = set()
        self._room = threading.Lock()
        self._claimed: dict[Path, int] = {}  # staging directory -> bytes that are about to be written there
        self._skipped: list[str] = []
        self._expired = False

    def run(self, deadline: float) -> None:
        for source in range(len(self.sources)):
            self._list(source)
        while self._running:
            left_s = deadline - time.monotonic()
            try:
                event = self._events.get(timeout=max(0.0, min(left_s, _PROGRESS_S)))
            except queue.Empty:
                if left_s > _PROGRESS_S:
                    self._tell_progress()
                    continue
                self._expired = True
                return
            # An answer that comes with the deadline is late: nothing is installed after it.
            if left_s <= 0:
                self._expired = True
                return
            self._running -= 1
            self._handle(event)

    def _tell_progress(self) -> None:
        fetched_bytes = 0
        for path in self.staging.rglob("*"):
            # A thread may just have moved on from it.
            with contextlib.suppress(OSError):
                fetched_bytes += path.stat().st_size if path.is_file() else 0
        print(
            f"warmstart: restoring: {_count(len(self._done), 'bundle')} in place, {size(fetched_bytes)} fetched of"
            f" further ones, {_count(self._running, 'answer')} to come",
            flush=True,
        )

    def abandon(self) -> None:
        """Tells threads that still wait for a store to end without a trace, and removes what they staged."""
        self._abandoned.set()
        _remove(self.staging)

    def result(self, deadline_s: float) -> Restored:
        skipped = list(self._skipped)
        if self._expired:
            skipped.append(f"{_count(self._running, 'answer')} had not come after {deadline_s:g} s")
        places = ", ".join(store.location for store in self.sources) or "no store"
        total_bytes = sum(item.size_bytes for item in self.installed)
        if not self._done:
            outcome = RestoreOutcome.FAILED if skipped else RestoreOutcome.NOTHING
            reason = f"nothing was restored from {places}: {_told(skipped) or 'it holds no bundle for this key'}"
            return Restored(outcome, reason, skipped=tuple(skipped))
        reason = f"{_count(len(self._done), 'bundle')} ({size(total_bytes)}) from {places}"
        if skipped:
            reason = f"{reason}, but {_told(skipped)}"
        outcome = RestoreOutcome.PARTIAL if skipped else RestoreOutcome.RESTORED
        counts = len(self._done), len(self.installed), total_bytes
        return Restored(outcome, reason, *counts, skipped=tuple(skipped))

    def _start(self, source: int, name: str, job: Callable[[], _Event]) -> None:
        self._running += 1
        # Daemons: a thread that hangs in a store must not keep the process from ending.
        work = threading.Thread(
            target=self._work, args=(source, name, job), name=f"warmstart-restore-{source}", daemon=True
        )
        try:
            work.start()
        except RuntimeError as error:  # the container's limit of threads
            self._events.put(_Failed(source, name, _cause(error), gone=False))

    def _list(self, source: int) -> None:
        self._start(source, "", lambda: _Listed(source, self.sources[source].bundles(self.key)))

    def _work(self, source: int, name: str, job: Callable[[], _Event]) -> None:
        with self._slots[source]:
            if self._abandoned.is_set():
                return
            try:
                event = job()
            # The boundary: whatever a store or a bundle does here must cost a cache, not a boot. A panic of the object
            # store's client is no Exception, and an answer must come in any case.
            except BaseException as error:  # noqa: BLE001
                event = _Failed(source, name, _cause(error), isinstance(error, FileNotFoundError))
        self._events.put(event)
        if self._abandoned.is_set():
            # It may have written after the caller removed the directory.
            _remove(self.staging)

    def _handle(self, event: _Event) -> None:
        if isinstance(event, _Listed):
            # The race: a bundle that was missed after this listing was asked for may still be in it. A later one tells.
            missing = any((event.source, found.name) in self._missing for found in event.found)
            if self._relisting.pop(event.source, False) and missing:
                self._relist(event.source)
                return
            self._listed[event.source] = {found.name for found in event.found}
            for found in event.found:
                self._consider(event.source, found)
        elif isinstance(event, _Staged):
            self._install(event)
        else:
            self._failed(event)

    def _consider(self, source: int, found: BundleInfo) -> None:
        if found.name in self._done:
            return
        if found.name in self._elsewhere:
            self._elsewhere[found.name].append((source, found))
            return
        self._elsewhere[found.name] = []
        self._fetch(source, found)

    def _fetch(self, source: int, found: BundleInfo) -> None:
        self._start(source, found.name, lambda: self._stage(source, found))

    def _stage(self, source: int, found: BundleInfo) -> _Event:
        if found.size_bytes > self.limits.max_raw_bytes:
            raise BundleError(
                f"it has {found.size_bytes} bytes, more than the {self.limits.max_raw_bytes} of"
                " WARMSTART_MAX_BUNDLE_BYTES"
            )
        folder = self.staging / str(next(self._numbers))
        folder.mkdir()
        path = folder / "bundle"
        try:
            self._claim(folder, found.size_bytes, self.limits)
            self.sources[source].fetch(self.key, found, path)
            entries = bundles.stage(path, found.name, folder, self.limits, self._claim)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # the others may need the room
            raise
        finally:
            with self._room:
                self._claimed.pop(folder, None)  # what was written is on the disk's own account now
        path.unlink()
        return _Staged(source, found.name, folder, entries)

    def _claim(self, folder: Path, size_bytes: int, limits: Limits) -> None:
        """Asks for room beside what others are about to write: each alone might fit, and all together not."""
        with self._room:
            others_bytes = sum(claimed for other, claimed in self._claimed.items() if other != folder)
            bundles.check_room(folder, others_bytes + size_bytes, limits)
            self._claimed[folder] = size_bytes

    def _install(self, staged: _Staged) -> None:
        try:
            self._check_total(staged.entries)
            bundles.install(staged.entries, staged.folder, self.live)
        except (OSError, BundleError) as error:
            self._skip(staged.source, staged.name, _cause(error))
        else:
            self._done.add(staged.name)
            known = set(self.installed)
            self.installed += [item for item in staged.entries if item not in known]
        finally:
            shutil.rmtree(staged.folder, ignore_errors=True)

    def _check_total(self, entries: Sequence[Entry]) -> None:
        together = {*self.installed, *entries}
        total_bytes = sum(item.size_bytes for item in together)
        if total_bytes > self.limits.max_raw_bytes or len(together) > self.limits.max_files:
            raise BundleError(
                f"with it the version's bundles pass {size(self.limits.max_raw_bytes)} (WARMSTART_MAX_BUNDLE_BYTES) or"
                f" {self.limits.max_files} files"
            )

    def _failed(self, event: _Failed) -> None:
        if others := self._elsewhere.get(event.name):
            self._fetch(*others.pop(0))
        elif event.name and event.gone:
            self._gone(event)
        else:
            self._skip(event.source, event.name, event.cause)

    def _gone(self, event: _Failed) -> None:
        """A compaction may remove what was just listed; its files are then in a bundle that a new listing names.

        That one may go too before it is fetched. Each bundle has one more listing, so this ends.
        """
        del self._elsewhere[event.name]
        if event.name not in self._listed[event.source]:
            return  # a later listing, without it, has come already
        if (event.source, event.name) in self._missing:
            self._skip(event.source, event.name, "it is listed, but is not there")
            return
        self._missing.add((event.source, event.name))
        if event.source in self._relisting:
            self._relisting[event.source] = True
        else:
            self._relist(event.source)

    def _relist(self, source: int) -> None:
        self._relisting[source] = False
        self._list(source)

    def _skip(self, source: int, name: str, cause: str) -> None:
        what = f"bundle {name[:12]} of " if name else ""
        self._skipped.append(f"{what}{self.sources[source].location} was skipped: {cause}")


def _late(what: str, deadline_s: float, started: float) -> Persisted:
    reason = f"{what} within {deadline_s:g} s; the files stay pending and are published by the next save"
    return Persisted(PersistOutcome.FAILED, reason, seconds=time.monotonic() - started)


def _cause(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{type(error).__name__}, {error.strerror}"
    return str(error).rstrip(".") or type(error).__name__


def _told(skipped: Sequence[str]) -> str:
    """Some of many reasons, as one line; a full disk or a missing secret is every bundle's."""
    rest = [f"{len(skipped) - _TOLD} more were skipped"] if len(skipped) > _TOLD else []
    return "; ".join([*skipped[:_TOLD], *rest])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _dropped(entries: Sequence[Entry], limits: Limits) -> str:
    total_bytes = sum(item.size_bytes for item in entries)
    largest = max(entries, key=lambda item: item.size_bytes)
    return (
        f"{_count(len(entries), 'file')} ({size(total_bytes)}, the largest {largest.path}) were not kept: a version's"
        f" bundles are limited to {size(limits.max_raw_bytes)} in {limits.max_files} files of at most"
        f" {size(limits.max_file_bytes)}; raise WARMSTART_MAX_BUNDLE_BYTES to keep them"
    )


def _remove(folder: Path) -> None:
    """Removes a directory that threads may still write into: what one adds during a pass goes with the next.

    Once the directory itself is gone, they can add nothing more.
    """
    for _ in range(_REMOVE_PASSES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return


def _remove_stale(live: Path) -> None:
    """Removes our own temporary directories of processes that died; nothing else here is ours to delete."""
    oldest = time.time() - STALE_S
    for path in live.glob(f"{TEMPORARY_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime < oldest:
                shutil.rmtree(path)

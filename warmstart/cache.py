"""Restores and persists one live directory within deadlines; knows stores and bundles, not Inductor or models.

Nothing here raises for trouble with a cache: a boot without one is only slower. Whatever a store does, every call ends
at its deadline, and the live directory is touched by the calling thread alone, so a late answer cannot change it.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import hashlib
import itertools
import queue
import shutil
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmstart import bundle as bundles
from warmstart import siblings
from warmstart.bundle import TEMPORARY_PREFIX, BundleError, Entry, FileStat, Limits
from warmstart.compaction import CompactOutcome, compact
from warmstart.key import Key, nearest
from warmstart.report import say
from warmstart.store import BROKEN, STALE_S, Address, BundleInfo, Store
from warmstart.usage import Reads

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence, Set

COMPACT_ABOVE = 16
"""A version with more bundles than this, each a request of its own at boot, gets one that holds them all."""

# A restore that says nothing for so long tells how far it is.
_PROGRESS_S = 5.0
_PARALLEL_PER_STORE = 4
_REMOVE_PASSES = 10
_TOLD = 3
_LONGEST_S = threading.TIMEOUT_MAX / 2  # what waits accept
_EXPLAIN_READS_BYTES = 16_000_000
# An index and one file, packed by zstd, are a few hundred bytes.
_LEAST_BUNDLE_BYTES = 64
_BROKEN = "a boot noted that its files break the compile"


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

    def row(self) -> dict[str, Any]:
        """As the report has it."""
        return asdict(self) | {"outcome": self.outcome.value}


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

    def row(self) -> dict[str, Any]:
        """As the report has it."""
        return asdict(self) | {"outcome": self.outcome.value}


class Cache:
    """One live directory, the stores it is filled from, and the one that its new files go to."""

    def __init__(
        self,
        sources: Sequence[Store],
        target: Store | None,
        key: Key,
        live: Path,
        limits: Limits | None = None,
        on_read: Callable[[Sequence[Entry]], None] | None = None,
    ) -> None:
        """As the attributes say; `on_read` is told at each save which files there are, and with which digests."""
        self._sources = tuple(sources)
        self._target = target
        self._key = key
        self._live = live
        self._limits = limits or Limits()
        self._kept: dict[tuple[str, str], int] = {}  # (path, sha256) -> bytes of what some bundle holds
        self._read: dict[str, tuple[FileStat, Entry]] = {}  # spares hashing a file again while its stat is the same
        self._on_read = on_read
        self._inherited = Reads(live)
        self._used: frozenset[str] = frozenset()  # names of the version's own bundles that were restored
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

    def _take(
        self, key: Key, ends: float, deadline_s: float, avoid: Set[str] = frozenset()
    ) -> tuple[Restored, list[Entry]]:
        """Restores one key's bundles, this version's or a sibling's; also returns what was put in place."""
        try:
            self._live.mkdir(parents=True, exist_ok=True, mode=0o700)
            _remove_stale(self._live)
            staging = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=self._live))
        except OSError as error:
            reason = f"the live directory cannot be written ({error.strerror}), so nothing was restored into it"
            return Restored(RestoreOutcome.FAILED, reason), []
        work = _Restore(self._sources, key, self._live, self._limits, staging, broken={*avoid})
        try:
            work.run(ends)
        finally:
            work.abandon()
        if key == self._key:
            self._used = frozenset(work.used)
        # Installed before another store's list came that notes it as broken: what other bundles have goes over it, and
        # what they lack is not published again.
        if work.used & work.broken - avoid and time.monotonic() < ends:
            self._kept |= {(item.path, item.sha256): item.size_bytes for item in work.installed}
            return self._take(key, ends, deadline_s, work.broken)
        return work.result(deadline_s), work.installed

    def condemn(self, better: Collection[str], why: str, deadline_s: float) -> str:
        """Notes on the version's bundles that were restored here that their files break the compile.

        A note costs the others one cold boot at most, so it is written only where there is something better, and a
        save that makes the very same bundle again removes it. Every reader believes it, signed or not: whoever can
        write it could as well delete the bundle.

        Args:
            better: names of the bundles that were published instead; one of them that was restored is not broken.
            why: what the compile said.
            deadline_s: how long to wait for the store.

        Returns:
            What was done, in words; "" for nothing.
        """
        target, names = self._target, sorted(self._used.difference(better))
        if target is None or not better or not names:
            return ""
        told = [f"bundles of {target.location} could not be noted as broken within {deadline_s:g} s"]
        text = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC: {why}\n"

        def work() -> None:
            try:
                for name in names:
                    target.write_note(self._key, name, BROKEN, text)
                told[0] = f"{_count(len(names), 'bundle')}, {names[0][:12]} for one, noted as broken; not used again"
            # The boundary, as in a save: without the note the next boot finds out again.
            except BaseException as error:  # noqa: BLE001
                told[0] = f"bundles of {target.location} could not be noted as broken: {_cause(error)}"

        thread = threading.Thread(target=work, name="warmstart-condemn", daemon=True)
        with contextlib.suppress(RuntimeError):  # the container's limit of threads
            thread.start()
            thread.join(min(deadline_s, _LONGEST_S))
        return told[0]

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

    def know(self, entries: Iterable[Entry]) -> None:
        """Takes the word for files that lie there already, which spares reading them at the first save."""
        self._remember(entries)

    @property
    def entries(self) -> list[Entry]:
        """The files that were restored, or read by a save."""
        return [item for _, item in list(self._read.values())]

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
                say(f"warmstart: {done.reason}")
        # The boundary, as in a save; what was published stays, and the next save tries again.
        except BaseException as error:  # noqa: BLE001
            say(f"warmstart: the bundles in {target.location} were not compacted: {_cause(error)}")
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
            if not new:
                # The same bytes again: they are not broken, the machine was where they broke.
                target.remove(self._key, packed.name, BROKEN)
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
        if self._on_read is not None:
            self._on_read(self.entries)
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

    Contents are read where all that a store holds for the key is small; otherwise the text says that they were not.

    Raises:
        OSError, StoreError: a store cannot be read.
    """
    near: list[siblings.Sibling] = []
    refused = ""
    key = siblings.standing_in(key, stores, time.monotonic() + _LONGEST_S)
    for store in stores:
        found, doubt = usable(store, key)
        if doubt:
            refused = f"{refused} Those in {store.location} are refused: {doubt}."
        whole, damages, were_read = _whole(store, key, found)
        if damages:
            refused = f"{refused} In {store.location} {_told(damages)}."
        if whole:
            held = f"{_count(len(whole), 'bundle')} ({size(sum(item.size_bytes for item in whole))})"
            unread = "" if were_read else " Their contents were not read; scripts/cache verify does that."
            return f"Hit: {store.location} holds {held} for this key.{refused}{unread}"
        near += siblings.nearest(key, store, store.keys(key.environment_digest))
    places = ", ".join(store.location for store in stores) or "any store, since none is configured"
    miss = f"Miss: no bundle for this key in {places}.{refused}"
    if sibling := siblings.best(near):
        differs = f"The nearest stored key differs in its version: {sibling.difference}."
        return f"{miss} {differs} A boot inherits what still fits."
    stored = [item for store in stores for item in store.keys()]  # noqa: SIM118  a store is no mapping
    others = [item.facts for item in stored if item.facts not in (None, key) and item.bundles]
    if (best := nearest(key, others)) is None:
        return f"{miss} No other key is stored there either, so the first boot is cold and fills it."
    return f"{miss} The nearest stored key differs in its {best[1]}."


def _whole(store: Store, key: Key, found: Sequence[BundleInfo]) -> tuple[list[BundleInfo], list[str], bool]:
    """Says which bundles look whole, what is wrong with the others, and whether all were read and not only listed."""
    are_read = sum(item.size_bytes for item in found) <= _EXPLAIN_READS_BYTES
    whole: list[BundleInfo] = []
    damages: list[str] = []
    with tempfile.TemporaryDirectory(prefix="warmstart-explain-", ignore_cleanup_errors=True) as place:
        for item in found:
            if item.size_bytes < _LEAST_BUNDLE_BYTES:
                damages.append(
                    f"bundle {item.name[:12]} is damaged: it has {item.size_bytes} bytes, as if it were cut short"
                )
            elif are_read and (damage := _damage(store, key, item, Path(place) / "bundle")):
                damages.append(f"bundle {item.name[:12]} {damage}")
            else:
                whole.append(item)
    return whole, damages, are_read


def _damage(store: Store, key: Key, item: BundleInfo, into: Path) -> str:
    try:
        store.fetch(key, item, into)
    except PermissionError as error:
        return f"cannot be read: {error.strerror}"
    except FileNotFoundError:
        return "was removed meanwhile"
    except BundleError as error:
        return f"is refused: {error}"
    with into.open("rb") as file:
        is_whole = hashlib.file_digest(file, "sha256").hexdigest() == item.name
    return "" if is_whole else "is damaged: its bytes are not those that were published"


def usable(store: Store, key: Address) -> tuple[list[BundleInfo], str]:
    """The bundles of a key that a boot would fetch, and why it would not fetch others, "" if there are none.

    Raises:
        OSError, StoreError: the store cannot be read.
    """
    doubts = {item: _BROKEN if item.broken else store.doubt(key, item.name) for item in store.bundles(key)}
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
    broken: set[str] = field(default_factory=set)  # names that some source notes as broken

    def __post_init__(self) -> None:
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._slots = [threading.BoundedSemaphore(_PARALLEL_PER_STORE) for _ in self.sources]
        self._abandoned = threading.Event()
        self._numbers = itertools.count()
        self._running: Counter[int] = Counter()  # source -> answers to come
        self._elsewhere: dict[str, list[tuple[int, BundleInfo]]] = {}  # name -> other sources that have it
        self._failures: dict[tuple[int, str], _Failed] = {}  # what its source is still to be asked about
        self._missed: set[tuple[int, str]] = set()
        self._given_up: set[tuple[int, str]] = set()
        self._done: set[str] = set()
        self._room = threading.Lock()
        self._claimed: dict[Path, int] = {}  # staging directory -> bytes that are about to be written there
        self._skipped: list[tuple[str, str]] = []  # name, "" for a listing, and why
        self._expired = False

    def run(self, deadline: float) -> None:
        for source in range(len(self.sources)):
            self._list(source)
        while self._running.total():
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
            self._running[event.source] -= 1
            self._handle(event)
            self._list_again(event.source)

    def _tell_progress(self) -> None:
        fetched_bytes = 0
        for path in self.staging.rglob("*"):
            # A thread may just have moved on from it.
            with contextlib.suppress(OSError):
                fetched_bytes += path.stat().st_size if path.is_file() else 0
        say(
            f"warmstart: restoring: {_count(len(self._done), 'bundle')} in place, {size(fetched_bytes)} fetched of"
            f" further ones, {_count(self._running.total(), 'answer')} to come"
        )

    def abandon(self) -> None:
        """Tells threads that still wait for a store to end without a trace, and removes what they staged."""
        self._abandoned.set()
        _remove(self.staging)

    @property
    def used(self) -> set[str]:
        """Names of the bundles that are in place."""
        return self._done

    def result(self, deadline_s: float) -> Restored:
        for failed in self._failures.values():
            self._give_up(failed)  # too late to ask
        # What one store had damaged may have come whole from a slower one.
        skipped = [line for name, line in self._skipped if name not in self._done]
        if self._expired:
            skipped.append(f"{_count(self._running.total(), 'answer')} had not come after {deadline_s:g} s")
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
        self._running[source] += 1
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
            self.broken |= {found.name for found in event.found if found.broken}
            self._settle(event)
            for found in event.found:
                self._consider(event.source, found)
        elif isinstance(event, _Staged):
            self._install(event)
        else:
            self._failed(event)

    def _consider(self, source: int, found: BundleInfo) -> None:
        if found.name in self._done or (source, found.name) in self._given_up:
            return
        if found.name in self.broken:
            self._skip(source, found.name, _BROKEN)
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
        if others := self._elsewhere.pop(event.name, None):
            self._elsewhere[event.name] = others
            self._fetch(*others.pop(0))
        elif (event.source, event.name) in self._missed:
            self._give_up(event)
        elif event.name:
            self._failures[event.source, event.name] = event
        else:
            self._skip(event.source, "", event.cause)
            for failed in self._failures_of(event.source):
                self._give_up(failed)

    def _list_again(self, source: int) -> None:
        """Asks a store anew once it has answered everything, if something could not be fetched.

        A compaction may remove what was just listed, also while it is read, which fails in any way. Its files are in
        a bundle that the new listing names. That one may go too, but each is asked about once, so this ends.
        """
        # Not before: a listing that is asked for after the last failure cannot be older than what was missed.
        if not self._running[source] and self._failures_of(source):
            self._list(source)

    def _failures_of(self, source: int) -> list[_Failed]:
        return [failed for failed in self._failures.values() if failed.source == source]

    def _settle(self, listed: _Listed) -> None:
        """Decides by a new listing about what failed: what it no longer names is in another bundle."""
        names = {found.name for found in listed.found}
        for failed in self._failures_of(listed.source):
            place = failed.source, failed.name
            if failed.name in names and failed.gone:
                self._missed.add(place)
                del self._failures[place]  # it came back, or the first listing was stale: fetched once more
            elif failed.name in names:
                self._give_up(failed)
            else:
                del self._failures[place]

    def _give_up(self, failed: _Failed) -> None:
        place = failed.source, failed.name
        self._failures = {other: kept for other, kept in self._failures.items() if other != place}
        self._given_up.add(place)
        self._skip(*place, "it is listed, but is not there" if failed.gone else failed.cause)

    def _skip(self, source: int, name: str, cause: str) -> None:
        what = f"bundle {name[:12]} of " if name else ""
        self._skipped.append((name, f"{what}{self.sources[source].location} was skipped: {cause}"))


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

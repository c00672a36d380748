"""Packs a version's many bundles into one, and later removes those; knows stores and bundles, not boots.

Nothing is locked and nothing is changed in place, so any number of processes may do this at once, beside others that
publish and restore, and may die at any step:

1. The union of the bundles is published as one more bundle. Until then, nothing has happened.
2. Each bundle of the union gets a note: covered by which other one, since when. Whoever restores ignores notes.
3. A later call removes a bundle whose note is older than the grace period, after it has fetched and verified the
   bundle that covers it. A reader that had listed the removed one lists again.

A bundle never changes, so a note that is true once stays true. One that names a bundle which is gone is ignored.

A listing need be neither a snapshot nor the latest: one that misses a bundle which is there makes another union or
leaves a bundle for the next call, and one that is older than the grace period is what no store gives. Without grace a
reader could miss a bundle and what covers it; `Store.files` lists again while it sees signs of that.
"""

from __future__ import annotations

import enum
import json
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from warmstart import bundle as bundles
from warmstart.bundle import SUFFIX, TEMPORARY_PREFIX, BundleError, Entry, Limits
from warmstart.store import BROKEN, COVERED, STALE_S, Address, BundleInfo, Store, StoredFile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from warmstart.key import Key

GRACE_S = 3600.0
"""How long a covered bundle stays, so that a reader that has listed it need not list again."""


class CompactOutcome(enum.Enum):
    """What became of a compaction."""

    COMPACTED = "compacted"
    NOTHING = "nothing"
    FAILED = "failed"
    """Some of it was not done; all that was there is there still, or in the bundle that covers it."""


@dataclass(frozen=True)
class Compacted:
    """Outcome of a compaction, a sentence saying why, the new bundle, and how many it covers and how many went."""

    outcome: CompactOutcome
    reason: str
    name: str = ""
    covered: int = 0
    removed: int = 0
    skipped: tuple[str, ...] = ()


class LateError(Exception):
    """The deadline came; what was done so far stays."""


def compact(
    store: Store,
    key: Key,
    place: Path,
    limits: Limits,
    *,
    at_most: int = 1,
    grace_s: float = GRACE_S,
    deadline: float | None = None,
) -> Compacted:
    """Makes one bundle of a version's many, and removes those that an earlier call covered.

    Args:
        store: where the bundles are.
        key: the version.
        place: directory to work in, on a disk with room for the version's files.
        limits: bounds on what is fetched and on the bundle that is made.
        at_most: so many bundles that nothing covers are left alone.
        grace_s: how long a covered bundle stays.
        deadline: the monotonic time after which no step is begun.

    Raises:
        OSError, StoreError, BundleError, LateError: a step failed or came too late; no file is lost.
    """
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=place, ignore_cleanup_errors=True) as work:
        job = _Compaction(store, key, Path(work), limits, grace_s, deadline)
        if job.files:
            store.write_facts(key)  # whoever saves comes by here, also if nothing is new
        removed = job.sweep()
        open_ones = uncovered(job.files, job.notes)
        if len(open_ones) > at_most:
            return job.unite(open_ones, removed)
        return job.settled(len(open_ones), removed)


def uncovered(files: Sequence[StoredFile], notes: Mapping[str, str]) -> list[StoredFile]:
    """The bundles whose files no other listed bundle is noted to hold, oldest first; those noted as broken are none.

    Args:
        files: what the store lists.
        notes: of bundles with a note, which bundle covers it.
    """
    listed = _listed(files)
    found = [file for name, file in listed.items() if _cover_of(name, listed, notes) is None]
    return sorted(found, key=lambda file: (file.modified_s, file.name))


def covers(store: Store, key: Address, files: Sequence[StoredFile]) -> dict[str, str]:
    """Reads the notes: of each covered bundle, which one covers it."""
    noted = ((file.name, _read_note(store, key, file)) for file in files if file.suffix == COVERED)
    return {name: note for name, note in noted if note is not None}


@dataclass
class _Compaction:
    """One call, step by step."""

    store: Store
    key: Key
    work: Path
    limits: Limits
    grace_s: float
    deadline: float | None
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.files = self.store.files(self.key)
        self.notes = covers(self.store, self.key, self.files)

    # --- what was covered goes -------------------------------------------------------------------------------------

    def sweep(self) -> int:
        """Removes what has been covered for long, and notes that have lost their bundle; returns how many bundles."""
        listed = {file.name: file for file in self.files if file.suffix == SUFFIX}
        # First, before anything is fetched: a publisher may come back with a bundle of such a name.
        for file in self.files:
            # Old ones only: a signature without its bundle may be one whose bundle is about to come.
            if file.suffix != SUFFIX and file.name not in listed and self._is_older(file, STALE_S):
                self.store.remove(self.key, file.name, file.suffix)
        whole = _listed(self.files)
        goes: dict[str, list[str]] = {}
        for file in self.files:
            cover = _cover_of(file.name, whole, self.notes) if file.name in whole else None
            if file.suffix == COVERED and cover is not None and self._is_older(file, self.grace_s):
                goes.setdefault(cover, []).append(file.name)
        removed = {name for cover, names in goes.items() for name in self._remove(listed[cover], names)}
        self.files = [file for file in self.files if file.name not in removed]
        return len(removed)

    def _remove(self, cover: StoredFile, names: Sequence[str]) -> Sequence[str]:
        """Removes bundles, if what covers them can be had whole: a note alone is no reason to lose files."""
        whole = self._fetch(cover, staging := self.work / "cover") is not None
        shutil.rmtree(staging, ignore_errors=True)
        if not whole:
            return ()
        for name in names:
            self._check_time()
            # Not its notes. They go when old, so that no reader finds the bundle and not its signature.
            self.store.remove(self.key, name, SUFFIX)
        return names

    def _is_older(self, file: StoredFile, age_s: float) -> bool:
        return file.modified_s <= time.time() - age_s

    def settled(self, open_ones: int, removed: int) -> Compacted:
        """Returns what there is to say if nothing needs to be united."""
        if self.skipped:
            reason = f"covered bundles were kept in {self.store.location}: {'; '.join(self.skipped)}"
            return Compacted(CompactOutcome.FAILED, reason, removed=removed, skipped=tuple(self.skipped))
        reason = f"there is no need: {open_ones} of the bundles in {self.store.location} are in no other"
        if removed:
            reason = f"{reason}; {removed} that are were removed"
        return Compacted(CompactOutcome.NOTHING, reason, removed=removed)

    # --- many become one -------------------------------------------------------------------------------------------

    def unite(self, open_ones: Sequence[StoredFile], removed: int) -> Compacted:
        """Publishes the union of bundles, and notes on each that it is covered."""
        union: dict[str, Entry] = {}
        united: list[str] = []
        root = self.work / "union"
        root.mkdir()
        # From old to new: of two bundles with one path, what was published last counts.
        for number, file in enumerate(open_ones):
            entries = self._fetch(file, staging := self.work / str(number))
            if entries is not None and self._fits(file, union, entries):
                bundles.install(entries, staging, root)
                union |= {item.path: item for item in entries}
                united.append(file.name)
            shutil.rmtree(staging, ignore_errors=True)
        if len(united) < 2:
            outcome = CompactOutcome.FAILED if self.skipped else CompactOutcome.NOTHING
            reason = f"nothing was united in {self.store.location}: {'; '.join(self.skipped) or 'others are at it'}"
            return Compacted(outcome, reason, removed=removed, skipped=tuple(self.skipped))
        return self._publish(root, union, united, removed)

    def _publish(self, root: Path, union: Mapping[str, Entry], united: Sequence[str], removed: int) -> Compacted:
        self._check_time()
        packed = bundles.pack(root, list(union.values()), self.work, self.limits)
        self.store.publish(self.key, packed.path, packed.name)
        others = [name for name in united if name != packed.name]
        for name in others:
            self._check_time()
            self.store.write_note(self.key, name, COVERED, json.dumps({"by": packed.name}) + "\n")
        reason = (
            f"{len(united)} bundles of {self.store.location} are now in one, {packed.name[:12]} with {len(union)}"
            f" files; the old ones go after {self.grace_s:g} s"
        )
        if self.skipped:
            reason = f"{reason}; {'; '.join(self.skipped)}"
        return Compacted(CompactOutcome.COMPACTED, reason, packed.name, len(others), removed, tuple(self.skipped))

    def _fits(self, file: StoredFile, union: Mapping[str, Entry], entries: Sequence[Entry]) -> bool:
        together = {**union, **{item.path: item for item in entries}}.values()
        raw_bytes = sum(item.size_bytes for item in together)
        if raw_bytes <= self.limits.max_raw_bytes and len(together) <= self.limits.max_files:
            return True
        self.skipped.append(
            f"bundle {file.name[:12]} was left out: with it one bundle would pass {self.limits.max_raw_bytes} bytes"
            f" (WARMSTART_MAX_BUNDLE_BYTES) or {self.limits.max_files} files"
        )
        return False

    def _fetch(self, file: StoredFile, staging: Path) -> tuple[Entry, ...] | None:
        """Fetches and verifies a bundle; None if it is gone or not to be used."""
        self._check_time()
        staging.mkdir(exist_ok=True)
        path = self.work / "bundle"
        try:
            bundles.check_room(self.work, file.size_bytes, self.limits)
            self.store.fetch(self.key, BundleInfo(file.name, file.size_bytes), path)
            return bundles.stage(path, file.name, staging, self.limits)
        except FileNotFoundError:
            return None  # another compaction was faster
        except BundleError as error:
            self.skipped.append(f"bundle {file.name[:12]} was left out: {error}")
            return None
        finally:
            path.unlink(missing_ok=True)

    def _check_time(self) -> None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise LateError("the deadline came before the bundles were packed into one")


def _listed(files: Sequence[StoredFile]) -> dict[str, StoredFile]:
    """The bundles that a boot would use, by name; what a broken one covers is not covered."""
    broken = {file.name for file in files if file.suffix == BROKEN}
    return {file.name: file for file in files if file.suffix == SUFFIX and file.name not in broken}


def _cover_of(name: str, listed: Mapping[str, StoredFile], notes: Mapping[str, str]) -> str | None:
    """Follows notes to a listed bundle that has none itself; None where they lead nowhere or in a circle.

    Two versions of zstd pack the same files under two names. Two compactors could so cover each other's bundle; without
    an end to the circle both would go.
    """
    seen = {name}
    while (cover := notes.get(name)) is not None:
        if cover in seen or cover not in listed:
            return None
        seen.add(cover)
        name = cover
    return name if len(seen) > 1 else None


def _read_note(store: Store, key: Address, file: StoredFile) -> str | None:
    try:
        value = json.loads(store.note(key, file.name, COVERED) or "null")
    except (ValueError, RecursionError):
        return None
    by = value.get("by") if isinstance(value, dict) else None
    return by if isinstance(by, str) else None

"""What a person does to stores: remove old versions, copy bundles between two, sign anew; knows stores, not boots."""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from warmstart import bundle as bundles
from warmstart.bundle import SUFFIX, BundleError, Limits
from warmstart.compaction import covers, uncovered
from warmstart.store import BROKEN, BundleInfo, SignedStore, Store, StoredFile, StoredKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from warmstart.key import Key

NO_FACTS = (
    "its key's facts are missing or not those of its digests; the next boot of that version that may write to the store"
    " puts them back, otherwise prune it"
)

_DAY_S = 86_400


@dataclass(frozen=True)
class Version:
    """A stored version, the files it has, and when something was last published to it."""

    stored: StoredKey
    files: tuple[StoredFile, ...]

    @property
    def size_bytes(self) -> int:
        """Of its bundles and their notes."""
        return sum(file.size_bytes for file in self.files)

    @property
    def published_s(self) -> float:
        """When its last bundle came, as seconds since 1970; 0 if it has none."""
        return max((file.modified_s for file in self.files if file.suffix == SUFFIX), default=0.0)


@dataclass(frozen=True)
class Rules:
    """Which versions go; one that any rule names does.

    Attributes:
        older_than_days: nothing was published to it for so long.
        keep: it is not among so many that were published to last.
        max_bytes: it is the oldest, while all together are larger.
    """

    older_than_days: float | None = None
    keep: int | None = None
    max_bytes: int | None = None


@dataclass
class Copied:
    """What a copy did: bundles by name with their size, and a line for each that was left behind."""

    done: list[BundleInfo] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def versions(store: Store) -> list[Version]:
    """Lists all versions of a store, last published first.

    Raises:
        OSError, StoreError: the store cannot be read.
    """
    held = store.keys()
    found = [Version(stored, tuple(store.files(stored))) for stored in held]
    return sorted(found, key=lambda item: (-item.published_s, item.stored.environment_digest, _digest(item)))


def outdated(found: Sequence[Version], rules: Rules, *, spare: Key | None, now_s: float | None = None) -> list[Version]:
    """Chooses the versions that the rules name, oldest first.

    Args:
        found: all versions, last published first.
        rules: what names them.
        spare: this version stays whatever the rules say. It counts in them all the same.
        now_s: the time since 1970, if it is not now.
    """
    now_s = time.time() if now_s is None else now_s
    total_bytes = sum(item.size_bytes for item in found)
    chosen: list[Version] = []
    for rank, item in reversed(list(enumerate(found))):
        old = rules.older_than_days is not None and item.published_s < now_s - rules.older_than_days * _DAY_S
        beyond = rules.keep is not None and rank >= rules.keep
        large = rules.max_bytes is not None and total_bytes > rules.max_bytes
        if (old or beyond or large) and not _is(item.stored, spare):
            chosen.append(item)
            total_bytes -= item.size_bytes
    return chosen


def remove(store: Store, version: Version) -> None:
    """Removes a version, bundles first, so that one that is cut short leaves nothing that looks whole.

    Raises:
        OSError, StoreError: not all of it could be removed.
    """
    for file in sorted(version.files, key=lambda file: file.suffix != SUFFIX):
        store.remove(version.stored, file.name, file.suffix)
    store.remove_facts(version.stored)


def broken(version: Version) -> list[BundleInfo]:
    """The bundles of a version that are noted as broken."""
    return [item for item in version.stored.bundles if item.broken]


def remove_broken(store: Store, version: Version) -> None:
    """Removes bundles that are noted as broken; the note goes last, so that one cut short is still passed over.

    Raises:
        OSError, StoreError: not all of them could be removed.
    """
    names = {item.name for item in broken(version)}
    for file in sorted(version.files, key=lambda file: (file.suffix == BROKEN, file.suffix != SUFFIX)):
        if file.name in names:
            store.remove(version.stored, file.name, file.suffix)


def copy(source: Store, target: Store, tell: Callable[[str], None], *, only: Key | None = None) -> Copied:
    """Copies each bundle that the target lacks, after it was verified here; the target's secret signs it.

    Bundles that another one holds already are not copied.

    Args:
        source: where bundles are.
        target: where they are to be.
        tell: is given a line for people about each bundle.
        only: the key to copy; all keys without. Its facts stand in for those that the source has lost.

    Raises:
        OSError, StoreError: a store cannot be read or written; what was copied stays.
    """
    copied = Copied()
    held = source.keys()
    for stored in held:
        if only is not None and not _is(stored, only):
            continue
        missing = list(_missing(source, target, stored))
        facts = stored.facts or only
        if facts is None:
            copied.skipped += [f"bundle {item.name[:12]} of {_digest_pair(stored)}: {NO_FACTS}" for item in missing]
            continue
        for number, item in enumerate(missing, 1):
            tell(f"{number} of {len(missing)} bundles of {_digest_pair(stored)}: {item.name[:12]}")
            if reason := _copy_one(source, target, facts, item):
                copied.skipped.append(f"bundle {item.name[:12]} of {source.location}: {reason}")
            else:
                copied.done.append(item)
    return copied


def sign_anew(store: Store, key: Key) -> int:
    """Signs with the first secret what only the second one signed; returns how many bundles that were.

    Raises:
        OSError, StoreError: the store cannot be read or written.
    """
    if not isinstance(store, SignedStore):
        return 0
    old = [item for item in store.bundles(key) if not store.is_current(key, item.name)]
    return sum(not _copy_one(store, store, key, item) for item in old)


def _missing(source: Store, target: Store, stored: StoredKey) -> Iterator[BundleInfo]:
    files = source.files(stored)
    there = set(target.bundles(stored))
    for file in uncovered(files, covers(source, stored, files)):
        item = BundleInfo(file.name, file.size_bytes)
        # One that is there without a signature that the target's secret accepts is as good as missing.
        if item not in there or target.doubt(stored, item.name):
            yield item


def _copy_one(source: Store, target: Store, key: Key, item: BundleInfo) -> str:
    """Copies one bundle; says why not, "" if it was."""
    place = Path(tempfile.mkdtemp(prefix="warmstart-copy-"))
    limits = Limits(max_raw_bytes=2**63, max_file_bytes=2**63)
    try:
        bundles.check_room(place, item.size_bytes, limits)
        try:
            source.fetch(key, item, place / "bundle")
        except FileNotFoundError:
            return "it was removed meanwhile"
        except PermissionError as error:
            return f"it cannot be read: {error}"
        # Whole, not only its name: a bundle that no boot would take is not worth its bytes.
        (place / "files").mkdir()
        bundles.stage(place / "bundle", item.name, place / "files", limits)
        target.publish(key, place / "bundle", item.name)
    except BundleError as error:
        return str(error)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return ""


def _is(stored: StoredKey, key: Key | None) -> bool:
    return key is not None and (stored.environment_digest, stored.version_digest) == (
        key.environment_digest,
        key.version_digest,
    )


def _digest(version: Version) -> str:
    return version.stored.version_digest


def _digest_pair(stored: StoredKey) -> str:
    return f"{stored.environment_digest[:12]}/{stored.version_digest[:12]}"

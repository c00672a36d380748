"""Whether the files that earlier boots left in a live directory can be used; knows digests, not what the files are for.

Torch verifies nothing that it finds. A flipped bit in a library runs as wrong code or ends the process, and ends the
next one too. So a directory that was set from outside, which may outlive a boot, gets three kinds of dot file:

- a record: of each file that a boot ran with, its digest. What is not as recorded is removed; it is made anew.
- a mark for each boot that is warming up, locked while its process lives. One without a lock is of a boot that died.
  What no record proves may be why: what that boot made is removed, and beside what others put there nothing is run.
- a lock, held by every process that uses the directory. Only one that is alone removes anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from warmstart import bundle
from warmstart.bundle import TEMPORARY_PREFIX, BundleError, Entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

RECORD = f"{TEMPORARY_PREFIX}files.json"
MARK = f"{TEMPORARY_PREFIX}booting-"
_LOCK = f"{TEMPORARY_PREFIX}lock"
_MAX_RECORD_BYTES = 64 << 20
_ALL = os.R_OK | os.W_OK | os.X_OK


class UnfitError(Exception):
    """The directory is not to be used by this boot; the text says why."""


class Leftover:
    """A live directory that may hold files of earlier boots; made before anything is restored into it.

    Attributes:
        entries: the files that are as a boot recorded them.
        findings: what was removed and why, for the report.
    """

    def __init__(self, root: Path) -> None:
        """Looks through the directory, and removes what is damaged if no other process uses it.

        Raises:
            UnfitError: something in it must not be used and may not be removed.
            OSError: it cannot be read or written.
        """
        self.entries: list[Entry] = []
        self.findings: list[str] = []
        self._root = root
        self._mark: tuple[Path, int] | None = None
        self._writing = threading.Lock()
        self._lock = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            self._alone = _try_lock(self._lock)
            self._look_through()
        except BaseException:
            os.close(self._lock)
            raise
        # Kept for as long as the process lives. Not atomic: another may look through meanwhile, as nothing is loaded.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_SH)

    @property
    def was_empty(self) -> bool:
        """Whether there was nothing that a compile may find."""
        return not self.entries and not self._theirs

    # --- at the start ------------------------------------------------------------------------------------------------

    def _look_through(self) -> None:
        recorded = _read_record(self._root)
        dead = list(self._dead_marks())
        if self._alone:
            for stale in self._root.glob(f"{TEMPORARY_PREFIX}*.tmp"):  # a record or a mark whose writer was killed
                stale.unlink(missing_ok=True)
        self._remove(self._unusable(), "links to nowhere, or locks that cannot be opened")
        changed = []
        for path, item in (recorded or {}).items():
            if bundle.is_whole(self._root, item):
                self.entries.append(item)
            elif os.path.lexists(self._root / path):
                changed.append(path)
        self._remove(changed, "not as the boot that used them last recorded them: a damaged disk, or another's work")
        unproved = set(bundle.scan(self._root)) - {item.path for item in self.entries}
        if recorded is None:
            # Whatever damaged it was at work here, and nothing is left to compare with.
            self._remove(unproved, f"without proof, as the record of digests, {RECORD}, is damaged")
            _remove(self._root / RECORD)
            unproved = set()
        elif dead:
            self._distrust(unproved, dead)
            unproved = set()
        self._theirs = unproved

    def _dead_marks(self) -> Iterator[tuple[Path, frozenset[str] | None]]:
        """Marks of boots that died in their warm-up, each with the unproved files that it began with."""
        for path in self._root.glob(f"{MARK}*"):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            with os.fdopen(descriptor, "rb") as file:
                # Not by its number: those of another container, or of before, mean other processes here. Shared, so
                # that two which look at once both see that its own process is gone.
                if _try_lock(descriptor, fcntl.LOCK_SH):
                    yield path, _parse_mark(file.read(_MAX_RECORD_BYTES))

    def _distrust(self, unproved: set[str], dead: list[tuple[Path, frozenset[str] | None]]) -> None:
        theirs = {path for path in unproved if any(began is None or path in began for _, began in dead)}
        if theirs:
            raise UnfitError(
                f"a boot died in its warm-up in {self._root}, where {len(theirs)} files lie that no boot has proved,"
                f" {min(theirs)} for one"
            )
        self._remove(unproved, "made by a boot that died in its warm-up")
        for path, _ in dead:
            path.unlink(missing_ok=True)

    def _unusable(self) -> list[str]:
        """What stops every compile that meets it: locks that cannot be opened, links to nowhere."""
        found = []
        for folder, folders, files in os.walk(self._root):
            for path in (Path(folder, name) for name in [*folders, *files]):
                if _stops_torch(path):
                    found.append(str(path.relative_to(self._root)))
                elif path.name in folders and not path.is_symlink() and not os.access(path, _ALL):
                    # Nothing in it is lost. Somebody else's cannot be changed, and ends in the error.
                    path.chmod(0o700)
        return found

    def _remove(self, paths: Iterable[str], why: str) -> None:
        paths = sorted(paths)
        if not paths:
            return
        what = f"{len(paths)} files in {self._root} are {why}; {paths[0]} for one"
        if not self._alone:
            raise UnfitError(f"{what}. They were left, as other processes use the directory")
        for path in paths:
            try:
                _remove(self._root / path)
            except OSError as error:
                raise UnfitError(f"{what}. They cannot be removed: {error.strerror}") from error
        self.findings.append(f"{what}. They were removed, and are restored or built anew")

    # --- during the boot ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Marks that compiled code is about to run for the first time."""
        self.give_up()  # the mark of an attempt before
        # A full disk costs the mark: then a boot that dies is not noticed.
        with contextlib.suppress(OSError):
            descriptor, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, suffix=".tmp", dir=self._root)
            # The race: renamed when it is locked, so that nobody takes it for a dead one's.
            _try_lock(descriptor)
            os.write(descriptor, json.dumps(sorted(self._theirs)).encode())
            os.fsync(descriptor)
            path = self._root / f"{MARK}{uuid.uuid4().hex}"
            Path(name).rename(path)
            self._mark = path, descriptor

    def record(self, entries: Iterable[Entry]) -> None:
        """Adds files to the record, once a save has read them; safe from any thread.

        Files of others, which nothing has proved yet, are left out until the boot has ended.
        """
        lines = {item.path: item for item in entries if item.path not in self._theirs}
        with self._writing, contextlib.suppress(OSError):
            # The race: two processes that write at once; what one of them adds is missing until its next save, and
            # what is missing is trusted as any file that others put here.
            _write_record(self._root, {**(_read_record(self._root) or {}), **lines})

    def end(self, entries: Iterable[Entry]) -> None:
        """Records all files there are, those of others too: the boot ended well with them.

        Args:
            entries: those that were read already, which spares reading them again.
        """
        known = {item.path: item for item in (*self.entries, *entries)}
        found = [known.get(path) or bundle.entry(self._root, path) for path in bundle.scan(self._root)]
        self._theirs = set()
        self.record(item for item in found if item is not None)
        self.give_up()

    def give_up(self) -> None:
        """Removes the mark; nothing is known about the files."""
        if self._mark is not None:
            with contextlib.suppress(OSError):
                self._mark[0].unlink()
            os.close(self._mark[1])
            self._mark = None

    def condemn(self) -> None:
        """Ends with the files found guilty: they broke a compile that went well without them.

        Files of others stay, and so does the mark, which keeps later boots from them.
        """
        with contextlib.suppress(OSError):
            if _try_lock(self._lock):
                for path in set(bundle.scan(self._root)) - self._theirs:
                    _remove(self._root / path)
                fcntl.flock(self._lock, fcntl.LOCK_SH)
                if not self._theirs:
                    self.give_up()
        if self._mark is not None:
            os.close(self._mark[1])
            self._mark = None


def _try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Whether nobody else stands in the way; on a file system without locks nobody could be seen."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _stops_torch(path: Path) -> bool:
    if path.is_symlink() and not os.path.exists(path):  # noqa: PTH110  Path.exists raises where links form a circle
        return True
    return path.suffix == ".lock" and (path.is_dir() or not os.access(path, os.R_OK | os.W_OK))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _parse_mark(raw: bytes) -> frozenset[str] | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return frozenset(map(str, value)) if isinstance(value, list) else None


def _write_record(root: Path, lines: dict[str, Entry]) -> None:
    index = bundle.to_index([lines[path] for path in sorted(lines)])
    descriptor, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, suffix=".tmp", dir=root)  # for the owner alone
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(index).hexdigest().encode() + b"\n" + index)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(root / RECORD)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _read_record(root: Path) -> dict[str, Entry] | None:
    """The record by path; empty if there is none, None if it is damaged."""
    try:
        descriptor = os.open(root / RECORD, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            digest, _, index = file.read(_MAX_RECORD_BYTES).partition(b"\n")
        entries = bundle.parse_index(index)
    except FileNotFoundError:
        return {}
    except (OSError, BundleError):
        return None
    if hashlib.sha256(index).hexdigest().encode() != digest or any(bundle.refusal(item.path) for item in entries):
        return None
    return {item.path: item for item in entries}

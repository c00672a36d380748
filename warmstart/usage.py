"""Which of a directory's files have been read; knows access times of file systems, not what the files are for."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from warmstart.bundle import TEMPORARY_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable

# Long past: under the usual mount option `relatime` a read is noted only if the last one lies before the last change.
_NEVER_READ_NS = 1_000_000_000


class Reads:
    """Notices which files are read once they are watched, whoever reads them.

    Torch does not tell which libraries it loads, some only in processes of their own; the file system notes them all.
    What is used together counts as one: see `_unit`. Where reads are not noted (mount option `noatime`, somebody
    else's file) a file counts as read, so the answer errs to one side only.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._watched: dict[str, tuple[int, int, int]] = {}

    def watch(self, paths: Iterable[str]) -> None:
        """Begins to watch files, given relative to the root; what was read earlier is forgotten."""
        if not _notes_reads(self._root):
            return
        watched: dict[str, tuple[int, int, int]] = {}
        for path in paths:
            # Not ours to mark, or gone: it counts as read.
            with contextlib.suppress(OSError):
                mtime_ns = (self._root / path).stat().st_mtime_ns
                os.utime(self._root / path, ns=(_NEVER_READ_NS, mtime_ns))
                watched[path] = _state(self._root / path)
        # In one step, since a save may ask from another thread.
        self._watched = watched

    def unread(self) -> frozenset[str]:
        """The watched files that are as they were and of whose unit nobody has read any."""
        units: defaultdict[str, list[bool]] = defaultdict(list)
        watched = self._watched
        for path, state in watched.items():
            units[_unit(path)].append(self._is(path, state))
        return frozenset(path for path in watched if all(units[_unit(path)]))

    def _is(self, path: str, state: tuple[int, int, int]) -> bool:
        try:
            return _state(self._root / path) == state
        except OSError:
            return False


def _unit(path: str) -> str:
    """Names what is used together: a source and the library made of it, or all files of one graph or GPU kernel.

    A source is only looked for, never read, where its library exists; without it the next boot would write it anew. The
    former lie in folders of the root that others share, and differ in their suffix; the latter in one of their own.
    """
    folder, _, name = path.rpartition("/")
    return folder if "/" in folder else f"{folder}/{name.partition('.')[0]}"


def _state(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_atime_ns


def _notes_reads(folder: Path) -> bool:
    """Tries it out, since no mount table says it for every kind of file system."""
    try:
        with tempfile.NamedTemporaryFile(prefix=TEMPORARY_PREFIX, dir=folder) as file:
            path = Path(file.name)
            path.write_bytes(b"0")
            os.utime(path, ns=(_NEVER_READ_NS, path.stat().st_mtime_ns))
            path.read_bytes()
            return path.stat().st_atime_ns != _NEVER_READ_NS
    except OSError:
        return False

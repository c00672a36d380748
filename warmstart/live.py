"""Where compiled code lives while the process runs: a directory that can hold it; not what is in it, and no torch."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

# A place with less room than this would fill up in the first compile: the default model's code takes 3 MB.
_ROOM_BYTES = 4 << 20
# As long as the longest path that torch makes below the live directory, so that a place too deep is seen at once.
_LONGEST = 180


@dataclass(frozen=True)
class LiveDirectory:
    """Where Inductor reads and writes while this process runs."""

    path: Path
    reason: str
    """Why this place, in words."""
    lock: int | None = None
    """Descriptor of the shared lock that tells neighbours the directory is in use; None where it is not ours."""


def prepare(preset: str, name: str) -> tuple[LiveDirectory | None, list[str]]:
    """Chooses the live directory and puts it into the environment; to be called before torch is imported.

    Args:
        preset: a directory that the platform or the user has set. It is only ever added to, since it may hold what
            the platform restored. Empty for one of our own.
        name: names our own directory; equal for equal keys, so that processes of one image share it.

    Returns:
        The first place that can hold code, None if there is none, and of each place before it why it cannot.
    """
    bases = _bases()
    places: list[tuple[str, Callable[[], LiveDirectory]]] = [(preset, lambda: _preset(preset))] if preset else []
    places += [(str(base), lambda base=base: _own(base, name)) for base in bases]  # type: ignore[misc]
    live, refused = _first(places)
    # A dot directory in the live one is passed over by everything that saves.
    _ensure_temporary([*bases, *([live.path / ".temporary"] if live else [])])
    if live is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(live.path)
        # Triton then writes into a directory inside the live one, where it is saved along.
        os.environ.pop("TRITON_CACHE_DIR", None)
    else:
        do_without(preset)
    return live, refused


def do_without(preset: str) -> None:
    """Lets torch be imported by a process that compiles nothing, where it could not even make a directory.

    Torch 2.13 makes its cache directory, in the temporary one if none is set, while Dynamo is imported, which diffusers
    does; where that fails the import does. To be taken out when torch makes it at the first use.
    """
    temporary = _ensure_temporary(_bases())
    with contextlib.suppress(OSError):
        if preset:
            Path(preset).mkdir(parents=True, exist_ok=True, mode=0o700)
        if preset or temporary:
            return
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/"  # it is there, and nothing will be written


def headers_in(live: Path) -> Path:
    """Names a directory inside a live one for what only this process uses while it builds; gone when the process ends.

    A killed process leaves it. It has the name of our temporary ones, which later boots remove from there.
    """
    path = live / f".warmstart-headers-{secrets.token_hex(8)}"
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def set_aside(live: LiveDirectory, name: str) -> tuple[LiveDirectory | None, list[str]]:
    """Leaves a live directory in which the compile breaks for a new, empty one; returns the same as `prepare`."""

    def new(base: Path) -> LiveDirectory:
        path = _temporary(base, f"warmstart-{name}-retry-")
        _probe(path)
        return LiveDirectory(path, f"in place of {live.path}, where the compile broke")

    fresh, refused = _first([(str(base), lambda base=base: new(base)) for base in _bases()])  # type: ignore[misc]
    if fresh is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(fresh.path)
        # Torch 2.13 sets it to a place in the first directory that it compiled in (`triton_heuristics`).
        os.environ.pop("TRITON_CACHE_DIR", None)
    return fresh, refused


def _first(places: Iterable[tuple[str, Callable[[], LiveDirectory]]]) -> tuple[LiveDirectory | None, list[str]]:
    refused: list[str] = []
    for place, make in places:
        try:
            return make(), refused
        except OSError as error:
            refused.append(f"{_short(place)} ({error.strerror or error})")
    return None, refused


def _bases() -> list[Path]:
    """Directories in which one of our own is tried, in order.

    First the temporary one, in which nobody expects anything to last. A hardened container often has a `noexec` tmpfs
    there (Docker's --tmpfs makes one), and then /var/tmp or the user's cache directory, on another mount. Then
    /dev/shm, which is memory, and writable where the root is read-only. Never the working directory, which is the
    project.
    """
    found: list[Path] = []
    # Raised where neither TMPDIR nor /tmp, /var/tmp or the working directory can be written.
    with contextlib.suppress(FileNotFoundError):
        found.append(Path(tempfile.gettempdir()).absolute())
    found += [Path("/tmp"), Path("/var/tmp")]  # noqa: S108  what is made there is the owner's alone
    # Raised for a user without a passwd entry and without HOME.
    with contextlib.suppress(RuntimeError):
        found.append(Path.home().absolute() / ".cache")
    return list(dict.fromkeys([*found, Path("/dev/shm")]))  # noqa: S108  as above


def _ensure_temporary(folders: Iterable[Path]) -> bool:
    """Gives a process without a temporary directory one, and says whether it can be written.

    Torch, g++ and predictions write there, and torch asks for its name while it is imported.
    """
    with contextlib.suppress(FileNotFoundError):
        return os.access(tempfile.gettempdir(), os.W_OK)
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"0")
            tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
            return True
    tempfile.tempdir = "/tmp"  # noqa: S108  a name only: who writes there learns that it cannot be
    return False


def _preset(preset: str) -> LiveDirectory:
    path = Path(preset).absolute()
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    _probe(path)
    for folder, _, _ in os.walk(path):
        # Torch would fail in there in the middle of a compile, or keep nothing and not say so.
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            owner = Path(folder).stat().st_uid
            raise OSError(
                errno.EACCES, f"its {Path(folder).relative_to(path)} belongs to user {owner}, not to this one"
            )
    return LiveDirectory(path, "set from outside")


def _own(base: Path, name: str) -> LiveDirectory:
    """A directory at a fixed place, empty for a process alone in it and shared with processes beside it."""
    root = base / f"warmstart-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700, parents=True)
    if not _is_ours(root):
        # Somebody else made it first: code in there would be theirs, and loading it would run it.
        root = _temporary(base, f"warmstart-{os.getuid()}-")
    _probe(root)
    path = root / name
    lock = os.open(root / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(lock, fcntl.LOCK_SH)
        path.mkdir(mode=0o700, exist_ok=True)
        return LiveDirectory(path, "shared with processes beside this one", lock)
    # Alone. What a killed process left may be half written, and whole files come back from the store anyway.
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700, exist_ok=True)
    # Not atomic: another process may lock, and empty the still empty directory, before this returns.
    fcntl.flock(lock, fcntl.LOCK_SH)
    return LiveDirectory(path, "of our own, begun empty", lock)


def _is_ours(root: Path) -> bool:
    got = root.lstat()
    return stat.S_ISDIR(got.st_mode) and got.st_uid == os.getuid() and not got.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _temporary(base: Path, prefix: str) -> Path:
    """A new directory that is gone when the process ends."""
    base.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _probe(folder: Path) -> None:
    """Raises OSError unless code can be written there and loaded from there.

    Loading a library maps its segments with PROT_EXEC. The kernel refuses that by the mount (noexec: EPERM) or by a
    security module's rule for the file (EACCES), and looks at nothing in the file; so any file stands for a library.
    """
    # Torch 2.13 puts paths into the compiler's command line as they are, and splits that as a shell would.
    if re.search(r"[\s'\"\\]", str(folder)):
        raise OSError(errno.EINVAL, "torch cannot name it to the compiler: there is a space or a quote in the path")
    descriptor, name = tempfile.mkstemp(prefix=".warmstart-probe-".ljust(_LONGEST, "-"), dir=folder)
    try:
        os.posix_fallocate(descriptor, 0, _ROOM_BYTES)
        mmap.mmap(descriptor, mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
    except PermissionError as error:
        raise OSError(error.errno, "code cannot be loaded from there: is it mounted noexec?") from error
    finally:
        os.close(descriptor)
        Path(name).unlink()


def _short(place: str) -> str:
    return place if len(place) <= 100 else f"{place[:50]}...{place[-40:]}"

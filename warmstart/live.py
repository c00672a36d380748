"""Where compiled code lives while the process runs: a directory that is ours; not what is in it, and no torch."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LiveDirectory:
    """Where Inductor reads and writes while this process runs."""

    path: Path
    reason: str
    """Why this place, in words."""
    lock: int | None = None
    """Descriptor of the shared lock that tells neighbours the directory is in use; None where it is not ours."""


def prepare(preset: str, name: str) -> LiveDirectory:
    """Chooses the live directory and puts it into the environment; to be called before torch is imported.

    Args:
        preset: a directory that the platform or the user has set. It is only ever added to, since it may hold what
            the platform restored. Empty for one of our own.
        name: names our own directory; equal for equal keys, so that processes of one image share it.

    Raises:
        OSError: no directory can be made.
    """
    live = LiveDirectory(Path(preset).absolute(), "set from outside") if preset else _own(name)
    live.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(live.path)
    # Triton then writes into a directory inside the live one, where it is saved along.
    os.environ.pop("TRITON_CACHE_DIR", None)
    return live


def _own(name: str) -> LiveDirectory:
    """A directory at a fixed place, empty for a process alone in it and shared with processes beside it."""
    root = Path(tempfile.gettempdir()) / f"warmstart-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.is_symlink() or root.stat().st_uid != os.getuid():
        # Somebody else made it first: code in there would be theirs, and loading it would run it.
        root = Path(tempfile.mkdtemp(prefix=f"warmstart-{os.getuid()}-"))
    path = root / name
    lock = os.open(root / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(lock, fcntl.LOCK_SH)
        return LiveDirectory(path, "shared with processes beside this one", lock)
    # Alone. What a killed process left may be half written, and whole files come back from the store anyway.
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700, exist_ok=True)
    # Not atomic: another process may lock, and empty the still empty directory, before this returns.
    fcntl.flock(lock, fcntl.LOCK_SH)
    return LiveDirectory(path, "of our own, begun empty", lock)


def set_aside(live: LiveDirectory, name: str) -> LiveDirectory:
    """Leaves a live directory whose files break the compile, and goes on in a new, empty one."""
    path = Path(tempfile.mkdtemp(prefix=f"warmstart-{name}-retry-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(path)
    return LiveDirectory(path, f"in place of {live.path}, whose files broke the compile")

"""Short notes in a live directory for later boots, published with what was compiled. Knows not what they say.

A note is one file named by its text, so that equal notes of many boots are one and no two are in each other's way. To
read one tells those who look at times of access that it was used.
"""

from __future__ import annotations

import hashlib
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_MAX_BYTES = 64 << 10


def add(live: Path, kind: str, text: str) -> None:
    """Leaves a note of a kind, which is the name of a directory, if there is no such note yet.

    Args:
        live: the live directory.
        kind: the name of a directory in it.
        text: what is noted; not empty, and no longer than 64 KiB.

    Raises:
        OSError: the directory cannot be written.
    """
    path = live / kind / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if _text(path) != text:
        # Processes of two containers may have the same number.
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def read(live: Path, kind: str) -> list[str]:
    """The notes of a kind; what cannot be read, or is too long for one, is none."""
    return [text for path in sorted((live / kind).glob("*.json")) if (text := _text(path))]


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        return content.decode() if len(content) <= _MAX_BYTES else ""
    except (OSError, UnicodeDecodeError):
        return ""

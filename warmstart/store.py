"""Where bundles live: a directory or an object store, listed, fetched, published; not Inductor, models or boots.

Layout: `<store>/<environment>/environment.json`, `<store>/<environment>/<version>/version.json` and
`<store>/<environment>/<version>/<sha256>.tar.zst`. A bundle never changes once it has its name, and nobody points at
one, so publishing needs no lock and no conditional write, which some object stores accept and ignore.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import re
import stat
import tempfile
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from warmstart.bundle import SUFFIX, TEMPORARY_PREFIX
from warmstart.key import Key, KeyFactError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

STALE_S = 3600
"""A temporary file older than this was left by a process that died."""

_CHUNK_BYTES = 1 << 20
_MAX_FACTS_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_BUNDLE = re.compile(r"([0-9a-f]{64})" + re.escape(SUFFIX))
_SCHEMES = ("s3", "gs", "az")
# Small enough for the client's 30 s per request at 0.3 MB/s. Its own options are not set here, since setting one
# discards all that the user set by variables (AWS_ALLOW_HTTP, a proxy).
_PART_BYTES = 8 << 20
_RETRIES = 3
_RETRY_TIMEOUT_S = 60


class StoreError(Exception):
    """A store cannot be opened, or did not do what it was asked."""


@dataclass(frozen=True)
class BundleInfo:
    """A bundle as listed: its name, the sha256 of its bytes, and how many they are."""

    name: str
    size_bytes: int


@dataclass(frozen=True)
class StoredKey:
    """A key as stored; the facts are None where they are missing or do not give the digests."""

    environment_digest: str
    version_digest: str
    facts: Key | None
    bundles: tuple[BundleInfo, ...]


class Address(Protocol):
    """What says where a key's bundles lie; a `Key` and a `StoredKey` are one."""

    @property
    def environment_digest(self) -> str:
        """sha256 hex."""
        ...

    @property
    def version_digest(self) -> str:
        """sha256 hex."""
        ...


class Store(Protocol):
    """A place for bundles.

    Every method may raise OSError or StoreError, and may take for ever: whoever calls sets a deadline.
    """

    @property
    def location(self) -> str:
        """What the user wrote."""
        ...

    def keys(self) -> list[StoredKey]:
        """Lists everything, sorted."""
        ...

    def bundles(self, key: Address) -> list[BundleInfo]:
        """Lists one key's bundles, sorted by name; none if the key is not there."""
        ...

    def fetch(self, key: Address, bundle: BundleInfo, into: Path) -> None:
        """Copies a bundle to a file, unverified, but never more bytes than were listed.

        Raises:
            FileNotFoundError: it went away since it was listed.
        """
        ...

    def publish(self, key: Key, path: Path, name: str) -> bool:
        """Adds a bundle and the key's facts; False if a whole bundle of that name is there already."""
        ...


def open_store(location: str) -> Store:
    """Opens a directory path, a file:// URL or an object store's URL; nothing is read or created yet.

    Raises:
        StoreError: the location is none of these, or its client is not installed.
    """
    scheme, separator, rest = location.partition("://")
    if not separator:
        if not location.strip():
            raise StoreError(
                'The store\'s location is empty. Set WARMSTART_CACHE_URL to a directory, or to "s3://...".'
            )
        return DirectoryStore(Path(location).expanduser(), location)
    if scheme == "file":
        return DirectoryStore(_file_url_path(location), location)
    if scheme not in _SCHEMES or not rest.strip("/"):
        raise StoreError(
            f"The store's location is {location!r}, which names no store. Set WARMSTART_CACHE_URL to a directory, or to"
            f" a file://, {'://, '.join(_SCHEMES)}:// URL with a bucket."
        )
    return ObjectStore(location)


class DirectoryStore:
    """Bundles in a directory, local or on a network file system.

    A root that is made here is for its owner alone, since whoever can write there can run code here. What lies inside
    is readable by all, so that a store copied into an image serves whichever user the container runs as.
    """

    def __init__(self, root: Path, location: str | None = None) -> None:
        self.location = location if location is not None else str(root)
        self._root = root

    def keys(self) -> list[StoredKey]:
        """Lists everything, sorted."""
        return [
            StoredKey(environment.name, version.name, self._facts(version), tuple(_bundles_in(version)))
            for environment in _digest_folders(self._root)
            for version in _digest_folders(environment)
        ]

    def bundles(self, key: Address) -> list[BundleInfo]:
        """Lists one key's bundles, sorted by name; none if the key is not there."""
        return _bundles_in(self._folder(key))

    def fetch(self, key: Address, bundle: BundleInfo, into: Path) -> None:
        """Copies a bundle to a file, unverified, but never more bytes than were listed."""
        path = self._folder(key) / f"{bundle.name}{SUFFIX}"
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as source:
            _write_pieces(iter(lambda: source.read(_CHUNK_BYTES), b""), bundle, into)

    def publish(self, key: Key, path: Path, name: str) -> bool:
        """Adds a bundle and the key's facts; False if a whole bundle of that name is there already."""
        folder = self._folder(key)
        self._make_folders(folder)
        _remove_stale(folder)
        _write_facts(folder.parent / "environment.json", key.environment)
        _write_facts(folder / "version.json", key.version)
        target = folder / f"{name}{SUFFIX}"
        # Another size under the right name was cut short by a full disk or a crash; it is replaced.
        if target.is_file() and target.stat().st_size == path.stat().st_size:
            return False
        with path.open("rb") as source:
            _write_atomic(target, iter(lambda: source.read(_CHUNK_BYTES), b""))
        return True

    def _folder(self, key: Address) -> Path:
        return self._root / key.environment_digest / key.version_digest

    def _make_folders(self, folder: Path) -> None:
        self._root.parent.mkdir(parents=True, exist_ok=True)
        for made, mode in ((self._root, 0o700), (folder.parent, 0o755), (folder, 0o755)):
            # Another replica may make it first; then it is that one's business.
            with contextlib.suppress(FileExistsError):
                made.mkdir()
                made.chmod(mode)

    def _facts(self, version: Path) -> Key | None:
        try:
            environment_raw = _read_small(version.parent / "environment.json")
            version_raw = _read_small(version / "version.json")
        except OSError:
            return None
        return _parse_facts(environment_raw, version_raw, version.parent.name, version.name)


class ObjectStore:
    """Bundles in an object store, by `obstore`, which takes credentials and endpoint from its own variables."""

    def __init__(self, location: str) -> None:
        self.location = location
        try:
            self._obstore = importlib.import_module("obstore")
            self._errors = importlib.import_module("obstore.exceptions").BaseError
            module = importlib.import_module("obstore.store")
        except ImportError as error:
            raise StoreError(
                f"The store {location} needs the package obstore, which cannot be imported ({error}). Install it, or"
                " set WARMSTART_CACHE_URL to a directory."
            ) from error
        retries = {"max_retries": _RETRIES, "retry_timeout": datetime.timedelta(seconds=_RETRY_TIMEOUT_S)}
        with self._asking("open"):
            self._store = module.from_url(location, retry_config=retries)

    def keys(self) -> list[StoredKey]:
        """Lists everything, sorted."""
        found: dict[tuple[str, str], list[BundleInfo]] = {}
        for path, size_bytes in self._list(None):
            if (place := _parse_place(path)) is not None:
                environment, version, name = place
                found.setdefault((environment, version), []).append(BundleInfo(name, size_bytes))
        return [
            StoredKey(environment, version, self._facts(environment, version), _sorted(bundles))
            for (environment, version), bundles in sorted(found.items())
        ]

    def bundles(self, key: Address) -> list[BundleInfo]:
        """Lists one key's bundles, sorted by name; none if the key is not there."""
        prefix = f"{key.environment_digest}/{key.version_digest}"
        places = ((_parse_place(path), size_bytes) for path, size_bytes in self._list(prefix))
        return list(_sorted(BundleInfo(place[2], size_bytes) for place, size_bytes in places if place is not None))

    def fetch(self, key: Address, bundle: BundleInfo, into: Path) -> None:
        """Copies a bundle to a file, unverified, but never more bytes than were listed."""
        with self._asking("fetch a bundle", missing=True):
            _write_pieces(self._parts(_object(key, bundle.name), bundle.size_bytes), bundle, into)

    def publish(self, key: Key, path: Path, name: str) -> bool:
        """Adds a bundle and the key's facts; False if a whole bundle of that name is there already."""
        self._write_facts(f"{key.environment_digest}/environment.json", key.environment)
        self._write_facts(f"{key.environment_digest}/{key.version_digest}/version.json", key.version)
        target = _object(key, name)
        if self._size_bytes(target) == path.stat().st_size:
            return False
        with self._asking("publish a bundle"):
            # A path is sent in parts, so the bundle is never in memory; objects appear whole or not at all.
            self._obstore.put(self._store, target, path, chunk_size=_PART_BYTES)
        return True

    def _parts(self, path: str, size_bytes: int) -> Iterator[bytes]:
        for start in range(0, size_bytes, _PART_BYTES):
            end = min(start + _PART_BYTES, size_bytes)
            yield bytes(self._obstore.get_range(self._store, path, start=start, end=end))

    def _write_facts(self, path: str, facts: Mapping[str, str]) -> None:
        text = _facts_text(facts)
        # Content follows from the path, which holds its digest; equal size is enough to leave it.
        if self._size_bytes(path) != len(text):
            with self._asking("publish facts"):
                self._obstore.put(self._store, path, text)

    def _facts(self, environment: str, version: str) -> Key | None:
        try:
            environment_raw = self._read_small(f"{environment}/environment.json")
            version_raw = self._read_small(f"{environment}/{version}/version.json")
        except FileNotFoundError:
            return None
        return _parse_facts(environment_raw, version_raw, environment, version)

    def _read_small(self, path: str) -> bytes:
        with self._asking("read facts", missing=True):
            got = self._obstore.get(self._store, path)
            return bytes(got.bytes()) if got.meta["size"] <= _MAX_FACTS_BYTES else b""

    def _size_bytes(self, path: str) -> int | None:
        try:
            with self._asking("look for an object", missing=True):
                return int(self._obstore.head(self._store, path)["size"])
        except FileNotFoundError:
            return None

    def _list(self, prefix: str | None) -> Iterator[tuple[str, int]]:
        with self._asking("list"):
            for batch in self._obstore.list(self._store, prefix=prefix):
                for item in batch:
                    yield item["path"], item["size"]

    @contextlib.contextmanager
    def _asking(self, what: str, missing: bool = False) -> Iterator[None]:
        """Turns the client's errors into ours; with `missing`, an absent object is left to the caller."""
        try:
            yield
        except (self._errors, ValueError, FileNotFoundError) as error:
            if missing and isinstance(error, FileNotFoundError):
                raise
            text = " ".join(str(error).partition("Debug source:")[0].split())[:300]
            raise StoreError(
                f"The store {self.location} did not {what}: {text}. Check the bucket's name, the credentials and the"
                " network."
            ) from error


def _file_url_path(location: str) -> Path:
    parsed = urllib.parse.urlsplit(location)
    if parsed.netloc not in ("", "localhost") or not parsed.path:
        raise StoreError(f"The store's location is {location!r}; a file URL has three slashes: file:///a/directory.")
    return Path(urllib.parse.unquote(parsed.path))


def _object(key: Address, name: str) -> str:
    return f"{key.environment_digest}/{key.version_digest}/{name}{SUFFIX}"


def _parse_place(path: str) -> tuple[str, str, str] | None:
    environment, _, rest = path.partition("/")
    version, _, file = rest.partition("/")
    name = _BUNDLE.fullmatch(file)
    if name and _DIGEST.fullmatch(environment) and _DIGEST.fullmatch(version):
        return environment, version, name[1]
    return None


def _sorted(bundles: Iterable[BundleInfo]) -> tuple[BundleInfo, ...]:
    return tuple(sorted(bundles, key=lambda bundle: bundle.name))


def _digest_folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as found:
            names = [item.name for item in found if _DIGEST.fullmatch(item.name) and item.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    return [folder / name for name in sorted(names)]


def _bundles_in(folder: Path) -> list[BundleInfo]:
    found: list[BundleInfo] = []
    try:
        items = list(os.scandir(folder))
    except FileNotFoundError:
        return []
    for item in items:
        # Gone since it was listed: a compaction, not an error.
        with contextlib.suppress(FileNotFoundError):
            if (name := _BUNDLE.fullmatch(item.name)) and item.is_file(follow_symlinks=False):
                found.append(BundleInfo(name[1], item.stat(follow_symlinks=False).st_size))
    return list(_sorted(found))


def _write_pieces(pieces: Iterator[bytes], bundle: BundleInfo, into: Path) -> None:
    left = bundle.size_bytes
    with into.open("wb") as file:
        for piece in pieces:
            left -= len(piece)
            if left < 0:
                raise StoreError(f"The bundle {bundle.name[:12]} has more than the {bundle.size_bytes} bytes listed.")
            file.write(piece)


def _write_atomic(target: Path, pieces: Iterable[bytes]) -> None:
    """Writes beside the target and renames, so that a reader sees the whole file or none, whoever dies when."""
    descriptor, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, suffix=".tmp", dir=target.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)
            for piece in pieces:
                file.write(piece)
            file.flush()
            # Before the rename: after a power cut the name must not stand for bytes that were never written.
            os.fsync(descriptor)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _remove_stale(folder: Path) -> None:
    oldest = time.time() - STALE_S
    for path in folder.glob(f"{TEMPORARY_PREFIX}*.tmp"):
        # Another replica may be removing it too, or it may not be ours to remove.
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime < oldest:
                path.unlink()


def _facts_text(facts: Mapping[str, str]) -> bytes:
    return (json.dumps(dict(facts), indent=2, sort_keys=True) + "\n").encode()


def _write_facts(path: Path, facts: Mapping[str, str]) -> None:
    text = _facts_text(facts)
    with contextlib.suppress(OSError):
        if path.read_bytes() == text:
            return
    _write_atomic(path, [text])


def _read_small(path: Path) -> bytes:
    with path.open("rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return b""
        return file.read(_MAX_FACTS_BYTES)


def _parse_facts(environment_raw: bytes, version_raw: bytes, environment: str, version: str) -> Key | None:
    """Makes a key of stored facts, if they are what the digests say."""
    try:
        parts: list[Any] = [json.loads(raw) for raw in (environment_raw, version_raw)]
        if not all(isinstance(part, dict) for part in parts):
            return None
        key = Key(*parts)
    except (ValueError, RecursionError, KeyFactError):
        return None
    return key if (key.environment_digest, key.version_digest) == (environment, version) else None

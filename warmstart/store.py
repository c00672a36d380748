"""Where bundles live: a directory or an object store, listed, fetched, published; not Inductor, models or boots.

Layout: `<store>/<environment>/environment.json`, `<store>/<environment>/<version>/version.json` and
`<store>/<environment>/<version>/<sha256>.tar.zst`. A bundle never changes once it has its name, and nobody points at
one, so publishing needs no lock and no conditional write, which some object stores accept and ignore. Beside a bundle
may lie small notes of its name: `.hmac`, its signature, `.covered`, which bundle holds all that it does, and `.broken`,
that a boot found its files to break the compile.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import importlib
import json
import os
import queue
import re
import stat
import tempfile
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from warmstart.bundle import SUFFIX, TEMPORARY_PREFIX, BundleError
from warmstart.key import Key, KeyFactError
from warmstart.trust import Secrets, distrust

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

STALE_S = 3600
"""A temporary file older than this was left by a process that died."""

SIGNATURE = ".hmac"
COVERED = ".covered"
BROKEN = ".broken"

_CHUNK_BYTES = 1 << 20
_MAX_NOTE_BYTES = 4096
_MAX_FACTS_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"([0-9a-f]{64})(" + "|".join(map(re.escape, (SUFFIX, SIGNATURE, COVERED, BROKEN))) + ")")
_SCHEMES = ("s3", "gs", "az")
# Small enough for the client's 30 s per request at 0.3 MB/s. Its own options are not set here, since setting one
# discards all that the user set by variables (AWS_ALLOW_HTTP, a proxy).
_PART_BYTES = 8 << 20
_RETRIES = 3
_PARALLEL_FACTS = 8
# While a compaction removes bundles, the first listing is repeated once; more often only if one after it was torn too.
_MAX_LISTINGS = 5
_RETRY_TIMEOUT_S = 60


class StoreError(Exception):
    """A store cannot be opened, or did not do what it was asked."""


@dataclass(frozen=True)
class BundleInfo:
    """A bundle as listed: its name, the sha256 of its bytes, how many they are, and whether it is noted as broken."""

    name: str
    size_bytes: int
    broken: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class StoredFile:
    """A bundle or a note as listed: the bundle's name, which of them it is, and since when it is there."""

    name: str
    suffix: str
    size_bytes: int
    modified_s: float


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

    def keys(self, environment: str | None = None) -> list[StoredKey]:
        """Lists every key, or those of one environment (its digest), sorted; reads the facts of each."""
        ...

    def bundles(self, key: Address) -> list[BundleInfo]:
        """Lists one key's bundles, sorted by name; none if the key is not there."""
        ...

    def files(self, key: Address) -> list[StoredFile]:
        """Lists one key's bundles and their notes, sorted; none if the key is not there.

        Of a bundle that a compaction removes meanwhile and the one that covers it, at least one is in the list.
        """
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

    def write_facts(self, key: Key) -> None:
        """Writes the key's facts where they are missing or damaged."""
        ...

    def doubt(self, key: Address, name: str) -> str:
        """Says why a bundle would not be fetched, "" if nothing is against it."""
        ...

    def note(self, key: Address, name: str, suffix: str) -> str | None:
        """Reads a note; None if there is none."""
        ...

    def write_note(self, key: Address, name: str, suffix: str, text: str) -> None:
        """Adds or replaces a note; the key must be there."""
        ...

    def remove(self, key: Address, name: str, suffix: str) -> None:
        """Removes a bundle or a note, if it is there."""
        ...

    def remove_facts(self, key: Address) -> None:
        """Removes what is left of a key without bundles, and of its environment if that was its last key."""
        ...


def open_store(location: str, secrets: Secrets | None = None) -> Store:
    """Opens a directory path, a file:// URL or an object store's URL; nothing is read or created yet.

    Args:
        location: what the user wrote.
        secrets: with any, bundles are signed, and those without a right signature are not fetched.

    Raises:
        StoreError: the location is none of these, or its client is not installed.
    """
    if secrets:
        return SignedStore(_open(location, signed=True), secrets)
    return _open(location, signed=False)


def _open(location: str, *, signed: bool) -> Store:
    scheme, separator, rest = location.partition("://")
    if not separator:
        if not location.strip():
            raise StoreError(
                'The store\'s location is empty. Set WARMSTART_CACHE_URL to a directory, or to "s3://...".'
            )
        return DirectoryStore(Path(location).expanduser(), location, signed=signed)
    if scheme == "file":
        return DirectoryStore(_file_url_path(location), location, signed=signed)
    if scheme not in _SCHEMES or not rest.strip("/"):
        raise StoreError(
            f"The store's location is {location!r}, which names no store. Set WARMSTART_CACHE_URL to a directory, or to"
            f" a file://, {'://, '.join(_SCHEMES)}:// URL with a bucket."
        )
    return ObjectStore(location)


class DirectoryStore:
    """Bundles in a directory, local or on a network file system.

    A root that is made here is for its owner alone, since whoever can write there can run code here. What lies inside
    is readable by all, so that a store copied into an image serves whichever user the container runs as. A store that
    others can write to is neither read nor written; whether they can is asked each time, as it may change.
    """

    def __init__(self, root: Path, location: str | None = None, *, signed: bool = False) -> None:
        self.location = location if location is not None else str(root)
        self._root = root
        self._signed = signed

    def keys(self, environment: str | None = None) -> list[StoredKey]:
        """Lists every key, or those of one environment (its digest), sorted; reads the facts of each."""
        self._check(self._root)
        return [
            StoredKey(place.name, version.name, self._facts(version), tuple(_bundles(self._files_in(version))))
            for place in ([self._root / environment] if environment else _digest_folders(self._root))
            for version in _digest_folders(place)
        ]

    def bundles(self, key: Address) -> list[BundleInfo]:
        """Lists one key's bundles, sorted by name; none if the key is not there."""
        return _bundles(self.files(key))

    def files(self, key: Address) -> list[StoredFile]:
        """Lists one key's bundles and their notes, sorted; none if the key is not there."""
        self._check(self._folder(key))
        return _settled(lambda: _files_in(self._folder(key)))

    def fetch(self, key: Address, bundle: BundleInfo, into: Path) -> None:
        """Copies a bundle to a file, unverified, but never more bytes than were listed."""
        self._check(self._folder(key))
        with _open_plain(self._path(key, bundle.name, SUFFIX)) as source:
            _write_pieces(iter(lambda: source.read(_CHUNK_BYTES), b""), bundle, into)

    def publish(self, key: Key, path: Path, name: str) -> bool:
        """Adds a bundle and the key's facts; False if a whole bundle of that name is there already."""
        self.write_facts(key)
        folder = self._folder(key)
        for place in (folder, folder.parent):
            _remove_stale(place)
        target = self._path(key, name, SUFFIX)
        # Another size under the right name was cut short by a full disk or a crash; it is replaced.
        if target.is_file() and target.stat().st_size == path.stat().st_size:
            return False
        with path.open("rb") as source:
            _write_atomic(target, iter(lambda: source.read(_CHUNK_BYTES), b""))
        return True

    def write_facts(self, key: Key) -> None:
        """Writes the key's facts where they are missing or damaged; its directories are made where absent."""
        folder = self._prepare(key)
        _write_facts(folder.parent / "environment.json", key.environment)
        _write_facts(folder / "version.json", key.version)

    def doubt(self, key: Address, name: str) -> str:
        """Says why a bundle would not be fetched, "" if nothing is against it."""
        return ""

    def note(self, key: Address, name: str, suffix: str) -> str | None:
        """Reads a note; None if there is none."""
        self._check(self._folder(key))
        try:
            with _open_plain(self._path(key, name, suffix)) as file:
                return file.read(_MAX_NOTE_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return None

    def write_note(self, key: Address, name: str, suffix: str, text: str) -> None:
        """Adds or replaces a note; its directories are made where absent."""
        self._prepare(key)
        _write_atomic(self._path(key, name, suffix), [text.encode()])

    def remove(self, key: Address, name: str, suffix: str) -> None:
        """Removes a bundle or a note, if it is there."""
        self._check(self._folder(key))
        self._path(key, name, suffix).unlink(missing_ok=True)

    def remove_facts(self, key: Address) -> None:
        """Removes what is left of a key without bundles, and of its environment if that was its last key."""
        folder = self._folder(key)
        self._check(folder)
        (folder / "version.json").unlink(missing_ok=True)
        # A directory that is not empty stays: somebody published there just now.
        _remove_stale(folder)
        with contextlib.suppress(OSError):
            folder.rmdir()
        if not _digest_folders(folder.parent):
            (folder.parent / "environment.json").unlink(missing_ok=True)
            _remove_stale(folder.parent)
            with contextlib.suppress(OSError):
                folder.parent.rmdir()

    def _folder(self, key: Address) -> Path:
        return self._root / key.environment_digest / key.version_digest

    def _path(self, key: Address, name: str, suffix: str) -> Path:
        return self._folder(key) / f"{name}{suffix}"

    def _files_in(self, folder: Path) -> list[StoredFile]:
        self._check(folder)
        return _files_in(folder)[0]

    def _check(self, folder: Path) -> None:
        """Refuses a directory that others can write to, from the root down to the given one."""
        below = folder.relative_to(self._root).parts
        for depth in range(len(below) + 1):
            part = self._root.joinpath(*below[:depth])
            if reason := distrust(part, signed=self._signed, follow=depth == 0):
                raise StoreError(f"{reason}. Until then nothing is read from or written to {self.location}.")

    def _prepare(self, key: Address) -> Path:
        folder = self._folder(key)
        self._check(folder)
        self._root.parent.mkdir(parents=True, exist_ok=True)
        for made, mode in ((self._root, 0o700), (folder.parent, 0o755), (folder, 0o755)):
            # Another replica may make it first; then it is that one's business.
            with contextlib.suppress(FileExistsError):
                made.mkdir(mode=mode)  # at once with its mode: others may look, or write, before the next line
                made.chmod(mode)
        self._check(folder)  # what another made meanwhile
        return folder

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
        # Objects are deleted one by one, and the request that deletes many is missing or differs on some gateways.
        options = {"disable_bulk_delete": True} if location.startswith("s3://") else {}
        with self._asking("open"):
            self._store = module.from_url(location, retry_config=retries, **options)

    def keys(self, environment: str | None = None) -> list[StoredKey]:
        """Lists every key, or those of one environment (its digest), sorted; reads the facts of each."""
        found: dict[tuple[str, str], list[StoredFile]] = {}
        for place, file in self._list(environment):
            found.setdefault(place, []).append(file)
        # An environment's facts once, not with each of its versions, and as many at a time as a server likes to answer.
        names = [
            *sorted({_environment_facts(place[0]) for place in found}),
            *(_version_facts(*place) for place in found),
        ]
        raw = _in_parallel(self._read_facts, names)
        return [
            StoredKey(
                *place,
                _parse_facts(raw[_environment_facts(place[0])], raw[_version_facts(*place)], *place),
                tuple(_bundles(sorted(files, key=_order))),
            )
            for place, files in sorted(found.items())
        ]

    def bundles(self, key: Address) -> list[BundleInfo]:
        """Lists one key's bundles, sorted by name; none if the key is not there."""
        return _bundles(self.files(key))

    def files(self, key: Address) -> list[StoredFile]:
        """Lists one key's bundles and their notes, sorted; none if the key is not there."""
        return _settled(lambda: (sorted((file for _, file in self._list(_prefix(key))), key=_order), False))

    def fetch(self, key: Address, bundle: BundleInfo, into: Path) -> None:
        """Copies a bundle to a file, unverified, but never more bytes than were listed."""
        with self._asking("fetch a bundle", missing=True):
            _write_pieces(self._parts(_object(key, bundle.name, SUFFIX), bundle.size_bytes), bundle, into)

    def publish(self, key: Key, path: Path, name: str) -> bool:
        """Adds a bundle and the key's facts; False if a whole bundle of that name is there already."""
        self.write_facts(key)
        target = _object(key, name, SUFFIX)
        if self._size_bytes(target) == path.stat().st_size:
            return False
        with self._asking("publish a bundle"):
            # A path is sent in parts, so the bundle is never in memory; objects appear whole or not at all.
            self._obstore.put(self._store, target, path, chunk_size=_PART_BYTES)
        return True

    def write_facts(self, key: Key) -> None:
        """Writes the key's facts where they are missing or damaged."""
        self._write_facts(_environment_facts(key.environment_digest), key.environment)
        self._write_facts(_version_facts(key.environment_digest, key.version_digest), key.version)

    def doubt(self, key: Address, name: str) -> str:
        """Says why a bundle would not be fetched, "" if nothing is against it."""
        return ""

    def note(self, key: Address, name: str, suffix: str) -> str | None:
        """Reads a note; None if there is none."""
        try:
            return self._read_small(_object(key, name, suffix)).decode(errors="replace")
        except FileNotFoundError:
            return None

    def write_note(self, key: Address, name: str, suffix: str, text: str) -> None:
        """Adds or replaces a note."""
        with self._asking("write a note"):
            self._obstore.put(self._store, _object(key, name, suffix), text.encode())

    def remove(self, key: Address, name: str, suffix: str) -> None:
        """Removes a bundle or a note, if it is there."""
        self._delete(_object(key, name, suffix))

    def remove_facts(self, key: Address) -> None:
        """Removes what is left of a key without bundles, and of its environment if that was its last key."""
        self._delete(_version_facts(key.environment_digest, key.version_digest))
        if not any(place[0] == key.environment_digest for place, _ in self._list(key.environment_digest)):
            self._delete(_environment_facts(key.environment_digest))

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._asking("delete an object", missing=True):
            self._obstore.delete(self._store, path)

    def _parts(self, path: str, size_bytes: int) -> Iterator[bytes]:
        for start in range(0, size_bytes, _PART_BYTES):
            end = min(start + _PART_BYTES, size_bytes)
            yield bytes(self._obstore.get_range(self._store, path, start=start, end=end))

    def _write_facts(self, path: str, facts: Mapping[str, str]) -> None:
        text = _facts_text(facts)
        if self._read_facts(path) != text:
            with self._asking("publish facts"):
                self._obstore.put(self._store, path, text)

    def _read_facts(self, path: str) -> bytes:
        """Reads facts; none are as good as damaged ones."""
        try:
            return self._read_small(path)
        except FileNotFoundError:
            return b""

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

    def _list(self, prefix: str | None) -> Iterator[tuple[tuple[str, str], StoredFile]]:
        """Yields what has a name of ours, with the environment and version that it lies in."""
        with self._asking("list"):
            for batch in self._obstore.list(self._store, prefix=prefix):
                for item in batch:
                    if found := _parse_place(item["path"]):
                        environment, version, name, suffix = found
                        modified_s = item["last_modified"].timestamp()
                        yield (environment, version), StoredFile(name, suffix, item["size"], modified_s)

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


class SignedStore:
    """A store of which only bundles with a right signature are fetched, and to which only such are published.

    A signature is over the bundle's name, which is the digest of its bytes, and over the two digests of its key, so it
    can be moved neither to other bytes nor to another machine's code. It is compared before the bundle is fetched.
    """

    def __init__(self, inner: Store, secrets: Secrets) -> None:
        self.location = inner.location
        self._inner = inner
        self._secrets = secrets

    def keys(self, environment: str | None = None) -> list[StoredKey]:
        """Lists every key, or those of one environment, sorted; signatures are not looked at."""
        return self._inner.keys(environment)

    def bundles(self, key: Address) -> list[BundleInfo]:
        """Lists one key's bundles, sorted by name; signatures are not looked at."""
        return self._inner.bundles(key)

    def files(self, key: Address) -> list[StoredFile]:
        """Lists one key's bundles and their notes, sorted."""
        return self._inner.files(key)

    def fetch(self, key: Address, bundle: BundleInfo, into: Path) -> None:
        """Copies a bundle to a file, if its signature is right; its bytes are still to be compared with its name.

        Raises:
            BundleError: the signature is missing or wrong.
        """
        if reason := self.doubt(key, bundle.name):
            # The race: signature and bundle may have been removed since they were listed. The signature is there as
            # long as the bundle is, so a bundle that is still listed never had one.
            if all(item.name != bundle.name for item in self._inner.bundles(key)):
                raise FileNotFoundError(bundle.name)
            raise BundleError(reason)
        self._inner.fetch(key, bundle, into)

    def publish(self, key: Key, path: Path, name: str) -> bool:
        """Signs and adds a bundle; one that is there already is signed anew if the first secret did not sign it."""
        there = any(item.name == name for item in self._inner.bundles(key))
        if not there or not self.is_current(key, name):
            # Before the bundle: whoever sees that, sees its signature.
            self._sign(key, name)
        published = self._inner.publish(key, path, name)
        # The race: somebody removed the same signature, left from a removed bundle of this name, as we wrote it.
        if not self.is_current(key, name):
            self._sign(key, name)
        return published

    def doubt(self, key: Address, name: str) -> str:
        """Says why a bundle would not be fetched, "" if nothing is against it."""
        signature = self._inner.note(key, name, SIGNATURE)
        if signature is None:
            return "it has no signature, and with WARMSTART_CACHE_SECRET only signed bundles are used"
        if not self._secrets.accepts(signature.strip(), *_signed_parts(key, name)):
            return "its signature was made with another secret than WARMSTART_CACHE_SECRET, or for other bytes"
        return self._inner.doubt(key, name)

    def note(self, key: Address, name: str, suffix: str) -> str | None:
        """Reads a note; None if there is none."""
        return self._inner.note(key, name, suffix)

    def write_note(self, key: Address, name: str, suffix: str, text: str) -> None:
        """Adds or replaces a note."""
        self._inner.write_note(key, name, suffix, text)

    def remove(self, key: Address, name: str, suffix: str) -> None:
        """Removes a bundle or a note, if it is there."""
        self._inner.remove(key, name, suffix)

    def remove_facts(self, key: Address) -> None:
        """Removes what is left of a key without bundles, and of its environment if that was its last key."""
        self._inner.remove_facts(key)

    def write_facts(self, key: Key) -> None:
        """Writes the key's facts where they are missing or damaged."""
        self._inner.write_facts(key)

    def is_current(self, key: Address, name: str) -> bool:
        """Whether the secret that signs now has signed the bundle."""
        signature = self._inner.note(key, name, SIGNATURE) or ""
        return self._secrets.is_by_first(signature.strip(), *_signed_parts(key, name))

    def _sign(self, key: Address, name: str) -> None:
        self._inner.write_note(key, name, SIGNATURE, self._secrets.sign(*_signed_parts(key, name)) + "\n")


def _signed_parts(key: Address, name: str) -> tuple[str, str, str]:
    return key.environment_digest, key.version_digest, name


def _file_url_path(location: str) -> Path:
    parsed = urllib.parse.urlsplit(location)
    if parsed.netloc not in ("", "localhost") or not parsed.path:
        raise StoreError(f"The store's location is {location!r}; a file URL has three slashes: file:///a/directory.")
    return Path(urllib.parse.unquote(parsed.path))


def _environment_facts(environment: str) -> str:
    return f"{environment}/environment.json"


def _version_facts(environment: str, version: str) -> str:
    return f"{environment}/{version}/version.json"


def _prefix(key: Address) -> str:
    return f"{key.environment_digest}/{key.version_digest}"


def _object(key: Address, name: str, suffix: str) -> str:
    return f"{_prefix(key)}/{name}{suffix}"


def _parse_place(path: str) -> tuple[str, str, str, str] | None:
    environment, _, rest = path.partition("/")
    version, _, file = rest.partition("/")
    found = _FILE.fullmatch(file)
    if found and _DIGEST.fullmatch(environment) and _DIGEST.fullmatch(version):
        return environment, version, found[1], found[2]
    return None


def _order(file: StoredFile) -> tuple[str, str]:
    return file.name, file.suffix


def _bundles(files: Sequence[StoredFile]) -> list[BundleInfo]:
    broken = {file.name for file in files if file.suffix == BROKEN}
    return [BundleInfo(file.name, file.size_bytes, file.name in broken) for file in files if file.suffix == SUFFIX]


def _digest_folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as found:
            names = [item.name for item in found if _DIGEST.fullmatch(item.name) and item.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    return [folder / name for name in sorted(names)]


def _files_in(folder: Path) -> tuple[list[StoredFile], bool]:
    """Lists a directory's files, and says whether something came or went meanwhile."""
    found: list[StoredFile] = []
    try:
        before_ns = folder.stat().st_mtime_ns
        items = list(os.scandir(folder))
        for item in items:
            # Gone since it was listed: a compaction, not an error.
            with contextlib.suppress(FileNotFoundError):
                if (name := _FILE.fullmatch(item.name)) and item.is_file(follow_symlinks=False):
                    got = item.stat(follow_symlinks=False)
                    found.append(StoredFile(name[1], name[2], got.st_size, got.st_mtime))
        return sorted(found, key=_order), folder.stat().st_mtime_ns != before_ns
    except FileNotFoundError:
        return [], False


def _settled(list_once: Callable[[], tuple[list[StoredFile], bool]]) -> list[StoredFile]:
    """Lists once, and while a compaction removes bundles again until nothing has gone since the listing before.

    A listing is no snapshot: it may pass the place of a bundle before that is published, and the place of one that the
    first covers after that was removed, and so show neither. The next listing, begun later, shows the first one. That a
    compaction is at work is seen by a note or a signature that has lost its bundle, or by a directory that changes
    while it is listed.

    Args:
        list_once: lists, and says whether something came or went meanwhile, if that can be told.
    """
    found, changed = list_once()
    names = {file.name for file in found if file.suffix == SUFFIX}
    if not changed and all(file.name in names for file in found):
        return found
    for _ in range(_MAX_LISTINGS - 1):
        before = names
        found, _ = list_once()
        names = {file.name for file in found if file.suffix == SUFFIX}
        if before <= names:
            break
    return found


def _in_parallel(read: Callable[[str], bytes], paths: list[str]) -> dict[str, bytes]:
    """Reads some at a time; by daemons, since a server that hangs must not keep the process from ending."""
    left, answers = collections.deque(paths), queue.SimpleQueue[tuple[str, bytes | BaseException]]()

    def work() -> None:
        with contextlib.suppress(IndexError):
            while True:
                path = left.popleft()
                try:
                    answers.put((path, read(path)))
                except BaseException as error:  # noqa: BLE001  raised by the caller
                    answers.put((path, error))

    for _ in range(min(_PARALLEL_FACTS, len(paths))):
        threading.Thread(target=work, name="warmstart-facts", daemon=True).start()
    found: dict[str, bytes] = {}
    for _ in paths:
        path, answer = answers.get()
        if isinstance(answer, BaseException):
            raise answer
        found[path] = answer
    return found


def _open_plain(path: Path) -> BinaryIO:
    """Opens a file without following a link and without waiting for a pipe."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


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
        if _read_small(path) == text:
            return
    _write_atomic(path, [text])


def _read_small(path: Path) -> bytes:
    with _open_plain(path) as file:
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

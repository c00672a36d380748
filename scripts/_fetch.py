"""Brings a model's files into a directory, whole or not at all; knows the hub's client, digests and renames, no model.

Everything is put together in a staging directory beside the target, `.NAME.fetching`, and changes places with the
target in one step when every file has the digest that was announced. A process killed at any moment leaves the old
model whole, and what it had fetched for the next run.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import httpx2
import zstandard
from huggingface_hub import HfApi, errors, hf_hub_url
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers

NOTE = ".fetched.json"  # what lies there and from where; a name with a dot is no fact of the cache's key
PART = ".part"
MODEL = "model"  # in the staging directory, what becomes the target
TIMEOUT_S = 30.0
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_HERE = -100  # AT_FDCWD


class FetchError(Exception):
    """The model cannot be fetched; the text says what happened, why it matters and what to do."""


@dataclass(frozen=True)
class File:
    """One file to fetch."""

    path: str
    place: str
    """Its path in the target, which differs from `path` for the weights of a variant."""
    url: str
    algorithm: str
    """"sha256", or "git" for the SHA-1 that git gives a blob."""
    digest: str
    size_bytes: int | None = None
    """None where nobody told."""
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Repository:
    """A model's files at one commit."""

    name: str
    commit: str
    files: dict[str, File]


# --- the hub ---------------------------------------------------------------------------------------------------------


def listed(name: str, revision: str) -> Repository:
    """Ask the hub for the commit of a revision, and for its files with their sizes and digests."""
    with _told(f"the model {name} at {revision}"):
        info = HfApi(endpoint=ENDPOINT).model_info(name, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
        headers = build_hf_headers()
    # Compressed on the way a file has no ranges, and could not be resumed.
    sent = tuple({**headers, "Accept-Encoding": "identity"}.items())
    files = {}
    for item in info.siblings or ():
        path = item.rfilename
        if path.startswith("/") or {"", ".", ".."} & set(path.split("/")) or not path.isprintable():
            raise FetchError(f"{name} lists a file {path!r}, which would lie outside the model; do not use it.")
        url = hf_hub_url(name, path, revision=info.sha, endpoint=ENDPOINT)
        if item.lfs is not None:
            files[path] = File(path, path, url, "sha256", item.lfs.sha256, item.lfs.size, sent)
        else:
            files[path] = File(path, path, url, "git", str(item.blob_id), item.size, sent)
    return Repository(name, str(info.sha), files)


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Turns what the client raises into one sentence."""
    try:
        yield
    except errors.GatedRepoError as error:
        raise FetchError(
            f"{what} is gated and was refused to this token; accept its terms on its page at {ENDPOINT}, and set"
            " HF_TOKEN to a token of that account."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FetchError(f"{what} was not found: there is no such branch, tag or commit; see its page.") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        # The hub says 401 of a name that it does not know, so that nobody learns of private ones.
        if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
            raise FetchError(
                f"{what} was not found at {ENDPOINT}: there is none of that name, or it is private; correct the name,"
                " or set HF_TOKEN to a token that may read it."
            ) from error
        remedy = "set HF_TOKEN to a token that may read it" if status == 403 else "run this again later"
        raise FetchError(f"{what} was refused by the server (HTTP {status}); {remedy}.") from error
    except errors.OfflineModeIsEnabled as error:
        raise FetchError(f"{what} is not fetched, as HF_HUB_OFFLINE is set; unset it.") from error
    except httpx2.HTTPError as error:
        raise FetchError(
            f"{what} could not be fetched: {type(error).__name__} ({error}); see to the network, proxy and"
            " HF_ENDPOINT, and run this again, which goes on from there."
        ) from error
    except ValueError as error:  # an id that cannot be one, or a file beyond what goes over HTTP
        raise FetchError(f"{what} cannot be fetched: {str(error).splitlines()[0]}") from error


# --- one file --------------------------------------------------------------------------------------------------------


def fetch(file: File, folder: Path, reuse: Sequence[Path] = ()) -> Path:
    """Bring one file into a directory, unless it is there or in a directory of `reuse`.

    Raises:
        FetchError: it cannot be had, or has another digest than announced.
    """
    place = folder / file.place
    for candidate in (place, *(other / file.place for other in reuse)):
        if is_whole(candidate, file):
            if candidate != place:
                _link(candidate, place)
            return place
    _make_way(place)
    part = _part(place, file)
    resumed = part.exists()
    for _ in range(2):
        _download(file, part)
        if is_whole(part, file):
            part.replace(place)
            return place
        found = digest_of(part, file.algorithm)
        part.unlink()
        if not resumed:
            break
        resumed = False  # what lay there may have been damaged; once more from the start
    raise FetchError(
        f"{file.path} came with the digest {found[:16]}... and not {file.digest[:16]}..., as announced; it was damaged"
        " on the way or exchanged, so it was thrown away. Run this again; if it comes back, suspect a proxy or mirror."
    )


def _part(place: Path, file: File) -> Path:
    """Where a file grows; named by its digest, so that nothing is appended to a part of another version."""
    return place.with_name(f"{place.name}.{file.digest[:16]}{PART}")


def _download(file: File, part: Path) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)
    have_bytes = part.stat().st_size if part.exists() else 0
    if file.size_bytes is not None and have_bytes > file.size_bytes:
        part.unlink()
        have_bytes = 0
    if file.size_bytes is None and have_bytes and digest_of(part, file.algorithm) == file.digest:
        return
    try:
        with _told(file.path), part.open("ab") as stream:
            http_get(
                file.url,
                stream,
                resume_size=have_bytes,
                headers=dict(file.headers),
                expected_size=file.size_bytes,
                displayed_filename=file.path,
            )
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        # The client raises this too, for a body that ends early.
        reason = error.strerror or str(error).splitlines()[0]
        raise FetchError(
            f"{file.path} could not be fetched whole: {reason}; see to it and run this again, which goes on from there."
        ) from error


def is_whole(path: Path, file: File) -> bool:
    """Tell whether a regular file has the announced size and digest."""
    if path.is_symlink() or not path.is_file():
        return False
    if file.size_bytes is not None and path.stat().st_size != file.size_bytes:
        return False
    return digest_of(path, file.algorithm) == file.digest


def digest_of(path: Path, algorithm: str) -> str:
    """Return the sha256 of a file, or the SHA-1 that git gives it, in hex."""
    with path.open("rb") as stream:
        if algorithm == "sha256":
            return hashlib.file_digest(stream, "sha256").hexdigest()
        start = b"blob %d\0" % path.stat().st_size
        # What the hub tells of small files; it guards against damage, TLS against an attacker.
        return hashlib.file_digest(stream, lambda: hashlib.sha1(start, usedforsecurity=False)).hexdigest()


def _link(source: Path, place: Path) -> None:
    _make_way(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, place)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, place)


def _make_way(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


# --- an archive ------------------------------------------------------------------------------------------------------


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a tar (plain, gzip, xz, zstd) or zip into a new folder; return the directory that holds the model."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    try:
        _extract(archive, folder)
    except (tarfile.TarError, zipfile.BadZipFile, zstandard.ZstdError, EOFError, OSError) as error:
        raise FetchError(
            f"{archive.name} cannot be unpacked: {type(error).__name__} ({str(error).splitlines()[0]}); it must be a"
            " tar (also gzip, xz or zstd) or zip that holds a model's directory."
        ) from error
    inside = list(folder.iterdir())
    return inside[0] if len(inside) == 1 and inside[0].is_dir() else folder


def _extract(archive: Path, folder: Path) -> None:
    with archive.open("rb") as stream:
        start = stream.read(4)
        stream.seek(0)
        if start == b"PK\x03\x04":
            zipfile.ZipFile(stream).extractall(folder)  # noqa: S202  this leaves out `..` and roots, and makes no links
            return
        if start == b"\x28\xb5\x2f\xfd":
            with zstandard.ZstdDecompressor().stream_reader(stream) as raw, tarfile.open(fileobj=raw, mode="r|") as tar:
                _extract_tar(tar, folder)
            return
        with tarfile.open(fileobj=stream) as tar:
            _extract_tar(tar, folder)


def _extract_tar(tar: tarfile.TarFile, folder: Path) -> None:
    if hasattr(tarfile, "data_filter"):
        tar.extractall(folder, filter="data")
        return
    # Python before 3.11.4, Debian 12's say, has no filter for what leads outside: files and directories alone then.
    for member in tar:
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
            raise tarfile.TarError(f"{member.name} is no file or directory inside it")
        tar.extract(member, folder, set_attrs=False)


# --- the staging directory and the target ----------------------------------------------------------------------------


@contextlib.contextmanager
def staging(target: Path) -> Iterator[Path]:
    """The directory beside the target in which the new model is put together, held by one process at a time."""
    place = target.parent / f".{target.name}.fetching"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        holder = _hold(place)
        if _aside(target).exists() and not target.exists():
            _aside(target).rename(target)  # killed between the two renames of `_exchange`
    except OSError as error:
        raise FetchError(
            f"{target} cannot be written: {error.strerror} ({error.filename}); name another place with --into, or make"
            f" {target.parent} writable."
        ) from error
    try:
        (place / MODEL).mkdir(exist_ok=True)
        yield place
    finally:
        for empty in (place / MODEL, place):
            with contextlib.suppress(OSError):  # not empty, or gone
                empty.rmdir()
        os.close(holder)


def _hold(place: Path) -> int:
    for _ in range(10):
        place.mkdir(exist_ok=True)
        holder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(holder)
            break
        # Between opening and locking, the one that held it may have put it in the target's place.
        if place.exists() and place.stat().st_ino == os.fstat(holder).st_ino:
            return holder
        os.close(holder)
    raise FetchError(f"another scripts/fetch_weights is filling {place}; wait for it to end, and run this again.")


def keep_only(folder: Path, files: Sequence[File]) -> None:
    """Remove from a directory what an earlier fetch, of something else, left there."""
    places = {file.place for file in files}
    parts = {_part(Path(file.place), file).as_posix() for file in files}
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()
        elif path.relative_to(folder).as_posix() not in places | parts:
            path.unlink()


def check_room(folder: Path, files: Sequence[File], reuse: Sequence[Path]) -> None:
    """Refuse what would fill the disk, before anything is fetched."""
    need_bytes = 0
    for file in files:
        if not any((place / file.place).is_file() for place in (folder, *reuse)):
            part = _part(folder / file.place, file)
            need_bytes += (file.size_bytes or 0) - (part.stat().st_size if part.exists() else 0)
    free_bytes = shutil.disk_usage(folder).free
    if need_bytes > free_bytes:
        raise FetchError(
            f"{need_bytes:,} bytes are to be fetched into {folder.parent.parent}, and {free_bytes:,} are free there;"
            " free some, or name another place with --into."
        )


def note_of(target: Path) -> dict:
    """Return what an earlier fetch noted of the target, {} if nothing."""
    try:
        value = json.loads((target / NOTE).read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def put_in_place(folder: Path, staging: Path, target: Path, note: dict) -> None:
    """Let a directory of the staging one and the target change places, and remove the staging directory."""
    temporary = folder / f"{NOTE}{PART}"
    temporary.write_text(json.dumps(note, indent=1, sort_keys=True) + "\n")
    temporary.replace(folder / NOTE)
    try:
        folder.chmod(target.stat().st_mode & 0o777 if target.exists() else 0o755)
        _exchange(folder, target)
    except OSError as error:
        raise FetchError(
            f"{target} cannot be replaced ({error.strerror}), as a mount point cannot, for one; all is fetched, so"
            f" name a directory inside it with --into, or move {folder} yourself."
        ) from error
    shutil.rmtree(staging, ignore_errors=True)


def _exchange(folder: Path, target: Path) -> None:
    """In one step where the file system can; elsewhere a kill between two renames leaves the old model aside."""
    if not target.exists():
        folder.rename(target)
        return
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)  # glibc has it since 2.28
    if renameat2 and renameat2(_HERE, os.fsencode(folder), _HERE, os.fsencode(target), _EXCHANGE) == 0:
        return
    aside = _aside(target)
    if aside.exists():
        shutil.rmtree(aside)
    target.rename(aside)
    try:
        folder.rename(target)
    except OSError:
        aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _aside(target: Path) -> Path:
    return target.parent / f".{target.name}.before"


def archive_file(url: str, sha256: str) -> File:
    """Return an archive as a file to fetch; no token is sent to its server."""
    name = Path(urlsplit(url).path).name or "archive"
    return File(name, name, url, "sha256", sha256.lower(), None, (("Accept-Encoding", "identity"),))

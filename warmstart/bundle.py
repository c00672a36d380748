"""Bytes: a deterministic tar.zst of chosen files, its index, its digests, and safe unpacking; not what files are for.

A bundle is named by the sha256 of its compressed bytes. Its first member, index.json, lists every file with size and
digest; the members follow in the order of the index. A reader therefore knows each header byte before it reads it and
compares instead of parsing: links, devices, sparse files, odd names and duplicates cannot even be expressed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import struct
import tarfile
import tempfile
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, Self, cast

import zstandard

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

FORMAT = 1
SUFFIX = ".tar.zst"
TEMPORARY_PREFIX = ".warmstart-"

_CHUNK_BYTES = 1 << 20
# Small enough to stay in a core's cache between being decompressed, hashed and written.
_PIECE_BYTES = 256 << 10
_THREADS = 2
_JOB_BYTES = 1 << 20
_BATCH_BYTES = 1 << 20
_BATCH_FILES = 100
_BATCHES_AHEAD = 4
_BLOCK_BYTES = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK_BYTES)
_PLAIN_END = (b"0".ljust(101, b"\0") + b"ustar\00000").ljust(356, b"\0")  # what follows a header's checksum
_LEVEL = 3
_MAX_WINDOW_BYTES = 8 << 20  # level 3 needs 2 MiB; a frame that asks for more is not ours
_MAX_PATH_BYTES = 1024
_MAX_NAME_BYTES = 255
_INDEX_BYTES_PER_FILE = _MAX_PATH_BYTES + 256
_NAME = re.compile(r"[0-9a-f]{64}")

# Compiled by g++ in place; everything else in an Inductor directory appears by rename.
_BUILT_SUFFIXES = (".so", ".o")
_NEVER_SUFFIXES = (".lock", ".gch", ".pch", ".pyc")
_NEVER_DIRECTORIES = frozenset({"locks", "precompiled_headers", "__pycache__"})


class BundleError(Exception):
    """A bundle is not what its name, its index or the limits say."""


@dataclass(frozen=True)
class Limits:
    """Bounds on the files of one version, for packing and for unpacking alike.

    Attributes:
        max_raw_bytes: all files together; a compressed bundle may not be larger either.
        max_file_bytes: one file.
        max_files: number of files.
        reserve_bytes: free disk that unpacking leaves for everybody else.
    """

    max_raw_bytes: int = 4 << 30
    max_file_bytes: int = 1 << 30
    max_files: int = 50_000
    reserve_bytes: int = 64 << 20


@dataclass(frozen=True)
class FileStat:
    """What tells, without reading a file, that it has not changed."""

    size_bytes: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True)
class Entry:
    """One file of a bundle; `path` is relative, with slashes."""

    path: str
    size_bytes: int
    sha256: str
    executable: bool = False


@dataclass(frozen=True)
class Bundle:
    """A packed bundle on disk."""

    name: str
    path: Path
    size_bytes: int
    raw_bytes: int
    files: tuple[Entry, ...]


def scan(root: Path) -> dict[str, FileStat]:
    """Lists the files below a directory that a bundle may hold.

    Left out: links and anything else that is not a regular file, dot files, locks, temporary names, precompiled
    headers, byte code (it names its source's date), and empty files (an artifact never is one; a crash leaves them).
    """
    return dict(sorted(_walk(root, "")))


def stat_of(root: Path, path: str) -> FileStat | None:
    """What `scan` says of one file; None if it is gone or no regular file."""
    try:
        got = os.lstat(f"{root}/{path}")
    except OSError:
        return None
    return FileStat(got.st_size, got.st_mtime_ns, got.st_ino) if stat.S_ISREG(got.st_mode) else None


def entry(root: Path, path: str) -> Entry | None:
    """Reads one file's size and digest; None if it is gone, changing, or still being built.

    The race closed here: g++ writes its .so in place, under Inductor's lock of that name. A held lock means that it is
    being written; no lock and an incomplete ELF file means that its writer was killed. Inductor never rebuilds a file
    that exists, so one that is complete and unlocked stays as it is.
    """
    if path.endswith(_BUILT_SUFFIXES) and _lock_is_held(root, path):
        return None
    try:
        with _open_regular(f"{root}/{path}") as file:
            before = os.fstat(file.fileno())
            if path.endswith(_BUILT_SUFFIXES) and not _elf_is_complete(file, before.st_size):
                return None
            digest = _digest(file, before.st_size)
            after = os.fstat(file.fileno())
    except OSError:
        return None
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        return None
    return Entry(path, before.st_size, digest, bool(before.st_mode & stat.S_IXUSR))


def is_whole(root: Path, item: Entry) -> bool:
    """Whether a file is there, can be read, and is what its entry says; a link is not."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return _is_there(descriptor, item.path, item)
    finally:
        os.close(descriptor)


def remove_incomplete(root: Path) -> list[str]:
    """Removes libraries and objects that a killed compiler left half written, or that nobody can read; names them.

    Inductor takes a file that exists for a built one, so each later process would fail on it, crash in the loader, or
    take a cut-off test of the processor for a processor without vector units. What is being built now is locked.
    """
    removed = []
    # Not `scan`, which passes over empty files: a kill in the middle of a link leaves just those.
    built = (path for path in root.rglob("*") if path.name.endswith(_BUILT_SUFFIXES))
    for path in sorted(str(path.relative_to(root)) for path in built):
        if not _lock_is_held(root, path):
            # Gone meanwhile, or not ours to remove: then it is not ours to use either, and the compile will tell.
            with contextlib.suppress(OSError):
                if _is_complete(root, path):
                    continue
                (root / path).unlink()
                removed.append(path)
    return removed


def _is_complete(root: Path, path: str) -> bool:
    try:
        with _open_regular(f"{root}/{path}") as file:
            return _elf_is_complete(file, os.fstat(file.fileno()).st_size)
    except PermissionError:
        return False


def pack(root: Path, entries: Sequence[Entry], directory: Path, limits: Limits) -> Bundle:
    """Writes a bundle of the entries' files into a directory, under the name of its content.

    Raises:
        BundleError: the entries break a limit, or a file is no longer what its entry says.
    """
    ordered = sorted(entries, key=lambda item: item.path)
    _check_entries(ordered, limits)
    descriptor, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, suffix=".tmp", dir=directory)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            sink = _CountingSink(file, limits.max_raw_bytes)
            _write_tar(root, ordered, sink)
        path = directory / f"{sink.digest.hexdigest()}{SUFFIX}"
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    raw_bytes = sum(item.size_bytes for item in ordered)
    return Bundle(sink.digest.hexdigest(), path, sink.written_bytes, raw_bytes, tuple(ordered))


def unpack(path: Path, name: str, root: Path, limits: Limits) -> tuple[Entry, ...]:
    """Verifies a whole bundle, then moves its files into a directory that others may be using.

    Raises:
        BundleError: the bundle is damaged, hostile or too large; nothing of it is in the directory.
        OSError: the disk is full or the directory cannot be written.
    """
    staging = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=root))
    try:
        entries = stage(path, name, staging, limits)
        install(entries, staging, root)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return entries


def stage(
    path: Path, name: str, staging: Path, limits: Limits, claim: Callable[[Path, int, Limits], None] | None = None
) -> tuple[Entry, ...]:
    """Verifies a bundle and writes its files as 0, 1, 2, ... into a private directory.

    Args:
        path: the bundle.
        name: the digest that its bytes must have.
        staging: the directory.
        limits: bounds on what is written.
        claim: asked for room for so many bytes before any is written, in place of `check_room`.

    Raises:
        BundleError: as for `unpack`.
        OSError: the disk is full.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > limits.max_raw_bytes:
            raise BundleError(
                f"The bundle has more than the {limits.max_raw_bytes} bytes allowed, so it was not read. Raise"
                " WARMSTART_MAX_BUNDLE_BYTES if it is yours."
            )
        _check_name(file, name)
        try:
            with _decompressor(file) as stream:
                return _read_tar(_Source(stream), staging, limits, claim or check_room)
        except zstandard.ZstdError as error:
            raise BundleError(
                f"The bundle is not a zstd stream of ours ({error}). Delete it from the store."
            ) from error


def install(entries: Sequence[Entry], staging: Path, root: Path) -> None:
    """Moves staged files to their places; each appears whole, and one that is already there and equal stays.

    Raises:
        BundleError: a directory of the path is a link or a file, so the move could leave `root`.
        OSError: the directory cannot be written.
    """
    numbered = enumerate(entries)
    for folder, group in itertools.groupby(numbered, key=lambda item: item[1].path.rpartition("/")[0]):
        with _folder(root, folder) as folder_fd:
            for number, item in group:
                name = item.path.rpartition("/")[2]
                if not _is_there(folder_fd, name, item):
                    # Same file system, so a rename: a neighbour sees the old file, or the new one, never a part of it.
                    os.replace(f"{staging}/{number}", name, dst_dir_fd=folder_fd)


def refusal(path: str) -> str | None:
    """Says why a path may not be in a bundle, None if it may."""
    try:
        size_bytes = len(path.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode"
    parts = path.split("/")
    if not path or size_bytes > _MAX_PATH_BYTES or any(len(part.encode()) > _MAX_NAME_BYTES for part in parts):
        return "is empty or too long"
    if "\\" in path or not path.isprintable():
        return "has a backslash or a control character"
    if any(part in ("", ".", "..") for part in parts):
        return "is not a normalised relative path"
    if any(part.startswith((".", "tmp.")) or ".tmp" in part or part.endswith("_CxxBuild") for part in parts):
        return "is a dot file or temporary"
    if path.endswith(_NEVER_SUFFIXES) or not _NEVER_DIRECTORIES.isdisjoint(parts) or parts[0] == "gcc":
        return "is a lock, byte code, a compiler or a precompiled header"
    return None


def _walk(root: Path, prefix: str) -> Iterator[tuple[str, FileStat]]:
    try:
        found = list(os.scandir(root / prefix))
    except OSError:  # removed by a neighbour since it was listed, or not ours to read
        return
    for item in found:
        # A neighbour may remove or replace it between the listing and the look.
        with contextlib.suppress(OSError):
            yield from _look(root, prefix + item.name, item)


def _look(root: Path, path: str, item: os.DirEntry[str]) -> Iterator[tuple[str, FileStat]]:
    if item.is_dir(follow_symlinks=False):
        if refusal(f"{path}/x") is None:
            yield from _walk(root, f"{path}/")
    elif item.is_file(follow_symlinks=False) and refusal(path) is None:
        got = item.stat(follow_symlinks=False)
        if got.st_size:
            yield path, FileStat(got.st_size, got.st_mtime_ns, got.st_ino)


def _digest(file: io.FileIO, size_bytes: int) -> str:
    """Hashes a file as `hashlib.file_digest` does, without its 256 KiB of fresh zeros for each small file."""
    digest = hashlib.sha256()
    while chunk := file.read(min(size_bytes + 1, _CHUNK_BYTES)):
        digest.update(chunk)
    return digest.hexdigest()


def _lock_is_held(root: Path, path: str) -> bool:
    lock = root / "locks" / f"{path.rpartition('/')[2].partition('.')[0]}.lock"
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # Shared and at once released: a builder that asks in the meantime only asks again.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _elf_is_complete(file: io.FileIO, size_bytes: int) -> bool:
    """Tests that a 64-bit ELF file reaches to the end of its section table, which linkers write last."""
    head = os.pread(file.fileno(), 64, 0)
    if len(head) < 64 or head[:5] != b"\x7fELF\x02":
        return False
    order = "<" if head[5] == 1 else ">"
    sections_at = struct.unpack_from(f"{order}Q", head, 40)[0]
    section_bytes, sections = struct.unpack_from(f"{order}HH", head, 58)
    return bool(sections_at and sections and sections_at + section_bytes * sections <= size_bytes)


def _open_regular(path: str) -> io.FileIO:
    # Not blocking, not following: a pipe or a link may have taken the place of what was listed.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return os.fdopen(descriptor, "rb", buffering=0)  # it is read in large pieces


def _check_entries(entries: Sequence[Entry], limits: Limits) -> None:
    if len(entries) > limits.max_files:
        raise BundleError(f"{len(entries)} files are more than the {limits.max_files} allowed.")
    raw_bytes = sum(item.size_bytes for item in entries)
    if raw_bytes > limits.max_raw_bytes:
        raise BundleError(
            f"The files have {raw_bytes} bytes, more than the {limits.max_raw_bytes} allowed. Raise"
            " WARMSTART_MAX_BUNDLE_BYTES if they are yours."
        )
    for item in entries:
        if reason := refusal(item.path):
            raise BundleError(f"The path {item.path[:80]!r} {reason}, so it may not be in a bundle.")
        if item.size_bytes > limits.max_file_bytes:
            raise BundleError(
                f"{item.path} has {item.size_bytes} bytes, more than the {limits.max_file_bytes} allowed."
            )
    _check_places([item.path for item in entries])


def _check_places(paths: Sequence[str]) -> None:
    files = set(paths)
    for before, path in itertools.pairwise(paths):
        if before >= path:
            raise BundleError(f"The path {path!r} is listed twice or out of order.")
    for path in paths:
        folder = path
        while folder := folder.rpartition("/")[0]:
            if folder in files:
                raise BundleError(f"The path {folder!r} is listed as a file and as a directory.")


def to_index(entries: Sequence[Entry]) -> bytes:
    """Writes entries as a bundle's index does, as JSON."""
    files = [
        {"path": item.path, "size": item.size_bytes, "sha256": item.sha256}
        | ({"executable": True} if item.executable else {})
        for item in entries
    ]
    return json.dumps({"format": FORMAT, "files": files}, separators=(",", ":"), sort_keys=True).encode()


def _header(path: str, size_bytes: int, executable: bool = False) -> bytes:
    """The one header a member may have: no owner, no time, one of two modes."""
    mode = 0o755 if executable else 0o644
    if path.isascii() and len(path) <= 100 and size_bytes < 8**11:
        return _plain_header(path.encode(), size_bytes, mode)
    info = tarfile.TarInfo(path)
    info.size = size_bytes
    info.mode = mode
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def _plain_header(path: bytes, size_bytes: int, mode: int) -> bytes:
    """What tarfile writes for a name and a size that need no extension; it takes ten times as long."""
    start = b"%-100b%07o\0%07o\0%07o\0%011o\0%011o\0" % (b"", mode, 0, 0, size_bytes, 0)
    start = path.ljust(100, b"\0") + start[100:]
    # The sum is taken with blanks in its own place.
    total = sum(start) + sum(_PLAIN_END) + 8 * ord(" ")
    return start + b"%06o\0 " % total + _PLAIN_END


def _padding(size_bytes: int) -> bytes:
    return bytes(-size_bytes % _BLOCK_BYTES)


class _CountingSink:
    """Hashes and counts what goes through, and stops at the limit."""

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self.digest = hashlib.sha256()
        self.written_bytes = 0
        self._file = file
        self._max_bytes = max_bytes

    def write(self, data: bytes, /) -> int:
        self.written_bytes += len(data)
        if self.written_bytes > self._max_bytes:
            raise BundleError(f"The bundle would have more than the {self._max_bytes} bytes allowed.")
        self.digest.update(data)
        return self._file.write(data)


def _write_tar(root: Path, entries: Sequence[Entry], sink: _CountingSink) -> None:
    # Compressed beside the reading and hashing of the next files. How many threads do it does not change the bytes, and
    # small jobs keep the memory at a third of what zstd takes by itself.
    parameters = zstandard.ZstdCompressionParameters.from_level(
        _LEVEL, write_checksum=True, write_content_size=False, threads=_THREADS, job_size=_JOB_BYTES
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    index = to_index(entries)
    with compressor.stream_writer(cast("IO[bytes]", sink), closefd=False) as out:
        out.write(_header("index.json", len(index)) + index + _padding(len(index)))
        for item in entries:
            out.write(_header(item.path, item.size_bytes, item.executable))
            _copy_in(f"{root}/{item.path}", item, out)
            out.write(_padding(item.size_bytes))
        out.write(_END)


def _copy_in(path: str, item: Entry, out: zstandard.ZstdCompressionWriter) -> None:
    digest = hashlib.sha256()
    left = item.size_bytes
    with _open_regular(path) as file:
        while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
            digest.update(chunk)
            out.write(chunk)
            left -= len(chunk)
    if left or digest.hexdigest() != item.sha256:
        raise BundleError(
            f"{item.path} changed while it was packed, so the bundle was dropped. It is packed next time."
        )


def _check_name(file: io.BufferedReader, name: str) -> None:
    """Nothing of a bundle is parsed before its bytes are known to be those that were published."""
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    if not _NAME.fullmatch(name) or digest != name:
        raise BundleError(
            f"The bundle {name[:64]!r} has the digest {digest[:12]}..., so its bytes are not those that were published."
            " It was not read; delete it from the store."
        )
    file.seek(0)


@contextlib.contextmanager
def _decompressor(file: BinaryIO) -> Iterator[zstandard.ZstdDecompressionReader]:
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    with decompressor.stream_reader(file, read_size=_CHUNK_BYTES, read_across_frames=True, closefd=False) as stream:
        yield stream


class _Source:
    """Reads exactly what is asked for, in bounded pieces."""

    def __init__(self, stream: zstandard.ZstdDecompressionReader) -> None:
        self._stream = stream
        self._rest = memoryview(b"")

    def pieces(self, size_bytes: int) -> Iterator[memoryview]:
        left = size_bytes
        while left:
            self._rest = self._rest or memoryview(self._stream.read(_PIECE_BYTES))
            if not self._rest:
                raise BundleError(f"The bundle ends {left} bytes early. Delete it from the store.")
            piece, self._rest = self._rest[:left], self._rest[left:]
            left -= len(piece)
            yield piece

    def exactly(self, size_bytes: int) -> memoryview:
        if size_bytes <= len(self._rest):
            found, self._rest = self._rest[:size_bytes], self._rest[size_bytes:]
            return found
        return memoryview(b"".join(self.pieces(size_bytes)))

    def expect(self, data: bytes, what: str) -> None:
        _expect(self.exactly(len(data)), data, what)

    def expect_end(self) -> None:
        self.expect(_END, "The end of the bundle")
        if self._rest or self._stream.read(1):
            raise BundleError("The bundle goes on after its end. Delete it from the store.")


def _read_tar(
    source: _Source, staging: Path, limits: Limits, claim: Callable[[Path, int, Limits], None]
) -> tuple[Entry, ...]:
    entries = _read_index(source, limits)
    claim(staging, sum(item.size_bytes for item in entries), limits)
    with _Writer(staging) as writer:
        for number, item in enumerate(entries):
            header, padding = _header(item.path, item.size_bytes, item.executable), _padding(item.size_bytes)
            if item.size_bytes > _BATCH_BYTES:
                source.expect(header, f"The header of {item.path}")
                _copy_out(f"{staging}/{number}", item, source.pieces(item.size_bytes))
                source.expect(padding, f"The padding after {item.path}")
                continue
            member = source.exactly(len(header) + item.size_bytes + len(padding))
            _expect(member[: len(header)], header, f"The header of {item.path}")
            _expect(member[len(header) + item.size_bytes :], padding, f"The padding after {item.path}")
            writer.write(number, item, member[len(header) : len(header) + item.size_bytes])
        source.expect_end()
    return entries


def _expect(found: memoryview, wanted: bytes, what: str) -> None:
    if found != wanted:
        raise BundleError(f"{what} is not as the bundle's index says. Delete the bundle from the store.")


class _Writer:
    """Hashes and writes small files on threads, several at a time, beside whoever decompresses the next ones.

    That makes a restore a third shorter where two cores are free. Some megabytes are in memory at most.
    """

    def __init__(self, staging: Path) -> None:
        self._staging = staging
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="warmstart-unpack")
        self._jobs: deque[Future[None]] = deque()
        self._batch: list[tuple[str, Entry, memoryview]] = []
        self._batch_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self._submit()
                self._finish(0)
        finally:
            self._pool.shutdown(cancel_futures=True)

    def write(self, number: int, item: Entry, data: memoryview) -> None:
        self._batch.append((f"{self._staging}/{number}", item, data))
        self._batch_bytes += item.size_bytes
        if self._batch_bytes >= _BATCH_BYTES or len(self._batch) >= _BATCH_FILES:
            self._submit()
            self._finish(_BATCHES_AHEAD)

    def _submit(self) -> None:
        self._jobs.append(self._pool.submit(_copy_all_out, self._batch))
        self._batch, self._batch_bytes = [], 0

    def _finish(self, left: int) -> None:
        while len(self._jobs) > left:
            self._jobs.popleft().result()


def _copy_all_out(batch: Sequence[tuple[str, Entry, memoryview]]) -> None:
    for path, item, data in batch:
        _copy_out(path, item, [data])


def _read_index(source: _Source, limits: Limits) -> tuple[Entry, ...]:
    header = bytes(source.exactly(_BLOCK_BYTES))
    try:
        size_bytes = int(header[124:135], 8)
    except ValueError as error:
        raise BundleError("The bundle does not begin with a tar header. Delete it from the store.") from error
    if not 0 <= size_bytes <= limits.max_files * _INDEX_BYTES_PER_FILE or header != _header("index.json", size_bytes):
        raise BundleError("The bundle does not begin with an index.json of a sane size. Delete it from the store.")
    raw = bytes(source.exactly(size_bytes))
    source.expect(_padding(size_bytes), "The padding after index.json")
    entries = parse_index(raw)
    _check_entries(entries, limits)
    return entries


def parse_index(raw: bytes) -> tuple[Entry, ...]:
    """Reads what `to_index` wrote; whether the paths may be used is not looked at.

    Raises:
        BundleError: it is something else.
    """
    try:
        index = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"The bundle's index is not JSON ({str(error)[:80]}).") from error
    files = index.get("files") if isinstance(index, dict) else None
    if not isinstance(files, list) or index.get("format") != FORMAT:
        raise BundleError(f"The bundle's index is not of format {FORMAT}. It is of another version of warmstart.")
    return tuple(_parse_entry(item) for item in files)


def _parse_entry(item: object) -> Entry:
    fields: Mapping[str, object] = item if isinstance(item, dict) else {}
    path, size_bytes, digest = fields.get("path"), fields.get("size"), fields.get("sha256")
    executable = fields.get("executable", False)
    if (
        isinstance(path, str)
        and type(size_bytes) is int
        and size_bytes >= 0
        and isinstance(digest, str)
        and _NAME.fullmatch(digest)
        and isinstance(executable, bool)
    ):
        return Entry(path, size_bytes, digest, executable)
    raise BundleError(f"The bundle's index has a malformed line: {str(item)[:80]}.")


def check_room(folder: Path, raw_bytes: int, limits: Limits) -> None:
    """Raises OSError now rather than fill the disk that the whole container shares."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < raw_bytes + limits.reserve_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{free_bytes} bytes are free where {raw_bytes} and a reserve of {limits.reserve_bytes} are needed",
        )


def _copy_out(path: str, item: Entry, pieces: Iterable[memoryview]) -> None:
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755 if item.executable else 0o644)
    try:
        for piece in pieces:
            digest.update(piece)
            _write(descriptor, piece)
    finally:
        os.close(descriptor)
    if digest.hexdigest() != item.sha256:
        raise BundleError(f"{item.path} is not as the bundle's index says. Delete the bundle from the store.")


def _write(descriptor: int, data: memoryview) -> None:
    written_bytes = os.write(descriptor, data)
    while written_bytes < len(data):  # a disk that is about to be full takes a part first
        written_bytes += os.write(descriptor, data[written_bytes:])


@contextlib.contextmanager
def _folder(root: Path, folder: str) -> Iterator[int]:
    """Opens a directory below the root, made where absent, without passing through a link."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in filter(None, folder.split("/")):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=descriptor)
            # Opened by the parent's descriptor: a link put in its place since then is refused, not followed.
            below = _open_folder(descriptor, name, folder)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def _open_folder(parent: int, name: str, folder: str) -> int:
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise BundleError(
                f"{folder} goes through a link or a file in the live directory, so nothing was put there."
            ) from error
        raise


def _is_there(folder_fd: int, name: str, item: Entry) -> bool:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_fd)
    except OSError:
        return False
    got = os.fstat(descriptor)
    if not stat.S_ISREG(got.st_mode) or got.st_size != item.size_bytes:
        os.close(descriptor)
        return False
    with os.fdopen(descriptor, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == item.sha256

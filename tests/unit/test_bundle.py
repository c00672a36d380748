"""Bundles: what goes in, that the same work has the same name, and that nothing hostile or broken comes out."""

import bz2
import contextlib
import errno
import fcntl
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import shutil
import subprocess
import tarfile
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zstandard
from artifacts import GRAPH, LIMITS, TREE, contents, elf, entries, fill, in_namespace, named, packed

from warmstart import bundle
from warmstart.bundle import BundleError, Entry, Limits

MUTATIONS = 2400
PEAK_BYTES = 12 << 20


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return fill(tmp_path / "tree", TREE)


def compressed(tar: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(tar)


def tar_of(tree: Path, directory: Path) -> bytes:
    """The tar inside a good bundle of the tree."""
    with packed(tree, directory).path.open("rb") as file:
        return zstandard.ZstdDecompressor().stream_reader(file).read()


def forged(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """A tar like ours, of members like nobody's."""
    out = io.BytesIO()
    for info, data in members:
        out.write(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape") + data + bytes(-len(data) % 512))
    return out.getvalue() + bytes(1024)


def member(path: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(path)
    info.type, info.size, info.mode = kind, len(data), 0o644
    return info, data


def line(path: object, data: bytes = b"x", **changes: object) -> dict[str, object]:
    digest = hashlib.sha256(data).hexdigest()
    return {"path": path, "size": len(data), "sha256": digest} | changes


def index(*lines: object, **changes: object) -> tuple[tarfile.TarInfo, bytes]:
    return member("index.json", json.dumps({"format": 1, "files": list(lines)} | changes).encode())


def refused(tmp_path: Path, data: bytes, match: str, limits: Limits = LIMITS) -> None:
    """Unpacks into a directory with neighbours, and finds both as they were."""
    outer = fill(tmp_path / "outer", {"live/old": b"old", "neighbour": b"n"})
    path, name = named(tmp_path / "store", data)
    with pytest.raises(BundleError, match=match):
        bundle.unpack(path, name, outer / "live", limits)
    assert contents(outer) == {"live/old": b"old", "neighbour": b"n"}


# --- What goes in ----------------------------------------------------------------------------------------------------


def test_a_bundle_brings_back_what_was_packed(tree: Path, tmp_path: Path) -> None:
    (tree / "sh/run.sh").write_bytes(b"#!")
    (tree / "sh/run.sh").chmod(0o755)
    made = packed(tree, tmp_path / "out")
    live = tmp_path / "live"
    live.mkdir()
    restored = bundle.unpack(made.path, made.name, live, LIMITS)
    assert restored == made.files
    assert contents(live) == contents(tree)
    assert made.raw_bytes == sum(map(len, contents(tree).values()))
    assert os.access(live / "sh/run.sh", os.X_OK)
    assert not os.access(live / GRAPH, os.X_OK)


def test_the_same_files_have_the_same_name(tree: Path, tmp_path: Path) -> None:
    other = fill(tmp_path / "elsewhere/deep", dict(reversed(TREE.items())))
    for path in other.rglob("*"):
        os.utime(path, (1, 1))
    one, two = packed(tree, tmp_path / "a"), packed(other, tmp_path / "b")
    assert one.name == two.name == hashlib.sha256(one.path.read_bytes()).hexdigest()
    assert one.path.name == f"{one.name}.tar.zst"
    fill(tree, {"sh/another": b"1"})
    assert packed(tree, tmp_path / "a").name != one.name


def test_any_tar_can_list_a_bundle_and_the_index_comes_first(tree: Path, tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(tar_of(tree, tmp_path / "out"))) as tar:
        members = tar.getmembers()
        first = json.loads(tar.extractfile(members[0]).read())  # type: ignore[union-attr]
    assert members[0].name == "index.json"
    assert [item["path"] for item in first["files"]] == [item.name for item in members[1:]] == sorted(TREE)
    assert {(item.mtime, item.uid, item.gid, item.uname, item.gname) for item in members} == {(0, 0, 0, "", "")}


def test_the_format_is_what_it_was(tmp_path: Path) -> None:
    """A change of this digest makes every stored bundle unreadable: raise the format version with it."""
    tree = fill(tmp_path / "tree", {"a/b": b"c", "long/" + "d" * 120: b"e"})
    digest = hashlib.sha256(tar_of(tree, tmp_path / "out")).hexdigest()
    assert digest == "c08a65f9cc77fbfbb8268d63aa4066732a53742d87061e5243ac8ef545210d09"


NEVER = [
    "locks/cabc.lock", "locks/anything", "ab/c.lock", ".hidden/file", "ab/.1234.5678.tmp", "ab/x.tmp", "ab/x.tmp.1",
    "triton/tmp.pid_12_ab/kernel.json", "triton/0/tmp.9f/kernel.json", "precompiled_headers/ab/c.h", "ab/c.h.gch",
    "ab/c.pch", "ab/__pycache__/c.cpython-311.pyc", "ab/cabc.main_CxxBuild/x.o", "gcc/bin/g++", ".warmstart-x/0",
    "ab/with\nnewline", "ab/back\\slash",
]  # fmt: skip


@pytest.mark.parametrize("path", ["a", "index.json", "a%b", "d/" + "x" * 97, "d/" + "x" * 98, "d/" + "x" * 99, "d/é"])
@pytest.mark.parametrize("size_bytes", [0, 1, 8**11 - 1, 8**11])
@pytest.mark.parametrize("executable", [True, False])
def test_headers_are_those_of_the_tar_format(path: str, size_bytes: int, executable: bool) -> None:
    """Plain ones are written without tarfile; a byte off, and every bundle of before would be refused."""
    info = tarfile.TarInfo(path)
    info.size, info.mode = size_bytes, 0o755 if executable else 0o644
    assert bundle._header(path, size_bytes, executable) == info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def test_scan_leaves_out_what_is_no_artifact(tree: Path) -> None:
    fill(tree, dict.fromkeys(NEVER, b"x"))
    fill(tree, {"ab/empty.py": b""})
    (tree / "ab/link").symlink_to(tree / GRAPH)
    (tree / "linked").symlink_to(tree / "fxgraph")
    os.mkfifo(tree / "ab/pipe")
    Path(os.fsdecode(os.fsencode(tree) + b"/ab/\xff")).write_bytes(b"x")
    assert list(bundle.scan(tree)) == sorted(TREE)


def test_scan_of_a_directory_that_is_not_there_finds_nothing(tmp_path: Path) -> None:
    assert bundle.scan(tmp_path / "absent") == {}


@contextmanager
def held(lock: Path) -> Iterator[None]:
    """The lock of a file as Inductor holds it, by another open file description."""
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("name", ["ab/ckey.so", "ab/ckey.main.so", "ab/ckey.optimized.o"])
def test_a_file_whose_lock_is_held_is_not_read(tmp_path: Path, name: str) -> None:
    fill(tmp_path, {name: elf()})
    with held(tmp_path / "locks/ckey.lock"):
        assert bundle.entry(tmp_path, name) is None
    assert bundle.entry(tmp_path, name) is not None


def test_the_lock_is_not_kept(tmp_path: Path) -> None:
    fill(tmp_path, {"ab/ckey.so": elf(), "locks/ckey.lock": b""})
    assert bundle.entry(tmp_path, "ab/ckey.so") is not None
    with (tmp_path / "locks/ckey.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_shared_object_cut_anywhere_is_not_archived(tmp_path: Path) -> None:
    (tmp_path / "k.cpp").write_text('extern "C" int f(int x) { return x + 1; }\n')
    subprocess.run(["g++", "-shared", "-fPIC", "-o", tmp_path / "k.so", tmp_path / "k.cpp"], check=True)
    whole = (tmp_path / "k.so").read_bytes()
    assert bundle.entry(tmp_path, "k.so") is not None
    for cut in {1, 4, 63, 64, len(whole) // 2, len(whole) - 64, len(whole) - 1}:
        (tmp_path / "k.so").write_bytes(whole[:cut])
        assert bundle.entry(tmp_path, "k.so") is None, cut
    (tmp_path / "k.so").write_bytes(bytes(len(whole)))
    assert bundle.entry(tmp_path, "k.so") is None, "space reserved, nothing written"


def test_what_took_the_place_of_a_file_is_not_read(tree: Path) -> None:
    (tree / GRAPH).unlink()
    assert bundle.entry(tree, GRAPH) is None
    os.mkfifo(tree / GRAPH)
    assert bundle.entry(tree, GRAPH) is None
    (tree / GRAPH).unlink()
    (tree / GRAPH).symlink_to(tree / "sh")
    assert bundle.entry(tree, GRAPH) is None


@pytest.mark.parametrize("content", [b"graph" * 399, b"other" * 400, None])
def test_a_file_that_changes_while_it_is_packed_spoils_no_bundle(
    tree: Path, tmp_path: Path, content: bytes | None
) -> None:
    found = entries(tree)
    (tree / GRAPH).unlink()
    if content is not None:
        (tree / GRAPH).write_bytes(content)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises((BundleError, FileNotFoundError)):
        bundle.pack(tree, found, out, LIMITS)
    assert contents(out) == {}


@pytest.mark.parametrize(
    ("limits", "match"),
    [
        (Limits(max_raw_bytes=100), "more than the 100"),
        (Limits(max_file_bytes=100), "more than the 100"),
        (Limits(max_files=2), "more than the 2"),
    ],
)
def test_limits_hold_both_ways(tree: Path, tmp_path: Path, limits: Limits, match: str) -> None:
    with pytest.raises(BundleError, match=match):
        packed(tree, tmp_path / "out", limits)
    refused(tmp_path, packed(tree, tmp_path / "out").path.read_bytes(), match, limits)


def test_the_limit_is_on_unpacked_bytes(tmp_path: Path) -> None:
    """What compresses well is measured by what it becomes."""
    tree = fill(tmp_path / "tree", {"ab/1": bytes(60_000), "ab/2": bytes(60_000)})
    small = Limits(max_raw_bytes=100_000, reserve_bytes=0)
    with pytest.raises(BundleError, match="The files have 120000 bytes"):
        packed(tree, tmp_path / "out", small)
    refused(tmp_path, packed(tree, tmp_path / "out").path.read_bytes(), "The files have 120000 bytes", small)


def test_memory_does_not_grow_with_a_file(tmp_path: Path) -> None:
    big = tmp_path / "tree/ab/big"
    big.parent.mkdir(parents=True)
    with big.open("wb") as file:
        file.truncate(48 << 20)
    (tmp_path / "live").mkdir()
    tracemalloc.start()
    try:
        made = packed(tmp_path / "tree", tmp_path / "out")
        bundle.unpack(made.path, made.name, tmp_path / "live", LIMITS)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 12 << 20


# --- What comes out --------------------------------------------------------------------------------------------------


def test_a_file_that_is_there_and_equal_is_left_alone(tree: Path, tmp_path: Path) -> None:
    made = packed(tree, tmp_path / "out")
    live = fill(tmp_path / "live", {GRAPH: TREE[GRAPH], "sh/mine": b"mine"})
    before = (live / GRAPH).stat()
    bundle.unpack(made.path, made.name, live, LIMITS)
    after = (live / GRAPH).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert contents(live) == TREE | {"sh/mine": b"mine"}


def test_a_file_of_the_same_size_and_other_content_is_replaced(tree: Path, tmp_path: Path) -> None:
    made = packed(tree, tmp_path / "out")
    live = fill(tmp_path / "live", {GRAPH: b"other" * 400})
    bundle.unpack(made.path, made.name, live, LIMITS)
    assert contents(live) == TREE


def test_a_truncated_file_is_healed_and_open_readers_keep_theirs(tree: Path, tmp_path: Path) -> None:
    made = packed(tree, tmp_path / "out")
    live = fill(tmp_path / "live", {GRAPH: b"gra"})
    with (live / GRAPH).open("rb") as reader:
        bundle.unpack(made.path, made.name, live, LIMITS)
        assert reader.read() == b"gra"
    assert (live / GRAPH).read_bytes() == TREE[GRAPH]


def test_links_in_the_live_directory_are_not_followed(tree: Path, tmp_path: Path) -> None:
    made = packed(tree, tmp_path / "out")
    outside = fill(tmp_path / "outside", {"file": b"outside"})
    live = tmp_path / "live"
    live.mkdir()
    (live / "fxgraph").symlink_to(outside)
    with pytest.raises(BundleError, match="goes through a link"):
        bundle.unpack(made.path, made.name, live, LIMITS)
    assert contents(outside) == {"file": b"outside"}
    (live / "fxgraph").unlink()
    (live / GRAPH).parent.mkdir(parents=True)
    (live / GRAPH).symlink_to(outside / "file")
    bundle.unpack(made.path, made.name, live, LIMITS)
    assert contents(outside) == {"file": b"outside"}
    assert contents(live) == TREE


def test_the_name_is_checked_before_anything_else(tree: Path, tmp_path: Path) -> None:
    made = packed(tree, tmp_path / "out")
    live = tmp_path / "live"
    live.mkdir()
    for name in ("0" * 64, "", "../" * 21, made.name.upper(), made.name[:63]):
        with pytest.raises(BundleError, match="not those that were published"):
            bundle.unpack(made.path, name, live, LIMITS)
    assert list(live.iterdir()) == []


PATHS = [
    "../evil", "a/../../evil", "/etc/evil", "a//b", "a/./b", "a/", "", ".", "..", "a\\b", "a\x00b", "a\nb", "a/.b",
    "x" * 300, "y/" * 600 + "z", "locks/a", "a.lock", "tmp.1/a", "a.tmp", "\ud800", "gcc/a", "a.gch",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_is_not_plain_is_refused(tmp_path: Path, path: str) -> None:
    refused(tmp_path, compressed(forged([index(line(path)), member("a", b"x")])), "may not be in a bundle")


KINDS = [
    tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE,
    tarfile.GNUTYPE_SPARSE, tarfile.CONTTYPE, tarfile.XGLTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_accepted(tmp_path: Path, kind: bytes) -> None:
    refused(tmp_path, compressed(forged([index(line("a")), member("a", b"x", kind)])), "not as the bundle's index says")


def test_a_link_beside_its_index_line_is_refused(tmp_path: Path) -> None:
    info, _ = member("a", b"", tarfile.SYMTYPE)
    info.linkname = "/etc/passwd"
    refused(tmp_path, compressed(forged([index(line("a")), (info, b"")])), "not as the bundle's index says")


HOSTILE_INDEXES: list[tuple[list[tuple[tarfile.TarInfo, bytes]], str]] = [
    ([index(line("a"), line("a")), member("a", b"x"), member("a", b"x")], "listed twice"),
    ([index(line("b"), line("a")), member("b", b"x"), member("a", b"x")], "out of order"),
    ([index(line("a"), line("a/b")), member("a", b"x"), member("a/b", b"x")], "as a file and as a directory"),
    ([index(line("a"), line("a-"), line("a/b"))], "as a file and as a directory"),
    ([index(line("a")), member("b", b"x")], "not as the bundle's index says"),
    ([index(line("a")), member("a", b"y")], "not as the bundle's index says"),
    ([index(line("a")), member("a", b"xx")], "not as the bundle's index says"),
    ([index(line("a")), member("a", b"x"), member("b", b"x")], "not as the bundle's index says"),
    ([index(line("a"), line("b")), member("a", b"x")], "not as the bundle's index says"),
    ([index(line("a", executable=True)), member("a", b"x")], "not as the bundle's index says"),
    ([member("a", b"x"), index(line("a"))], "does not begin with an index"),
    ([index(line("a", size=-1)), member("a", b"x")], "malformed line"),
    ([index(line("a", size=True)), member("a", b"x")], "malformed line"),
    ([index(line("a", size=1.0)), member("a", b"x")], "malformed line"),
    ([index(line("a", sha256="A" * 64)), member("a", b"x")], "malformed line"),
    ([index(line("a", executable=1)), member("a", b"x")], "malformed line"),
    ([index(line(7)), member("a", b"x")], "malformed line"),
    ([index("a")], "malformed line"),
    ([index(format=2)], "not of format 1"),
    ([index(files={})], "not of format 1"),
    ([member("index.json", b"[1]")], "not of format 1"),
    ([member("index.json", b"{")], "not JSON"),
    ([member("index.json", b"[" * 100_000)], "not JSON"),
    ([member("index.json", b'{"format": ' + b"9" * 5000 + b"}")], "not JSON"),
    ([member("index.json", b"\xff")], "not JSON"),
    ([index(line("a", size=1 << 80))], "more than the"),
]


@pytest.mark.parametrize(("members", "match"), HOSTILE_INDEXES)
def test_a_bundle_at_odds_with_its_index_is_refused(
    tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]], match: str
) -> None:
    refused(tmp_path, compressed(forged(members)), match)


def test_one_bad_member_keeps_all_the_others_out(tmp_path: Path) -> None:
    names = [f"f{number:03}" for number in range(20)]
    members = [member(name, b"x") for name in names[:-1]] + [member(names[-1], b"y")]
    refused(tmp_path, compressed(forged([index(*map(line, names)), *members])), "f019 is not as")


@pytest.mark.parametrize("more", [b"\0", bytes(512), b"hidden"], ids=["a byte", "a block", "text"])
def test_a_little_after_the_end_is_refused(tmp_path: Path, more: bytes) -> None:
    """So little that it is read along with what comes before it."""
    good = forged([index(line("a")), member("a", b"x")])
    refused(tmp_path, compressed(good + more), "goes on after its end")


@pytest.mark.parametrize("size_bytes", [1, (1 << 20) + 1], ids=["small", "large"])
def test_nothing_hides_in_the_padding(tmp_path: Path, size_bytes: int) -> None:
    data = b"x" * size_bytes
    first, second = index(line("a", data)), member("a", data)
    good = forged([first, second])
    after_index = 512 + len(first[1])
    for at, what in ((after_index, "after index.json"), (len(good) - 1024 - 1, "after a")):
        assert good[at] == 0
        refused(tmp_path, compressed(good[:at] + b"!" + good[at + 1 :]), f"The padding {what} is not as")


def test_a_bomb_stops_at_the_limit(tmp_path: Path) -> None:
    small = Limits(max_raw_bytes=1 << 20, max_file_bytes=1 << 20, max_files=10, reserve_bytes=0)
    zeros = bytes(64 << 20)
    good = forged([index(line("a")), member("a", b"x")])
    huge = tarfile.TarInfo("index.json")
    huge.size, huge.mode = len(zeros), 0o644
    refused(tmp_path, compressed(good + zeros), "goes on after its end", small)
    refused(tmp_path, compressed(forged([(huge, zeros)])), "sane size", small)
    refused(tmp_path, compressed(forged([index(line("a", zeros)), member("a", zeros)])), "more than the", small)
    refused(tmp_path, compressed(good) + compressed(zeros), "goes on after its end", small)
    refused(tmp_path, os.urandom(2 << 20), "more than the", small)


def test_a_frame_that_wants_much_memory_is_refused(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27, write_content_size=False)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    tar = forged([index(line("a")), member("a", b"x")])
    refused(tmp_path, stream.compress(tar) + stream.flush(), "not a zstd stream of ours")


@pytest.mark.parametrize("data", [b"", b"\0" * 2000, b"\x1f\x8b gzip", b"PK\x03\x04 zip", os.urandom(3000)])
def test_another_compression_is_refused(tmp_path: Path, data: bytes) -> None:
    refused(tmp_path, data, "zstd stream|ends .* bytes early")


Mutation = Callable[[random.Random, bytes], bytes]


def flip(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def truncate(chance: random.Random, data: bytes) -> bytes:
    return data[: chance.randrange(len(data))]


def overwrite(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + chance.randbytes(chance.randrange(1, 40)) + data[at + 40 :]


def swap_blocks(chance: random.Random, data: bytes) -> bytes:
    blocks = [data[at : at + 512] for at in range(0, len(data), 512)]
    one, two = chance.sample(range(len(blocks)), 2)
    blocks[one], blocks[two] = blocks[two], blocks[one]
    return b"".join(blocks)


def drop_block(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(0, len(data), 512)
    return data[:at] + data[at + 512 :]


def repeat_block(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(0, len(data), 512)
    return data[: at + 512] + data[at:]


def digit(chance: random.Random, data: bytes) -> bytes:
    """Another digit where there is one: sizes, checksums, digests."""
    at = chance.choice([at for at, byte in enumerate(data) if chr(byte).isdigit()])
    return data[:at] + str(chance.randrange(10)).encode() + data[at + 1 :]


def dots(chance: random.Random, data: bytes) -> bytes:
    """A path that climbs, of the same length, in the index and in the header alike."""
    path = chance.choice(sorted(TREE)).encode()
    return data.replace(path, b"../" * 3 + path[9:])


def members_of(data: bytes) -> list[tuple[tarfile.TarInfo, bytes]]:
    """The members of a good tar, to be put together again otherwise."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [(info, tar.extractfile(info).read()) for info in tar.getmembers()]  # type: ignore[union-attr]


def swap_members(chance: random.Random, data: bytes) -> bytes:
    found = members_of(data)
    one, two = chance.sample(range(len(found)), 2)
    found[one], found[two] = found[two], found[one]
    return forged(found)


def duplicate(chance: random.Random, data: bytes) -> bytes:
    """A member twice, in the index too or not."""
    found = members_of(data)
    again = chance.randrange(1, len(found))
    lines = json.loads(found[0][1])["files"]
    if chance.random() < 0.5:
        found[0] = index(*lines[:again], *lines[again - 1 :])
    return forged([*found[: again + 1], *found[again:]])


def rename(chance: random.Random, data: bytes) -> bytes:
    """An absolute, climbing or otherwise odd path, where index and header agree."""
    found = members_of(data)
    lines = json.loads(found[0][1])["files"]
    at = chance.randrange(len(lines))
    lines[at]["path"] = path = chance.choice([*PATHS, f"/{lines[at]['path']}", f"../{lines[at]['path']}"])
    with contextlib.suppress(UnicodeEncodeError, ValueError):
        found[at + 1] = member(path, found[at + 1][1])
        return forged([index(*lines), *found[1:]])
    return forged([index(*lines), *found[1 : at + 1]])


def retype(chance: random.Random, data: bytes) -> bytes:
    """A link, a device, a pipe, a sparse file: what a member is, and where it points."""
    found = members_of(data)
    info = found[chance.randrange(len(found))][0]
    info.type = chance.choice(KINDS)
    info.linkname = chance.choice(["", "/etc/passwd", "../neighbour", "old"])
    return forged(found)


def bomb(chance: random.Random, data: bytes) -> bytes:
    """Much of nothing: in a member, after the end, or promised only."""
    found = members_of(data)
    zeros = bytes(chance.randrange(1 << 20, 3 << 20))
    where = chance.randrange(3)
    if where == 0:
        return data + zeros
    lines = json.loads(found[0][1])["files"]
    if where == 1:
        return forged([index(line("zeros", zeros)), member("zeros", zeros)])
    lines[0]["size"] = chance.choice([1 << 62, 1 << 40, 10**30, len(zeros)])
    return forged([index(*lines), *found[1:]])


def wrong_index(chance: random.Random, data: bytes) -> bytes:
    """A line that is missing, is one too many, or says something else."""
    found = members_of(data)
    lines = json.loads(found[0][1])["files"]
    at = chance.randrange(len(lines))
    odd = chance.choice([None, -1, 1.5, True, "x", [], {}, 1 << 70, "0" * 64, "\ud800", ""])
    change = chance.randrange(4)
    if change == 0:
        del lines[at]
    elif change == 1:
        lines.insert(at, line("zz/extra"))
    elif change == 2:
        lines[at][chance.choice(["path", "size", "sha256", "executable", "format"])] = odd
    else:
        lines[at] = odd
    return forged([index(*lines), *found[1:]])


def foreign(chance: random.Random, data: bytes) -> bytes:
    """The same tar, packed by something else."""
    pack = chance.choice([gzip.compress, bz2.compress, lzma.compress, zlib.compress, bytes])
    return pack(data)[chance.choice([0, 0, 1]) :]


INSIDE: list[Mutation] = [
    flip, truncate, overwrite, swap_blocks, drop_block, repeat_block, digit, dots, swap_members, duplicate, rename,
    retype, bomb, wrong_index,
]  # fmt: skip
OUTSIDE: list[Mutation] = [flip, truncate, overwrite, foreign]
SMALL = Limits(max_raw_bytes=1 << 20, max_file_bytes=1 << 20, max_files=50, reserve_bytes=0)


def mutated(mutate: Mutation, tree: Path, directory: Path, inside: bool) -> Iterator[bytes]:
    """Bundles that somebody made who may write to the store: of a changed tar, or changed after packing."""
    good = tar_of(tree, directory)
    whole = packed(tree, directory).path.read_bytes()
    chance = random.Random(f"{mutate.__name__} {inside}")
    for _ in range(MUTATIONS // (len(INSIDE) + len(OUTSIDE)) + 1):
        yield compressed(mutate(chance, good)) if inside else mutate(chance, good if mutate is foreign else whole)


@pytest.mark.parametrize(
    ("mutate", "inside"), [(mutate, True) for mutate in INSIDE] + [(mutate, False) for mutate in OUTSIDE]
)
def test_a_mutated_bundle_is_refused_or_harmless(tree: Path, tmp_path: Path, mutate: Mutation, inside: bool) -> None:
    """Any bytes under the right name: refused whole, or the very files that were packed. Memory stays small."""
    outer = fill(tmp_path / "outer", {"neighbour": b"n", "live/old": b"old"})
    before = contents(outer)
    outcomes = set()
    tracemalloc.start()
    try:
        for data in mutated(mutate, tree, tmp_path / "out", inside):
            path, name = named(tmp_path / "store", data)
            tracemalloc.reset_peak()
            base_bytes = tracemalloc.get_traced_memory()[0]
            try:
                bundle.unpack(path, name, outer / "live", SMALL)
                outcomes.add("harmless")
                assert contents(outer / "live") == TREE | {"old": b"old"}
                shutil.rmtree(outer)
                fill(outer, {"neighbour": b"n", "live/old": b"old"})
            except BundleError:
                outcomes.add("refused")
                assert contents(outer) == before
            assert tracemalloc.get_traced_memory()[1] - base_bytes < PEAK_BYTES
            path.unlink()
    finally:
        tracemalloc.stop()
    assert "refused" in outcomes
    assert {item.name for item in tmp_path.iterdir()} == {"tree", "out", "outer", "store"}, "nothing climbed out"


def test_damage_on_the_way_is_found_by_the_name(tree: Path, tmp_path: Path) -> None:
    made = packed(tree, tmp_path / "out")
    whole = made.path.read_bytes()
    chance = random.Random(1)
    live = tmp_path / "live"
    live.mkdir()
    for number in range(40):
        made.path.write_bytes((flip, truncate)[number % 2](chance, whole))
        with pytest.raises(BundleError, match="not those that were published"):
            bundle.unpack(made.path, made.name, live, LIMITS)
    assert list(live.iterdir()) == []


# --- A disk that others use ------------------------------------------------------------------------------------------


def test_readers_beside_an_unpacking_see_whole_files_or_none(tree: Path, tmp_path: Path) -> None:
    made = packed(tree, tmp_path / "out")
    live = tmp_path / "live"
    live.mkdir()
    stop, seen = threading.Event(), set()

    def look() -> None:
        while not stop.is_set():
            for path in TREE:
                try:
                    seen.add((live / path).read_bytes() == TREE[path])
                except FileNotFoundError:
                    continue

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for number in range(30):
            fill(live, {".old": b""})
            if number % 2:
                (live / GRAPH).unlink()
            bundle.unpack(made.path, made.name, live, LIMITS)
    finally:
        stop.set()
        reader.join()
    assert seen == {True}


def test_too_little_room_is_said_before_anything_is_written(tree: Path, tmp_path: Path) -> None:
    made = packed(tree, tmp_path / "out")
    live = tmp_path / "live"
    live.mkdir()
    with pytest.raises(OSError, match="are free where") as caught:
        bundle.unpack(made.path, made.name, live, Limits(reserve_bytes=1 << 60))
    assert caught.value.errno == errno.ENOSPC
    assert list(live.iterdir()) == []


FULL_DISK = """
import pathlib, subprocess, sys
from artifacts import LIMITS
from warmstart import bundle
place, path, name = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], check=True)
bundle.check_room = lambda *_: None  # another process fills the disk after it was asked
live = pathlib.Path(place)
try:
    bundle.unpack(pathlib.Path(path), name, live, LIMITS)
except OSError as error:
    print(error.errno, list(live.iterdir()))
"""


def test_a_full_disk_is_an_os_error_and_leaves_no_litter(tmp_path: Path) -> None:
    tree = fill(tmp_path / "tree", {f"ab/{number}": os.urandom(100_000) for number in range(5)})
    made = packed(tree, tmp_path / "out")
    place = tmp_path / "small"
    place.mkdir()
    done = in_namespace(FULL_DISK, str(place), str(made.path), made.name)
    assert done.stdout.split(None, 1) == [str(errno.ENOSPC), "[]\n"], done.stderr


def test_an_entry_is_what_the_file_is(tree: Path) -> None:
    found = bundle.entry(tree, GRAPH)
    assert found == Entry(GRAPH, 2000, hashlib.sha256(TREE[GRAPH]).hexdigest())


def test_half_written_libraries_are_removed_unless_somebody_is_writing_them(tmp_path: Path) -> None:
    files = {
        "ab/whole.main.so": elf(),
        "ab/cut.main.so": elf()[:3000],
        "ab/empty.so": b"",
        "ab/busy.main.so": b"\x7fELF",
    }
    for path, data in {**files, "ab/source.cpp": b"", "locks/busy.lock": b""}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(data)
    with (tmp_path / "locks/busy.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert bundle.remove_incomplete(tmp_path) == ["ab/cut.main.so", "ab/empty.so"]
    assert {path.name for path in (tmp_path / "ab").iterdir()} == {"whole.main.so", "busy.main.so", "source.cpp"}

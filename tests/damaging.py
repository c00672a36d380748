"""Damages the files of a live directory that outlives its boots: which kinds there are, and what can happen to each."""

import random
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

from booting import ONE, SEVEN, SMALL, Boot, Booted, warnings

from warmstart.leftover import RECORD

# Somebody whom a file's mode can keep out, which it cannot with root.
USER = 1000
KINDS = (
    "kernel.so",
    "kernel.cpp",
    "probe.so",
    "probe.cpp",
    "wrapper.py",
    "graph",
    "autograd",
    "compiler",
    "lock",
    "record",
)
# Torch's tests of the processor are among the files: some processors need them, and older caches hold them.
TESTED = f"{ONE}\nfrom warmstart import inductor\ninductor._trust_vector_units = lambda: None"
# What changes nothing that a boot needs: locks are empty, a file that is gone is made anew.
HARMLESS = {("lock", damage) for damage in ("half", "100 bytes", "emptied", "flipped bit", "deleted")}


def kind(path: str) -> str:
    """What a file of a live directory is for; raises for one of a kind that is not known here."""
    top, name = path.split("/")[0], path.rpartition("/")[2]
    folders = {"fxgraph": "graph", "aotautograd": "autograd", "toolchain": "compiler", "locks": "lock"}
    if top in folders:
        return folders[top]
    known = {RECORD: "record", ".warmstart-lock": "own lock"}
    ends = {".main.so": "kernel.so", ".main.cpp": "kernel.cpp", ".so": "probe.so", ".cpp": "probe.cpp"}
    found = [what for end, what in {**ends, ".py": "wrapper.py"}.items() if name.endswith(end)]
    return known.get(name) or found[0]


def of_kind(live: Path, wanted: str) -> list[Path]:
    files = sorted(path for path in live.rglob("*") if path.is_file())
    return [path for path in files if kind(path.relative_to(live).as_posix()) == wanted]


def cut(path: Path, size_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:size_bytes])


def flip(path: Path) -> None:
    """One bit: of a library in the middle of its machine code, since half of the file is notes for debuggers."""
    data = bytearray(path.read_bytes())
    where = code_of(data) if data.startswith(b"\x7fELF") else range(len(data))
    if where:
        data[where[len(where) // 2]] ^= 0x10
    path.write_bytes(data)


def code_of(elf: bytes | bytearray) -> range:
    """Where a 64-bit little-endian ELF file has the segment that is executed."""
    start, size_bytes, count = (
        struct.unpack_from(kind, elf, at)[0] for kind, at in (("<Q", 32), ("<H", 54), ("<H", 56))
    )
    for at in range(start, start + size_bytes * count, size_bytes):
        what, flags, offset = struct.unpack_from("<IIQ", elf, at)
        if (what, flags & 1) == (1, 1):
            return range(offset, offset + struct.unpack_from("<Q", elf, at + 32)[0])
    raise ValueError("no segment is executed")


def to_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere/at/all")


DAMAGES = {
    "half": lambda path: cut(path, path.stat().st_size // 2),
    "100 bytes": lambda path: cut(path, 100),
    "emptied": lambda path: cut(path, 0),
    "flipped bit": flip,
    "deleted": lambda path: path.unlink(),
    "unreadable": lambda path: path.chmod(0),
    "directory": to_directory,
    "link": to_link,
}


@dataclass
class Place:
    """A live directory that a good boot left, the store that it filled, and what it drew."""

    live: Path
    store: Path
    pictures: list[list[str]]


def prepare(boot: Boot, folder: Path) -> Place:
    made = folder / "made"
    booted = start(boot, made, folder / "store")
    assert booted.report["outcome"] == "cold", booted.report["reason"]
    return Place(made, folder / "store", booted.pictures)


def start(boot: Boot, live: Path, store: Path, **environment: str) -> Booted:
    environment = {**SMALL, "TORCHINDUCTOR_CACHE_DIR": str(live), **environment}
    return boot(store, draw=SEVEN, before=TESTED, as_user=USER, environment=environment)


def damaged(place: Place, live: Path, what: str, damage: str, *, one: random.Random | None = None) -> Path:
    """A copy of the live directory in which all files of a kind, or one by chance, are damaged."""
    shutil.copytree(place.live, live)
    chosen = of_kind(live, what)
    assert chosen, f"no file of the kind {what}"
    for path in [one.choice(chosen)] if one else chosen:
        DAMAGES[damage](path)
    return live


@dataclass
class Cell:
    """One kind of file with one kind of damage: two boots in that directory, and what is wrong with them."""

    first: Booted
    second: Booted
    faults: list[str]


def run(boot: Boot, place: Place, live: Path, what: str, damage: str, store: Path | None = None) -> Cell:
    """Boots twice in a damaged directory, with an empty store for each boot or with the one given."""
    stores = [store or live.parent / f"{live.name}-{number}" for number in (1, 2)]
    first, second = (start(boot, live, each) for each in stores)
    faults = [
        f"the {order} boot's pictures are wrong"
        for order, booted in (("first", first), ("second", second))
        if booted.pictures != place.pictures
    ]
    told = warnings(first.report) or first.report["outcome"] != "warm"
    if not told and damage != "deleted" and (what, damage) not in HARMLESS:
        faults.append("the report of the first boot says nothing")
    if second.report["outcome"] not in ("warm", "partial", "cold") or warnings(second.report):
        faults.append(f"the damage outlived a boot: {second.report['outcome']}, {warnings(second.report)}")
    return Cell(first, second, faults)

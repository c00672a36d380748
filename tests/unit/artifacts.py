"""Files like Inductor's, keys and namespaces for the tests of bundle, store and cache; no test itself."""

import hashlib
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from warmstart import bundle
from warmstart.bundle import Entry, Limits
from warmstart.key import Key

ROOT = Path(__file__).resolve().parent.parent.parent
LIMITS = Limits(reserve_bytes=0)
GRAPH = "fxgraph/ke/fkegoom6xzljz643nissibn5st6uglijwkshubigmz5t4k2jspsf/j7ygzfye5j67rlu5xdsolvevruzsofrrimslu55uvj"
TREE = {
    GRAPH: b"graph" * 400,
    "aotautograd/a2go4ch6hr6odsl7jyaqj765x2uvkknyfpudwvuyn26milbviind/xpalcqfamqz6gz6hoq7itoxiwnx42ws": b"a" * 700,
    "o6/co6lv4nto4mqrczbi4qpmmn3ilfvaq2i377tmatlm6h5act42cvh.main.cpp": b"int main;",
    "sh/csho6ob662swkjdpetf3sp5snnnwf2jmdiuomcg3ddgtqb2z7nme.py": b"x = 1\n",
    f"triton/0/RMDIO/{'triton_poi_fused_' + 'add_' * 30}0.cubin": b"\x7fELF cubin",
}


def fill(root: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def contents(root: Path) -> dict[str, bytes]:
    """Every file below a directory, whatever it is called; links as their target's name."""
    return {
        path.relative_to(root).as_posix(): os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def entries(root: Path) -> list[Entry]:
    found = [bundle.entry(root, path) for path in bundle.scan(root)]
    return [item for item in found if item is not None]


def packed(root: Path, directory: Path, limits: Limits = LIMITS) -> bundle.Bundle:
    directory.mkdir(parents=True, exist_ok=True)
    return bundle.pack(root, entries(root), directory, limits)


def named(directory: Path, data: bytes) -> tuple[Path, str]:
    """Writes bytes under the name that makes them a bundle, as somebody who may write to the store would."""
    directory.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(data).hexdigest()
    path = directory / f"{name}.tar.zst"
    path.write_bytes(data)
    return path, name


def key(**changes: str) -> Key:
    """A key like a CPU's; a change goes to the part whose label it has, and otherwise to the version."""
    environment = {"device": "cpu", "torch": "2.13.0+cpu", "cpu flags": "avx avx2 fma sse sse2"}
    version = {"model": "digits", "dtype": "bf16"}
    for label, value in changes.items():
        (environment if label in environment else version)[label] = value
    return Key(environment, version)


def elf(size_bytes: int = 4096) -> bytes:
    """The outline of a shared object whose section table ends with the file."""
    sections = 3
    start = b"\x7fELF\x02\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, size_bytes - 64 * sections, 0, 64, 56, 0, 64, sections, 2
    )
    return start.ljust(size_bytes, b"\x90")


def in_namespace(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python where it may mount file systems that nobody else sees; no root is needed for that."""
    command = ["unshare", "--map-root-user", "--mount", sys.executable, "-c", code, *arguments]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'unit'}"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

"""Which files count as read: whoever reads them, together with what belongs to them, and in doubt all."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from artifacts import GRAPH, fill, in_namespace

from warmstart import usage
from warmstart.usage import Reads

LIBRARY, SOURCE, OTHER = "ab/cone.main.so", "ab/cone.main.cpp", "ab/ctwo.py"
CUBIN, CUBIN_FACTS = "triton/0/KERNEL/fused.cubin", "triton/0/KERNEL/__grp__fused.json"
FILES = dict.fromkeys((LIBRARY, SOURCE, OTHER, CUBIN, CUBIN_FACTS, GRAPH), b"content")


@pytest.fixture
def reads(tmp_path: Path) -> Reads:
    made = Reads(fill(tmp_path / "live", FILES))
    made.watch(FILES)
    return made


def test_what_nobody_reads_is_unread(reads: Reads, tmp_path: Path) -> None:
    for path in FILES:
        (tmp_path / "live" / path).stat()
    assert reads.unread() == set(FILES)
    assert [path.name for path in (tmp_path / "live").iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("read", "used"),
    [
        (LIBRARY, {LIBRARY, SOURCE}),
        (OTHER, {OTHER}),
        (CUBIN, {CUBIN, CUBIN_FACTS}),
        (GRAPH, {GRAPH}),
    ],
)
def test_a_file_that_is_read_takes_what_belongs_to_it_along(reads: Reads, tmp_path: Path, read: str, used: set) -> None:
    (tmp_path / "live" / read).read_bytes()
    assert set(FILES) - reads.unread() == used


def test_another_process_that_reads_counts(reads: Reads, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", f"open({OTHER!r}).read()"], cwd=tmp_path / "live", check=True)
    assert OTHER not in reads.unread()


def test_a_library_that_is_loaded_counts(tmp_path: Path) -> None:
    import _ctypes

    live = fill(tmp_path / "live", {LIBRARY: Path(_ctypes.__file__).read_bytes()})
    reads = Reads(live)
    reads.watch([LIBRARY])
    ctypes.CDLL(str(live / LIBRARY))
    assert reads.unread() == set()


def test_a_file_that_is_made_anew_counts_and_so_does_one_that_is_gone(reads: Reads, tmp_path: Path) -> None:
    (tmp_path / "live" / OTHER).unlink()
    new = tmp_path / "live" / "new"
    new.write_bytes(b"content")
    # As like as it can be made: what was made anew was made by this version.
    os.utime(new, ns=(usage._NEVER_READ_NS, (tmp_path / "live" / GRAPH).stat().st_mtime_ns))
    new.replace(tmp_path / "live" / GRAPH)
    assert reads.unread() == set(FILES) - {OTHER, GRAPH}


NOATIME = """
import subprocess, sys
from pathlib import Path
from artifacts import fill
from warmstart.usage import Reads
subprocess.run(["mount", "-t", "tmpfs", "-o", sys.argv[1], "none", sys.argv[2]], check=True)
reads = Reads(fill(Path(sys.argv[2]), {"ab/one": b"1"}))
reads.watch(["ab/one"])
print(sorted(reads.unread()))
"""


@pytest.mark.parametrize(("option", "unread"), [("noatime", "[]"), ("relatime", "['ab/one']")])
def test_where_reads_are_not_noted_all_files_count(tmp_path: Path, option: str, unread: str) -> None:
    done = in_namespace(NOATIME, option, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == unread


def test_a_file_that_cannot_be_marked_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    utime = os.utime

    def refuse(path: Path, **times: object) -> None:
        if path.name == "ctwo.py":
            raise PermissionError(1, "Operation not permitted")
        utime(path, **times)

    monkeypatch.setattr(os, "utime", refuse)
    reads = Reads(fill(tmp_path / "live", FILES))
    reads.watch([*FILES, "ab/gone"])
    assert reads.unread() == set(FILES) - {OTHER}

"""What an earlier boot left in a live directory: what is kept, what is removed, and when the directory is not used."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from artifacts import GRAPH, LIMITS, ROOT, TREE, contents, elf, fill, key

from warmstart import bundle, cache, inductor, leftover
from warmstart.leftover import MARK, RECORD, Leftover, UnfitError
from warmstart.store import DirectoryStore

LIBRARY = "ab/kernel.main.so"
FILES = {**TREE, LIBRARY: elf()}


def files(root: Path) -> dict[str, bytes]:
    return {path: data for path, data in contents(root).items() if not path.startswith(".")}


def close(here: Leftover) -> None:
    """What the end of its process does: no lock is held any more."""
    os.close(here._lock)
    if here._mark is not None:
        os.close(here._mark[1])


def boot(root: Path, more: dict[str, bytes] | None = None) -> Leftover:
    """A boot that goes well, and has ended."""
    here = Leftover(root)
    here.begin()
    fill(root, more or {})
    here.end([])
    close(here)
    return here


def die(root: Path, more: dict[str, bytes]) -> None:
    """A boot in a process of its own that is killed in its warm-up."""
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        "from artifacts import fill\nfrom warmstart.leftover import Leftover\n"
        "root = Path(sys.argv[1])\nLeftover(root).begin()\nfill(root, eval(sys.argv[2]))\nos.kill(os.getpid(), 9)"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'unit'}"}
    done = subprocess.run([sys.executable, "-c", code, str(root), repr(more)], env=environment, timeout=120)
    assert done.returncode == -9


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """A directory in which a boot ended well."""
    root = tmp_path / "live"
    root.mkdir()
    boot(root, FILES)
    return root


def flip(path: Path, at: int) -> None:
    data, before = bytearray(path.read_bytes()), path.stat()
    data[at] ^= 1
    path.write_bytes(data)
    # As a disk does it: nothing but the content tells.
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_what_is_as_recorded_is_kept_and_told(live: Path) -> None:
    here = Leftover(live)
    assert {item.path for item in here.entries} == set(FILES)
    assert here.findings == []
    assert files(live) == FILES
    assert not here.was_empty


@pytest.mark.parametrize("path", [GRAPH, LIBRARY])
def test_one_flipped_bit_is_noticed_and_the_file_removed(live: Path, path: str) -> None:
    flip(live / path, 1000)
    here = Leftover(live)
    assert files(live) == {name: data for name, data in FILES.items() if name != path}
    assert len(here.findings) == 1
    assert path in here.findings[0]
    assert path not in {item.path for item in here.entries}


def test_what_took_the_place_of_a_file_is_removed(live: Path) -> None:
    names = list(FILES)
    for name in names[:3]:
        (live / name).unlink()
    fill(live, {f"{names[0]}/inside": b"x"})
    (live / names[1]).symlink_to(live / names[3])
    (live / names[2]).symlink_to("/nowhere")
    assert len(Leftover(live).findings) == 2
    assert files(live) == {name: data for name, data in FILES.items() if name not in names[:3]}


def test_what_others_put_there_is_left_and_recorded_once_a_boot_ended_well_with_it(live: Path) -> None:
    fill(live, {"theirs/file": b"theirs"})
    here = Leftover(live)
    assert here.findings == []
    here.record([leftover.bundle.entry(live, "theirs/file")])
    assert "theirs/file" not in leftover._read_record(live)
    here.end([])
    assert "theirs/file" in leftover._read_record(live)
    assert files(live)["theirs/file"] == b"theirs"


def test_beside_another_process_nothing_is_removed_and_the_directory_is_not_used(live: Path) -> None:
    neighbour = Leftover(live)
    close(Leftover(live))  # both use it while all is well
    flip(live / LIBRARY, 1000)
    before = contents(live)
    with pytest.raises(UnfitError, match="other processes use the directory"):
        Leftover(live)
    assert contents(live) == before
    close(neighbour)
    assert Leftover(live).findings


def test_of_a_killed_boot_stays_what_was_recorded_and_goes_what_was_not(live: Path) -> None:
    die(live, {"cd/new.py": b"made by the boot that died"})
    here = Leftover(live)
    assert files(live) == FILES
    assert ["made by a boot that died" in line for line in here.findings] == [True]
    assert list(live.glob(f"{MARK}*")) == []


def test_a_boot_that_died_beside_unproved_files_bars_the_directory_until_they_are_gone(live: Path) -> None:
    fill(live, {"theirs/file": b"theirs"})
    die(live, {"cd/new.py": b"new"})
    for _ in range(2):
        with pytest.raises(UnfitError, match="theirs/file"):
            Leftover(live)
    (live / "theirs/file").unlink()
    Leftover(live)
    assert files(live) == FILES


def test_a_boot_that_is_warming_up_is_no_dead_one(live: Path) -> None:
    neighbour = Leftover(live)
    neighbour.begin()
    fill(live, {"cd/new.py": b"being made"})
    here = Leftover(live)
    assert here.findings == []
    assert "cd/new.py" in files(live)
    close(here)
    close(neighbour)


@pytest.mark.parametrize("damage", ["cut", "flipped", "directory", "outside"])
def test_without_a_whole_record_nothing_is_believed(live: Path, damage: str) -> None:
    record = live / RECORD
    text = record.read_bytes()
    record.unlink()
    if damage == "directory":
        record.mkdir()
    elif damage == "outside":
        index = json.dumps({"format": 1, "files": [{"path": "../x", "size": 1, "sha256": "0" * 64}]}).encode()
        record.write_bytes(leftover.hashlib.sha256(index).hexdigest().encode() + b"\n" + index)
    else:
        record.write_bytes(text[:-20] if damage == "cut" else text.replace(b'"size":', b'"size": ', 1))
    here = Leftover(live)
    assert files(live) == {}
    assert RECORD in here.findings[0]
    here.end([])
    assert leftover._read_record(live) == {}


def test_files_that_broke_a_compile_go_and_those_of_others_bar_the_directory(live: Path) -> None:
    here = Leftover(live)
    here.begin()
    here.condemn()
    close(here)
    assert files(live) == {}
    assert Leftover(live).was_empty
    fill(live, {"theirs/file": b"theirs"})
    other = Leftover(live)
    other.begin()
    other.condemn()
    close(other)
    with pytest.raises(UnfitError, match="theirs/file"):
        Leftover(live)


def test_locks_that_cannot_be_opened_and_folders_that_are_closed_are_put_right(live: Path) -> None:
    fill(live, {"locks/good.lock": b""})
    (live / "locks/bad.lock").mkdir()
    (live / "locks/lost.lock").symlink_to("/nowhere")
    (live / "ab").chmod(0)
    code = "import sys\nfrom pathlib import Path\nfrom warmstart.leftover import Leftover\nLeftover(Path(sys.argv[1]))"
    # Root may open everything.
    command = ["unshare", "--user", "--map-user=1000", "--map-group=1000", sys.executable, "-c", code, str(live)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=120)
    assert [path.name for path in (live / "locks").iterdir()] == ["good.lock"]
    assert LIBRARY in files(live)


def test_the_record_is_for_its_owner_alone(live: Path) -> None:
    assert (live / RECORD).stat().st_mode & 0o777 == 0o600


def test_the_lock_is_held_while_the_process_lives(live: Path) -> None:
    here = Leftover(live)
    descriptor = os.open(live / ".warmstart-lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    close(here)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_dot_files_of_ours_are_no_code_and_no_stale_temporary_ones(tmp_path: Path) -> None:
    boot(tmp_path)
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    before = contents(tmp_path)
    assert RECORD in before
    assert not inductor.holds_code(tmp_path)
    cache._remove_stale(tmp_path)
    assert contents(tmp_path) == before


def test_a_save_tells_the_record_what_it_read_and_reads_nothing_twice(
    live: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Leftover(live)
    store = DirectoryStore(tmp_path / "store")
    saving = cache.Cache([store], store, key(), live, LIMITS, here.record)
    saving.know(here.entries)
    read = []
    entry = bundle.entry
    monkeypatch.setattr(bundle, "entry", lambda root, path: read.append(path) or entry(root, path))
    fill(live, {"cd/new.py": b"new"})
    assert saving.persist().files == len(FILES) + 1
    assert read == ["cd/new.py"]
    assert set(leftover._read_record(live)) == {*FILES, "cd/new.py"}
    here.end(saving.entries)
    assert read == ["cd/new.py"]


def test_a_library_that_nobody_can_read_is_removed_and_a_directory_is_left(tmp_path: Path) -> None:
    fill(tmp_path, {"ab/closed.so": elf(), "ab/whole.so": elf(), "ab/directory.so/x": b""})
    (tmp_path / "ab/closed.so").chmod(0)
    code = "import sys\nfrom pathlib import Path\nfrom warmstart import bundle\n"
    code += "print(bundle.remove_incomplete(Path(sys.argv[1])))"
    command = ["unshare", "--user", "--map-user=1000", "--map-group=1000", sys.executable, "-c", code, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "['ab/closed.so']\n", done.stderr
    assert {path.name for path in (tmp_path / "ab").iterdir()} == {"whole.so", "directory.so"}


def test_a_directory_in_the_place_of_a_file_is_not_that_file(tmp_path: Path) -> None:
    item = bundle.entry(fill(tmp_path, {"ab/x": b"1"}), "ab/x")
    assert item is not None
    assert bundle.is_whole(tmp_path, item)
    (tmp_path / "ab/x").unlink()
    (tmp_path / "ab/x").mkdir()
    opened = len(list(Path("/proc/self/fd").iterdir()))
    assert not bundle.is_whole(tmp_path, item)
    assert len(list(Path("/proc/self/fd").iterdir())) == opened


def test_a_second_attempt_leaves_one_mark_and_a_good_end_none(tmp_path: Path) -> None:
    leftover = Leftover(tmp_path)
    leftover.begin()
    leftover.begin()
    assert len(list(tmp_path.glob(f"{MARK}*"))) == 1
    leftover.end(())
    assert list(tmp_path.glob(f"{MARK}*")) == []

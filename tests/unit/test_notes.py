"""Notes for later boots: equal ones are one, and what is no note is passed over."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from warmstart import notes


def test_equal_notes_are_one_and_kinds_are_apart(tmp_path: Path) -> None:
    for text in ("b", "a", "b"):
        notes.add(tmp_path, "parts", text)
    assert sorted(notes.read(tmp_path, "parts")) == ["a", "b"]
    assert notes.read(tmp_path, "others") == []
    assert len(list((tmp_path / "parts").iterdir())) == 2


def test_a_note_that_was_cut_short_is_written_anew(tmp_path: Path) -> None:
    notes.add(tmp_path, "parts", "transformer")
    [path] = (tmp_path / "parts").iterdir()
    path.write_text("trans")
    notes.add(tmp_path, "parts", "transformer")
    assert notes.read(tmp_path, "parts") == ["transformer"]


def test_what_is_no_note_is_passed_over(tmp_path: Path) -> None:
    notes.add(tmp_path, "parts", "good")
    folder = tmp_path / "parts"
    (folder / "letters.json").write_bytes(b"\xff\xfe\x00")
    (folder / "empty.json").write_text("")
    (folder / "long.json").write_text("x" * ((64 << 10) + 1))
    (folder / "folder.json").mkdir()
    (folder / "gone.json").symlink_to(tmp_path / "nowhere")
    assert notes.read(tmp_path, "parts") == ["good"]


def test_threads_and_processes_of_one_number_may_note_the_same_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        for number in range(50):
            for done in [pool.submit(notes.add, tmp_path, "parts", str(number)) for _ in range(4)]:
                done.result()
    assert len(notes.read(tmp_path, "parts")) == len(list((tmp_path / "parts").iterdir())) == 50


def test_nothing_is_left_of_a_note_that_cannot_be_put_in_its_place(tmp_path: Path) -> None:
    notes.add(tmp_path, "parts", "a")
    [path] = (tmp_path / "parts").iterdir()
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        notes.add(tmp_path, "parts", "a")
    assert list((tmp_path / "parts").iterdir()) == [path]


def test_reading_a_note_leaves_a_time_of_access(tmp_path: Path) -> None:
    notes.add(tmp_path, "parts", "good")
    [path] = (tmp_path / "parts").iterdir()
    long_ago = 1_000_000_000
    os.utime(path, ns=(long_ago, path.stat().st_mtime_ns))
    notes.read(tmp_path, "parts")
    assert path.stat().st_atime_ns != long_ago


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "parts").write_text("")
    with pytest.raises(FileExistsError):
        notes.add(tmp_path, "parts", "a")

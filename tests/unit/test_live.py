"""Choosing the live directory: what is probed, whose it may be, where else it is looked for."""

import mmap
import os
import tempfile
from pathlib import Path

import pytest

from warmstart import live
from warmstart.live import LiveDirectory, do_without, prepare, set_aside


@pytest.fixture(autouse=True)
def bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two places of the test's own in place of the machine's, and its environment back afterwards."""
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        place.mkdir()
    monkeypatch.setattr(live, "_bases", lambda: places)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    return places


def chosen(preset: str = "") -> tuple[LiveDirectory, list[str]]:
    found, refused = prepare(preset, "name")
    assert found is not None
    return found, refused


@pytest.fixture
def without_code(monkeypatch: pytest.MonkeyPatch, bases: list[Path]) -> Path:
    """A base whose files cannot be mapped as code, as on a mount with noexec."""
    real = mmap.mmap

    def refuse(descriptor: int, *arguments: int) -> mmap.mmap:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(bases[0]):
            raise PermissionError(1, "Operation not permitted")
        return real(descriptor, *arguments)

    monkeypatch.setattr(live.mmap, "mmap", refuse)
    return bases[0]


def test_the_first_place_is_taken_and_put_into_the_environment(bases: list[Path]) -> None:
    found, refused = chosen()
    assert (found.path, refused) == (bases[0] / f"warmstart-{os.getuid()}" / "name", [])
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(found.path)
    assert "TRITON_CACHE_DIR" not in os.environ
    assert [path.name for path in found.path.parent.iterdir() if path.name.startswith(".")] == [], "the probe is gone"


def test_a_place_from_which_code_cannot_be_loaded_is_passed_over(bases: list[Path], without_code: Path) -> None:
    found, refused = chosen()
    assert found.path.is_relative_to(bases[1])
    assert refused == [f"{without_code} (code cannot be loaded from there: is it mounted noexec?)"]


def test_where_no_place_can_hold_code_there_is_none(bases: list[Path], without_code: Path) -> None:
    bases[1].rmdir()
    bases[1].write_text("")
    found, refused = prepare(str(without_code / "set"), "name")
    assert found is None
    assert [reason.partition(" ")[0] for reason in refused] == [str(without_code / "set"), *map(str, bases)]
    assert refused[2].endswith("(Not a directory)")


def test_a_set_place_comes_first_and_keeps_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "theirs").write_text("kept")
    found, refused = chosen(str(tmp_path / "set"))
    assert (found.path, found.reason, refused) == (tmp_path / "set", "set from outside", [])
    assert [path.name for path in found.path.iterdir()] == ["theirs"]


@pytest.mark.parametrize("name", ["a b", "it's", 'a"b', "back\\slash"])
def test_a_path_that_a_command_line_would_break_is_passed_over(tmp_path: Path, name: str) -> None:
    _, refused = chosen(str(tmp_path / name))
    assert "there is a space or a quote in the path" in refused[0]


def test_letters_beyond_ascii_are_no_reason(tmp_path: Path) -> None:
    assert chosen(str(tmp_path / "Zwölf"))[0].path == tmp_path / "Zwölf"


def test_a_path_too_deep_for_what_torch_makes_in_it_is_passed_over(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d" * 205] * 19)
    _, refused = chosen(str(deep))
    assert "File name too long" in refused[0]
    assert len(refused[0]) < 200


@pytest.mark.parametrize("kind", ["link", "file", "writable"])
def test_a_root_that_another_may_have_filled_is_not_used(bases: list[Path], tmp_path: Path, kind: str) -> None:
    root = bases[0] / f"warmstart-{os.getuid()}"
    if kind == "link":
        root.symlink_to(tmp_path)
    elif kind == "file":
        root.write_text("")
    else:
        root.mkdir()
        root.chmod(0o777)
    found, _ = chosen()
    assert found.path.parent.parent == bases[0]
    assert found.path.parent != root
    assert found.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_full_place_is_passed_over(bases: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([OSError(28, "No space left on device"), None])

    def allocate(*_: int) -> None:
        if (error := next(answers)) is not None:
            raise error

    monkeypatch.setattr(live.os, "posix_fallocate", allocate)
    real = mmap.mmap
    monkeypatch.setattr(live.mmap, "mmap", lambda descriptor, length, *_: real(-1, length))
    assert chosen()[1] == [f"{bases[0]} (No space left on device)"]


def test_setting_aside_takes_the_next_place_that_can_hold_code(bases: list[Path], without_code: Path) -> None:
    aside, refused = set_aside(chosen()[0], "name")
    assert aside is not None
    assert aside.path.parent == bases[1]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(aside.path)
    assert len(refused) == 1


@pytest.fixture
def nothing(bases: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No temporary directory, and no base that can be written."""

    def none() -> str:
        if tempfile.tempdir is None:
            raise FileNotFoundError(2, "No usable temporary directory found")
        return str(tempfile.tempdir)

    for base in bases:
        base.rmdir()
        base.write_text("")
    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", "/nowhere")


@pytest.mark.usefixtures("nothing")
def test_without_a_temporary_directory_one_is_made_in_the_set_place(tmp_path: Path) -> None:
    found, _ = chosen(str(tmp_path / "set"))
    assert os.environ["TMPDIR"] == tempfile.tempdir == str(found.path / ".temporary")


@pytest.mark.usefixtures("nothing")
@pytest.mark.parametrize("preset", ["", "first/below"])
def test_where_nothing_can_be_written_torch_gets_names_that_are_there(tmp_path: Path, preset: str) -> None:
    do_without(preset and str(tmp_path / preset))
    assert (os.environ["TORCHINDUCTOR_CACHE_DIR"], tempfile.gettempdir()) == ("/", "/tmp")


def test_what_compiles_nothing_leaves_a_set_place_alone(tmp_path: Path) -> None:
    do_without(str(tmp_path / "set"))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == ""


def test_a_directory_in_place_of_another_has_triton_inside_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/old")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/old/triton/0")
    monkeypatch.setattr(live, "_bases", lambda: [tmp_path])
    fresh, _ = live.set_aside(live.LiveDirectory(tmp_path / "old", ""), "k")
    assert fresh is not None
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(fresh.path)
    assert "TRITON_CACHE_DIR" not in os.environ

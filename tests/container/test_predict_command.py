"""`scripts/predict`: the README's command, values from a command line, files of outputs, and errors before a boot."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _server import descendants
from judge import read_digits
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def predict(
    command: Callable[[str], types.ModuleType], toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """Run the command for the toy, in an empty directory."""
    toys_own, here = tmp_path / "toy", tmp_path / "here"
    toys_own.mkdir()
    here.mkdir()
    monkeypatch.setenv("TOY_DIR", str(toys_own))
    monkeypatch.chdir(here)
    module = command("predict")
    return lambda *arguments: int(module.main(list(arguments), toy))


def files(directory: Path = Path()) -> list[str]:
    """Return the names in a directory, the current one when left out."""
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_command_of_the_readme_leaves_a_picture_of_a_seven(
    boot_environment: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "predict", "-i", "prompt=a handwritten seven", "-o", "seven.png"],
        cwd=tmp_path,
        # The interpreter of the tests comes first, so that it is not a .venv that is tested.
        env={**os.environ, **boot_environment, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert files(tmp_path) == ["seven.png"]
    with Image.open(tmp_path / "seven.png") as picture:
        assert picture.format == "PNG"
        assert read_digits([picture.convert("RGB")]) == [7]
    assert "Asking for output_format=png, as -o ends in .png." in done.stderr
    assert "boot: " in done.stderr
    assert "seed: " in done.stderr, "the prediction's log is shown"


def test_one_file_goes_to_the_path_of_o(predict: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert predict("-i", "text=hi", "-o", "one.txt") == 0
    assert Path("one.txt").read_text() == "hi 0"
    assert files() == ["one.txt"]
    said = capsys.readouterr()
    assert said.out == ""
    assert re.search(r"boot: warm in [0-9.]+ s - nothing to do", said.err)
    assert "  idling         0.25 s\n" in said.err
    assert "  warning: mind the toy\n" in said.err
    assert "  toy: words=['a'] image=None format=txt\n" in said.err
    assert "toy: setting up" not in said.err, "the setup log is for -v"
    assert "saved one.txt (text/plain, 4 bytes)" in said.err


def test_several_files_are_numbered(predict: Callable[..., int]) -> None:
    assert predict("-i", "text=hi", "-i", "count=3", "-o", "x.txt") == 0
    assert files() == ["x.0.txt", "x.1.txt", "x.2.txt"]
    assert Path("x.2.txt").read_text() == "hi 2"


def test_without_o_files_are_named_output_with_their_types_suffix(predict: Callable[..., int]) -> None:
    assert predict("-i", "text=hi", "-i", "output_format=csv") == 0
    assert files() == ["output.0.csv"]


def test_verbose_shows_the_setup_log(predict: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert predict("-v", "-i", "text=hi") == 0
    assert "  toy: setting up\n" in capsys.readouterr().err


def test_the_suffix_of_o_asks_for_a_format_unless_one_was_named(
    predict: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict("-i", "text=hi", "-o", "x.csv") == 0
    said = capsys.readouterr().err
    assert "Asking for output_format=csv, as -o ends in .csv." in said
    assert "format=csv" in said
    assert predict("-i", "text=hi", "-i", "output_format=txt", "-o", "x.csv") == 0
    said = capsys.readouterr().err
    assert "Asking" not in said
    assert "  x.csv holds text/plain, whatever its suffix says; the usual one is .txt." in said


def test_json_is_the_answer_with_paths_in_place_of_files(
    predict: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict("-i", "text=hi", "-i", "count=2", "--json") == 0
    body = json.loads(capsys.readouterr().out)
    assert body["output"] == ["output.0.txt", "output.1.txt"]
    assert body["status"] == "succeeded"
    assert body["metrics"]["predict_time"] > 0
    assert predict("-i", "text=fail", "--json") == 1
    body = json.loads(capsys.readouterr().out)
    assert body["status"] == "failed"
    assert "asked to fail" in body["error"]


def test_files_and_lists_reach_the_model(predict: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.txt").write_text("from a file")
    assert predict("-i", "text=hi", "-i", "image=@in.txt", "-i", "words=b", "-i", "words=c") == 0
    assert "words=['b', 'c'] image=from a file" in capsys.readouterr().err


def test_a_failed_prediction_is_told(predict: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert predict("-i", "text=fail") == 1
    assert "The prediction failed (HTTP 200): " in capsys.readouterr().err
    assert files() == []


def test_a_failed_setup_is_told_with_its_log(
    predict: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_ERROR", "no weights in here")
    assert predict("-i", "text=hi") == 1
    said = capsys.readouterr().err
    assert "no weights in here" in said
    assert "  toy: setting up\n" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-i", "text=a", "-i", "txet=b"], "There is no input 'txet'. Did you mean text? The inputs are: text, count,"),
        (["-i", "text=a", "-i", "zzz=b"], "There is no input 'zzz'. The inputs are: text, count, kind,"),
        (["-i", "text=a", "-i", "kind=xml"], "kind=xml is not offered. Choose one of: txt, bin."),
        (["-i", "text=a", "-i", "count=9"], "count=9 is out of range. Give a value from 1 to 4."),
        (["-i", "text=a", "-i", "count=two"], "count=two is not a whole number. Give a value from 1 to 4."),
        (["-i", "text=a", "-i", "count=1.5"], "count=1.5 is not a whole number."),
        (["-i", "text=a", "-i", "count=true"], "count=true is not a whole number."),
        (["-i", "text=a", "-i", "pause_s=NaN"], "pause_s=NaN is not a number."),
        (["-i", "text=a", "-i", "image=@nowhere.png"], "Input image: the file nowhere.png cannot be read"),
        (["-i", "text=a", "-i", "text=b"], 'text=["a", "b"] is not a text.'),
        (["-i", "text"], "'text' names no value. Write -i name=value"),
        ([], "Input text is missing and has no default. Add -i text=..."),
        (["-i", "text=a", "-o", "nowhere/x.png"], "the directory nowhere does not exist. Create it first."),
        (["-i", "text=a", "-o", "~nobody-of-that-name/x.png"], "Name the path in full."),
        (["-i", "text=@~nobody-of-that-name/x"], "cannot be read"),
        (["-i", "count=" + "[" * 100_000], "count"),
    ],
)
def test_a_wrong_input_is_told_before_anything_boots(
    predict: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert predict(*arguments) == 2
    heard = capsys.readouterr().err
    assert said in heard
    assert "Booting" not in heard


def test_all_that_is_wrong_is_told_at_once(predict: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert predict("-i", "kind=xml", "-i", "count=9", "-i", "nothing=1") == 2
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_a_wrong_option_is_a_usage_error(command: Callable[[str], types.ModuleType]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command("predict").main(["--jsno"])


@pytest.mark.parametrize(
    ("prop", "texts", "value"),
    [
        ({"type": "integer"}, ["5"], 5),
        ({"type": "integer"}, ["9007199254740993"], 9007199254740993),
        ({"type": "number"}, ["5"], 5),
        ({"type": "number"}, ["1e-3"], 0.001),
        ({"type": "boolean"}, ["false"], False),
        ({"type": "string"}, ["5"], "5"),
        ({"type": "string"}, ['"quoted"'], "quoted"),
        ({"type": "string"}, ["a=b"], "a=b"),
        ({"type": "string"}, [""], ""),
        ({"type": "object"}, ['{"a": 1}'], {"a": 1}),
        ({"type": "array", "items": {"type": "integer"}}, ["5"], [5]),
        ({"type": "array", "items": {"type": "integer"}}, ["[1, 2]"], [1, 2]),
        ({"type": "array", "items": {"type": "string"}}, ["1", "2"], ["1", "2"]),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, ["5"], 5),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, ["five"], "five"),
    ],
)
def test_values_get_the_type_of_their_input(prop: dict[str, Any], texts: list[str], value: object) -> None:
    from _inputs import parse

    document = {"components": {"schemas": {"Input": {"properties": {"x": prop}}}}}
    parsed = parse([f"x={text}" for text in texts], document)["x"]
    assert (parsed, type(parsed)) == (value, type(value))


def test_a_file_is_sent_with_its_type(tmp_path: Path) -> None:
    from _inputs import data_url

    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    assert data_url("image", tmp_path / "a.png") == "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_no_server(toy: Path, tmp_path: Path, number: int) -> None:
    """Both in the middle of a boot: Ctrl-C by a person, SIGTERM by whatever runs the command."""
    start = (
        "import sys; from importlib.machinery import SourceFileLoader as Loader; from pathlib import Path;"
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        f"sys.path.insert(0, {str(ROOT / 'scripts')!r});"
        f"module = Loader('scripts_predict', {str(ROOT / 'scripts' / 'predict')!r}).load_module();"
        f"sys.exit(module.main(['-v', '-i', 'text=a'], Path({str(toy)!r})))"
    )
    environment = {**os.environ, "TOY_SETUP_S": "600", "TOY_DIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", start], env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        while "toy: setting up" not in process.stderr.readline():
            assert process.poll() is None
        below = descendants(process.pid)
        assert len(below) == 3, "the server, its worker and what watches over both"
        process.send_signal(number)
        process.stderr.read()
    assert process.returncode == 128 + number
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_text() for pid in below):
        assert time.monotonic() < deadline
        time.sleep(0.05)


SAY = """
import os
from cog import BaseRunner, ConcatenateIterator, Input, streaming

class Sayer(BaseRunner):
    def setup(self) -> None:
        pass

    @streaming
    def run(self, times: int = Input(default=2, ge=1)) -> ConcatenateIterator[str]:
        for number in range(int(times)):
            if number == 5:
                raise ValueError("asked to fail")
            yield f"{os.environ['WARMSTART_MODEL']} {number}, "
"""


@pytest.fixture
def say(
    command: Callable[[str], types.ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """Run the command for a project that has a second Predictor, which writes text."""
    (tmp_path / "say.py").write_text(SAY)
    (tmp_path / "cog.yaml").write_text('run: "nothing.py:Nobody"\n')
    (tmp_path / "cog-say.yaml").write_text(
        'environment:\n  - OTHER=1\n  - WARMSTART_MODEL=words\n\nrun: "say.py:Sayer"\n'
    )
    monkeypatch.chdir(tmp_path)
    module = command("predict")
    return lambda *arguments: int(module.main(["-f", "cog-say.yaml", *arguments], tmp_path))


def test_f_names_the_configuration_and_text_is_printed_as_it_comes(
    say: Callable[..., int], command: Callable[[str], types.ModuleType], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pieces: list[str] = []
    monkeypatch.setattr(sys.modules["scripts_predict"], "show_piece", pieces.append)
    assert say() == 0
    assert pieces == ["words 0, ", "words 1, "]
    assert capsys.readouterr().out == "\n"
    monkeypatch.undo()
    assert say("-i", "times=9") == 1
    said = capsys.readouterr()
    assert said.out == "words 0, words 1, words 2, words 3, words 4, \n"
    assert "asked to fail" in said.err


def test_a_text_is_one_in_a_file_and_in_json(
    say: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert say("-o", "said.txt") == 0
    assert Path("said.txt").read_text() == "words 0, words 1, "
    # What is set here goes before what the configuration says.
    monkeypatch.setenv("WARMSTART_MODEL", "more")
    assert say("--json") == 0
    assert json.loads(capsys.readouterr().out)["output"] == "more 0, more 1, "

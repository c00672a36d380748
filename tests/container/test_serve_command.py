"""`scripts/serve`: it says where to send requests, serves them, and leaves nothing when it is stopped."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import types
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from _server import WORKER, descendants

ROOT = Path(__file__).resolve().parents[2]
# Ignored signals are inherited, and whoever runs the tests may ignore Ctrl-C; a terminal does not.
START = """\
import signal, sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[1] + "/scripts")
module = SourceFileLoader("scripts_serve", sys.argv[1] + "/scripts/serve").load_module()
sys.exit(module.main(sys.argv[3:], Path(sys.argv[2])))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(toy: Path, port: int, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", START, ROOT, toy, "--port", str(port)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read_until(process: subprocess.Popen[str], wanted: str) -> list[str]:
    assert process.stdout
    lines: list[str] = []
    while not lines or wanted not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines)
    return lines


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_text() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_example_that_it_shows_works_and_a_stop_leaves_nothing(toy: Path, tmp_path: Path, number: int) -> None:
    port = free_port()
    with serve(toy, port, TOY_DIR=str(tmp_path)) as process:
        assert "toy: setting up\n" in read_until(process, "Ready."), "setup's log is shown"
        _, url, _, header, _, data = shlex.split(read_until(process, "curl")[-1])
        assert url == f"http://127.0.0.1:{port}/predictions"
        name, _, value = header.partition(": ")
        with urllib.request.urlopen(urllib.request.Request(url, data=data.encode(), headers={name: value})) as response:
            assert json.load(response)["status"] == "succeeded"
        below = descendants(process.pid)
        assert len(below) == 3, "the server, its worker and what watches over both"
        process.send_signal(number)
        assert "Stopped.\n" in read_until(process, "Stopped.")
    assert process.returncode == 130
    assert_gone(below)


def test_a_stop_during_setup_leaves_nothing(toy: Path) -> None:
    with serve(toy, free_port(), TOY_SETUP_S="600") as process:
        read_until(process, "toy: setting up")
        below = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        read_until(process, "Stopped.")
    assert process.returncode == 130
    assert_gone(below)


def test_a_worker_that_was_killed_is_told(toy: Path, tmp_path: Path) -> None:
    with serve(toy, free_port(), TOY_DIR=str(tmp_path)) as process:
        read_until(process, "curl")
        below = descendants(process.pid)
        [worker] = [pid for pid in below if WORKER in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(worker, signal.SIGKILL)
        assert read_until(process, "no prediction can be made")[-1].startswith("The server's worker died")
    assert process.returncode == 1
    assert_gone(below)


@pytest.mark.parametrize("name", ["serve", "predict"])
@pytest.mark.parametrize("value", ["-1", "0", "nan", "soon"])
def test_a_timeout_that_is_none_is_refused(
    toy: Path,
    command: Callable[[str], types.ModuleType],
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command(name).main([f"--setup-timeout-s={value}"], toy)
    assert f"--setup-timeout-s: '{value}' is no number of seconds above 0" in capsys.readouterr().err


def test_errors_are_sentences(
    toy: Path,
    tmp_path: Path,
    command: Callable[[str], types.ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main = command("serve").main
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["--port", str(taken.getsockname()[1])], toy) == 1
    assert "Choose another port or address." in capsys.readouterr().out
    monkeypatch.setenv("TOY_ERROR", "no weights in here")
    assert main(["--port", str(free_port())], toy) == 1
    assert "no weights in here" in capsys.readouterr().out
    assert main([], tmp_path) == 1
    assert "It says which class serves requests." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("required", "expected"), [([], {"prompt": "it's a seven"}), (["image"], {"image": "..."})], ids=["none", "one"]
)
def test_the_example_has_what_must_be_given_or_else_the_first_input(
    command: Callable[[str], types.ModuleType], required: list[str], expected: dict[str, str]
) -> None:
    properties = {"prompt": {"type": "string", "default": "it's a seven"}, "image": {"type": "string"}}
    document = {"components": {"schemas": {"Input": {"properties": properties, "required": required}}}}
    as_a_shell_reads_it = shlex.split(command("serve").example("http://x", document))
    assert json.loads(as_a_shell_reads_it[-1]) == {"input": expected}

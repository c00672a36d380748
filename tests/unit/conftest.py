"""S3 servers on loopback for the tests of stores; credentials reach the client by variables, as a user gives them.

Two that differ where S3 servers do: moto refuses a conditional write as AWS does, JuiceFS's gateway ignores it.
"""

from collections.abc import Iterator
from pathlib import Path

import juicefs_gateway
import pytest

BUCKET = "bundles"
USER, PASSWORD = "test-user", "test-password"


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
    server, endpoint = juicefs_gateway.start(tmp_path_factory.mktemp("juicefs"), BUCKET, USER, PASSWORD)
    yield endpoint
    juicefs_gateway.stop(server)


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

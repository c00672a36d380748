"""What a container does between READY and its end: who still runs, what is saved by then, and how fast it stops."""

import signal
import time
from pathlib import Path

import pytest
from _server import Server, descendants
from slow_store import SlowStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

WAIT_S = 300.0
# The stop of the server itself: two processes that end, on a machine however busy.
STOP_S = 5.0


def stopped_after_s(server: Server) -> float:
    started = time.monotonic()
    server.signal(signal.SIGTERM)
    server.wait_ended(WAIT_S)
    return time.monotonic() - started


def test_when_it_is_ready_nobody_else_runs_and_it_stops_at_once(
    small: Path, small_environment: dict[str, str | None]
) -> None:
    with Server(small, environment=small_environment, namespace=True) as server:
        report = server.setup_report()
        worker = server.worker_pid()
        assert worker
        assert report["outcome"] == "cold"
        assert descendants(worker) == []
        assert report["process"]["children"] == []
        assert 100e6 < report["process"]["resident_bytes"] <= report["process"]["peak_bytes"]
        assert server.predict({}).body["metrics"]["graphs_compiled"] == 0
        assert stopped_after_s(server) < STOP_S
        assert not Path(f"/proc/{worker}").exists()


def test_ready_does_not_wait_for_a_slow_store_and_it_gets_all_later(
    small: Path, small_environment: dict[str, str | None]
) -> None:
    with SlowStore() as store, Server(small, environment=small_environment | store.environment) as server:
        assert store.asked.is_set()
        assert store.written == []
        [warning] = [said for said in server.setup_report()["warnings"] if "not all is saved" in said]
        assert "in the background" in warning
        assert server.predict({}).body["metrics"]["graphs_compiled"] == 0
        store.take.set()
        ends = time.monotonic() + WAIT_S
        while not any(path.endswith(".tar.zst") for path in store.written) and time.monotonic() < ends:
            time.sleep(0.1)
    assert [path for path in store.written if path.endswith(".tar.zst")]


def test_a_store_that_hangs_holds_up_the_end_no_longer_than_the_grace(
    small: Path, small_environment: dict[str, str | None]
) -> None:
    with SlowStore() as store:
        environment = small_environment | store.environment | {"WARMSTART_STOP_GRACE_S": "2"}
        with Server(small, environment=environment, namespace=True) as server:
            seconds = stopped_after_s(server)
    assert 2 <= seconds < 2 + STOP_S


def test_what_a_request_compiled_is_saved_beside_it(small: Path, small_environment: dict[str, str | None]) -> None:
    """Without a graceful stop: the process is killed as soon as the bundle is there."""
    environment = small_environment | {"WARMSTART_UNPLANNED": "compile", "WARMSTART_DYNAMIC": "false"}
    store = Path(str(environment["WARMSTART_CACHE_URL"]))
    with Server(small, environment=environment, namespace=True) as server:
        before = set(store.glob("*/*/*.tar.zst"))
        answer = server.predict({"tokens": 6}).body
        assert (answer["metrics"]["graphs_compiled"], "waited for a compile of 1 graph" in answer["logs"]) == (1, True)
        ends = time.monotonic() + WAIT_S
        while set(store.glob("*/*/*.tar.zst")) == before and time.monotonic() < ends:
            time.sleep(0.05)
        server.signal(signal.SIGKILL)
        server.wait_ended(WAIT_S)
    with Server(small, environment=environment, namespace=True) as server:
        assert server.setup_report()["outcome"] == "warm"
        again = server.predict({"tokens": 6}).body
        assert again["output"] == answer["output"]
    assert len(set(store.glob("*/*/*.tar.zst"))) == len(before) + 1

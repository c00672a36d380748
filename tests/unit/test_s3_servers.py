"""Two kinds of S3 server: one refuses a conditional write, one ignores the condition. The cache works alike on both."""

import os
import subprocess
import sys
from pathlib import Path

import juicefs_gateway
import obstore
import pytest
from artifacts import LIMITS, ROOT, contents, fill, key

from warmstart.cache import Cache, RestoreOutcome
from warmstart.compaction import CompactOutcome, compact
from warmstart.store import SUFFIX, BundleInfo, ObjectStore, StoredFile, open_store
from warmstart.trust import Secrets

SECRET = "a-secret-of-some-length"
REPLICAS = ("a", "b", "c")

# A replica: waits for the others, then publishes one file of its own and one that all have.
REPLICA = """
import pathlib, sys
from artifacts import LIMITS, fill, key
from warmstart.cache import Cache
from warmstart.store import open_store
from warmstart.trust import Secrets

name, location, secret, live = sys.argv[1:]
store = open_store(location, Secrets(secret))
fill(pathlib.Path(live), {f"own/{name}": name.encode() * 500, "all/same": b"same" * 500})
print("ready", flush=True)
sys.stdin.readline()
saved = Cache([store], store, key(), pathlib.Path(live), LIMITS).persist(300)
assert saved.outcome.value == "published", saved
"""


@pytest.fixture(params=["s3", "s3_gateway"])
def location(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def create_twice(location: str) -> bytes:
    backend = obstore.store.from_url(location)
    for content in (b"first", b"second"):
        obstore.put(backend, "a/name", content, mode="create")
    return bytes(obstore.get(backend, "a/name").bytes())


def test_one_server_refuses_a_second_creation(s3: str) -> None:
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        create_twice(s3)


def test_the_other_overwrites_what_was_to_be_created_only_if_absent(s3_gateway: str) -> None:
    """Why nothing here may depend on a condition: this server accepts it and does not keep it."""
    assert create_twice(s3_gateway) == b"second"


def test_replicas_that_publish_at_once_are_restored_together(location: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'unit'}"}
    replicas = [
        subprocess.Popen(
            [sys.executable, "-c", REPLICA, name, location, SECRET, str(tmp_path / name)],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for name in REPLICAS
    ]  # fmt: skip
    try:
        for replica in replicas:
            assert replica.stdout
            assert replica.stdout.readline() == "ready\n", replica.communicate()[1]
        for replica in replicas:
            assert replica.stdin
            replica.stdin.write("go\n")
            replica.stdin.flush()
        for replica in replicas:
            assert (replica.communicate(timeout=300)[1], replica.returncode) == ("", 0)
    finally:
        for replica in replicas:
            replica.kill()
            replica.communicate()
    got = Cache([open_store(location, Secrets(SECRET))], None, key(), tmp_path / "live", LIMITS).restore(300)
    assert (got.outcome, got.bundles) == (RestoreOutcome.RESTORED, len(REPLICAS)), got.reason
    own = {f"own/{name}": name.encode() * 500 for name in REPLICAS}
    assert contents(tmp_path / "live") == own | {"all/same": b"same" * 500}


def test_a_reader_that_listed_before_a_compaction_restores_all(location: str, tmp_path: Path) -> None:
    store = open_store(location, Secrets(SECRET))
    for name in REPLICAS:
        fill(tmp_path / name, {f"own/{name}": name.encode() * 500})
        assert Cache([store], store, key(), tmp_path / name, LIMITS).persist(300).name
    before = store.bundles(key())

    class ListedBefore:
        """The store as a reader sees it that lists, and fetches only after the compaction is over."""

        stale = True

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def bundles(self, _: object) -> list[BundleInfo]:
            if self.stale:
                self.stale = False
                for _ in range(2):  # the second removes what the first one covered
                    assert compact(store, key(), tmp_path, LIMITS, grace_s=0).outcome is not CompactOutcome.FAILED
                return before
            return store.bundles(key())

    got = Cache([ListedBefore()], None, key(), tmp_path / "live", LIMITS).restore(300)  # type: ignore[list-item]
    assert got.outcome is RestoreOutcome.RESTORED, got.reason
    assert contents(tmp_path / "live") == {f"own/{name}": name.encode() * 500 for name in REPLICAS}
    assert len(store.bundles(key())) == 1


def test_a_listing_that_a_compaction_tears_misses_nothing(
    location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages pass the place of the union before that is there, and those of what it covers after they went."""
    store = open_store(location, Secrets(SECRET))
    for name in REPLICAS:
        fill(tmp_path / name, {f"own/{name}": name.encode() * 500})
        assert Cache([store], store, key(), tmp_path / name, LIMITS).persist(300).name
    assert compact(store, key(), tmp_path, LIMITS, grace_s=3600).outcome is CompactOutcome.COMPACTED
    listings, real = [], ObjectStore._list

    def torn(self: ObjectStore, prefix: str | None) -> list[tuple[tuple[str, str], StoredFile]]:
        listings.append(prefix)
        if len(listings) > 1:
            return list(real(self, prefix))
        before = {file for _, file in real(self, prefix)}
        monkeypatch.setattr(ObjectStore, "_list", real)
        extra = fill(tmp_path / "extra", {"own/a": b"a" * 500, "own/new": b"new"})
        assert Cache([], store, key(), extra, LIMITS).persist(300).name
        for _ in range(2):
            assert compact(store, key(), tmp_path, LIMITS, grace_s=0).outcome is not CompactOutcome.FAILED
        monkeypatch.setattr(ObjectStore, "_list", torn)
        return [(place, file) for place, file in real(self, prefix) if file in before or file.suffix != SUFFIX]

    monkeypatch.setattr(ObjectStore, "_list", torn)
    got = Cache([store], None, key(), tmp_path / "live", LIMITS).restore(300)
    assert got.outcome is RestoreOutcome.RESTORED, got.reason
    wanted = {f"own/{name}": name.encode() * 500 for name in REPLICAS}
    assert contents(tmp_path / "live") == wanted | {"own/new": b"new"}
    assert len(listings) == 2


def test_another_secret_is_refused(location: str, tmp_path: Path) -> None:
    store = open_store(location, Secrets("a-secret-of-somebody-else"))
    fill(tmp_path / "made", {"own/a": b"a" * 500})
    assert Cache([store], store, key(), tmp_path / "made", LIMITS).persist(300).name
    got = Cache([open_store(location, Secrets(SECRET))], None, key(), tmp_path / "live", LIMITS).restore(300)
    assert got.outcome is RestoreOutcome.FAILED
    assert "another secret" in got.reason
    assert contents(tmp_path / "live") == {}


def test_a_machine_without_the_gateway_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(juicefs_gateway.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(pytest.fail.Exception, match=r"pip install -r requirements-dev\.txt"):
        juicefs_gateway.find_juicefs()

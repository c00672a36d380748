"""Stores: the layout that outsiders rely on, publishing that loses nobody's work, and locations that make sense."""

import contextlib
import io
import itertools
import json
import os
import stat
import threading
import time
from collections import Counter
from pathlib import Path

import obstore
import pytest
from artifacts import TREE, contents, fill, in_namespace, key, packed

from warmstart import store as stores
from warmstart.bundle import SUFFIX, TEMPORARY_PREFIX, Bundle, BundleError
from warmstart.store import (
    COVERED,
    SIGNATURE,
    STALE_S,
    BundleInfo,
    DirectoryStore,
    ObjectStore,
    SignedStore,
    Store,
    StoredFile,
    StoreError,
    open_store,
)
from warmstart.trust import Secrets


@pytest.fixture(params=["directory", "s3", "s3_gateway"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "directory":
        return open_store(str(tmp_path / "store"))
    return open_store(request.getfixturevalue(request.param))


@pytest.fixture
def made(tmp_path: Path) -> Bundle:
    return packed(fill(tmp_path / "tree", TREE), tmp_path / "out")


def another(tmp_path: Path, number: int) -> Bundle:
    return packed(fill(tmp_path / f"tree-{number}", {"ab/file": b"%d" % number}), tmp_path / "out")


# --- Every store -----------------------------------------------------------------------------------------------------


def test_what_is_published_is_listed_and_fetched(store: Store, made: Bundle, tmp_path: Path) -> None:
    assert store.bundles(key()) == []
    assert store.keys() == []
    assert store.publish(key(), made.path, made.name)
    assert store.bundles(key()) == [BundleInfo(made.name, made.size_bytes)]
    into = tmp_path / "fetched"
    store.fetch(key(), BundleInfo(made.name, made.size_bytes), into)
    assert into.read_bytes() == made.path.read_bytes()


def test_publishing_the_same_again_changes_nothing(store: Store, made: Bundle) -> None:
    assert store.publish(key(), made.path, made.name)
    assert not store.publish(key(), made.path, made.name)
    assert len(store.bundles(key())) == 1


def test_a_bundle_cut_short_under_its_name_is_replaced(store: Store, made: Bundle, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(made.path.read_bytes()[:100])
    store.publish(key(), part, made.name)
    assert store.publish(key(), made.path, made.name)
    assert store.bundles(key()) == [BundleInfo(made.name, made.size_bytes)]


def test_keys_come_back_with_their_facts(store: Store, made: Bundle, tmp_path: Path) -> None:
    keys = [key(), key(dtype="fp32"), key(device="another")]
    for one in keys:
        store.publish(one, made.path, made.name)
    extra = another(tmp_path, 1)
    store.publish(keys[0], extra.path, extra.name)
    found = store.keys()
    assert [item.facts for item in found] == sorted(keys, key=lambda one: (one.environment_digest, one.version_digest))
    counts = {item.version_digest + item.environment_digest: len(item.bundles) for item in found}
    assert counts[keys[0].version_digest + keys[0].environment_digest] == 2
    assert sorted(counts.values()) == [1, 1, 2]
    assert store.bundles(found[0]) == list(found[0].bundles), "a stored key is an address too"


def test_a_bundle_that_went_away_is_file_not_found(store: Store, made: Bundle, tmp_path: Path) -> None:
    store.publish(key(), made.path, made.name)
    with pytest.raises(FileNotFoundError):
        store.fetch(key(), BundleInfo("0" * 64, 10), tmp_path / "fetched")


def test_no_more_is_fetched_than_was_listed(store: Store, made: Bundle, tmp_path: Path) -> None:
    store.publish(key(), made.path, made.name)
    with contextlib.suppress(StoreError):
        store.fetch(key(), BundleInfo(made.name, 10), tmp_path / "fetched")
    assert (tmp_path / "fetched").stat().st_size <= 10


def test_big_bundles_are_streamed_whole(store: Store, tmp_path: Path) -> None:
    """Larger than one part of an upload and than one piece of a download."""
    made = packed(fill(tmp_path / "tree", {"ab/big": os.urandom(12 << 20)}), tmp_path / "out")
    store.publish(key(), made.path, made.name)
    store.fetch(key(), BundleInfo(made.name, made.size_bytes), tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == made.path.read_bytes()


def test_names_that_are_not_bundles_are_ignored(store: Store, made: Bundle, tmp_path: Path) -> None:
    store.publish(key(), made.path, made.name)
    names = [
        f"{key().environment_digest}/{key().version_digest}/{name}"
        for name in ("notes.txt", f"{'0' * 63}.tar.zst", f"{'A' * 64}.tar.zst", f".{made.name}.tar.zst", "x/y.tar.zst")
    ]
    names += [f"{'0' * 64}/notes.txt", f"readme/{'0' * 64}/{made.name}.tar.zst", "README.md"]
    put(store, dict.fromkeys(names, b"x"), tmp_path)
    assert store.bundles(key()) == [BundleInfo(made.name, made.size_bytes)]
    held = store.keys()
    assert [item.bundles for item in held if item.bundles] == [(BundleInfo(made.name, made.size_bytes),)]


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b'{"a": 1}', b'{"dtype": "another"}', b'{"": "x"}', b"[" * 50_000, b"\xff\xfe"],
)
def test_facts_that_are_not_the_keys_are_not_believed(store: Store, made: Bundle, tmp_path: Path, text: bytes) -> None:
    store.publish(key(), made.path, made.name)
    put(store, {f"{key().environment_digest}/{key().version_digest}/version.json": text}, tmp_path)
    [held] = store.keys()
    assert (held.facts, len(held.bundles)) == (None, 1)


def put(store: Store, files: dict[str, bytes], tmp_path: Path) -> None:
    """Puts strangers' files where a store keeps its own."""
    if isinstance(store, DirectoryStore):
        fill(Path(store.location), files)
        return
    assert isinstance(store, ObjectStore)
    backend = obstore.store.from_url(store.location)
    for name, content in files.items():
        obstore.put(backend, name, io.BytesIO(content))


def test_notes_lie_beside_a_bundle_and_are_no_bundles(store: Store, made: Bundle) -> None:
    before_s = time.time()
    store.publish(key(), made.path, made.name)
    assert store.note(key(), made.name, SIGNATURE) is None
    store.write_note(key(), made.name, SIGNATURE, "first")
    store.write_note(key(), made.name, SIGNATURE, "second\n")
    store.write_note(key(), "0" * 64, COVERED, "x")
    assert store.note(key(), made.name, SIGNATURE) == "second\n"
    listed = store.files(key())
    assert [(file.name, file.suffix, file.size_bytes) for file in listed] == sorted(
        [("0" * 64, COVERED, 1), (made.name, SIGNATURE, 7), (made.name, SUFFIX, made.size_bytes)]
    )
    assert all(before_s - 60 < file.modified_s < time.time() + 60 for file in listed)
    assert store.bundles(key()) == [BundleInfo(made.name, made.size_bytes)]
    assert [item.bundles for item in store.keys()] == [(BundleInfo(made.name, made.size_bytes),)]  # noqa: SIM118


def test_what_is_removed_is_gone_and_may_be_removed_again(store: Store, made: Bundle) -> None:
    keys = [key(), key(dtype="fp32")]
    for one in keys:
        store.publish(one, made.path, made.name)
        store.write_note(one, made.name, COVERED, "x")
    for _ in range(2):
        store.remove(keys[0], made.name, SUFFIX)
        store.remove(keys[0], made.name, COVERED)
        store.remove_facts(keys[0])
    assert store.files(keys[0]) == []
    assert [item.facts for item in store.keys()] == [keys[1]], "the environment's facts stay for the other"  # noqa: SIM118
    store.remove(keys[1], made.name, SUFFIX)
    store.remove(keys[1], made.name, COVERED)
    store.remove_facts(keys[1])
    assert store.keys() == []
    assert not everything(store)


def test_what_killed_processes_left_half_written_goes_with_the_next_save_and_the_last_removal(
    tmp_path: Path, made: Bundle
) -> None:
    store = DirectoryStore(tmp_path / "store")
    store.publish(key(), made.path, made.name)
    folder = tmp_path / "store" / key().environment_digest / key().version_digest

    def leave_litter() -> list[Path]:
        litter = [place / f"{TEMPORARY_PREFIX}x.tmp" for place in (folder, folder.parent)]
        for path in litter:
            path.write_text("half")
            os.utime(path, (time.time() - STALE_S - 60,) * 2)
        return litter

    litter = leave_litter()
    store.publish(key(), made.path, made.name)
    assert not any(path.exists() for path in litter)
    leave_litter()
    store.remove(key(), made.name, SUFFIX)
    store.remove_facts(key())
    assert list((tmp_path / "store").iterdir()) == []


def everything(store: Store) -> list[str]:
    """The name of every file or object of a store, whatever it is called."""
    if isinstance(store, DirectoryStore):
        return sorted(contents(Path(store.location)))
    return [item["path"] for batch in obstore.list(obstore.store.from_url(store.location)) for item in batch]


def test_a_signed_store_is_a_store(store: Store, made: Bundle, tmp_path: Path) -> None:
    signed = SignedStore(store, Secrets("a-secret-of-some-length"))
    assert signed.publish(key(), made.path, made.name)
    assert not signed.publish(key(), made.path, made.name)
    [listed] = signed.bundles(key())
    signed.fetch(key(), listed, tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == made.path.read_bytes()
    store.remove(key(), made.name, SIGNATURE)
    with pytest.raises(BundleError, match="has no signature"):
        signed.fetch(key(), listed, tmp_path / "fetched")


def test_replicas_that_publish_at_once_lose_nothing(store: Store, tmp_path: Path) -> None:
    made = [another(tmp_path, number) for number in range(6)]

    def publish_all() -> None:
        for one in made:
            store.publish(key(), one.path, one.name)

    replicas = [threading.Thread(target=publish_all) for _ in range(2)]
    replicas += [threading.Thread(target=store.publish, args=(key(), one.path, one.name)) for one in made]
    for replica in replicas:
        replica.start()
    for replica in replicas:
        replica.join()
    assert {item.name for item in store.bundles(key())} == {one.name for one in made}
    assert store.keys()[0].facts == key()


def test_missing_and_damaged_facts_are_written_again(store: Store, made: Bundle, tmp_path: Path) -> None:
    store.publish(key(), made.path, made.name)
    places = [f"{key().environment_digest}/environment.json"]
    places.append(f"{key().environment_digest}/{key().version_digest}/version.json")
    size_bytes = len(json.dumps(dict(key().version), indent=2, sort_keys=True)) + 1
    for place, text in itertools.product(places, (b"", b"{}", b"x" * size_bytes)):
        put(store, {place: text}, tmp_path)
        assert [item.facts for item in store.keys()] == [None]  # noqa: SIM118  a store is no mapping
        store.write_facts(key())
        assert [item.facts for item in store.keys()] == [key()]  # noqa: SIM118


def test_one_environments_keys_are_listed_alone(store: Store, made: Bundle) -> None:
    keys = [key(), key(dtype="fp32"), key(device="another")]
    for one in keys:
        store.publish(one, made.path, made.name)
    found = [item.facts for item in store.keys(key().environment_digest)]
    assert found == sorted(keys[:2], key=lambda one: one.version_digest)
    assert store.keys("0" * 64) == []


def test_facts_are_read_once_each(s3: str, made: Bundle) -> None:
    """Counted, as seconds depend on the network: an environment's facts were read with each of its versions."""
    store = ObjectStore(s3)
    for number in range(12):
        store.publish(key(dtype=f"fp{number}", device=f"gpu{number % 2}"), made.path, made.name)
    real, asked = store._obstore, Counter[str]()

    class Counting:
        def __getattr__(self, name: str) -> object:
            asked[name] += 1
            return getattr(real, name)

    store._obstore = Counting()  # type: ignore[assignment]
    assert len(store.keys()) == 12
    assert asked == {"list": 1, "get": 12 + 2}
    asked.clear()
    assert len(store.keys(key(device="gpu1").environment_digest)) == 6
    assert asked == {"list": 1, "get": 6 + 1}


def test_facts_that_cannot_be_read_are_an_error(s3: str, made: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore(s3)
    store.publish(key(), made.path, made.name)
    monkeypatch.setattr(store, "_read_facts", lambda _: (_ for _ in ()).throw(StoreError("Access denied.")))
    with pytest.raises(StoreError, match="Access denied"):
        store.keys()


# --- A listing is no snapshot ----------------------------------------------------------------------------------------


def listing(names: str) -> list[StoredFile]:
    """Bundles by a capital letter each; a small one is the note of a bundle."""
    return [StoredFile(letter.upper(), SUFFIX if letter.isupper() else COVERED, 1, 0.0) for letter in names]


@pytest.mark.parametrize(
    ("answers", "changed", "asked", "names"),
    [
        (["AB"], False, 1, "AB"),
        (["AaB"], False, 1, "AaB"),  # covered, and still there
        (["aB", "aBC"], False, 2, "aBC"),  # A went meanwhile, into C
        (["aB", "aB"], False, 2, "aB"),  # it went long ago
        (["B", "BC"], True, 2, "BC"),
        (["abC", "abcD", "abcDE"], False, 3, "abcDE"),  # the second one was torn too
        (["aB", "abC", "abcD", "abcdE", "abcdeF", "x"], False, 5, "abcdeF"),
    ],
)
def test_a_torn_listing_is_repeated_until_nothing_has_gone(
    answers: list[str], changed: bool, asked: int, names: str
) -> None:
    left = list(answers)
    assert stores._settled(lambda: (listing(left.pop(0)), changed)) == listing(names)
    assert len(answers) - len(left) == asked


def test_a_directory_that_changes_while_it_is_listed_is_listed_again(
    made: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path / "store")
    store.publish(key(), made.path, made.name)
    union, scandir = another(tmp_path, 1), os.scandir

    def scan(folder: Path) -> object:
        found = list(scandir(folder))
        monkeypatch.setattr(os, "scandir", scandir)
        store.publish(key(), union.path, union.name)
        store.remove(key(), made.name, SUFFIX)
        return found

    monkeypatch.setattr(os, "scandir", scan)
    assert [item.name for item in store.bundles(key())] == [union.name]


# --- A directory -----------------------------------------------------------------------------------------------------


def test_the_layout_is_what_people_read(made: Bundle, tmp_path: Path) -> None:
    open_store(str(tmp_path / "store")).publish(key(), made.path, made.name)
    environment, version = key().environment_digest, key().version_digest
    assert set(contents(tmp_path / "store")) == {
        f"{environment}/environment.json",
        f"{environment}/{version}/version.json",
        f"{environment}/{version}/{made.name}.tar.zst",
    }
    text = (tmp_path / "store" / environment / "environment.json").read_text()
    assert text == json.dumps(dict(key().environment), indent=2, sort_keys=True) + "\n"


def test_a_root_of_our_own_is_the_owners_and_its_files_are_readable(made: Bundle, tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        open_store(str(tmp_path / "deep/store")).publish(key(), made.path, made.name)
    finally:
        os.umask(old)
    root = tmp_path / "deep/store"
    modes = {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_file()}
    folders = {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_dir()}
    assert (stat.S_IMODE(root.stat().st_mode), folders, modes) == (0o700, {0o755}, {0o644})


def test_a_root_that_was_there_keeps_its_mode(made: Bundle, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o755)
    open_store(str(tmp_path / "store")).publish(key(), made.path, made.name)
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o755


def test_what_a_dead_publisher_left_is_ignored_and_cleaned_up_when_old(made: Bundle, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    store.publish(key(), made.path, made.name)
    folder = tmp_path / "store" / key().environment_digest / key().version_digest
    fill(folder, {".warmstart-old.tmp": b"half", ".warmstart-new.tmp": b"half", ".strangers": b"s"})
    old = time.time() - stores.STALE_S - 60
    for name in (".warmstart-old.tmp", ".strangers"):
        os.utime(folder / name, (old, old))
    assert len(store.bundles(key())) == 1
    store.publish(key(), made.path, made.name)
    assert {path.name for path in folder.iterdir() if path.name.startswith(".")} == {".warmstart-new.tmp", ".strangers"}


def test_a_publisher_that_fails_leaves_no_bundle(made: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path / "store"))
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        store.publish(key(), made.path, made.name)
    assert contents(tmp_path / "store") == {}


def test_links_in_a_store_are_not_followed(made: Bundle, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    store.publish(key(), made.path, made.name)
    folder = tmp_path / "store" / key().environment_digest / key().version_digest
    (folder / f"{'0' * 64}.tar.zst").symlink_to(made.path)
    assert [item.name for item in store.bundles(key())] == [made.name]
    with pytest.raises(OSError, match="symbolic link"):
        store.fetch(key(), BundleInfo("0" * 64, made.size_bytes), tmp_path / "fetched")


READ_ONLY = """
import pathlib, subprocess, sys
from artifacts import key
from warmstart.store import open_store
place, path, name = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,mode=755", "tmpfs", place], check=True)
try:
    open_store(place).publish(key(), pathlib.Path(path), name)
except OSError as error:
    print(error.strerror)
print(open_store(place).bundles(key()), open_store(place).keys())
"""


@pytest.mark.timeout(30)
def test_a_pipe_in_the_place_of_facts_keeps_nobody_waiting(made: Bundle, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    store.publish(key(), made.path, made.name)
    facts = next((tmp_path / "store").glob("*/environment.json"))
    facts.unlink()
    os.mkfifo(facts)
    assert [stored.facts for stored in store.keys()] == [None]  # noqa: SIM118
    store.publish(key(), made.path, made.name)
    assert [stored.facts for stored in store.keys()] == [key()]  # noqa: SIM118


def test_a_read_only_store_can_be_read(made: Bundle, tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    done = in_namespace(READ_ONLY, str(tmp_path / "place"), str(made.path), made.name)
    assert done.stdout == "Read-only file system\n[] []\n", done.stderr


# --- Locations -------------------------------------------------------------------------------------------------------


def test_a_file_url_is_a_directory(made: Bundle, tmp_path: Path) -> None:
    (tmp_path / "a store").mkdir()
    open_store(f"file://{tmp_path}/a%20store").publish(key(), made.path, made.name)
    assert len(open_store(str(tmp_path / "a store")).bundles(key())) == 1


@pytest.mark.parametrize(
    "location", ["", "  ", "s3://", "s3:///", "http://host/x", "ftp://host/x", "file://host/x", "file://"]
)
def test_a_location_that_is_none_says_what_is(location: str) -> None:
    with pytest.raises(StoreError, match=r"s3://|file:///a/directory"):
        open_store(location)


@pytest.mark.parametrize("location", ["s3://bucket/prefix", "gs://bucket", "az://container/prefix"])
def test_object_stores_open_without_asking_anybody(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert open_store(location).location == location


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(StoreError, match="needs the package obstore"):
        open_store("s3://bucket/prefix")
    assert open_store("here").location == "here", "a directory needs no client"


def test_an_absent_bucket_is_a_store_error(s3: str, made: Bundle) -> None:
    store = open_store("s3://no-such-bucket/prefix")
    with pytest.raises(StoreError, match=r"no-such-bucket.*did not list.*Check the bucket"):
        store.bundles(key())
    with pytest.raises(StoreError, match=r"did not .*Check the bucket"):
        store.publish(key(), made.path, made.name)

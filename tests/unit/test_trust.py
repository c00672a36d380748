"""Whom a store believes: directories that others can write to, secrets that stay secret, and signatures."""

import copy
import dataclasses
import importlib
import json
import os
import shutil
import stat
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
from artifacts import LIMITS, TREE, contents, fill, key, packed

from warmstart import trust
from warmstart.bundle import BundleError
from warmstart.cache import Cache, PersistOutcome, RestoreOutcome, explain
from warmstart.settings import Settings, SettingsError
from warmstart.store import BundleInfo, SignedStore, Store, StoreError, open_store
from warmstart.trust import Secrets, distrust

NEW, OLD, OTHER = ("a-secret-of-some-length-" + name for name in ("new", "old", "other"))
LONG_S = 300.0


# --- Directories -----------------------------------------------------------------------------------------------------


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A store with a bundle."""
    made = packed(fill(tmp_path / "tree", TREE), tmp_path / "out")
    open_store(str(tmp_path / "store")).publish(key(), made.path, made.name)
    return tmp_path / "store"


def folders(root: Path) -> list[Path]:
    environment = root / key().environment_digest
    return [root, environment, environment / key().version_digest]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("mode", [0o777, 0o757, 0o1777])
def test_a_store_that_anybody_can_write_to_is_neither_read_nor_written(filled: Path, depth: int, mode: int) -> None:
    folder = folders(filled)[depth]
    folder.chmod(mode)
    store = open_store(str(filled))
    before = contents(filled)
    for ask in (
        lambda: store.bundles(key()),
        lambda: store.fetch(key(), BundleInfo("0" * 64, 1), filled.parent / "fetched"),
        lambda: store.publish(key(), filled.parent / "tree/x", "0" * 64),
        lambda: store.write_note(key(), "0" * 64, ".covered", ""),
        lambda: store.remove(key(), "0" * 64, ".tar.zst"),
    ):
        with pytest.raises(StoreError, match="can put code there") as caught:
            ask()
        assert f"{folder} has the mode {mode:04o}" in str(caught.value)
        assert f"chmod go-w {folder}" in str(caught.value)
    assert contents(filled) == before


def test_a_boot_says_so_and_goes_on_cold(filled: Path, tmp_path: Path) -> None:
    filled.chmod(0o777)
    store = open_store(str(filled))
    one = Cache([store], store, key(), tmp_path / "live", LIMITS)
    restored = one.restore(LONG_S)
    assert (restored.outcome, restored.files) == (RestoreOutcome.FAILED, 0)
    assert f"{filled} has the mode 0777" in restored.reason
    assert f"chmod go-w {filled}" in restored.reason
    fill(tmp_path / "live", {"ab/new": b"new"})
    assert one.persist(LONG_S).outcome is PersistOutcome.FAILED
    filled.chmod(0o755)
    assert one.restore(LONG_S).outcome is RestoreOutcome.RESTORED, "it is asked each time"


def test_a_link_in_place_of_a_stores_directory_is_not_followed(filled: Path, tmp_path: Path) -> None:
    version = folders(filled)[2]
    shutil.move(version, tmp_path / "elsewhere")
    version.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="is a link or a file"):
        open_store(str(filled)).bundles(key())
    (tmp_path / "link").symlink_to(filled)
    version.unlink()
    shutil.move(tmp_path / "elsewhere", version)
    assert len(open_store(str(tmp_path / "link")).bundles(key())) == 1, "the root is what the user named"


def test_a_clone_made_under_umask_002_works(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories are then writable by the owner's own group, in which nobody else is."""
    for folder in folders(filled):
        folder.chmod(0o775)
    accounts(monkeypatch, [("ada", os.getuid(), os.getgid())], {})
    assert len(open_store(str(filled)).bundles(key())) == 1


def accounts(monkeypatch: pytest.MonkeyPatch, users: list[tuple[str, int, int]], groups: dict[int, list[str]]) -> None:
    """The accounts of a machine: (name, number, primary group), and who else is in a group."""
    known = [SimpleNamespace(pw_name=name, pw_uid=uid, pw_gid=gid) for name, uid, gid in users]

    def of_user(uid: int) -> SimpleNamespace:
        return {item.pw_uid: item for item in known}[uid]

    monkeypatch.setattr(trust.pwd, "getpwuid", of_user)
    monkeypatch.setattr(trust.pwd, "getpwall", lambda: known)
    monkeypatch.setattr(trust.grp, "getgrgid", lambda gid: SimpleNamespace(gr_mem=groups[gid]))


ADA, BOB = ("ada", 1000, 1000), ("bob", 1001, 1001)


@pytest.mark.parametrize(
    ("mode", "owner", "group", "users", "groups", "distrusted"),
    [
        (0o755, 1000, 1000, [ADA], {}, False),
        (0o700, 0, 0, [ADA], {}, False),
        (0o775, 0, 0, [ADA], {0: ["ada"]}, False),  # root chose who is in root's group; images have such directories
        (0o775, 1000, 1000, [ADA, BOB], {}, False),
        (0o775, 1000, 1000, [ADA, BOB], {1000: ["ada"]}, False),
        (0o775, 1000, 1000, [ADA, BOB], {1000: ["bob"]}, True),
        (0o775, 1000, 1000, [ADA, ("bob", 1001, 1000)], {}, True),
        (0o775, 1000, 100, [ADA], {100: []}, True),  # a group of several, whose members a container does not know
        (0o775, 1000, 1000, [], {}, False),  # a container that has no accounts of its host
        (0o775, 1000, 1001, [], {}, True),
        (0o775, 0, 2000, [ADA], {}, True),
        (0o755, 1001, 1001, [ADA, BOB], {}, True),  # another user's
        (0o755, 65534, 65534, [], {}, True),
    ],
)
def test_who_can_write_decides(
    monkeypatch: pytest.MonkeyPatch,
    mode: int,
    owner: int,
    group: int,
    users: list[tuple[str, int, int]],
    groups: dict[int, list[str]],
    distrusted: bool,
) -> None:
    accounts(monkeypatch, users, groups)
    monkeypatch.setattr(trust.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(trust, "__file__", "/proc/self/status")  # root's, or this process's own
    got = SimpleNamespace(st_mode=stat.S_IFDIR | mode, st_uid=owner, st_gid=group)
    monkeypatch.setattr(Path, "lstat", lambda _: got)
    reason = distrust(Path("store"), signed=False)
    assert bool(reason) is distrusted, reason
    assert distrust(Path("store"), signed=True) == "", "signatures tell whose code it is, whoever can write"


@pytest.mark.parametrize(("owner", "trusted"), [(1000, True), (1001, False), (65534, False)])
def test_who_owns_the_code_may_own_the_store(monkeypatch: pytest.MonkeyPatch, owner: int, trusted: bool) -> None:
    """A container runs as root on a project that is mounted from its user's home."""
    monkeypatch.setattr(trust.os, "geteuid", lambda: 0)
    code = SimpleNamespace(st_uid=65534 if owner == 65534 else 1000)
    monkeypatch.setattr(Path, "stat", lambda _: code)
    got = SimpleNamespace(st_mode=stat.S_IFDIR | 0o755, st_uid=owner, st_gid=owner)
    monkeypatch.setattr(Path, "lstat", lambda _: got)
    reason = distrust(Path("store"), signed=False)
    assert (reason == "") is trusted
    assert trusted or f"belongs to the user {owner}" in reason


def test_directories_are_never_open_for_a_moment(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under umask 000 a directory made first and closed later is everybody's in between."""
    modes: list[int] = []
    real = Path.chmod
    monkeypatch.setattr(Path, "chmod", lambda path, mode: modes.append(path.stat().st_mode) or real(path, mode))
    old = os.umask(0)
    try:
        open_store(str(filled.parent / "new")).write_note(key(), "0" * 64, ".covered", "")
    finally:
        os.umask(old)
    assert len(modes) == 3
    assert [stat.S_IMODE(mode) & 0o022 for mode in modes] == [0, 0, 0]


# --- Secrets ---------------------------------------------------------------------------------------------------------


def settings(text: str) -> Settings:
    return Settings.from_environment({"WARMSTART_CACHE_SECRET": text})


@pytest.mark.parametrize("text", [f"{NEW},{OLD}", f"{NEW}\n{OLD}\n", f" {NEW} , {OLD} "])
def test_one_or_two_secrets_are_read(text: str) -> None:
    assert settings(text).cache_secret == Secrets(NEW, OLD)
    assert settings(NEW).cache_secret == Secrets(NEW) != Secrets(OLD)
    assert not settings("").cache_secret


@pytest.mark.parametrize(
    ("text", "says"),
    [("hunter2-hunter2", "15 characters"), (",", "0 characters"), (f"{NEW},{OLD},{OTHER}", "3 secrets")],
)
def test_a_bad_secret_is_told_without_telling_it(text: str, says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings(text)
    assert says in str(caught.value)
    assert "WARMSTART_CACHE_SECRET" in str(caught.value)
    told = "".join(traceback.format_exception(caught.value))
    assert all(part not in told for part in ("hunter", "some-length"))


def test_no_text_shows_a_secret() -> None:
    told = settings(f"{NEW},{OLD}")
    shown = [repr(told), str(told), f"{told.cache_secret}", repr(dataclasses.asdict(told)), repr(copy.deepcopy(told))]
    shown.append(json.dumps(dataclasses.asdict(told), default=str))
    shown.append(repr(vars(open_store("somewhere", told.cache_secret))))
    assert all("some-length" not in text for text in shown)


def test_a_boot_gives_its_secret_to_every_store(monkeypatch: pytest.MonkeyPatch) -> None:
    boot = importlib.import_module("warmstart.boot")  # the package's attribute of that name is the function
    given: list[Secrets] = []
    monkeypatch.setattr(boot, "open_store", lambda _, secrets=None: given.append(secrets))
    stage = SimpleNamespace(settings=dataclasses.replace(settings(NEW), cache_url="another"), warnings=[])
    boot._Boot._stores(stage)  # type: ignore[arg-type]
    assert given == [Secrets(NEW), Secrets(NEW)]


# --- Signatures ------------------------------------------------------------------------------------------------------


def signed(root: Path, *secrets: str) -> Store:
    return open_store(str(root), Secrets(*secrets))


def publish(store: Store, tmp_path: Path, files: dict[str, bytes]) -> str:
    made = packed(fill(tmp_path / f"made-{len(list(tmp_path.glob('made-*')))}", files), tmp_path / "out")
    store.publish(key(), made.path, made.name)
    return made.name


def restored(store: Store, live: Path) -> tuple[RestoreOutcome, set[str], str]:
    done = Cache([store], None, key(), live, LIMITS).restore(LONG_S)
    return done.outcome, set(contents(live)) if live.exists() else set(), done.reason


def test_what_was_signed_is_used_and_the_rest_is_not(tmp_path: Path) -> None:
    root = tmp_path / "store"
    publish(signed(root, NEW), tmp_path, {"ab/1": b"1"})
    without = publish(open_store(str(root)), tmp_path, {"ab/2": b"2"})
    wrong = publish(signed(root, OTHER), tmp_path, {"ab/3": b"3"})
    outcome, files, reason = restored(signed(root, NEW), tmp_path / "live")
    assert (outcome, files) == (RestoreOutcome.PARTIAL, {"ab/1"})
    assert f"bundle {without[:12]}" in reason
    assert "has no signature" in reason
    assert f"bundle {wrong[:12]}" in reason
    assert "made with another secret" in reason
    assert restored(open_store(str(root)), tmp_path / "all")[1] == {"ab/1", "ab/2", "ab/3"}, "without a secret, all"


def test_a_wrong_signature_is_seen_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "store"
    name = publish(open_store(str(root)), tmp_path, TREE)
    monkeypatch.setattr(type(open_store(str(root))), "fetch", lambda *_: pytest.fail("it was fetched"))
    with pytest.raises(BundleError, match="has no signature"):
        signed(root, NEW).fetch(key(), BundleInfo(name, 1), tmp_path / "into")


def sign_file(root: Path, name: str) -> Path:
    return folders(root)[2] / f"{name}.hmac"


@pytest.mark.parametrize("change", ["another environment", "another version", "another bundle"])
def test_a_signature_holds_for_one_bundle_of_one_key(tmp_path: Path, change: str) -> None:
    root, other = tmp_path / "store", tmp_path / "other"
    name = publish(signed(root, NEW), tmp_path, TREE)
    keys = {"another environment": key(device="cuda"), "another version": key(dtype="fp32")}
    if change == "another bundle":
        forged = publish(open_store(str(root)), tmp_path, {"ab/evil": b"e"})
        shutil.copy(sign_file(root, name), sign_file(root, forged))
        wanted, store = key(), signed(root, NEW)
        name = forged
    else:
        wanted = keys[change]
        place = other / wanted.environment_digest / wanted.version_digest
        shutil.copytree(folders(root)[2], place)
        store = signed(other, NEW)
    assert "another secret" in store.doubt(wanted, name)


@pytest.mark.parametrize("text", ["", "x" * 64, "\ud800é", "0" * 64 + "\n", "A" * 10_000])
def test_a_forged_signature_is_refused(tmp_path: Path, text: str) -> None:
    name = publish(signed(tmp_path / "store", NEW), tmp_path, TREE)
    sign_file(tmp_path / "store", name).write_bytes(text.encode(errors="surrogatepass"))
    assert restored(signed(tmp_path / "store", NEW), tmp_path / "live")[:2] == (RestoreOutcome.FAILED, set())


def test_the_signature_is_there_before_the_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher that dies in between leaves a signature, which is nothing without its bundle."""
    store = signed(tmp_path / "store", NEW)
    assert isinstance(store, SignedStore)
    monkeypatch.setattr(type(store._inner), "publish", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
    with pytest.raises(OSError, match="No space"):
        publish(store, tmp_path, TREE)
    assert [path.suffix for path in folders(tmp_path / "store")[2].iterdir()] == [".hmac"]
    assert store.bundles(key()) == []


def test_a_bundle_that_went_with_its_signature_is_gone_and_not_unsigned(tmp_path: Path) -> None:
    """A reader lists again then; an unsigned one it would leave out, and so miss what holds its files now."""
    store = signed(tmp_path / "store", NEW)
    name = publish(store, tmp_path, TREE)
    [listed] = store.bundles(key())
    store.remove(key(), name, ".tar.zst")
    store.remove(key(), name, ".hmac")
    with pytest.raises(FileNotFoundError):
        store.fetch(key(), listed, tmp_path / "into")


def test_a_signature_that_is_removed_while_its_bundle_comes_is_written_again(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = signed(root, NEW)
    assert isinstance(store, SignedStore)
    inner = store._inner

    class Sweeping:
        """A store beside which an old signature of the same name is removed at the worst moment."""

        def __getattr__(self, name: str) -> object:
            return getattr(inner, name)

        def publish(self, key: object, path: Path, name: str) -> bool:
            sign_file(root, name).unlink()
            return inner.publish(key, path, name)  # type: ignore[arg-type]

    store._inner = Sweeping()  # type: ignore[assignment]
    publish(store, tmp_path, TREE)
    assert restored(signed(root, NEW), tmp_path / "live")[0] is RestoreOutcome.RESTORED


def test_a_secret_is_changed_without_a_cold_boot(tmp_path: Path) -> None:
    root = tmp_path / "store"
    publish(signed(root, OLD), tmp_path, TREE)
    both = signed(root, NEW, OLD)
    assert restored(both, tmp_path / "1")[0] is RestoreOutcome.RESTORED, "either is accepted"
    publish(both, tmp_path, {"ab/1": b"1"})
    assert restored(signed(root, NEW), tmp_path / "2")[1] == {"ab/1"}, "the first signs"
    assert restored(signed(root, OLD), tmp_path / "3")[1] == set(TREE)
    publish(both, tmp_path, TREE)
    assert restored(signed(root, NEW), tmp_path / "4")[1] == {*TREE, "ab/1"}, "who publishes the same signs it anew"


def test_explain_counts_only_what_a_boot_would_use(tmp_path: Path) -> None:
    publish(open_store(str(tmp_path / "store")), tmp_path, TREE)
    text = explain(key(), [signed(tmp_path / "store", NEW)])
    assert text.startswith("Miss:")
    assert "are refused: it has no signature" in text
    assert "No other key is stored there" in text
    publish(signed(tmp_path / "store", NEW), tmp_path, TREE)
    assert explain(key(), [signed(tmp_path / "store", NEW)]).startswith("Hit:")

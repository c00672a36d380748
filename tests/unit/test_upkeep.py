"""Pruning and copying: what goes, what never goes, and that only whole and wanted bundles travel."""

import os
from pathlib import Path

import pytest
from artifacts import LIMITS, TREE, contents, fill, key, packed

from warmstart.cache import Cache, RestoreOutcome
from warmstart.compaction import compact
from warmstart.key import Key
from warmstart.store import COVERED, SUFFIX, DirectoryStore, Store, open_store
from warmstart.trust import Secrets
from warmstart.upkeep import Rules, copy, outdated, remove, sign_anew, versions

DAY_S = 86_400
NOW_S = 1_000 * DAY_S
NEW, OLD = (f"a-secret-of-some-length-{name}" for name in ("new", "old"))


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def publish(store: Store, tmp_path: Path, files: dict[str, bytes], of: Key | None = None) -> str:
    number = len(list(tmp_path.glob("made-*")))
    made = packed(fill(tmp_path / f"made-{number}", files), tmp_path / "out")
    store.publish(of or key(), made.path, made.name)
    return made.name


def publish_aged(store: DirectoryStore, tmp_path: Path, model: str, *ages_days: float) -> Key:
    """A version with a bundle of 1000 random bytes for each age."""
    of = key(model=model)
    for age_days in ages_days:
        name = publish(store, tmp_path, {f"ab/{age_days}": os.urandom(1000)}, of)
        path = Path(store.location) / of.environment_digest / of.version_digest / f"{name}{SUFFIX}"
        os.utime(path, (NOW_S - age_days * DAY_S,) * 2)
    return of


# --- Prune -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def aged(store: DirectoryStore, tmp_path: Path) -> dict[str, Key]:
    """Versions by what was last published to them, in days; c has an old bundle too."""
    return {
        "a": publish_aged(store, tmp_path, "a", 40),
        "b": publish_aged(store, tmp_path, "b", 30),
        "c": publish_aged(store, tmp_path, "c", 50, 2),
        "d": publish_aged(store, tmp_path, "d", 1),
    }


@pytest.mark.parametrize(
    ("rules", "spare", "goes"),
    [
        (Rules(older_than_days=35), None, "a"),
        (Rules(older_than_days=29.9), None, "ab"),
        (Rules(older_than_days=0), None, "abcd"),
        (Rules(older_than_days=1000), None, ""),
        (Rules(keep=2), None, "ab"),
        (Rules(keep=0), None, "abcd"),
        (Rules(keep=9), None, ""),
        (Rules(max_bytes=10**6), None, ""),
        (Rules(max_bytes=5500), None, "a"),
        (Rules(max_bytes=0), None, "abcd"),
        (Rules(older_than_days=35, keep=2), None, "ab"),
        (Rules(), None, ""),
        (Rules(keep=0), "c", "abd"),
        (Rules(keep=1), "a", "bc"),
        (Rules(max_bytes=3000), "a", "bc"),
        (Rules(older_than_days=35), "a", ""),
    ],
)
def test_the_oldest_go_and_the_current_one_never(
    store: DirectoryStore, aged: dict[str, Key], rules: Rules, spare: str | None, goes: str
) -> None:
    found = outdated(versions(store), rules, spare=aged[spare] if spare else None, now_s=NOW_S)
    letters = {one.version_digest: letter for letter, one in aged.items()}
    assert "".join(letters[item.stored.version_digest] for item in found) == goes


def test_removing_a_version_leaves_nothing_of_it_and_all_of_the_others(
    store: DirectoryStore, aged: dict[str, Key]
) -> None:
    store.write_note(aged["c"], "0" * 64, COVERED, "x")
    before = contents(Path(store.location))
    [item] = [item for item in versions(store) if item.stored.version_digest == aged["c"].version_digest]
    remove(store, item)
    after = contents(Path(store.location))
    assert after == {path: text for path, text in before.items() if aged["c"].version_digest not in path}
    assert not (Path(store.location) / aged["c"].environment_digest / aged["c"].version_digest).exists()


def test_the_last_version_takes_its_environment_along(store: DirectoryStore, aged: dict[str, Key]) -> None:
    for item in versions(store):
        assert list(Path(store.location).iterdir()) != []
        remove(store, item)
    assert list(Path(store.location).iterdir()) == []


def test_a_version_that_is_published_to_while_it_goes_keeps_its_directory(
    store: DirectoryStore, tmp_path: Path
) -> None:
    publish(store, tmp_path, {"ab/1": b"1"})
    [item] = versions(store)
    new = publish(store, tmp_path, {"ab/2": b"2"})
    remove(store, item)
    assert [info.name for info in store.bundles(key())] == [new]
    publish(store, tmp_path, {"ab/3": b"3"})
    assert store.keys()[0].facts == key(), "the next publication brings the facts back"


# --- Copy ------------------------------------------------------------------------------------------------------------


def restored(store: Store, live: Path) -> dict[str, bytes]:
    done = Cache([store], None, key(), live, LIMITS).restore(300)
    assert done.outcome is RestoreOutcome.RESTORED, done.reason
    return contents(live)


def test_what_is_missing_is_copied_and_only_that(store: DirectoryStore, tmp_path: Path) -> None:
    there = publish(store, tmp_path, {"ab/1": b"1"})
    other = DirectoryStore(tmp_path / "other")
    names = {publish(other, tmp_path, {f"ab/{number}": b"%d" % number}) for number in range(1, 4)}
    publish(other, tmp_path, TREE, key(dtype="fp32"))
    told: list[str] = []
    done = copy(other, store, told.append)
    assert len(done.done) == len(told) == 3
    assert {info.name for info in store.bundles(key())} == names >= {there}
    assert [item.facts for item in store.keys()] == [item.facts for item in other.keys()]  # noqa: SIM118
    assert done.skipped == []
    again = copy(other, store, told.append)
    assert (again.done, again.skipped) == ([], [])
    assert restored(store, tmp_path / "live") == {f"ab/{number}": b"%d" % number for number in range(1, 4)}


def test_a_damaged_bundle_stays_behind_and_one_cut_short_is_replaced(store: DirectoryStore, tmp_path: Path) -> None:
    other = DirectoryStore(tmp_path / "other")
    bad, good = publish(other, tmp_path, TREE), publish(other, tmp_path, {"ab/1": b"1"})
    [path] = Path(other.location).rglob(f"{bad}*")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    copy(other, store, lambda _: None)
    [half] = Path(store.location).rglob(f"{good}*")
    half.write_bytes(half.read_bytes()[:5])
    done = copy(other, store, lambda _: None)
    assert [item.name for item in done.done] == [good]
    [line] = done.skipped
    assert line.startswith(f"bundle {bad[:12]} of {other.location}: The bundle")
    assert restored(store, tmp_path / "live") == {"ab/1": b"1"}


def test_what_another_bundle_holds_is_not_copied(store: DirectoryStore, tmp_path: Path) -> None:
    other = DirectoryStore(tmp_path / "other")
    for number in range(4):
        publish(other, tmp_path, {f"ab/{number}": b"%d" % number})
    made = compact(other, key(), tmp_path, LIMITS)
    assert [item.name for item in copy(other, store, lambda _: None).done] == [made.name]
    assert len(restored(store, tmp_path / "live")) == 4


def test_bundles_without_facts_stay_behind(store: DirectoryStore, tmp_path: Path) -> None:
    other = DirectoryStore(tmp_path / "other")
    publish(other, tmp_path, TREE)
    next(Path(other.location).rglob("version.json")).unlink()
    [line] = copy(other, store, lambda _: None).skipped
    assert "facts are missing" in line
    assert not Path(store.location).exists()


def test_with_a_secret_signed_bundles_travel_and_are_signed_there(store: DirectoryStore, tmp_path: Path) -> None:
    plain = DirectoryStore(tmp_path / "other")
    unsigned = publish(plain, tmp_path, {"ab/evil": b"e"})
    publish(open_store(plain.location, Secrets(OLD)), tmp_path, TREE)
    both = Secrets(NEW, OLD)
    done = copy(open_store(plain.location, both), open_store(store.location, both), lambda _: None)
    assert len(done.done) == 1
    [line] = done.skipped
    assert unsigned[:12] in line
    assert "has no signature" in line
    assert restored(open_store(store.location, Secrets(NEW)), tmp_path / "live") == TREE


def test_what_only_the_old_secret_signed_is_signed_anew(store: DirectoryStore, tmp_path: Path) -> None:
    publish(open_store(store.location, Secrets(OLD)), tmp_path, TREE)
    publish(store, tmp_path, {"ab/evil": b"e"})
    both = open_store(store.location, Secrets(NEW, OLD))
    assert sign_anew(both, key()) == 1, "but not what nobody signed"
    assert sign_anew(both, key()) == 0
    assert sign_anew(store, key()) == 0
    done = Cache([open_store(store.location, Secrets(NEW))], None, key(), tmp_path / "live", LIMITS).restore(300)
    assert contents(tmp_path / "live") == TREE
    assert done.bundles == 1

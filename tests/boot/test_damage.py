"""A live directory that outlives its boots, damaged in every way: boots end ready and right, and the next one is too.

Some of each: what would run as wrong code, and another that a seed chooses; scripts/damage_matrix runs all.
"""

import random
import shutil

import pytest
from booting import ONE, SMALL, Boot
from damaging import DAMAGES, KINDS, USER, code_of, damaged, kind, of_kind, prepare, run, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SEED = 20261130
LIBRARIES = [("kernel.so", damage) for damage in ("half", "flipped bit", "unreadable")]
OTHERS = [(what, damage) for what in KINDS for damage in DAMAGES if (what, damage) not in LIBRARIES]
CHOSEN = [*LIBRARIES, random.Random(SEED).choice(OTHERS)]


@pytest.fixture(scope="module")
def place(boot: Boot, tmp_path_factory):
    return prepare(boot, tmp_path_factory.mktemp("damage"))


def test_every_file_of_a_live_directory_is_of_a_kind_that_is_damaged_here(place):
    found = {kind(path.relative_to(place.live).as_posix()) for path in place.live.rglob("*") if path.is_file()}
    assert found - {"own lock"} == set(KINDS)


@pytest.mark.parametrize(("what", "damage"), CHOSEN, ids=lambda value: value.replace(" ", "-"))
def test_a_damaged_directory_is_healed_without_any_store(boot, place, tmp_path, what, damage):
    """All files of the kind for half of the cells, one of them for the others."""
    rng = random.Random(f"{SEED} {what} {damage}")
    live = damaged(place, tmp_path / "live", what, damage, one=rng if rng.random() < 0.5 else None)
    cell = run(boot, place, live, what, damage)
    assert cell.faults == []


@pytest.mark.parametrize("damage", ["flipped bit", "directory"])
def test_what_bundles_hold_is_restored_in_place_of_what_is_damaged(boot, place, tmp_path, damage):
    live = tmp_path / "live"
    shutil.copytree(place.live, live)
    for what in KINDS:
        for path in of_kind(live, what):
            if what not in ("lock", "record"):
                DAMAGES[damage](path)
    booted = start(boot, live, place.store)
    assert booted.report["outcome"] == "warm", booted.report["reason"]
    assert (booted.counts["fx_hits"], booted.counts["kernels_built"]) == (1, 0)
    assert any("not as the boot that used them" in warning for warning in booted.report["warnings"])
    assert booted.pictures == place.pictures


def test_code_that_ends_the_process_ends_one_boot_and_not_the_next(boot, place, tmp_path):
    """No record tells that these libraries are not as they were, as in a directory of before there were records."""
    live = tmp_path / "live"
    shutil.copytree(place.live, live)
    of_kind(live, "record")[0].unlink()
    for path in of_kind(live, "kernel.so"):
        data = path.read_bytes()
        code = code_of(data)
        path.write_bytes(data[: code.start] + b"\xcc" * len(code) + data[code.stop :])
    environment = {**SMALL, "TORCHINDUCTOR_CACHE_DIR": str(live)}
    failed = boot.start(tmp_path / "first", before=ONE, as_user=USER, environment=environment)
    assert failed.returncode < 0, f"the process was to die by a signal:\n{failed.stdout[-2000:]}{failed.stderr[-2000:]}"
    for number in (1, 2):
        booted = start(boot, live, tmp_path / "store")
        assert booted.report["outcome"] == ("cold" if number == 1 else "warm"), booted.report["reason"]
        assert any("a boot died in its warm-up" in warning for warning in booted.report["warnings"])
        assert booted.report["facts"]["live_dir"] != str(live)
        assert booted.pictures == place.pictures

"""The default model's first boot is cold, every later one is warm and draws the same, whoever boots it where."""

import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
import zstandard
from booting import DRAWN, ROOT
from PIL import Image

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_the_first_boot_is_cold_says_why_and_leaves_a_bundle(cold, shared_store):
    assert cold.report["outcome"] == "cold"
    assert "no bundle for this key" in cold.report["reason"]
    assert cold.counts["fx_hits"] == 0
    assert cold.counts["fx_misses"] > 0
    assert cold.counts["kernels_built"] > 0
    assert list(shared_store.glob("*/*/*.tar.zst"))


def test_each_region_has_two_graphs_for_all_twelve_requests(cold):
    # One for a batch of 1 and one for larger batches: torch specialises on 1. No size needs another.
    assert {region["name"]: region["graphs"] for region in cold.report["regions"]} == {
        "transformer.FluxSingleTransformerBlock": 2,
        "transformer.FluxTransformerBlock": 2,
    }
    assert len(cold.report["requests"]) == 12


def test_phases_add_up_to_the_boot(cold):
    assert sum(cold.report["phases"].values()) == pytest.approx(cold.report["boot_s"], rel=0.05)


def test_work_is_saved_while_the_boot_goes_on(cold, shared_store):
    published = [save["name"] for save in cold.report["persisted"] if save["outcome"] == "published"]
    # Four graphs, two in each of two requests; a save takes along what was compiled during the one before.
    assert 2 <= len(published) <= 4
    assert {f"{name}.tar.zst" for name in published} == {path.name for path in shared_store.glob("*/*/*.tar.zst")}


def test_bundles_hold_artifacts_and_nothing_that_only_lay_beside_them(cold, shared_store):
    """The rule stated anew, by the names that Inductor, g++ and Triton give to what must stay behind."""
    never = re.compile(r"\.lock$|\.(gch|pch|pyc)$|\.tmp|(^|/)(\.|tmp\.)|(^|/)(locks|precompiled_headers|__pycache__)/")
    paths = [path for bundle in shared_store.glob("*/*/*.tar.zst") for path in indexed(bundle)]
    assert [path for path in paths if never.search(path)] == []
    # What was looked through is what a boot needs, and the live directory did hold what must stay behind.
    assert {path.partition("/")[0] for path in paths} > {"fxgraph", "aotautograd"}
    assert any(path.endswith(".so") for path in paths)
    live = Path(cold.report["facts"]["live_dir"])
    assert any(never.search(path.relative_to(live).as_posix()) for path in live.rglob("*") if path.is_file())


def indexed(bundle: Path) -> list[str]:
    """The paths of a bundle by its index, which must be those of its members."""
    with zstandard.open(bundle, "rb") as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        listed = [item["path"] for item in json.loads(tar.extractfile(tar.next()).read())["files"]]
        assert [member.name for member in tar] == ["index.json", *listed]
    return listed


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The working tree's files that git would clone, at another path."""
    place = tmp_path_factory.mktemp("elsewhere") / "a clone"
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, place / name)
    return place


@pytest.fixture(scope="module")
def warm(cold, boot, shared_store, clone, pictures):
    """A boot of another clone, in another live directory and process, over the first one's store."""
    return boot(shared_store, project=clone, draw=DRAWN, folder=str(pictures), threads=5)


def test_a_later_boot_elsewhere_is_warm_and_proves_it(warm):
    assert warm.report["outcome"] == "warm", warm.report["reason"]
    assert warm.counts["fx_hits"] == warm.counts["aot_hits"] == warm.counts["graphs"] > 0
    for zero in ("fx_misses", "aot_misses", "fx_bypasses", "aot_bypasses", "kernels_built"):
        assert warm.counts[zero] == 0, zero


def test_a_warm_boot_publishes_nothing(cold, warm, shared_store):
    assert {save["outcome"] for save in warm.report["persisted"]} == {"nothing_new"}
    published = [save for save in cold.report["persisted"] if save["outcome"] == "published"]
    assert len(list(shared_store.glob("*/*/*.tar.zst"))) == len(published)


def test_the_pictures_of_a_warm_boot_equal_those_of_a_cold_one_to_the_bit(cold, warm):
    assert warm.pictures == cold.pictures
    assert len({digest for picture in cold.pictures for digest in picture}) == sum(row[2] for row in DRAWN)


@pytest.mark.parametrize(("which", "number"), [("cold", 2), ("warm", 5)])
def test_after_ready_no_planned_request_compiles_from_any_thread(which, number, request):
    booted = request.getfixturevalue(which)
    threads = [dict(asked) for asked in booted.threads]
    assert len({asked.pop("thread") for asked in threads}) == number
    for asked in threads:
        assert len(asked) == 12
        assert set(asked.values()) == {0}, asked


def test_compiled_pictures_equal_eager_ones_within_rounding(cold, boot, pictures, tmp_path):
    eager = boot(tmp_path / "none", draw=DRAWN, folder=str(pictures), environment={"WARMSTART_COMPILE": "off"})
    assert eager.report["outcome"] == "eager"
    for compiled, plain in zip(cold.pictures, eager.pictures, strict=True):
        for ours, theirs in zip(compiled, plain, strict=True):
            difference = np.abs(load(pictures, ours) - load(pictures, theirs))
            # Of 255 steps of grey: eight denoising steps may carry a rounding difference over the edge of one.
            assert difference.max() <= 2, compiled


def load(folder: Path, digest: str) -> np.ndarray:
    return np.asarray(Image.open(folder / f"{digest}.png"), dtype=np.int16)


def test_each_region_was_compared_with_its_eager_self(cold):
    for region in cold.report["regions"]:
        assert 0 <= region["difference"] <= region["tolerance"]


def test_another_user_is_warm_too(cold, boot, shared_store, clone):
    booted = boot(shared_store, project=clone, as_user=12345)
    assert booted.report["outcome"] == "warm", booted.report["reason"]
    assert "warmstart-12345/" in booted.report["facts"]["live_dir"]

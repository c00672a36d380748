"""Whatever goes wrong with a cache, a store or a compiler, the boot ends with right answers and says what happened."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from booting import ONE, QUICK, SEVEN, TWO, rebuild, warnings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def right(boot, tmp_path_factory):
    """The picture that an uncompiled boot draws."""
    place = tmp_path_factory.mktemp("eager")
    # With `reject`, too: where nothing is compiled a planned request is still a planned one.
    environment = {"WARMSTART_COMPILE": "off", "WARMSTART_UNPLANNED": "reject"}
    return boot(place / "store", draw=SEVEN, before=ONE, environment=environment).pictures


@pytest.fixture(scope="module")
def filled(boot, tmp_path_factory):
    """A store with the small boot's bundle, and what that boot drew."""
    store = tmp_path_factory.mktemp("filled") / "store"
    booted = boot(store, draw=SEVEN, before=ONE, environment=QUICK)
    assert booted.report["outcome"] == "cold"
    return store, booted


def test_without_a_compiler_the_boot_is_eager_and_right(boot, right, tmp_path):
    booted = boot(tmp_path / "store", draw=SEVEN, before=ONE, environment={**QUICK, "CXX": "/nowhere/g++"})
    assert booted.report["outcome"] == "eager"
    assert "there is no C++ compiler: CXX is '/nowhere/g++', which cannot be run" in booted.report["reason"]
    assert booted.pictures == right


def test_a_trace_of_a_warm_boot_is_kept_and_made_into_a_page(boot, filled, tmp_path):
    frozen = "import gc\nanswer = [gc.isenabled(), gc.get_freeze_count()]"
    environment = {**QUICK, "WARMSTART_TRACE_DIR": str(tmp_path / "trace")}
    booted = boot(filled[0], before=ONE, environment=environment, after=frozen)
    assert booted.report["outcome"] == "warm"
    # What was imported is out of the collector's sight, and the collector at work.
    assert booted.after[0] is True
    assert booted.after[1] > 300_000
    page = Path(booted.report["facts"]["trace"])
    assert page == tmp_path / "trace" / "report" / "index.html"
    assert page.is_file()
    assert any("fx_graph_cache_hit" in path.name for path in page.parent.rglob("*"))


def test_required_makes_a_failed_compile_fatal(boot, tmp_path):
    environment = {**QUICK, "CXX": "/nowhere/g++", "WARMSTART_COMPILE": "required"}
    failed = boot.start(tmp_path / "store", before=ONE, environment=environment)
    assert failed.returncode != 0
    assert "WARMSTART_COMPILE=required makes that fatal" in failed.stderr


def test_one_planned_shape_makes_one_graph(filled):
    assert [region["graphs"] for region in filled[1].report["regions"]] == [1]
    assert filled[1].report["facts"]["dynamic"] is False


def test_without_the_restore_the_same_boot_is_cold(boot, filled, tmp_path):
    """What says warm elsewhere depends on the restore, and on nothing that an earlier boot left behind."""
    before = (
        ONE
        + """
from warmstart.cache import Cache, Restored, RestoreOutcome
Cache.restore = lambda self, deadline_s: Restored(RestoreOutcome.NOTHING, "left out")
"""
    )
    # A copy, since a boot that does not know what is stored publishes it again.
    store, first = shutil.copytree(filled[0], tmp_path / "store"), filled[1]
    assert boot(store, before=ONE, environment=QUICK).report["outcome"] == "warm"
    booted = boot(store, draw=SEVEN, before=before, environment=QUICK)
    assert booted.report["outcome"] == "cold"
    assert (booted.counts["fx_hits"], booted.counts["fx_misses"]) == (0, 1)
    assert booted.counts["kernels_built"] > 0
    assert booted.pictures == first.pictures


def test_code_that_breaks_the_compile_is_set_aside_once_and_never_used_again(boot, filled, tmp_path):
    """A whole, rightly named bundle whose library cannot be loaded."""
    store, first = filled
    broken = tmp_path / "store"
    [packed] = store.glob("*/*/*.tar.zst")
    rebuild(packed, broken / packed.parent.relative_to(store), tmp_path)
    booted = boot(broken, draw=SEVEN, before=ONE, environment=QUICK)
    assert booted.report["outcome"] == "cold"
    assert any("set aside" in warning for warning in booted.report["warnings"])
    assert any("noted as broken" in warning for warning in booted.report["warnings"])
    assert booted.pictures == first.pictures
    # The processor was asked anew: what the broken tests of it said would give other kernels.
    healed = boot(broken, draw=SEVEN, before=ONE, environment=QUICK)
    assert healed.report["outcome"] == "warm"
    assert (healed.counts["fx_hits"], healed.counts["kernels_built"], warnings(healed.report)) == (1, 0, [])
    assert "noted that its files break the compile" in healed.report["restored"]["reason"]
    assert healed.pictures == first.pictures


def test_a_region_that_differs_from_eager_is_not_served(boot, right, filled):
    before = ONE + "\nimport torch\nfrom warmstart import regions\nregions.TOLERANCES[torch.float32] = -1.0"
    booted = boot(filled[0], draw=SEVEN, before=before, environment=QUICK)
    assert booted.report["outcome"] == "eager"
    assert "differs from its eager self" in booted.report["reason"]
    assert booted.pictures == right


def test_an_unreachable_store_is_a_cold_boot_with_a_reason(boot, filled):
    environment = {**QUICK, "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ALLOW_HTTP": "true"}
    environment |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}
    environment |= {"WARMSTART_RESTORE_DEADLINE_S": "3", "WARMSTART_PERSIST_DEADLINE_S": "3"}
    booted = boot("s3://bucket/prefix", draw=SEVEN, before=ONE, environment=environment)
    assert booted.report["outcome"] == "cold"
    assert "s3://bucket/prefix" in booted.report["reason"]
    assert booted.pictures == filled[1].pictures


def test_a_live_directory_that_cannot_be_written_is_replaced(boot, filled, tmp_path):
    (tmp_path / "a file").write_text("")
    environment = {**QUICK, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "a file" / "cache")}
    booted = boot(filled[0], draw=SEVEN, before=ONE, environment=environment)
    assert booted.report["outcome"] == "warm"
    assert any("cannot be kept in" in warning for warning in booted.report["warnings"])


def test_a_directory_that_the_platform_set_is_used_and_only_added_to(boot, filled, tmp_path):
    preset = tmp_path / "preset"
    preset.mkdir()
    (preset / "theirs").write_text("kept")
    # A copy, since what lies in that directory is published along with the rest.
    store = shutil.copytree(filled[0], tmp_path / "store")
    booted = boot(store, before=ONE, environment={**QUICK, "TORCHINDUCTOR_CACHE_DIR": str(preset)})
    assert booted.report["outcome"] == "warm"
    assert booted.report["facts"]["live_dir"] == str(preset)
    assert (preset / "theirs").read_text() == "kept"


def test_what_a_killed_compiler_left_in_a_set_directory_is_built_anew(boot, filled, tmp_path):
    """Libraries cut short, one empty, and no finished graph: torch would take them for built, now and for ever."""
    preset = tmp_path / "preset"
    environment = {**QUICK, "TORCHINDUCTOR_CACHE_DIR": str(preset)}
    boot(tmp_path / "store", before=ONE, environment=environment)
    libraries = sorted(preset.rglob("*.so"))
    for library in libraries:
        library.write_bytes(library.read_bytes()[:3000])
    kernels = [library for library in libraries if library.name.endswith(".main.so")]
    kernels[0].write_bytes(b"")
    (preset / ".warmstart-files.json").unlink()
    shutil.rmtree(preset / "fxgraph")
    shutil.rmtree(preset / "aotautograd")
    booted = boot(tmp_path / "other", draw=SEVEN, before=ONE, environment=environment)
    assert booted.report["outcome"] == "cold"
    assert any("half-written files" in warning for warning in booted.report["warnings"])
    assert booted.pictures == filled[1].pictures
    assert "published" in [saved["outcome"] for saved in booted.report["persisted"]]


def test_a_budget_stops_the_warm_up_and_the_next_boot_goes_on(boot, right, tmp_path):
    store = tmp_path / "store"
    environment = {**QUICK, "WARMSTART_SETUP_BUDGET_S": "0.01", "WARMSTART_DYNAMIC": "false"}
    wide = [["three", "3:2", 1, 8, 1.0, 12]]
    first = boot(store, draw=wide, before=TWO, environment=environment)
    assert "warmed 1 of 2 requests" in first.report["reason"]
    # Not warmed: it runs uncompiled and nobody waits for a compile.
    assert first.drawn[0]["graphs"] == 0
    assert "was not warmed" in first.drawn[0]["reason"]
    second = boot(store, before=TWO, environment={**environment, "WARMSTART_SETUP_BUDGET_S": "0"})
    assert second.report["outcome"] == "partial"
    assert (second.counts["fx_hits"], second.counts["fx_misses"]) == (1, 1)
    third = boot(store, before=TWO, environment=environment | {"WARMSTART_SETUP_BUDGET_S": "0"})
    assert third.report["outcome"] == "warm"


def test_an_unplanned_shape_is_compiled_and_kept_where_that_is_the_policy(boot, filled, tmp_path):
    store = shutil.copytree(filled[0], tmp_path / "store")
    before = len(list(store.glob("*/*/*.tar.zst")))
    wide = [["three", "3:2", 1, 8, 1.0, 12]]
    environment = {**QUICK, "WARMSTART_UNPLANNED": "compile"}
    booted = boot(store, draw=[*wide, *wide], before=ONE, environment=environment)
    assert [item["graphs"] for item in booted.drawn] == [1, 0]
    assert len(list(store.glob("*/*/*.tar.zst"))) > before
    counted = "from warmstart import inductor\ncounts = inductor.counts()\nanswer = [counts.fx_hits, counts.fx_misses]"
    later = boot(store, draw=wide, before=ONE, environment=environment, after=counted)
    assert later.after == [2, 0]


def test_replicas_that_boot_cold_together_keep_the_work_of_all(boot, tmp_path):
    """Each compiles another unplanned shape; a later boot finds both, though neither knew of the other."""
    store = tmp_path / "store"
    shapes = [[["three", shape, count, 8, 1.0, 12]] for shape, count in (("3:2", 1), ("1:1", 2))]
    environment = {**QUICK, "WARMSTART_UNPLANNED": "compile"}
    with ThreadPoolExecutor() as pool:
        booted = list(pool.map(lambda draw: boot(store, draw=draw, before=ONE, environment=environment), shapes))
    assert [replica.report["outcome"] for replica in booted] == ["cold", "cold"]
    counted = "from warmstart import inductor\ncounts = inductor.counts()\nanswer = [counts.fx_hits, counts.fx_misses]"
    later = boot(store, draw=[*shapes[0], *shapes[1]], before=ONE, environment=environment, after=counted)
    assert later.report["outcome"] == "warm"
    assert later.after == [3, 0]
    assert later.pictures == [picture for replica in booted for picture in replica.pictures]


def test_an_unplanned_shape_is_refused_where_that_is_the_policy(boot, filled):
    environment = {**QUICK, "WARMSTART_UNPLANNED": "reject"}
    failed = boot.start(filled[0], draw=[["three", "3:2", 1, 8, 1.0, 12]], before=ONE, environment=environment)
    assert failed.returncode != 0
    assert "'3:2 x1' was not planned" in failed.stderr
    assert "planned are: 1:1 x1" in failed.stderr


@pytest.mark.parametrize(
    ("environment", "before", "words"),
    [
        ({"WARMSTART_MODEL": "nowhere"}, ONE, "WARMSTART_MODEL is 'nowhere'"),
        ({"WARMSTART_MODEL": "warmstart"}, ONE, "the model directory 'warmstart' has neither the model_index.json"),
        ({}, "PLAN = []", "the warm-up plan is empty"),
        ({}, ONE + "\nPLAN *= 2", "more than one request labelled '1:1 x1'"),
        (QUICK, "import predict\nPLAN = [predict.request(7, '1:1', 1, 1, 1.0, 0)]", "the model fails on the planned"),
    ],
)
def test_what_is_wrong_with_the_model_or_the_plan_fails_the_boot(boot, tmp_path, environment, before, words):
    failed = boot.start(tmp_path / "store", before=before, environment=environment)
    assert failed.returncode != 0
    assert words in failed.stderr


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WARMSTART_REGIONS": "Nothing"}, "holds no module of class Nothing"),
        ({"WARMSTART_PARTS": "unet"}, "WARMSTART_PARTS names 'unet'"),
    ],
)
def test_a_region_or_part_that_is_not_there_is_an_eager_boot_with_a_reason(boot, tmp_path, environment, words):
    booted = boot(tmp_path / "store", before=ONE, environment=environment)
    assert booted.report["outcome"] == "eager"
    assert words in booted.report["reason"]

"""A new version starts from its nearest sibling's code: what fits is used and kept, the rest is compiled."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from booting import BLOCK, ONE, ROOT, SEVEN, TWO, rebuild
from hub import Hub, nobody
from PIL import Image

from warmstart import bundle
from warmstart.bundle import Limits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SINGLE, DOUBLE = "transformer.FluxSingleTransformerBlock", "transformer.FluxTransformerBlock"
# Another forward of one block class, as a new version of the model's code would bring.
PATCHED = (
    ONE
    + """
from diffusers.models.transformers import transformer_flux
old = transformer_flux.FluxSingleTransformerBlock.forward
def forward(self, *args, **kwargs):
    encoder_hidden_states, hidden_states = old(self, *args, **kwargs)
    return encoder_hidden_states * 0.5, hidden_states * 0.5
transformer_flux.FluxSingleTransformerBlock.forward = forward
"""
)


@pytest.fixture(scope="module")
def sibling(boot, pictures, tmp_path_factory):
    """The store that a boot of both regions filled for one planned request, and that boot."""
    store = tmp_path_factory.mktemp("sibling") / "store"
    booted = boot(store, draw=SEVEN, before=ONE, folder=str(pictures))
    assert booted.report["outcome"] == "cold"
    assert booted.report["restored"]["inherited"] is None
    return store, booted


@pytest.fixture
def store(sibling, tmp_path):
    """A copy of that store, for one test."""
    return shutil.copytree(sibling[0], tmp_path / "store")


def versions(store: Path) -> dict[str, set[str]]:
    """The files that the bundles of each version hold, by its digest."""
    found: dict[str, set[str]] = {}
    for number, packed in enumerate(sorted(store.glob("*/*/*.tar.zst"))):
        root = store.parent / f"unpacked-{len(list(store.parent.iterdir()))}-{number}"
        root.mkdir()
        entries = bundle.unpack(packed, packed.name.removesuffix(".tar.zst"), root, Limits())
        found.setdefault(packed.parent.name, set()).update(item.path for item in entries)
    return found


def forget_sibling(store: Path, booted) -> None:
    [folder] = store.glob(f"*/{booted.report['facts']['version']}")
    shutil.rmtree(folder)


def assert_warm(booted) -> None:
    assert booted.report["outcome"] == "warm", booted.report["reason"]
    assert booted.counts["fx_hits"] == booted.counts["aot_hits"] == booted.counts["graphs"] > 0
    for zero in ("fx_misses", "aot_misses", "fx_bypasses", "aot_bypasses", "kernels_built"):
        assert booted.counts[zero] == 0, zero


def assert_same_within_rounding(pictures: Path, ours: list[list[str]], theirs: list[list[str]]) -> None:
    [[one]], [[other]] = ours, theirs
    loaded = [np.asarray(Image.open(pictures / f"{name}.png"), dtype=np.int16) for name in (one, other)]
    # Of 255 steps of grey: eight denoising steps may carry a rounding difference over the edge of one.
    assert np.abs(loaded[0] - loaded[1]).max() <= 2


def test_a_changed_default_in_predict_py_boots_warm_and_keeps_what_it_used(boot, sibling, store, tmp_path):
    project = tmp_path / "project"
    for name in ("warmstart", "weights"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "predict.py").read_text()
    assert 'default="a handwritten seven"' in text
    (project / "predict.py").write_text(text.replace('default="a handwritten seven"', 'default="a handwritten three"'))
    # One region where the sibling had two: half of what is inherited is of no use here.
    first = boot(store, project=project, before=ONE, environment=BLOCK)
    assert_warm(first)
    old, new = sibling[1].report["facts"]["version"], first.report["facts"]["version"]
    assert first.report["restored"]["inherited"] == old
    assert f"inherited from version {old[:8]} (code is " in first.report["reason"]
    held = versions(store)
    assert held[new] < held[old]
    assert len([path for path in held[old] if path.startswith("fxgraph/")]) == 2
    assert len([path for path in held[new] if path.startswith("fxgraph/")]) == 1

    forget_sibling(store, sibling[1])
    second = boot(store, project=project, before=ONE, environment=BLOCK)
    assert_warm(second)
    assert second.report["restored"]["inherited"] is None
    assert {save["outcome"] for save in second.report["persisted"]} == {"nothing_new"}


def test_a_fine_tune_boots_warm_and_draws_its_own_pictures(boot, sibling, store, pictures, tmp_path):
    from safetensors.torch import load_file, save_file

    tuned = shutil.copytree(ROOT / "weights", tmp_path / "tuned")
    weights = tuned / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({name: tensor * 1.05 for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    # Derived, the version would be the same, since the shapes are. Here it is named, as of a registry of models.
    environment = {"WARMSTART_MODEL": str(tuned), "WARMSTART_MODEL_VERSION": "fine-tuned"}
    booted = boot(store, draw=SEVEN, before=ONE, folder=str(pictures), environment=environment)
    assert_warm(booted)
    assert booted.report["restored"]["inherited"] == sibling[1].report["facts"]["version"]
    eager = environment | {"WARMSTART_COMPILE": "off"}
    plain = boot(store, draw=SEVEN, before=ONE, folder=str(pictures), environment=eager)
    assert_same_within_rounding(pictures, booted.pictures, plain.pictures)
    assert booted.pictures != sibling[1].pictures


def test_a_wider_plan_compiles_only_what_is_new(boot, sibling, store):
    environment = {**BLOCK, "WARMSTART_DYNAMIC": "false"}
    first = boot(store, before=TWO, environment=environment)
    assert first.report["outcome"] == "partial"
    assert (first.counts["fx_hits"], first.counts["fx_misses"]) == (1, 1)
    assert "; inherited from version " in first.report["reason"]
    forget_sibling(store, sibling[1])
    second = boot(store, before=TWO, environment=environment)
    assert_warm(second)
    assert second.counts["fx_hits"] == 2


def test_a_changed_block_is_compiled_and_the_other_is_not(boot, sibling, store, pictures):
    environment = {"WARMSTART_MODEL_VERSION": "patched"}
    booted = boot(store, draw=SEVEN, before=PATCHED, folder=str(pictures), environment=environment)
    assert booted.report["outcome"] == "partial"
    regions = {row["name"]: (row["fx_hits"], row["fx_misses"]) for row in booted.report["regions"]}
    assert regions == {DOUBLE: (1, 0), SINGLE: (0, 1)}
    eager = environment | {"WARMSTART_COMPILE": "off"}
    plain = boot(store, draw=SEVEN, before=PATCHED, folder=str(pictures), environment=eager)
    assert_same_within_rounding(pictures, booted.pictures, plain.pictures)
    assert booted.pictures != sibling[1].pictures
    # The sibling's graph of the block that changed is of no use to this version and is not kept under it.
    held = versions(store)
    old, new = sibling[1].report["facts"]["version"], booted.report["facts"]["version"]
    assert len([path for path in held[new] - held[old] if path.startswith("fxgraph/")]) == 1
    assert len([path for path in held[new] & held[old] if path.startswith("fxgraph/")]) == 1


def test_another_environment_is_never_inherited(boot, sibling, store):
    threads = sibling[1].report["facts"]["threads"]
    booted = boot(store, before=ONE, environment={**BLOCK, "OMP_NUM_THREADS": str(threads + 1)})
    assert booted.report["outcome"] == "cold"
    assert booted.report["restored"]["inherited"] is None
    assert booted.report["restored"]["files"] == 0
    assert f'environment: cpu threads is "{threads + 1}" here, "{threads}" there' in booted.report["reason"]


def test_a_broken_sibling_costs_one_boot(boot, sibling, tmp_path):
    """Whole, rightly named bundles whose libraries are truncated, as a kill in the middle of a build leaves them."""
    broken = tmp_path / "store"
    for packed in sibling[0].glob("*/*/*.tar.zst"):
        rebuild(packed, broken / packed.parent.relative_to(sibling[0]), tmp_path)
    shutil.copy(packed.parent.parent / "environment.json", broken / packed.parent.parent.name)
    booted = boot(broken, draw=SEVEN, before=ONE, environment={"WARMSTART_MODEL_VERSION": "next"})
    assert booted.report["outcome"] == "cold"
    assert any("set aside" in warning for warning in booted.report["warnings"])
    assert booted.pictures == sibling[1].pictures
    # What this version compiled is its own now, so the next boot does not turn to the sibling again.
    assert list(broken.glob(f"*/{booted.report['facts']['version']}/*.tar.zst"))


# --- A model at the hub: its version is the id and the commit --------------------------------------------------------

HUB_ID = "digits/flux"


@pytest.fixture
def hub(model_dir: Path) -> Iterator[Hub]:
    with Hub({HUB_ID: model_dir}) as started:
        yield started


def at_the_hub(hub: Hub, home: Path) -> dict[str, str]:
    model = {"WARMSTART_MODEL": HUB_ID, "WARMSTART_MODEL_REVISION": hub.commit(HUB_ID)}
    return {**model, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}


def test_a_hub_id_boots_warm_and_later_without_the_hub(boot, sibling, store, hub, tmp_path):
    environment = at_the_hub(hub, tmp_path / "home")
    first = boot(store, draw=SEVEN, before=ONE, environment=environment)
    assert_warm(first)
    assert "model is" in first.report["reason"], "inherited from the same model in a directory"
    assert hub.fetched()["transformer/diffusion_pytorch_model.safetensors"] > 0
    forget_sibling(store, sibling[1])
    later = boot(store, draw=SEVEN, before=ONE, environment=environment | {"HF_ENDPOINT": nobody()})
    assert_warm(later)
    assert later.report["restored"]["inherited"] is None
    assert first.pictures == later.pictures == sibling[1].pictures


def test_a_hub_that_cannot_be_reached_is_a_model_error_with_its_remedy(boot, store, hub, tmp_path):
    environment = at_the_hub(hub, tmp_path / "home") | {"HF_ENDPOINT": nobody()}
    done = boot.start(store, before=ONE, environment=environment)
    assert done.returncode != 0
    *_, said = [line for line in done.stderr.splitlines() if "ModelError: " in line]
    assert f"the model '{HUB_ID}' cannot be loaded" in said
    assert "Check WARMSTART_MODEL, the revision, the network and HF_TOKEN" in said

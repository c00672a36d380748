"""A model that is a hub id: fetched by the first boot, one key from then on, and a clear error where no hub answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from booting import ONE, SEVEN, SMALL
from hub import Hub, nobody

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MODEL = "digits/flux"


@pytest.fixture(scope="module")
def hub(model_dir: Path) -> Iterator[Hub]:
    with Hub({MODEL: model_dir}) as started:
        yield started


@pytest.fixture(scope="module")
def at_the_hub(hub: Hub) -> dict[str, str]:
    revision = {"WARMSTART_MODEL_REVISION": hub.commit(MODEL)}
    return {**SMALL, **revision, "WARMSTART_MODEL": MODEL, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1"}


def test_it_boots_cold_then_warm_even_if_the_hub_is_down_by_then(boot, hub, at_the_hub, tmp_path):
    environment = {**at_the_hub, "HF_HOME": str(tmp_path / "home")}
    cold = boot(tmp_path / "store", draw=SEVEN, before=ONE, environment=environment)
    assert cold.report["outcome"] == "cold", cold.report["reason"]
    assert hub.fetched()["transformer/diffusion_pytorch_model.safetensors"] > 0
    warm = boot(tmp_path / "store", draw=SEVEN, before=ONE, environment={**environment, "HF_ENDPOINT": nobody()})
    assert warm.report["outcome"] == "warm", warm.report["reason"]
    assert (warm.counts["fx_misses"], warm.counts["kernels_built"]) == (0, 0)
    assert warm.counts["fx_hits"] == warm.counts["graphs"] > 0
    assert warm.pictures == cold.pictures


def test_a_hub_that_cannot_be_reached_is_a_model_error_that_says_so(boot, at_the_hub, tmp_path):
    environment = {**at_the_hub, "HF_ENDPOINT": nobody(), "HF_HOME": str(tmp_path / "home")}
    done = boot.start(tmp_path / "store", before=ONE, environment=environment)
    assert done.returncode != 0
    *_, said = [line for line in done.stderr.splitlines() if "ModelError: " in line]
    assert f"the model '{MODEL}' cannot be loaded" in said
    assert "scripts/fetch_weights" in said

"""LoRAs are swapped, scaled and taken out in a booted model without a graph, and do what they do in plain diffusers."""

import adapting
import pytest
from booting import QUICK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

BEFORE = """
import sys
sys.path.insert(0, "tests")
import adapting
from pathlib import Path
PLAN = [adapting.request(Path("."), [])]
"""


# A Predictor that loads its pipeline itself.
LOADS = """
import diffusers
LOAD = lambda: diffusers.FluxPipeline.from_pretrained("weights")
"""


@pytest.fixture(scope="module", params=["", LOADS], ids=["by warmstart", "by the Predictor"])
def boots(request, boot, tmp_path_factory):
    """Two boots with slots over one store, the second in a fresh process."""
    place = tmp_path_factory.mktemp("lora")
    adapting.write(place)
    after = f"answer = adapting.compare(model, Path({str(place)!r}))"
    room = {**QUICK, "WARMSTART_LORA_RANK": str(adapting.RANK)}
    return [boot(place / "store", before=BEFORE + request.param, after=after, environment=room) for _ in range(2)]


def test_a_boot_with_slots_is_warm_the_second_time(boots):
    cold, warm = boots
    assert (cold.report["outcome"], warm.report["outcome"]) == ("cold", "warm"), warm.report["reason"]
    assert (warm.counts["fx_misses"], warm.counts["aot_misses"], warm.counts["kernels_built"]) == (0, 0, 0)
    assert warm.report["facts"]["lora"] == "rank 8 in all linear layers, 112 slots"


@pytest.mark.parametrize("which", [0, 1], ids=["cold", "warm"])
def test_no_swap_compiles_anything_and_each_is_right(boots, which):
    for answer in boots[which].after:
        assert (answer["graphs"], answer["reason"]) == (0, ""), answer
        assert answer["error"] < 1e-4, answer
        # Far above what is rounding, or the LoRA did nothing; and nothing of it is left for a request without one.
        assert answer["change"] > 1e-2 if answer["swap"] else answer["change"] < 1e-4, answer


# A compiler that leaves the LoRAs out, and no kernel need be built to see it.
LEAVES_OUT = """
import torch
from warmstart.lora import LoraLinear

whole = LoraLinear.forward
plain = torch.nn.Linear.forward
LoraLinear.forward = lambda self, x: (plain if torch.compiler.is_compiling() else whole)(self, x)
compiled = torch.compile
torch.compile = lambda function, **options: compiled(function, backend="eager", **options)
"""


def test_the_boot_s_self_check_is_one_of_the_slots_too(boot, tmp_path):
    room = {**QUICK, "WARMSTART_LORA_RANK": str(adapting.RANK)}
    booted = boot(tmp_path / "store", before=BEFORE + LEAVES_OUT, environment=room)
    assert booted.report["outcome"] == "eager"
    assert "transformer.FeedForward differs from its eager self" in booted.report["reason"]

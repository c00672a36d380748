"""The denoiser compiled as one graph, for pictures of two shapes, with room for LoRAs in layers of fp8.

int8, with LoRA slots in blocks that are compiled each, is served in tests/container/test_adapted_server.py.
"""

import adapting
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

BEFORE = """
import sys
sys.path.insert(0, "tests")
import adapting, predict, warmstart
from pathlib import Path
wide = predict.request("a handwritten seven", "3:2", 1, 2, 1.0, 3)
wide = warmstart.Request(wide.label, {**wide.inputs, "output_type": "np"}, wide.seeds)
PLAN = [adapting.request(Path("."), []), wide]
"""


def test_swaps_compile_nothing_and_a_second_boot_is_warm(boot, tmp_path):
    adapting.write(tmp_path)
    after = f"answer = adapting.compare(model, Path({str(tmp_path)!r}))"
    settings = {"WARMSTART_STRATEGY": "whole", "WARMSTART_LORA_RANK": str(adapting.RANK), "WARMSTART_QUANTIZE": "fp8"}
    cold, warm = (boot(tmp_path / "store", before=BEFORE, after=after, environment=settings) for _ in range(2))
    assert (cold.report["outcome"], warm.report["outcome"]) == ("cold", "warm"), warm.report["reason"]
    # One graph for both shapes: their sizes are symbols in it.
    assert warm.counts["graphs"] == warm.counts["fx_hits"] == warm.counts["aot_hits"] == 1
    assert (warm.counts["fx_misses"], warm.counts["aot_misses"], warm.counts["kernels_built"]) == (0, 0, 0)
    assert warm.report["facts"]["lora"] == "rank 8 in all linear layers, 112 slots"
    assert warm.report["facts"]["quantization"] == "fp8, 112 layers"
    [region] = warm.report["regions"]
    assert (region["name"], region["modules"]) == ("transformer.FluxTransformer2DModel", 1)
    assert region["difference"] <= region["tolerance"]
    for answer in [*cold.after, *warm.after]:
        assert (answer["graphs"], answer["reason"]) == (0, ""), answer
        # To plain diffusers without quantisation: the weights lose 0.022 of brightness in 8 bits, a LoRA's are whole.
        assert answer["error"] < 0.04, answer
        # Without one it is not the same either, or nothing was quantised.
        assert answer["change"] > 0.045 if answer["swap"] else 1e-4 < answer["change"] < 0.03, answer
    assert [answer["change"] for answer in warm.after] == [answer["change"] for answer in cold.after]

"""A model with fp8 weights boots warm, compiled equals its eager self, and it draws nearly the same.

int8, with LoRA slots in the same layers, is served in tests/container/test_adapted_server.py.
"""

import json

import pytest
from booting import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Largest and mean difference of brightness to the model as it is, from 0 to 1. The digits stay the same to the eye.
NEAR = (0.08, 0.008)
BEFORE = """
import sys
sys.path.insert(0, "tests")
import adapting
from pathlib import Path
PLAN = [adapting.request(Path("."), [])]
"""
AFTER = """
expected, got = adapting.plain(Path("."), []), model(PLAN[0])
difference = abs(got.outputs[0] - expected)
answer = {"max": float(difference.max()), "mean": float(difference.mean()), "graphs": got.graphs}
"""


def test_the_second_boot_is_warm_and_near_the_unquantised_model(boot, tmp_path):
    settings = {**SMALL, "WARMSTART_QUANTIZE": "fp8"}
    cold, warm = (boot(tmp_path / "store", before=BEFORE, after=AFTER, environment=settings) for _ in range(2))
    assert (cold.report["outcome"], warm.report["outcome"]) == ("cold", "warm"), warm.report["reason"]
    assert warm.counts["fx_hits"] == warm.counts["aot_hits"] == warm.counts["graphs"] > 0
    for zero in ("fx_misses", "aot_misses", "fx_bypasses", "aot_bypasses", "kernels_built"):
        assert warm.counts[zero] == 0, zero
    for booted in (cold, warm):
        assert booted.report["facts"]["quantization"] == "fp8, 112 layers"
        # With the quantised model's eager self.
        assert all(region["difference"] <= region["tolerance"] for region in booted.report["regions"])
        assert booted.after["graphs"] == 0
        # Not the same, or nothing was quantised.
        assert 1e-4 < booted.after["max"] < NEAR[0], json.dumps(booted.after)
        assert booted.after["mean"] < NEAR[1], json.dumps(booted.after)

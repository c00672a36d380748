"""Linear layers that go to oneDNN are cached like all else."""

import pytest
from booting import ONE, QUICK, SEVEN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# The default model's layers are small.
LARGE_ENOUGH = """
from warmstart import matmul
matmul.MIN_ROWS = matmul.MIN_MULTIPLICATIONS = 1
"""
FIND = """
import os, pathlib
live = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
answer = sum("mkldnn._linear_pointwise.default(" in path.read_text() for path in live.rglob("*.py"))
"""


def made_by(vendor: str) -> str:
    return f"{ONE}\nfrom warmstart import key\nkey.cpu_vendor = lambda: {vendor!r}\n"


def test_graphs_for_amd_call_onednn_and_are_warm_the_next_time(boot, store):
    order = {"draw": SEVEN, "after": FIND, "environment": QUICK}
    first = boot(store, before=made_by("AuthenticAMD") + LARGE_ENOUGH, **order)
    assert (first.report["outcome"], first.report["facts"]["matmul"]) == ("cold", "oneDNN")
    assert first.after == 1
    assert all(region["difference"] <= region["tolerance"] for region in first.report["regions"])
    again = boot(store, before=made_by("AuthenticAMD") + LARGE_ENOUGH, **order)
    assert (again.report["outcome"], again.counts["fx_misses"], again.counts["kernels_built"]) == ("warm", 0, 0)
    assert again.pictures == first.pictures

    other = boot(store, before=made_by("GenuineIntel"), **order)
    assert (other.report["outcome"], other.report["facts"]["matmul"]) == ("cold", "torch")
    assert 'cpu vendor is "GenuineIntel" here, "AuthenticAMD" there' in other.report["reason"]
    assert other.after == 0

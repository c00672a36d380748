"""Linear layers that go to oneDNN are cached like all else; how threads wait is said before torch is there."""

import pytest
from booting import QUICK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Four wide pictures at once make the default model's layers large enough.
MADE_BY = """
import predict
from warmstart import key
key.cpu_vendor = lambda: {vendor!r}
PLAN = [predict.request('7', '3:2', 4, 1, 1.0, 0)]
"""
DRAW = [["a handwritten seven", "3:2", 4, 4, 1.0, 5]]
FIND = """
import os, pathlib
live = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
answer = sum("mkldnn._linear_pointwise.default(" in path.read_text() for path in live.rglob("*.py"))
"""
# GNU's libgomp tells what it was given, once it is loaded.
TELL = {**QUICK, "OMP_DISPLAY_ENV": "verbose", "OMP_WAIT_POLICY": None, "GOMP_SPINCOUNT": None}


def boot_of(boot, store, vendor, **environment):
    return boot(store, draw=DRAW, before=MADE_BY.format(vendor=vendor), after=FIND, environment={**TELL, **environment})


def test_graphs_for_amd_call_onednn_and_are_warm_the_next_time(boot, store):
    first = boot_of(boot, store, "AuthenticAMD")
    assert (first.report["outcome"], first.report["facts"]["matmul"]) == ("cold", "oneDNN")
    assert first.after > 0
    assert all(region["difference"] <= region["tolerance"] for region in first.report["regions"])
    again = boot_of(boot, store, "AuthenticAMD")
    assert (again.report["outcome"], again.counts["fx_misses"], again.counts["kernels_built"]) == ("warm", 0, 0)
    assert again.pictures == first.pictures
    assert "GOMP_SPINCOUNT = '30000'" in again.log

    other = boot_of(boot, store, "GenuineIntel", OMP_WAIT_POLICY="PASSIVE")
    assert (other.report["outcome"], other.report["facts"]["matmul"]) == ("cold", "torch")
    assert "cpu vendor here GenuineIntel, there AuthenticAMD" in other.report["reason"]
    assert other.after == 0
    assert "GOMP_SPINCOUNT" in other.log
    assert "GOMP_SPINCOUNT = '30000'" not in other.log

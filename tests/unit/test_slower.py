"""When the report warns that a region had better not be compiled."""

import pytest
from torch import nn

from warmstart.boot import _slower
from warmstart.models import Request
from warmstart.regions import Region, Speed
from warmstart.warmup import Warmed


@pytest.mark.parametrize(
    ("eager_s", "compiled_s", "warns"),
    [
        (0.010, 0.008, False),
        # Within what a busy machine does to single calls.
        (0.010, 0.014, False),
        (0.010, 0.020, True),
        # Three times slower, and a thousandth of the request.
        (0.000_1, 0.000_3, False),
    ],
)
def test_a_region_is_slower_if_a_request_notices(eager_s, compiled_s, warns):
    # Two requests, each run twice, call it ten times each: 0.1 s of a second.
    region = Region("t", "Block", [nn.Identity()], calls=40, speeds=[Speed(eager_s, compiled_s)] * 2)
    warmed = [Warmed(Request(label, {}), first_s=9.0, graphs=1, steady_s=0.5) for label in ("a", "b")]
    told = _slower(region, warmed)
    assert bool(told) is warns
    if warns:
        assert "takes 2.00 times as long compiled as uncompiled, which costs each request 0.100 of 0.500 s" in told


def test_what_is_served_uncompiled_is_not_slower():
    region = Region("t", "Block", [nn.Identity()], calls=40, speeds=[Speed(0.01, 0.02)], failed="it broke")
    assert _slower(region, [Warmed(Request("a", {}), first_s=9.0, graphs=1, steady_s=0.5)]) == ""


def test_what_was_not_timed_is_not_slower():
    assert _slower(Region("t", "Block", [nn.Identity()]), []) == ""

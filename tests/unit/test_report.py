"""Outcome, phases and the line of JSON."""

import io
import json
import time

import pytest

from warmstart.report import LINE, Evidence, Outcome, Report, Stopwatch, decide, say


def evidence(**numbers: int | bool) -> Evidence:
    return Evidence(
        **({"hits": 4, "misses": 0, "retraced": 0, "bypasses": 0, "kernels_built": 0, "restored": True} | numbers)
    )


@pytest.mark.parametrize(
    ("numbers", "outcome"),
    [
        ({}, Outcome.WARM),
        ({"misses": 1}, Outcome.PARTIAL),
        ({"retraced": 1}, Outcome.PARTIAL),
        ({"kernels_built": 1}, Outcome.PARTIAL),
        ({"bypasses": 1}, Outcome.PARTIAL),
        ({"hits": 0, "misses": 4}, Outcome.COLD),
        # Two requests of a first boot may share a graph; that hit was not restored.
        ({"hits": 1, "misses": 3, "restored": False}, Outcome.COLD),
    ],
)
def test_the_outcome_follows_from_the_counters(numbers, outcome):
    assert decide(evidence(**numbers))[0] is outcome


def test_a_graph_that_torch_refuses_to_cache_is_named():
    assert "1 that torch refuses to cache" in decide(evidence(bypasses=1))[1]


def test_phases_add_up_and_an_inner_phase_takes_its_time_from_the_outer():
    clock = Stopwatch()
    with clock.phase("outer"):
        time.sleep(0.02)
        with clock.phase("inner"):
            time.sleep(0.05)
        time.sleep(0.02)
    total_s = clock.total_s()
    assert sum(clock.seconds.values()) == pytest.approx(total_s)
    assert clock.seconds["inner"] >= 0.05
    assert clock.seconds["outer"] < total_s - 0.05


def test_a_phase_that_fails_is_counted_and_left():
    clock = Stopwatch()
    with pytest.raises(ValueError, match="no"), clock.phase("failing"):
        raise ValueError("no")
    clock.total_s()
    assert set(clock.seconds) == {"other", "failing"}


def test_the_last_line_is_json_on_one_line():
    report = Report(
        Outcome.COLD, "a reason", 1.0, {"warm-up": 1.0}, {}, {"graphs": 1},
        [
            {"name": "a", "outcome": "partly", "found": "as A declares", "reason": "C: no planned request calls it"},
            {"name": "b", "outcome": "compiled", "found": "as a whole", "reason": ""},
        ],
        [
            {"name": "a.B", "modules": 2, "graphs": 1, "fx_hits": 0, "fx_misses": 1, "difference": None}
            | {"compile_s": {"dynamo": 1.0, "kernels": 2.0}, "eager_s": 3.0, "compiled_s": 2.0},
            {"name": "a.C", "modules": 1, "graphs": 1, "fx_hits": 0, "fx_misses": 1, "difference": 1e-7}
            | {"compile_s": {"dynamo": 0.5, "kernels": 0.0}, "eager_s": None, "compiled_s": None},
        ],
        [{"label": "1:1 x1", "first_s": 1.0, "graphs": 1, "steady_s": None}],
        {"reason": "nothing"}, [], {}, {"resident_bytes": 1, "peak_bytes": 2, "threads": 3, "children": []},
        ["a warning"],
    )  # fmt: skip
    lines = report.lines()
    word, _, text = lines[-1].partition(" ")
    assert word == LINE
    assert json.loads(text)["outcome"] == "cold"
    assert json.loads(text)["boot_s"] == 1.0
    assert any("a warning" in line for line in lines)
    assert "  part       a is PARTLY compiled: C: no planned request calls it" in lines
    assert "  part       b is compiled as a whole" in lines
    assert "  region     a.B x2: 1 graphs, 0 hits, 1 misses; not checked; 1.50x eager's speed" in lines
    assert "  region     a.C x1: 1 graphs, 0 hits, 1 misses; differs from eager by 1.0e-07 at most" in lines
    assert "  compile    dynamo 1.50 s, kernels 2.00 s" in lines
    assert not any("\n" in line for line in lines)


@pytest.mark.parametrize(
    "error",
    [BrokenPipeError(32, "Broken pipe"), ValueError("closed file"), UnicodeEncodeError("ascii", "ö", 0, 1, "no")],
)
def test_a_log_that_cannot_be_written_costs_its_lines_only(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    monkeypatch.setattr("sys.stdout", Broken())
    say("nobody reads this")

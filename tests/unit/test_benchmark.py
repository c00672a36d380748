"""scripts/benchmark: what it makes of its figures, and when it says that they are not to be quoted."""

import argparse
import json
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from loading import load_command
from project_tree import ROOT

BARS = {
    "warm_tax_to_whole_warm_tax": 0.25,
    "warm_tax_to_cold_tax": 0.1,
    "cold_tax_to_whole_cold_tax": 0.2,
    "restore_and_persist_s": 0.125,
    "first_request_to_steady": 1.0,
    "warm_boot_to_eager_boot": 1.4,
    "eager_steady_to_steady": 2.0,
    "steady_to_whole_steady": 1.0,
}


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_command("benchmark")


def row(boot_s: float, steady_s: float = 1.0, **more: float) -> dict:
    figures = {"boot_s": boot_s, "first_s": steady_s, "steady_s": steady_s, "peak_bytes": 1, "cpu_s": 1.0}
    return {**figures, "phases": {"imports": boot_s / 2, "warm-up": boot_s / 2}, "counts": {"graphs": 2}, **more}


def figures(benchmark: ModuleType) -> dict:
    rows = {
        "eager": [row(5.0, 2.0), row(5.0, 2.0), row(9.0, 2.0)],
        "whole-cold": [row(105.0), row(105.0), row(109.0)],
        "whole-warm": [row(13.0), row(13.0), row(17.0)],
        "regional-cold": [row(25.0), row(25.0), row(29.0)],
        "regional-warm": [row(7.0, restore_s=0.1, persist_s=0.025)] * 2 + [row(11.0, restore_s=0.1, persist_s=0.025)],
    }
    return {mode: benchmark.summary(found, rows["eager"]) for mode, found in rows.items()}


def test_each_bar_is_a_ratio_of_medians_and_the_tax_is_to_the_eager_boot_of_the_same_round(benchmark):
    bars = benchmark.compared(figures(benchmark))
    assert {name: bar["value"] for name, bar in bars.items()} == BARS
    assert all(bar["met"] for bar in bars.values())


def test_a_bar_on_either_side_is_missed_by_a_little(benchmark):
    assert benchmark.at_most(0.301, 0.3) == {"value": 0.301, "at_most": 0.3, "met": False}
    assert benchmark.at_least(1.249, 1.25) == {"value": 1.249, "at_least": 1.25, "met": False}


def test_some_modes_alone_have_no_bars(benchmark):
    some = {mode: row for mode, row in figures(benchmark).items() if mode != "whole-warm"}
    assert benchmark.compared(some) == {}


def test_figures_of_a_quiet_machine_may_be_quoted(benchmark):
    assert benchmark.doubts(figures(benchmark), others=0.0, rounds=5) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"rounds": 4}, "4 rounds are fewer"),
        ({"others": 1e6}, "other processes used"),
        ({"steady": 1.5}, "the steady state of eager went from 1.000 to 1.500 s"),
    ],
)
def test_figures_of_a_busy_machine_or_of_few_rounds_are_not_to_be_quoted(benchmark, change, word):
    found = figures(benchmark)
    found["eager"]["steady_s"] = {"median": 1.0, "min": 1.0, "max": change.get("steady", 1.0)}
    [doubt] = benchmark.doubts(found, others=change.get("others", 0.0), rounds=change.get("rounds", 5))
    assert word in doubt


def test_modes_keep_their_order_and_a_warm_one_needs_its_cold_one(benchmark):
    assert benchmark.modes("regional-warm,regional-cold,eager") == ("eager", "regional-cold", "regional-warm")
    with pytest.raises(argparse.ArgumentTypeError, match="regional-warm starts from what regional-cold leaves"):
        benchmark.modes("eager,regional-warm")
    with pytest.raises(argparse.ArgumentTypeError, match="'lukewarm' is no mode; allowed: eager, "):
        benchmark.modes("lukewarm")


def test_a_boot_that_does_not_end_as_its_mode_says_is_no_figure(benchmark, monkeypatch, tmp_path):
    def child(order, place, environment):
        (place / "answer.json").write_text(json.dumps({"outcome": "cold", "reason": "no bundle fits"}))

    monkeypatch.setattr(benchmark, "child", child)
    with pytest.raises(benchmark.BootError, match="The regional-warm boot ended cold: no bundle fits"):
        benchmark.boot("regional-warm", "reference", "weights", tmp_path, 0)


def test_the_table_tells_each_bar_and_each_doubt(benchmark):
    found = figures(benchmark)
    bars = benchmark.compared(found) | {"missed": benchmark.at_most(2.0, 1.0)}
    answer = {"machine": {"cpu": "any"}, "modes": found, "bars": bars, "not_quotable": ["it was busy"]}
    lines = "\n".join(benchmark.table(answer))
    assert "warm_boot_to_eager_boot 1.40 (at most 1.6: met)" in lines
    assert "missed 2.00 (at most 1.0: MISSED)" in lines
    assert "Not to be quoted: it was busy." in lines


def test_the_picture_is_drawn_for_a_light_and_a_dark_page_and_is_the_same_each_time(benchmark, tmp_path):
    import _picture

    answer = {"modes": figures(benchmark)}
    first = [path.read_text() for path in _picture.draw(answer, tmp_path / "one")]
    again = [path.read_text() for path in _picture.draw(answer, tmp_path / "two")]
    assert first == again
    assert first[0] != first[1]
    assert all("compile and warm-up" in text and "regional-warm" in text for text in first)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_eager_boot_of_the_reference_is_measured():
    command = [sys.executable, ROOT / "scripts/benchmark", "--modes", "eager", "--rounds", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    eager = answer["modes"]["eager"]
    assert sum(eager["phases"].values()) == pytest.approx(eager["boot_s"]["median"], abs=0.01)
    assert 0 < eager["steady_s"]["median"] < eager["boot_s"]["median"]
    assert eager["peak_bytes"]["median"] > 100e6
    assert answer["bars_met"] is False
    assert any("fewer than 5" in doubt for doubt in answer["not_quotable"])


def test_with_minutes_cold_modes_run_once_and_others_while_there_is_time(benchmark, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: now[0])
    cost_s = {"eager": 10.0, "regional-cold": 100.0, "regional-warm": 15.0}
    chosen = argparse.Namespace(modes=tuple(cost_s), rounds=5, minutes=3.0)
    ran = []
    for number, mode in benchmark.schedule(chosen, 0.0):
        ran.append((number, mode))
        now[0] += cost_s[mode]
    # 125 s, then 25 s each: a third of those would end at 200 s.
    assert ran == [(0, mode) for mode in cost_s] + [
        (1, "eager"),
        (1, "regional-warm"),
        (2, "eager"),
        (2, "regional-warm"),
    ]
    everything = argparse.Namespace(modes=tuple(cost_s), rounds=2, minutes=None)
    assert list(benchmark.schedule(everything, 0.0)) == [(number, mode) for number in (0, 1) for mode in cost_s]


def test_the_parts_of_the_flux_workload_fit_together(tmp_path, monkeypatch):
    """With two narrow blocks in place of fifteen wide ones, on the CPU; the picture is eight times its latents."""
    import _workloads
    from diffusers import FluxPipeline

    small = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 1}
    monkeypatch.setitem(_workloads.TRANSFORMERS, "flux", _workloads.TRANSFORMERS["flux"] | small)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _workloads.build("flux", tmp_path / "model")
    [request], _ = _workloads.plan_of("flux")
    pipeline = FluxPipeline.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in pipeline.transformer.parameters()} == {torch.bfloat16}
    inputs = request.inputs | {"width": 64, "height": 64, "num_inference_steps": 1}
    assert pipeline(**inputs).images[0].size == (64, 64)

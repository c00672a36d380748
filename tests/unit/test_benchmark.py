"""scripts/benchmark: what it makes of its figures, and when it says that they are not to be quoted."""

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
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
        ({"steady": 1.5}, "the steady state of whole-warm went from 1.000 to 1.500 of eager's"),
    ],
)
def test_figures_of_a_busy_machine_or_of_few_rounds_are_not_to_be_quoted(benchmark, change, word):
    found = figures(benchmark)
    found["whole-warm"]["steady_to_eager"] = {"median": 1.0, "min": 1.0, "max": change.get("steady", 1.0)}
    found["eager"]["steady_s"] = {"median": 1.0, "min": 1.0, "max": 2.0}  # of the host, and so of all modes
    [doubt] = benchmark.doubts(found, others=change.get("others", 0.0), rounds=change.get("rounds", 5))
    assert word in doubt


def test_modes_keep_their_order_and_a_warm_one_needs_its_cold_one(benchmark):
    assert benchmark.modes("regional-warm,regional-cold,eager") == ("eager", "regional-cold", "regional-warm")
    with pytest.raises(argparse.ArgumentTypeError, match="regional-warm starts from what regional-cold leaves"):
        benchmark.modes("eager,regional-warm")
    with pytest.raises(argparse.ArgumentTypeError, match="'lukewarm' is no mode; allowed: eager, "):
        benchmark.modes("lukewarm")


# A process that boots in no time; what it answers to each line is told by the test.
PROCESS = """
import json, socket, sys
with socket.socket(fileno=json.loads(sys.argv[1])["turns"]) as turns, turns.makefile("rw") as pipe:
    print(json.dumps({row}), file=pipe, flush=True)
    while requests := int(pipe.readline() or 0):
        {work}
        print(json.dumps([1.0] * requests), file=pipe, flush=True)
    print(json.dumps({{"peak_bytes": 2}}), file=pipe, flush=True)
"""


@pytest.fixture
def processes(benchmark, monkeypatch):
    """Has each boot be such a process, and returns what they are told in turn."""

    def start(*, work: str = "pass", **row) -> list:
        program = PROCESS.format(row={"outcome": "", "reason": "", "boot_s": 1.0, "peak_bytes": 1} | row, work=work)
        monkeypatch.setattr(benchmark, "command", lambda order: [sys.executable, "-c", program, json.dumps(order)])
        asked: list = []
        ask = benchmark.Booted._ask
        monkeypatch.setattr(
            benchmark.Booted, "_ask", lambda self, number: asked.append((self.mode, number)) or ask(self, number)
        )
        return asked

    return start


def run_round(benchmark, place, *modes: str) -> list:
    options = argparse.Namespace(workload="reference", rounds=1)
    return benchmark.round_of(0, modes, options, "weights", place)


def test_processes_of_a_round_take_turns(benchmark, processes, tmp_path):
    asked = processes()
    rows = run_round(benchmark, tmp_path, "eager", "whole-cold")
    one_turn = [("eager", benchmark.REQUESTS), ("whole-cold", benchmark.REQUESTS)]
    assert asked == one_turn * benchmark.TURNS + [("eager", 0), ("whole-cold", 0)]
    assert [(mode, row["steady_s"], row["peak_bytes"]) for mode, row in rows] == [
        ("eager", 1.0, 2),
        ("whole-cold", 1.0, 2),
    ]


@pytest.mark.parametrize("full", ["memory", "gpu"])
def test_a_process_that_leaves_no_room_for_another_goes_on_alone(benchmark, processes, tmp_path, full):
    asked = processes(**({"peak_bytes": 1 << 60} if full == "memory" else {"gpu_peak_bytes": 10, "gpu_free_bytes": 19}))
    run_round(benchmark, tmp_path, "eager", "whole-cold")
    alone = [benchmark.REQUESTS] * benchmark.TURNS + [0]
    assert asked == [(mode, number) for mode in ("eager", "whole-cold") for number in alone]


def test_a_boot_that_does_not_end_as_its_mode_says_is_no_figure(benchmark, processes, tmp_path):
    processes(outcome="cold", reason="no bundle fits")
    with pytest.raises(benchmark.BootError, match="The regional-warm boot ended cold: no bundle fits"):
        run_round(benchmark, tmp_path, "regional-warm")


FAULTS = {
    "it ends": ("sys.exit('out of memory')", r"The eager process failed \(1\): out of memory\."),
    "it is killed": ("import os; os.kill(os.getpid(), 9)", r"The eager process failed \(-9\): it said nothing\."),
    "half a line": ("print('[1.0, 1', end='', file=pipe, flush=True); sys.exit(3)", r"failed \(3\): it said nothing\."),
    "no JSON": (
        "print('what?', file=pipe, flush=True); import time; time.sleep(60)",
        r"failed \(-9\): it said nothing",
    ),
    "too few": ("print([], file=pipe, flush=True)", r"answered \[\] to 4 requests"),
    "no list": ("print(5, file=pipe, flush=True)", "answered 5 to 4 requests"),
}


@pytest.mark.parametrize(("work", "told"), FAULTS.values(), ids=FAULTS)
def test_a_process_that_fails_is_told_with_its_last_words_and_no_other_is_left(
    benchmark, monkeypatch, processes, tmp_path, work, told
):
    processes(work=work)
    monkeypatch.setattr(benchmark, "DEATH_S", 0.5)
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        benchmark.subprocess,
        "Popen",
        lambda *args, **options: started.append(popen(*args, **options)) or started[-1],
    )
    with pytest.raises(benchmark.BootError, match=told):
        run_round(benchmark, tmp_path, "eager", "whole-cold")
    assert [process.returncode is not None for process in started] == [True, True]


def test_one_that_ended_between_two_turns_is_told_too(benchmark, processes, tmp_path):
    processes(work="pass")
    process = benchmark.boot("eager", "reference", "weights", tmp_path, 0)
    process._process.kill()
    process._process.wait()
    with pytest.raises(benchmark.BootError, match=r"The eager process failed \(-9\)"):
        process.turn()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_one_that_is_told_to_stop_leaves_neither_processes_nor_files(tmp_path, number):
    hangs = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    program = PROCESS.format(row={"outcome": "", "reason": "", "boot_s": 1.0, "peak_bytes": 1}, work=hangs)
    code = f"""
import json, signal, sys
sys.path[:0] = {[str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT)]!r}
from loading import load_command
benchmark = load_command("benchmark")
benchmark.build = lambda workload, model: None
benchmark.command = lambda order: [sys.executable, "-c", {program!r}, json.dumps(order)]
for name in ("SIGHUP", "SIGINT"):  # whoever runs these tests may have them ignored
    signal.signal(getattr(signal, name), signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)
sys.exit(benchmark.main(["--modes", "eager,whole-cold", "--directory", {str(tmp_path)!r}]))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(600):
            if (tmp_path / "pid").exists() and (pids := (tmp_path / "pid").read_text().split()):
                break
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == (130 if number == signal.SIGINT else 128 + number), errors
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]
    assert not any(Path("/proc", pid).exists() for pid in pids)


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
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: 100.0)
    chosen = argparse.Namespace(modes=("eager", "regional-cold", "regional-warm"), rounds=5, minutes=3.0)
    rows = {mode: [row(10.0, steady_s=1.0)] for mode in chosen.modes}
    assert benchmark.modes_of(0, chosen, 0.0, {}) == chosen.modes
    # Twice 10 s and 21 requests of 1 s: 62 of the 80 s that are left.
    assert benchmark.modes_of(1, chosen, 0.0, rows) == ["eager", "regional-warm"]
    assert benchmark.modes_of(1, chosen, -20.0, rows) == ()
    assert benchmark.modes_of(4, argparse.Namespace(modes=chosen.modes, minutes=None), 0.0, rows) == chosen.modes


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

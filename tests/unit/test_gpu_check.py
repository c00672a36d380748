"""scripts/gpu_check: what it says where it cannot run, and what it makes of what the tests and the benchmark said."""

import subprocess
import sys
from types import ModuleType

import pytest
import torch
from loading import load_command
from project_tree import ROOT


@pytest.fixture
def check(monkeypatch) -> ModuleType:
    module = load_command("gpu_check")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return module


def test_a_machine_without_a_gpu_is_told_and_may_rehearse(check, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main(["--out", str(tmp_path / "out")]) == check.USAGE
    assert "finds no usable NVIDIA GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert check.missing(rehearse=True) == ""


def test_what_is_not_installed_is_named_and_nothing_is_installed(check, monkeypatch):
    monkeypatch.setattr(check, "NEEDED", ("torch", "no_such_package", "nor_this_one"))
    assert "has no no_such_package, nor_this_one, which the check needs" in check.missing(rehearse=False)


@pytest.mark.parametrize(
    ("release", "told"), [("2.9.1", True), ("2.11.0+cu130", False), ("2.15.1", False), ("2.16", True)]
)
def test_another_torch_than_it_is_meant_for_is_told(check, monkeypatch, capsys, release, told):
    monkeypatch.setattr(torch, "__version__", release)
    assert check.missing(rehearse=False) == ""
    assert ("is meant for 2.11 to 2.15" in capsys.readouterr().err) is told


@pytest.mark.parametrize(
    ("status", "answer", "expected"),
    [(0, {"table": ["mode boot s"]}, 0), (1, {"table": ["mode boot s"]}, 1), (0, {"error": "it had not ended"}, 1)],
)
def test_it_passes_if_tests_and_benchmark_do_and_leaves_a_page_anyway(
    check, monkeypatch, tmp_path, status, answer, expected
):
    monkeypatch.setattr(check, "tests", lambda *_: {"status": status, "seconds": 1.0, "said": "3 passed in 1.0s"})
    monkeypatch.setattr(check, "benchmark", lambda *_: answer)
    assert check.main(["--out", str(tmp_path / "out")]) == expected
    page = (tmp_path / "out/README.md").read_text()
    assert page.startswith("# On a GPU")
    assert "3 passed" in page
    assert (answer.get("error") or "mode boot s") in page
    assert (tmp_path / "out/gpu-check.json").is_file()


def test_a_test_that_hangs_is_stopped(check, monkeypatch, tmp_path):
    (tmp_path / "tests/gpu").mkdir(parents=True)
    (tmp_path / "tests/gpu/test_slow.py").write_text("import time\n\ndef test_slow():\n    time.sleep(100)\n")
    monkeypatch.setattr(check, "ROOT", tmp_path)
    found = check.tests({}, limit_s=3.0)
    assert (found["status"], found["said"]) == (1, "stopped after 3 s")


def test_a_benchmark_that_fails_or_hangs_is_an_error_in_words(check, monkeypatch, tmp_path):
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts/benchmark"
    monkeypatch.setattr(check, "ROOT", tmp_path)
    script.write_text("import sys\nsys.exit(1)\n")
    assert "ended with status 1" in check.benchmark(tmp_path, True, {}, 60.0)["error"]
    script.write_text("import time\ntime.sleep(100)\n")
    assert check.benchmark(tmp_path, True, {}, 2.0)["error"] == "the benchmark had not ended after 2 s"
    script.write_text("print('a table')\nprint('{\"modes\": {}}')\n")
    assert check.benchmark(tmp_path, False, {}, 60.0) == {"modes": {}, "table": ["a table"]}


def test_scripts_run_in_the_python_that_it_is_called_by():
    """A GPU machine has a torch of its own: requirements that are not met there are no reason for a .venv."""
    code = "import os, sys\nsys.version_info = (3, 10)\nimport _venv\n_venv.ensure(dev=True)\nprint('as it is')"
    environment = {"PYTHONPATH": str(ROOT / "scripts"), "_WARMSTART_PYTHON_AS_IS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "as it is\n", done.stderr

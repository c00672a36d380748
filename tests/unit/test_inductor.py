"""What is asked of TorchInductor from outside, where it may refuse."""

import collections
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch._inductor import codecache

from warmstart import inductor

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, int]:
    """Torch's counters, as the test sets them; what a boot changes of torch is put back."""
    from torch._dynamo.utils import counters

    for name in ("_precompile_header", "_HEADER_DIR", "_HEADER_LOCK_DIR"):
        monkeypatch.setattr(codecache, name, getattr(codecache, name))
    monkeypatch.setitem(counters, "inductor", collections.Counter())
    return counters["inductor"]


def test_a_header_that_cannot_be_precompiled_is_left_out_of_the_command(monkeypatch, counted, tmp_path) -> None:
    asked = []

    def full(header: str, command: str, **_: object) -> str:
        asked.append(header)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(codecache, "_precompile_header", full)
    inductor.precompile_headers_in(tmp_path)
    counted["fxgraph_cache_miss"] = 1
    assert [codecache._precompile_header("a.h", "g++", shared=True) for _ in range(2)] == ["", ""]
    assert asked == ["a.h"], "what failed is not tried for each kernel again"


@pytest.mark.parametrize("counter", ["fxgraph_cache_miss", "fxgraph_cache_bypass"])
def test_headers_are_precompiled_once_a_graph_is_compiled_and_not_before(
    monkeypatch, counted, tmp_path, counter
) -> None:
    monkeypatch.setattr(codecache, "_precompile_header", lambda header, command: f"{codecache._HEADER_DIR}/{header}")
    inductor.precompile_headers_in(tmp_path)
    counted["fxgraph_cache_hit"] = 3
    assert codecache._precompile_header("a.h", "g++") == ""
    counted[counter] = 1
    assert codecache._precompile_header("a.h", "g++") == f"{tmp_path}/a.h"


def test_torch_takes_an_empty_name_for_no_header() -> None:
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    options = CppTorchDeviceOptions(device_type="cpu")
    plain = CppBuilder(name="o", sources="i", BuildOption=options).get_command_line()
    options.precompiled_header = ""
    assert CppBuilder(name="o", sources="i", BuildOption=options).get_command_line() == plain


def test_a_torch_without_that_function_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(codecache, "_precompile_header")
    inductor.precompile_headers_in(tmp_path)


@pytest.mark.parametrize(
    ("path", "holds"),
    [("fxgraph/ab/graph", True), ("locks/a.lock", False), (".warmstart-headers-1/a.gch", False), ("ab/.hidden", False)],
)
def test_locks_and_dot_files_are_no_code(tmp_path: Path, path: str, holds: bool) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text("")
    assert inductor.holds_code(tmp_path) is holds


def test_headers_that_are_dropped_are_not_named_again(monkeypatch, counted, tmp_path) -> None:
    monkeypatch.setattr(codecache, "_precompile_header", lambda header, command: f"{codecache._HEADER_DIR}/{header}")
    inductor.precompile_headers_in(tmp_path / "headers")
    (tmp_path / "headers").mkdir()
    counted["fxgraph_cache_miss"] = 1
    assert codecache._precompile_header("a.h", "g++")
    inductor.drop_headers(tmp_path / "headers")
    assert codecache._precompile_header("a.h", "g++") == ""
    assert list(tmp_path.iterdir()) == []


def test_each_second_of_a_compile_is_in_one_stage_and_what_no_graph_covered_is_told(monkeypatch) -> None:
    from torch._dynamo import utils

    cold = utils.CompilationMetrics(
        dynamo_cumulative_compile_time_us=20_000_000,
        aot_autograd_cumulative_compile_time_us=17_000_000,
        inductor_cumulative_compile_time_us=15_000_000,
        inductor_code_gen_cumulative_compile_time_us=14_000_000,
        triton_compile_time_us=6_000_000,
        recompile_reason="0/0: tensor 'x' size mismatch",
    )
    # From the cache: Inductor has no share, and the kernels are loaded outside it.
    warm = utils.CompilationMetrics(
        dynamo_cumulative_compile_time_us=3_000_000,
        aot_autograd_cumulative_compile_time_us=2_000_000,
        triton_compile_time_us=500_000,
    )
    monkeypatch.setattr(utils, "_compilation_metrics", collections.deque([cold, warm], maxlen=64))
    first, second = inductor.take_compiles()
    assert first.seconds == {"dynamo": 3, "aot_autograd": 2, "inductor": 1, "codegen": 8, "kernels": 6}
    assert second.seconds == {"dynamo": 1, "aot_autograd": 1.5, "inductor": 0, "codegen": 0, "kernels": 0.5}
    assert (first.reason, second.reason) == ("0/0: tensor 'x' size mismatch", "")
    assert inductor.take_compiles() == []


def test_torch_forgets_no_compile_of_a_large_plan(monkeypatch) -> None:
    from torch._dynamo import utils

    monkeypatch.setattr(utils, "_compilation_metrics", collections.deque(maxlen=64))
    inductor.keep_records()
    utils._compilation_metrics.extend(utils.CompilationMetrics() for _ in range(300))
    assert len(inductor.take_compiles()) == 300


def test_the_header_built_ahead_is_the_one_that_torch_s_kernels_include(monkeypatch, counted, tmp_path) -> None:
    """Arguments are part of a name; with others the header would be built twice."""
    given = []

    def asked(header: str, command: str, **options: object) -> str:
        given.append((header, command, options))
        raise OSError(28, "No space left on device")

    inductor.load()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(codecache, "_precompile_header", asked)
    precompile = inductor.precompile_headers_in(tmp_path / "headers")
    assert inductor.build_ahead(precompile, tmp_path)
    for thread in threading.enumerate():
        if thread.name == "warmstart-build-ahead":
            thread.join(60)
    assert len(given) == 1
    monkeypatch.setattr(codecache, "_precompile_header", asked)
    with pytest.raises(OSError, match="No space"):
        codecache.CppPythonBindingsCodeCache.load_pybinding_async(["float*"], "// a kernel", submit_fn=lambda _: None)
    assert given[1] == given[0]


def test_nothing_is_built_ahead_on_a_disk_with_little_room(monkeypatch, counted, tmp_path) -> None:
    asked = []
    monkeypatch.setattr(inductor, "_header_of_kernels", lambda: ("a.h", "g++", asked.append("begun") or {}))
    monkeypatch.setattr(inductor, "AHEAD_FREE_BYTES", 1 << 62)
    assert not inductor.build_ahead(lambda *_, **__: "", tmp_path)
    assert not inductor.build_ahead(lambda *_, **__: "", tmp_path / "nowhere")
    assert asked == []


def test_vector_units_of_the_processor_are_taken_as_usable_and_amx_is_tested(monkeypatch) -> None:
    from torch._inductor.cpu_vec_isa import VecAMX, VecAVX2, VecAVX512, VecAVX512VNNI, VecISA

    built = []
    monkeypatch.setattr(VecISA, "check_build", lambda self, code: built.append(code) or False)
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: True)
    inductor.load()
    inductor.load()
    assert VecAVX2().check_build(VecISA._avx_code)
    assert VecAVX512().check_build(VecAVX512._avx512_bf16_code)
    assert VecAVX512VNNI().check_build(VecAVX512VNNI._avx512_vnni_code)
    assert built == []
    assert not VecAMX().check_build(VecAMX._amx_code)
    assert built == [VecAMX._amx_code]


def test_torch_tests_other_processors_itself(monkeypatch) -> None:
    from torch._inductor.cpu_vec_isa import VecISA

    def own(self: VecISA, code: str) -> bool:
        return False

    monkeypatch.setattr(VecISA, "check_build", own)
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: False)
    inductor.load()
    assert VecISA.check_build is own


def test_two_threads_find_the_flags_of_the_processor_that_one_finds(tmp_path) -> None:
    """In a process of its own, as torch keeps what it found; on a processor that has all that torch asks for."""
    code = """
import threading, time, torch
from warmstart import inductor
inductor._trust_vector_units = lambda: None
inductor.load()
from torch._inductor import cpu_vec_isa
cpu_vec_isa.x86_isa_checker = lambda: ["avx2", "avx512", "avx512_vnni"]
cpu_vec_isa.platform.machine = lambda: "x86_64"
torch.cpu._is_avx512_bf16_supported = torch.cpu._is_vnni_supported = lambda: True
asked = []
def check_build(self, code):
    if "bf16" in code:
        asked.append(code)
        time.sleep(0.4 * len(asked))  # a second one begins before the first ends, and ends after it
    return True
cpu_vec_isa.VecISA.check_build = check_build
threads = [threading.Thread(target=cpu_vec_isa.pick_vec_isa) for _ in range(2)]
for thread in threads:
    thread.start()
    time.sleep(0.2)
[thread.join(60) for thread in threads]
print(cpu_vec_isa.pick_vec_isa().build_arch_flags())
"""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "-mavx512vnni" in done.stdout
    assert "bf16" not in done.stdout


class WithoutAutocast(torch.nn.Module):
    """As some blocks of diffusers: a few lines of it must not lose precision."""

    def forward(self, x):
        with torch.amp.autocast("cuda", enabled=False):
            y = x.float() * 2
        return y + 1


@pytest.mark.parametrize("declared", [True, False])
def test_a_graph_that_turns_autocast_off_can_be_cached(monkeypatch, declared: bool) -> None:
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, check_cacheable

    if not declared:
        monkeypatch.setattr(inductor, "_CACHEABLE", ())
    graphs = []

    def backend(graph, _):
        try:
            check_cacheable(graph)
            graphs.append("")
        except BypassAOTAutogradCache as error:
            graphs.append(str(error))
        return graph.forward

    torch._dynamo.reset()
    with inductor.compiling(inductor.Missing.COMPILED):
        torch.compile(WithoutAutocast(), backend=backend, fullgraph=True)(torch.ones(2))
    # Without being declared this is refused; when it no longer is, torch has come to know these functions.
    assert len(graphs) == 1
    assert ("_enter_autocast" in graphs[0]) is not declared
    assert (graphs[0] == "") is declared

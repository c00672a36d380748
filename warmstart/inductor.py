"""TorchInductor from outside: torch's counters, what a run must be wrapped in.

Knows nothing of models or stores. It imports torch only inside functions, since the live directory has to be in the
environment before torch is imported.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import os
import platform
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from warmstart import process, toolchain
from warmstart.report import sentence

MAX_GRAPHS = 256
"""Most graphs of one code object: torch 2.13's `accumulated_recompile_limit`, the same in each thread unless set."""


@dataclass(frozen=True)
class Counts:
    """Torch's own counters since the process began; subtract two to get what happened between them."""

    graphs: int = 0
    fx_hits: int = 0
    fx_misses: int = 0
    fx_bypasses: int = 0
    aot_hits: int = 0
    aot_misses: int = 0
    aot_bypasses: int = 0

    def __sub__(self, earlier: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def load() -> None:
    """Imports Inductor, which torch otherwise does in the first compile; it takes a second."""
    importlib.import_module("torch._inductor.compile_fx")
    _trust_vector_units()
    _test_processor_by_turns()


def _trust_vector_units() -> None:
    """Has torch take a processor's vector units as usable by its compiler, without building a library to see.

    Torch 2.13 builds one that includes its vector headers for each of up to four instruction sets, 4 s each, and a
    small one for each of VNNI and bf16; it loads each in another process in each boot, and takes one that was cut short
    for a processor without vector units. They are for compilers too old for torch's headers, which need C++20 by now,
    and so GCC 10 or clang 10, the first that know all of these instructions. The processor itself is asked as before,
    and so is the compiler for AMX, which needs a later one. To be taken out when torch no longer builds them.
    """
    import torch
    from torch._inductor.cpu_vec_isa import VecAVX512, VecAVX512VNNI, VecISA

    build = VecISA.check_build
    if platform.machine() != "x86_64" or getattr(build, "trusting", False) or not torch.cpu._is_avx2_supported():
        return
    trusted = {VecISA._avx_code, VecAVX512._avx512_bf16_code, VecAVX512VNNI._avx512_vnni_code}

    def check_build(self: VecISA, code: str) -> bool:
        return code in trusted or build(self, code)

    check_build.trusting = True  # type: ignore[attr-defined]
    VecISA.check_build = check_build  # type: ignore[method-assign]


def _test_processor_by_turns() -> None:
    """Has a second thread wait for what torch's tests of the processor tell the first.

    Torch 2.13 changes an instruction set's flags while it tests for one more (`VecAVX512.__bool__`, `VecAMX.__bool__`)
    and puts back what it found. A test on another thread at that time (`build_ahead`) finds the changed ones, and the
    process names its kernels by them: no later boot, whose flags are right, finds these in the cache. To be taken out
    when torch passes the flags to the test.
    """
    from torch._inductor import cpu_vec_isa

    asked = cpu_vec_isa.valid_vec_isa_list
    if hasattr(asked, "turns"):
        return
    turns = threading.Lock()

    @functools.wraps(asked)
    def valid_vec_isa_list() -> list[Any]:
        with turns:
            return asked()

    valid_vec_isa_list.turns = turns  # type: ignore[attr-defined]
    valid_vec_isa_list.cache_clear = asked.cache_clear  # type: ignore[attr-defined]
    valid_vec_isa_list.cache_info = asked.cache_info  # type: ignore[attr-defined]
    cpu_vec_isa.valid_vec_isa_list = valid_vec_isa_list  # type: ignore[assignment]


STAGES = ("dynamo", "aot_autograd", "inductor", "codegen", "kernels")
"""Stages of a compile, in order. dynamo: tracing Python into a graph, and its guards. aot_autograd: what comes before
Inductor, or looking the graph up in the cache and loading it. inductor: passes and scheduling. codegen: writing the
kernels' code and precompiling C++ headers. kernels: waiting for the compilers of C++ or Triton."""


@dataclass(frozen=True)
class Compile:
    """One compile by torch's own record."""

    seconds: dict[str, float]
    """By stage; each second is in one of them."""
    reason: str
    """What no earlier graph of the same code covered, in torch's words; "" if there was none."""


MAX_RECORDS = 1024
"""How many compiles torch is to remember; its own limit of 64 is less than one call of a model may need."""


def keep_records() -> None:
    """Has torch remember all its compiles until `take_compiles` is asked for them."""
    from torch._dynamo.utils import set_compilation_metrics_limit

    set_compilation_metrics_limit(MAX_RECORDS)


def take_compiles() -> list[Compile]:
    """Returns torch's records of the compiles since it was asked last, of any thread, and drops them."""
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

    records = get_compilation_metrics()
    clear_compilation_metrics()
    return [_compile(record) for record in records]


def _compile(record: Any) -> Compile:
    whole, aot, inductor, codegen, kernels = (
        (getattr(record, name, None) or 0) / 1e6
        for name in (
            "dynamo_cumulative_compile_time_us",
            "aot_autograd_cumulative_compile_time_us",
            "inductor_cumulative_compile_time_us",
            "inductor_code_gen_cumulative_compile_time_us",
            # Also of C++ kernels, whatever its name says.
            "triton_compile_time_us",
        )
    )
    # Torch counts each stage with all that it calls. Where the graph is from the cache, its kernels are waited for
    # outside Inductor.
    within_codegen = min(kernels, codegen)
    own = (
        whole - aot,
        aot - inductor - (kernels - within_codegen),
        inductor - codegen,
        codegen - within_codegen,
        kernels,
    )
    seconds = {stage: max(0.0, value) for stage, value in zip(STAGES, own, strict=True)}
    return Compile(seconds, getattr(record, "recompile_reason", None) or "")


def forget() -> None:
    """Drops all graphs of this process and what torch keeps in memory of its cache's files."""
    import torch
    from torch._inductor import cpu_vec_isa
    from torch._inductor.utils import clear_caches

    shut_down_workers()  # they keep the variables of the attempt before; torch starts new ones
    torch._dynamo.reset()
    clear_caches()
    take_compiles()
    _forget_processor(cpu_vec_isa)


def _forget_processor(cpu_vec_isa: Any) -> None:
    """Drops what torch's tests said of the processor: a broken one says that it has no vector units.

    They are not among the caches that `clear_caches` knows in torch 2.13; to be taken out when they are.
    """
    with contextlib.suppress(AttributeError):  # another version of torch
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        for isa in cpu_vec_isa.supported_vec_isa_list:
            # Extensions found by the first test would be flags of the next one, which is then another.
            vars(isa).pop("_is_avx512_bf16_supported", None)
            vars(isa).pop("_is_amx_fp16_supported", None)
            for function in (item for kind in type(isa).__mro__ for item in vars(kind).values()):
                if clear := getattr(function, "cache_clear", None):
                    clear()


def graphs() -> int:
    """Number of graphs compiled so far; one look-up, cheap enough for every call of every region."""
    return int(_counters()["stats"]["unique_graphs"])


@functools.cache
def _counters() -> Any:
    from torch._dynamo.utils import counters

    return counters


def counts() -> Counts:
    """Reads torch's counters."""
    counters = _counters()
    inductor, aot = counters["inductor"], counters["aot_autograd"]
    return Counts(
        graphs=counters["stats"]["unique_graphs"],
        fx_hits=inductor["fxgraph_cache_hit"],
        fx_misses=inductor["fxgraph_cache_miss"],
        fx_bypasses=inductor["fxgraph_cache_bypass"],
        aot_hits=aot["autograd_cache_hit"],
        aot_misses=aot["autograd_cache_miss"],
        aot_bypasses=aot["autograd_cache_bypass"],
    )


def holds_code(live: Path) -> bool:
    """Whether a live directory has anything that a compile may find; locks are waited for, dot files are our own."""
    for _, folders, names in os.walk(live):  # it passes over what a neighbour removes meanwhile
        folders[:] = [name for name in folders if not name.startswith(".")]
        if any(not name.endswith(".lock") and not name.startswith(".") for name in names):
            return True
    return False


def kernels(live: Path) -> frozenset[str]:
    """Names of the built kernels in a live directory: shared libraries of the CPU, cubins of a GPU."""
    suffixes = (".so", ".cubin", ".hsaco")
    return frozenset(
        str(Path(folder, name).relative_to(live))
        for folder, _, names in os.walk(live)
        for name in names
        if name.endswith(suffixes)
    )


class Run:
    """One answer of the model, in one piece or in several. Within it, what is true of the model is looked at less."""


_latest: Run | None = None
_runs = 0


def run_for(owner: Run) -> None:
    """Says that the model's calls from here on belong to `owner`; what is another one than before begins anew."""
    global _latest, _runs  # of the process, as all of torch's state that runs depend on
    if owner is not _latest:
        _latest, _runs = owner, _runs + 1


def run() -> int:
    """A number for the present run; 0 before the first, as in a process that calls modules by itself."""
    return _runs


class Missing(enum.Enum):
    """What becomes of a call that needs a graph which is not there; the values are torch's stances."""

    COMPILED = "default"
    REFUSED = "fail_on_recompile"
    """It raises `RuntimeError` before anything has run, if regions are whole graphs; see `refusal`."""
    EAGER = "eager_on_recompile"
    """It runs uncompiled, and torch says nothing of it."""


_CACHEABLE = ("torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast")


@contextlib.contextmanager
def compiling(missing: Missing) -> Iterator[None]:
    """What every run of the model is wrapped in, warm-up and prediction alike, so that no guard tells them apart.

    Entered anew in each thread: Dynamo's configuration is a context variable since torch 2.12
    (pytorch/pytorch#186537), so what setup() sets on its thread does not exist in a prediction's.

    Args:
        missing: what becomes of a call that needs a graph which is not there.
    """
    import torch
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor
    from torch.fx.experimental import _config as shapes

    from warmstart import matmul

    # Inference mode rather than no_grad: its tensors are no views of a base, and guards on the base's strides would
    # cost one more graph per region. Without duck shaping two sizes that happen to be equal at the first call (16
    # picture tokens, 16 text tokens) are not taken to be equal for ever (pytorch/pytorch#160271).
    # Constants such as a norm's epsilon stay constants: as symbols they have each region traced twice, and the first
    # trace is a cache miss on every boot.
    # Marks for the profiler round each graph would be calls that `direct` could not leave out.
    # Blocks that turn autocast off for a few lines (Z-Image's) would be traced in each boot, since AOTAutograd's cache
    # takes no function that it does not know. With all they are given these two are in the graph, and so in its key.
    with (
        torch.inference_mode(),
        shapes.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        dynamo.patch(specialize_float=True, record_runtime_overhead=False),
        inductor.patch(
            unsafe_marked_cacheable_functions=(
                dict.fromkeys(_CACHEABLE, "") | inductor.unsafe_marked_cacheable_functions
            ),
            post_grad_custom_post_pass=matmul.beside(inductor.post_grad_custom_post_pass),
        ),
        torch.compiler.set_stance(missing.value),
        toolchain.as_noted(),
    ):
        yield


def start_threads() -> None:
    """Starts the threads that compute for the calling one, each on a core of its own if there are as many."""
    import torch

    # Torch gives each at least 32,768 numbers (`at::internal::GRAIN_SIZE`).
    torch.empty(torch.get_num_threads() << 15, device="cpu").fill_(0)
    process.spread_threads()


@contextlib.contextmanager
def no_more_graphs(missing: Missing = Missing.EAGER) -> Iterator[None]:
    """Inside it, whatever was said outside, a call that would need one more graph runs uncompiled, or is refused."""
    import torch

    with torch.compiler.set_stance(missing.value):
        yield


def refusal(error: BaseException) -> str:
    """Why a call was refused under `Missing.REFUSED`, in torch's words; "" if the error is another one."""
    text = str(error)
    # torch 2.13 has no type of its own for it.
    if not isinstance(error, RuntimeError) or not text.startswith("Detected recompile when torch.compile stance"):
        return ""
    failures = [line.strip() for line in text.splitlines() if line.strip().startswith("- ")]
    # "- 0/1: tensor 'x' size mismatch ..." after the numbers of the graph that it was compared with.
    return failures[0].removeprefix("- ").partition(": ")[2] if failures else "no graph was compiled for it"


def untraceable(error: Exception) -> str:
    """Why torch cannot make one graph of a call, in its words; "" if the error is another one.

    It is raised before any of the call has run, so the call can run as it is. What a backend raises is not meant:
    there the cache, the compiler or the disk may be to blame.
    """
    from torch._dynamo import exc

    others = (exc.BackendCompilerFailed, exc.RecompileError)
    if not isinstance(error, exc.TorchDynamoException) or isinstance(error, others):
        return ""
    return sentence(error)


def precompile_headers_in(folder: Path) -> Callable[..., str] | None:
    """Has torch precompile C++ headers only where kernels are to be built, in a folder of this process alone.

    Torch 2.13 does so before it looks whether the kernel is there: 10 s of compilers in a warm boot, which builds none.
    It keeps them beside the default cache directory, 150 MB each, and takes what a killed compiler left of one for
    whole, whereupon every later compile fails. And it lets every error there fail the graph: no room (Docker's --tmpfs
    has 64 MiB), no openssl. To be taken out when torch builds them late, and goes on without.

    Returns:
        Torch's function for who will not wait until a graph was missed; None where this torch has none.
    """
    from torch._inductor import codecache

    precompile = getattr(codecache, "_precompile_header", None)
    if precompile is None:  # another version of torch
        return None

    @functools.cache
    def tolerant(*arguments: Any, **options: Any) -> str:
        try:
            return str(precompile(*arguments, **options))
        # The boundary: compiler and disk may raise anything. The kernel's own compile tells what matters.
        except Exception:  # noqa: BLE001
            return ""  # torch then compiles with the header itself

    def late(*arguments: Any, **options: Any) -> str:
        # A graph from the cache has its kernels with it. One that is not there was counted before it is compiled.
        now = counts()
        return tolerant(*arguments, **options) if now.fx_misses or now.fx_bypasses else ""

    codecache._precompile_header = late  # type: ignore[assignment]
    codecache._HEADER_DIR = str(folder)
    codecache._HEADER_LOCK_DIR = str(folder / "locks")
    return tolerant


AHEAD_FREE_BYTES = 1 << 30
"""Room on the disk below which nothing is built ahead: the header takes 150 MB, and a disk that is full for a second
while the compiler writes would fail what is written beside it."""


def build_ahead(precompile: Callable[..., str], live: Path) -> bool:
    """Has the header that all kernels of a CPU include precompiled, beside whatever comes next.

    For a boot that is certain to compile, after `load`. It takes 9 s of a core that is idle meanwhile: importing,
    loading weights and tracing use one. Whoever needs it before it is done waits for it by torch's own locks. What
    fails here fails again where it is needed, and is told there.

    Args:
        precompile: what `precompile_headers_in` returned.
        live: the live directory.

    Returns:
        Whether it was begun; not where there is no room or no thread to be had.
    """

    def work() -> None:
        # The boundary: torch's parts may be others in another version, compiler and disk may raise anything.
        with contextlib.suppress(Exception):
            header, command, options = _header_of_kernels()
            precompile(header, command, **options)

    try:
        if shutil.disk_usage(live).free < AHEAD_FREE_BYTES:
            return False
        threading.Thread(target=work, name="warmstart-build-ahead", daemon=True).start()
    except (OSError, RuntimeError):  # no such disk; the container's limit of threads
        return False
    return True


def _header_of_kernels() -> tuple[str, str, dict[str, Any]]:
    """The arguments that torch 2.13 precompiles a kernel's header with (`CppCodeCache.load_async`)."""
    from torch._inductor import codecache, cpp_builder, cpu_vec_isa

    cache = codecache.CppPythonBindingsCodeCache
    options: dict[str, Any] = {
        **cache.cpp_compile_command_flags,
        "device_type": "cpu",
        "extra_flags": (),
        "use_relative_path": False,
        "vec_isa": cpu_vec_isa.pick_vec_isa(),
    }
    build = cpp_builder.CppTorchDeviceOptions(compile_only=False, min_optimize=False, **options)
    command = cpp_builder.CppBuilder(name="o", sources="i", BuildOption=build).get_command_line()
    return str(cache._get_uncompiled_header("cpu")), command, {"min_optimize": False, **options}


def vector_isa() -> str | None:
    """The vector instructions that CPU kernels use, as torch names them; None where it was not asked for them.

    To ask anew would build and run torch's test of the processor.
    """
    # Where nothing was compiled it is not imported, which would take a second.
    known = sys.modules.get("torch._inductor.cpu_vec_isa")
    if known is None or not known.valid_vec_isa_list.cache_info().currsize:
        return None
    chosen = known.pick_vec_isa()
    return "none" if chosen is known.invalid_vec_isa else str(chosen)


def drop_headers(folder: Path) -> None:
    """Removes what was precompiled, 150 MB a header, once nothing more is to be compiled; what is, does without."""
    from torch._inductor import codecache

    vars(codecache)["_precompile_header"] = lambda *_, **__: ""
    shutil.rmtree(folder, ignore_errors=True)


def shut_down_workers() -> None:
    """Ends Inductor's pool of compile processes, each of which would keep a copy of torch in memory for ever."""
    # Where nothing was compiled there is none, and importing it fails where there is no temporary directory.
    if "torch._inductor.async_compile" not in sys.modules:
        return
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()

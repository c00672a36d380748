"""TorchInductor from outside: the live directory, torch's counters, what a run must be wrapped in.

Knows nothing of models or stores. It imports torch only inside functions, since the live directory has to be in the
environment before torch is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from warmstart import toolchain


@dataclass(frozen=True)
class LiveDirectory:
    """Where Inductor reads and writes while this process runs."""

    path: Path
    reason: str
    """Why this place, in words."""
    lock: int | None = None
    """Descriptor of the shared lock that tells neighbours the directory is in use; None where it is not ours."""


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


def prepare(preset: str, name: str) -> LiveDirectory:
    """Chooses the live directory and puts it into the environment; to be called before torch is imported.

    Args:
        preset: a directory that the platform or the user has set. It is only ever added to, since it may hold what
            the platform restored. Empty for one of our own.
        name: names our own directory; equal for equal keys, so that processes of one image share it.

    Raises:
        OSError: no directory can be made.
    """
    live = LiveDirectory(Path(preset).absolute(), "set from outside") if preset else _own(name)
    live.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(live.path)
    # Triton then writes into a directory inside the live one, where it is saved along.
    os.environ.pop("TRITON_CACHE_DIR", None)
    return live


def _own(name: str) -> LiveDirectory:
    """A directory at a fixed place, empty for a process alone in it and shared with processes beside it."""
    root = Path(tempfile.gettempdir()) / f"warmstart-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.is_symlink() or root.stat().st_uid != os.getuid():
        # Somebody else made it first: code in there would be theirs, and loading it would run it.
        root = Path(tempfile.mkdtemp(prefix=f"warmstart-{os.getuid()}-"))
    path = root / name
    lock = os.open(root / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(lock, fcntl.LOCK_SH)
        return LiveDirectory(path, "shared with processes beside this one", lock)
    # Alone. What a killed process left may be half written, and whole files come back from the store anyway.
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700, exist_ok=True)
    # Not atomic: another process may lock, and empty the still empty directory, before this returns.
    fcntl.flock(lock, fcntl.LOCK_SH)
    return LiveDirectory(path, "of our own, begun empty", lock)


def set_aside(live: LiveDirectory, name: str) -> LiveDirectory:
    """Leaves a live directory whose files break the compile, and goes on in a new, empty one."""
    import torch
    from torch._inductor.utils import clear_caches

    path = Path(tempfile.mkdtemp(prefix=f"warmstart-{name}-retry-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(path)
    torch._dynamo.reset()
    clear_caches()
    return LiveDirectory(path, f"in place of {live.path}, whose files broke the compile")


def graphs() -> int:
    """Number of graphs compiled so far; one look-up, cheap enough for every call of every region."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def counts() -> Counts:
    """Reads torch's counters."""
    from torch._dynamo.utils import counters

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
    """Whether a live directory has anything that a compile may find; locks are only ever waited for."""
    return any(path.is_file() and path.suffix != ".lock" for path in live.rglob("*"))


def kernels(live: Path) -> frozenset[str]:
    """Names of the built kernels in a live directory: shared libraries of the CPU, cubins of a GPU."""
    suffixes = (".so", ".cubin", ".hsaco")
    return frozenset(
        str(Path(folder, name).relative_to(live))
        for folder, _, names in os.walk(live)
        for name in names
        if name.endswith(suffixes)
    )


@contextlib.contextmanager
def compiling(*, allowed: bool) -> Iterator[None]:
    """What every run of the model is wrapped in, warm-up and prediction alike, so that no guard tells them apart.

    Entered anew in each thread: Dynamo's configuration is a context variable since torch 2.12
    (pytorch/pytorch#186537), so what setup() sets on its thread does not exist in a prediction's.

    Args:
        allowed: whether a graph that is missing may be compiled; if not, such a call runs eagerly.
    """
    import torch
    import torch._dynamo.config as dynamo
    from torch.fx.experimental import _config as shapes

    stance = "default" if allowed else "eager_on_recompile"
    # Inference mode rather than no_grad: its tensors are no views of a base, and guards on the base's strides would
    # cost one more graph per region. Without duck shaping two sizes that happen to be equal at the first call (16
    # picture tokens, 16 text tokens) are not taken to be equal for ever (pytorch/pytorch#160271).
    # Constants such as a norm's epsilon stay constants: as symbols they have each region traced twice, and the first
    # trace is a cache miss on every boot.
    with (
        torch.inference_mode(),
        shapes.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        dynamo.patch(specialize_float=True),
        torch.compiler.set_stance(stance),
        toolchain.as_noted(),
    ):
        yield


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


def compile_events() -> list[dict[str, object]]:
    """Torch's record of each compile so far: where, how long in each stage (seconds), and why again."""
    from torch._dynamo.utils import get_compilation_metrics

    return [
        {
            "function": event.co_name,
            "dynamo_s": _seconds(event.dynamo_cumulative_compile_time_us),
            "aot_autograd_s": _seconds(event.aot_autograd_cumulative_compile_time_us),
            "inductor_s": _seconds(event.inductor_cumulative_compile_time_us),
            "recompile_reason": event.recompile_reason,
            "failed": event.fail_reason,
        }
        for event in get_compilation_metrics()
    ]


def shut_down_workers() -> None:
    """Ends Inductor's pool of compile processes, each of which would keep a copy of torch in memory for ever."""
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()


def _seconds(microseconds: int | None) -> float:
    return round((microseconds or 0) / 1e6, 4)

"""The labelled facts that make a compiled artifact reusable; knows facts and digests, not stores, models or torch.

A key has two parts. The environment says where compiled code may run; the version says which graphs a model makes.
Each part is hashed by itself, so that a new model version can be told from a new machine. No fact holds a path, a
host, a user, a date or a process id: such a fact would turn every boot cold.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

FORMAT_VERSION = 1
"""Raised whenever old bundles may no longer be used; the first boot after that is cold."""

MAX_CONFIG_BYTES = 1 << 20
MAX_SAFETENSORS_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself
COMPILER_TIMEOUT_S = 20

_COMPILER = "c++ compiler"
_CPUINFO = Path("/proc/cpuinfo")
# What a compiler may emit under -march=native. Flags outside it (mitigations, virtualisation, power management) come
# and go with kernel updates and decide no instruction.
_X86_ISA = re.compile(
    r"(avx|sse|ssse3|pni$|fma|f16c$|bmi|abm$|popcnt$|movbe$|adx$|aes$|vaes$|v?pclmulqdq$|gfni$|sha|amx|mmx|3dnow"
    r"|cx16$|cmov$|lahf_lm$|xop$|tbm$)"
)
_ARM_NOT_ISA = frozenset({"cpuid", "ssbs", "ssbs2", "sb", "dit", "paca", "pacg", "bti", "evtstrm"})
_DIGEST = re.compile(r"[0-9a-f]{40,64}")


class KeyFactError(ValueError):
    """A fact is empty, is not text, or cannot be collected."""


@dataclass(frozen=True)
class Key:
    """Two sets of labelled facts.

    Attributes:
        environment: what makes compiled code unusable elsewhere.
        version: what decides the graphs.

    Raises:
        KeyFactError: a fact is empty or not text, so that two different machines could share a key.
    """

    environment: Mapping[str, str]
    version: Mapping[str, str]

    def __post_init__(self) -> None:
        for facts in (self.environment, self.version):
            for label, value in facts.items():
                _check_fact(label, value)

    @property
    def environment_digest(self) -> str:
        """sha256 hex over the environment facts."""
        return _digest(self.environment)

    @property
    def version_digest(self) -> str:
        """sha256 hex over the version facts."""
        return _digest(self.version)


def environment_facts(
    *, device: str, threads: int, visible_devices: str | None = None, compiler: str | None = None
) -> dict[str, str]:
    """Collects what decides whether code compiled elsewhere may run here, without importing torch.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        threads: CPU threads of a computation; Inductor compiles for that number.
        visible_devices: the value of CUDA_VISIBLE_DEVICES, if set.
        compiler: the value of CXX, if set.
    """
    torch = _torch_facts()
    facts = {
        "format": str(FORMAT_VERSION),
        "machine": platform.machine(),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "glibc": _glibc(),
        "torch": torch["__version__"],
        "torch git": torch["git_version"],
        "cuda runtime": torch["cuda"],
        "triton": installed("triton", "pytorch-triton"),
    }
    if device.startswith("cuda"):
        return facts | gpu_facts(device, visible_devices)
    return facts | {
        "device": device,
        "cpu vendor": cpu_vendor(),
        "cpu flags": cpu_flags(),
        "cpu threads": str(threads),
        _COMPILER: compiler_version(compiler),
    }


def model_version(model: Path) -> str:
    """Digests what decides the graphs of the model in a directory: configs, safetensors headers and code.

    Values of weights do not enter, so a fine-tune of the same architecture has the same version; no gigabytes are read.

    Raises:
        KeyFactError: a file is truncated or is not what its suffix says, or there is nothing to digest.
    """
    total = hashlib.sha256()
    found = False
    for path in _files(model):
        content = _identity(path)
        if content is not None:
            found = True
            name = path.relative_to(model).as_posix().encode()
            for part in (name, content):
                total.update(len(part).to_bytes(8, "big") + part)
    if not found:
        raise KeyFactError(
            f"The model directory {model.name!r} holds no *.json, *.safetensors or *.py file, so nothing in it can tell"
            " one model version from another. Check WARMSTART_MODEL, or name the version in WARMSTART_MODEL_VERSION."
        )
    return total.hexdigest()


def source_digest(paths: Sequence[Path]) -> str:
    """Digests the contents of source files, in the order of their names, wherever they lie."""
    total = hashlib.sha256()
    for _, content in sorted((path.name, path.read_bytes()) for path in paths):
        total.update(len(content).to_bytes(8, "big") + content)
    return total.hexdigest()


def difference(here: Mapping[str, str], there: Mapping[str, str], limit: int = 3) -> str:
    """Says in one line which facts differ: `dtype is "bf16" here, "fp32" there; ...and 2 more`."""
    labels = _differing(here, there)
    if not labels:
        return "the same"
    told = [_describe(label, here.get(label), there.get(label)) for label in labels[:limit]]
    if len(labels) > limit:
        told.append(f"...and {len(labels) - limit} more")
    return "; ".join(told)


def nearest(here: Key, others: Iterable[Key]) -> tuple[Key, str] | None:
    """Finds the key with the fewest differing facts, environment facts first, and says what differs."""
    return next(iter(ranked(here, others)), None)


def ranked(here: Key, others: Iterable[Key]) -> list[tuple[Key, str]]:
    """Orders keys by how many facts differ, environment facts first, and says of each what differs."""
    return [(other, _differences(here, other)) for other in sorted(others, key=lambda other: _distance(here, other))]


def _differences(here: Key, other: Key) -> str:
    parts = [
        f"{name}: {difference(ours, theirs)}"
        for name, ours, theirs in (
            ("environment", here.environment, other.environment),
            ("version", here.version, other.version),
        )
        if _differing(ours, theirs)
    ]
    return ". ".join(parts) or "the same"


def cpu_vendor(cpuinfo: Path = _CPUINFO) -> str:
    """Names the processor's maker as x86 processors do themselves; "unknown" of others. See `warmstart.matmul`."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^vendor_id\s*:[ \t]*(\S+)", cpuinfo.read_text(errors="replace"), re.MULTILINE):
            return found[1]
    return "unknown"


def cpu_flags(cpuinfo: Path = _CPUINFO) -> str:
    """Names the instruction sets of the first processor, sorted; kernels are built with -march=native."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError as error:
        return f"unknown: {error.strerror}"
    if found := re.search(r"^flags\s*:(.*)$", text, re.MULTILINE):
        flags = {flag for flag in found[1].split() if _X86_ISA.match(flag)}
    elif found := re.search(r"^Features\s*:(.*)$", text, re.MULTILINE):
        flags = set(found[1].split()) - _ARM_NOT_ISA
    else:
        return "unknown: no flags in cpuinfo"
    return " ".join(sorted(flags)) or "none"


def compiler_version(compiler: str | None = None) -> str:
    """Names the C++ compiler that torch would use and its version, "none" where there is none that answers."""
    return _ask_compiler(compiler, shutil.which(compiler or "g++"))[0]


def compiler_trouble(compiler: str | None = None) -> str:
    """Says why there is no C++ compiler and what to do, "" where there is one."""
    return _ask_compiler(compiler, shutil.which(compiler or "g++"))[1]


def lacks_compiler(environment: Mapping[str, str]) -> bool:
    """Whether these are facts of a machine that needs a C++ compiler and has none."""
    return environment.get(_COMPILER) == "none"


def differ_in_compiler(here: Mapping[str, str], there: Mapping[str, str]) -> bool:
    """Whether the C++ compiler is all that differs, so that what was compiled there runs here."""
    return _differing(here, there) == [_COMPILER]


@functools.lru_cache(maxsize=1)
def _ask_compiler(compiler: str | None, found: str | None) -> tuple[str, str]:
    """Asks as torch does (`cpp_compiler_search` in torch/_inductor/cpp_builder.py): CXX as one word, or g++.

    Asked once of the program that is `found` under that name: one that hangs is waited for once.
    """
    command = compiler or "g++"
    name = f"CXX is {command!r}, which" if compiler else "CXX is not set, and g++"
    remedy = "install g++, or set CXX to a compiler that is there"
    try:
        ran = subprocess.run(
            [command, "--version"], capture_output=True, text=True, errors="replace", timeout=COMPILER_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return "none", f"there is no C++ compiler: {name} did not tell its version in {COMPILER_TIMEOUT_S} s; {remedy}"
    except (OSError, ValueError) as error:
        why = "is not on PATH" if "/" not in command else "cannot be run"
        if compiler and len(command.split()) > 1:
            why = "is more than the name of a program, and torch takes it for one; leave out its options"
        detail = f" ({error.strerror})" if isinstance(error, OSError) and why == "cannot be run" else ""
        return "none", f"there is no C++ compiler: {name} {why}{detail}; {remedy}"
    if ran.returncode or not ran.stdout.strip():
        return "none", f"there is no C++ compiler: {name} fails when asked for its version; {remedy}"
    # GCC prints the name it was called by, which is not a difference between compilers.
    return re.sub(r"^\S+ \(", "gcc (", ran.stdout.strip().splitlines()[0]), ""


def gpu_facts(device: str, visible_devices: str | None) -> dict[str, str]:
    """Describes the GPU by NVML, which needs no CUDA context; what cannot be known says so and why."""
    try:
        import pynvml
    except ImportError as error:
        return _unknown_gpu(f"nvidia-ml-py cannot be imported ({error})")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return _unknown_gpu(str(error))
    try:
        return _nvml_facts(pynvml, _nvml_handle(pynvml, device, visible_devices))
    except (pynvml.NVMLError, ValueError, IndexError) as error:
        return _unknown_gpu(str(error))
    finally:
        pynvml.nvmlShutdown()


def _check_fact(label: object, value: object) -> None:
    if not isinstance(label, str) or not label or "=" in label or "\n" in label:
        raise KeyFactError(
            f"A key fact has the label {label!r}, which cannot be told from another once it is hashed. Use non-empty"
            " text without '=' or line breaks."
        )
    if not isinstance(value, str) or not value.strip():
        raise KeyFactError(
            f"The key fact {label!r} is {value!r}. An empty fact lets different machines share compiled code. Give it"
            ' as non-empty text; write "none" where there is none.'
        )


def _digest(facts: Mapping[str, str]) -> str:
    lines = (f"{label}={value}" for label, value in sorted(facts.items()))
    # Escaped, so that no value can pretend to be two facts.
    escaped = (line.replace("\\", "\\\\").replace("\n", "\\n") for line in lines)
    return hashlib.sha256("".join(f"{line}\n" for line in escaped).encode("utf-8", "surrogatepass")).hexdigest()


def _torch_facts() -> dict[str, str]:
    """Reads torch/version.py as text; importing torch would cost seconds and fix Inductor's directory too early."""
    spec = importlib.util.find_spec("torch")
    places = list(spec.submodule_search_locations or []) if spec else []
    file = Path(places[0]) / "version.py" if places else Path("torch/version.py")
    try:
        tree = ast.parse(file.read_text())
    except (OSError, SyntaxError) as error:
        raise KeyFactError(
            f"torch/version.py cannot be read ({type(error).__name__}), so compiled code cannot be tied to a torch"
            " version. Install torch as requirements.txt pins it."
        ) from error
    values = dict.fromkeys(("__version__", "git_version", "cuda"), "none")
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id in values and isinstance(value, ast.Constant) and value.value:
            values[target.id] = str(value.value)
    return values


def installed(*names: str) -> str:
    """The version of the first of these packages that is installed, "none" where none is."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


def _glibc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "unknown: no name"
    except (ValueError, OSError):
        return "unknown: not glibc"


_GPU_LABELS = ("device", "device capability", "device driver", "device cores", "device mig")


def _unknown_gpu(reason: str) -> dict[str, str]:
    return dict.fromkeys(_GPU_LABELS, f"unknown: {reason}")


def _nvml_handle(pynvml: Any, device: str, visible_devices: str | None) -> Any:
    """Finds the device that CUDA numbers N: the Nth of CUDA_VISIBLE_DEVICES, or the machine's Nth."""
    index = int(device.partition(":")[2] or 0)
    names = [name.strip() for name in (visible_devices or "").split(",") if name.strip()]
    name = names[index] if names else str(index)
    if not name.isdigit():
        return pynvml.nvmlDeviceGetHandleByUUID(name)
    handle = pynvml.nvmlDeviceGetHandleByIndex(int(name))
    # With MIG on, CUDA cannot use the whole GPU and takes its first slice.
    if _nvml_or(pynvml, lambda: pynvml.nvmlDeviceGetMigMode(handle)[0], 0):
        return pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0)
    return handle


def _nvml_facts(pynvml: Any, handle: Any) -> dict[str, str]:
    sliced = bool(_nvml_or(pynvml, lambda: pynvml.nvmlDeviceIsMigDeviceHandle(handle), False))
    whole = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if sliced else handle
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(whole)
    cores = _nvml_or(pynvml, lambda: str(pynvml.nvmlDeviceGetNumGpuCores(whole)), "unknown: not reported")
    return {
        "device": _text(pynvml.nvmlDeviceGetName(whole)),
        "device capability": f"{major}.{minor}",
        "device driver": _text(pynvml.nvmlSystemGetDriverVersion()),
        "device cores": cores,
        "device mig": _mig(pynvml, handle) if sliced else "no",
    }


def _mig(pynvml: Any, handle: Any) -> str:
    got = pynvml.nvmlDeviceGetAttributes(handle)
    return f"{got.multiprocessorCount} multiprocessors, {got.memorySizeMB} MB"


def _nvml_or(pynvml: Any, ask: Any, default: Any) -> Any:
    """Asks what not every device or driver can answer."""
    try:
        return ask()
    except pynvml.NVMLError:
        return default


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _files(model: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(model):
        # Dot directories hold downloaders' book-keeping, with dates in it.
        names[:] = sorted(name for name in names if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def _identity(path: Path) -> bytes | None:
    if path.suffix == ".safetensors":
        return _safetensors_layout(path)
    if path.suffix == ".py":
        return path.read_bytes()
    # Larger JSON files are vocabularies; they change words, not graphs.
    if path.suffix == ".json" and path.stat().st_size <= MAX_CONFIG_BYTES:
        return _canonical_json(path)
    return None


def _canonical_json(path: Path) -> bytes:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise KeyFactError(
            f"{path.name} is not JSON ({error}), so the model's version cannot be told. Fetch the model again."
        ) from error
    if isinstance(value, dict):
        value.pop("_name_or_path", None)  # where somebody once loaded it from: a path
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _safetensors_layout(path: Path) -> bytes:
    """Names, dtypes and shapes; not offsets, which follow from them, nor free-form metadata."""
    header, data_bytes = _safetensors_header(path)
    try:
        tensors = {name: value for name, value in header.items() if name != "__metadata__"}
        layout = {name: [tensor["dtype"], tensor["shape"]] for name, tensor in tensors.items()}
        needed_bytes = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        short = needed_bytes > data_bytes
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise _truncated(path, f"its header lacks a dtype, shape or offset ({error})") from error
    if short:
        raise _truncated(path, f"it holds {data_bytes} bytes of tensors where its header promises {needed_bytes}")
    return json.dumps(layout, sort_keys=True, separators=(",", ":")).encode()


def _safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length_bytes = int.from_bytes(start, "little")
        if len(start) < 8 or length_bytes > size_bytes - 8 or length_bytes > MAX_SAFETENSORS_HEADER_BYTES:
            pointer = ", which is how a Git LFS pointer looks" if start == b"version " else ""
            raise _truncated(path, f"it has {size_bytes} bytes and promises a header of {length_bytes}{pointer}")
        raw = file.read(length_bytes)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _truncated(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _truncated(path, "its header is not a JSON object")
    return header, size_bytes - 8 - length_bytes


def _truncated(path: Path, what: str) -> KeyFactError:
    return KeyFactError(
        f"{path.name} is not a whole safetensors file: {what}. The model's version cannot be told, and the model would"
        " not load. Fetch the file again."
    )


def _differing(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    return [label for label in sorted({*here, *there}) if here.get(label) != there.get(label)]


def _distance(here: Key, other: Key) -> tuple[int, int, str, str]:
    environment = len(_differing(here.environment, other.environment))
    version = len(_differing(here.version, other.version))
    return environment + version, environment, other.environment_digest, other.version_digest


def _describe(label: str, here: str | None, there: str | None) -> str:
    if here is None:
        return f"{label} is absent here, {_shown(there or '')} there"
    if there is None:
        return f"{label} is {_shown(here)} here, absent there"
    ours, theirs = here.split(), there.split()
    if min(len(ours), len(theirs)) > 3 and len({*ours} & {*theirs}) > 1 and ours == sorted(ours):
        return _describe_flags(label, ours, theirs)
    short_here, short_there = _shortened(here, there)
    return f"{label} is {_shown(short_here)} here, {_shown(short_there)} there"


def _describe_flags(label: str, here: Sequence[str], there: Sequence[str]) -> str:
    missing = [flag for flag in there if flag not in set(here)]
    extra = [flag for flag in here if flag not in set(there)]
    told = [f"{word} {_listed(flags)}" for word, flags in (("lacks", missing), ("adds", extra)) if flags]
    return f"{label} here {' and '.join(told) or 'are ordered otherwise'}"


def _listed(flags: Sequence[str], limit: int = 6) -> str:
    rest = f" and {len(flags) - limit} more" if len(flags) > limit else ""
    return " ".join(flags[:limit]) + rest


def _shortened(here: str, there: str, width: int = 60) -> tuple[str, str]:
    """Cuts two long values to where they differ."""
    if _DIGEST.fullmatch(here) and _DIGEST.fullmatch(there):
        return here[:12], there[:12]
    if max(len(here), len(there)) <= width:
        return here, there
    same = next((at for at, (ours, theirs) in enumerate(zip(here, there, strict=False)) if ours != theirs), 0)
    common = max(0, same - 12)
    lead = "..." if common else ""
    return lead + here[common:], lead + there[common:]


def _shown(value: str, width: int = 60) -> str:
    return json.dumps(value if len(value) <= width else value[:width] + "...", ensure_ascii=False)

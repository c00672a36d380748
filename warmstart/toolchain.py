"""The C++ compiler as torch asks for it: notes its answers, goes on from the notes without one, says what is wrong.

Knows torch's builder of C++ code, not keys, caches or models. Torch imports happen inside functions, as in `inductor`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sysconfig
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmstart import notes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOTES = "toolchain"
"""Kind of these notes."""

BUILD_TIMEOUT_S = 600.0
"""One run of the compiler; as long as Inductor waits for its own lock on what is being built."""

# As little as torch 2.13 asks of a compiler by its version: flags of aarch64 before GCC 13.
_GCC_MAJOR = 13
_HEADER = re.compile(r"fatal error: ['\"]?([\w./+-]+)['\"]?(?:: No such file| file not found)")
_LIBRARY = re.compile(r"(?:cannot find|unable to find library) -l([\w+.-]+)")
_REMEDIES = {
    "Python.h": "install Python's headers (python3-dev)",
    "omp.h": "install OpenMP's headers (they come with g++; libomp-dev for clang)",
    "gomp": "install libgomp (it comes with g++)",
}


class BuildError(RuntimeError):
    """Something would have to be built, and cannot be; the text says why."""


@dataclass(frozen=True)
class Compiler:
    """What torch asks of a C++ compiler other than to compile; it decides the names of all that is built.

    Attributes:
        name: CXX as torch took it. It is in Inductor's key of each graph and in each command line.
        info: what `get_compiler_version_info` says; in the name of the processor's test.
        intel: whether it is Intel's.
        old_gcc: whether it is a GCC before 13.
    """

    name: str
    info: str
    intel: bool
    old_gcc: bool


_noted: Compiler | None = None
_hung = ""


def note(live: Path) -> None:
    """Notes in a live directory what torch was told by the compiler here, if it is not noted there yet.

    Torch keeps most of these answers from the compile before.

    Raises:
        OSError: the directory cannot be written.
    """
    from torch._inductor import cpp_builder

    name = cpp_builder.get_cpp_compiler()
    here = Compiler(
        name,
        cpp_builder.get_compiler_version_info(name),
        cpp_builder._is_intel_compiler(name),
        cpp_builder._is_gcc_version_less_than(name, _GCC_MAJOR),
    )
    notes.add(live, NOTES, json.dumps(asdict(here), sort_keys=True))


def stand_in(live: Path) -> bool:
    """Has torch take the noted answers for the compiler's own, and refuse every build; False if there is no note.

    What the live directory holds is then found under the names it was built by. In 2.13 torch asks for the compiler
    and preprocesses a header with it also where nothing is built (`CppCodeCache.load_async`); to be taken out when it
    asks only for what it builds.
    """
    global _noted
    found = sorted(filter(None, map(_read, notes.read(live, NOTES))), key=lambda item: item.name)
    if not found:
        return False
    compiler = _noted = found[0]

    from torch._inductor import codecache, cpp_builder

    def refuse(command: str, cwd: str) -> None:
        raise BuildError(f"{Path(shlex.split(command)[1]).name} is not in the cache and would have to be built")

    told: dict[str, Callable[..., Any]] = {
        "cpp_compiler_search": lambda search: compiler.name,
        "get_compiler_version_info": lambda name: compiler.info,
        "_is_intel_compiler": lambda name: compiler.intel,
        "_is_gcc_version_less_than": lambda name, major: compiler.old_gcc,
        "_run_compile_cmd": refuse,
        # A header's path is in the command that builds, which is refused, and in no name.
        "_precompile_header": lambda header, *_, **__: header,
    }
    for name, function in told.items():
        for module in (cpp_builder, codecache):
            if hasattr(module, name):
                setattr(module, name, function)
    return True


@contextlib.contextmanager
def as_noted() -> Iterator[None]:
    """Gives Inductor the noted compiler's name, which is in its key of each graph; nothing where none stands in.

    Entered in each thread: Inductor's configuration is a context variable.
    """
    if _noted is None:
        yield
        return
    import torch._inductor.config as config

    with config.patch({"cpp.cxx": (None, _noted.name)}):
        yield


def bound_builds() -> None:
    """Ends a compiler that hangs after `BUILD_TIMEOUT_S`; torch 2.13 waits for ever (`_run_compile_cmd`)."""
    from torch._inductor import cpp_builder

    vars(cpp_builder)["_run_compile_cmd"] = _build


def works() -> bool:
    """Whether the compiler builds a library as small as can be of what torch's have in common: Python and OpenMP.

    A failed compile does not tell: a graph whose kernels are for vector units fails where a damaged test of the
    processor has said that there are none.
    """
    from torch._inductor import cpp_builder

    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            source, library = Path(folder, "small.cpp"), Path(folder, "small.so")
            source.write_text("#include <Python.h>\n#include <omp.h>\nint f() { return omp_get_max_threads(); }\n")
            flags = ["-shared", "-fPIC", "-fopenmp", f"-I{sysconfig.get_path('include')}"]
            command = [cpp_builder.get_cpp_compiler(), *flags, str(source), "-o", str(library)]
            _build(shlex.join(command), folder)
            return library.is_file()
    # The boundary: whatever it is, a full disk say, nothing can be built.
    except Exception:  # noqa: BLE001
        return False


def trouble(error: BaseException) -> str:
    """Says for people what an error of a compile tells about the toolchain, "" if it tells nothing about it."""
    text = str(error)
    if found := re.search(rf"{BuildError.__name__}: (.*)", text):
        return found[1].strip()
    if isinstance(error, BuildError):
        return text
    if "InvalidCxxCompiler" in text:
        return "torch finds no C++ compiler; install g++, or set CXX to one that is there"
    if "'openssl'" in text and "FileNotFoundError" in text:
        return "openssl is not on PATH, and torch hashes a header with it before it compiles; install openssl"
    if "C++ compile error" in text:
        return _said(text.partition("Output:")[2].partition("Set TORCHDYNAMO_VERBOSE")[0])
    return ""


def _said(output: str) -> str:
    for pattern, kind in ((_HEADER, "the header"), (_LIBRARY, "the library")):
        if found := pattern.search(output):
            name = found[1]
            remedy = _REMEDIES.get(name.rpartition("/")[2], "install the package that has it")
            return f"the C++ compiler does not find {kind} {name}, so nothing can be compiled; {remedy}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    words = next((line for line in lines if "error" in line), lines[0] if lines else "it says nothing")
    return f"the C++ compiler fails ({words[:200]}); correct or unset CXX, or install g++ anew"


def _read(note: str) -> Compiler | None:
    try:
        compiler = Compiler(**json.loads(note))
    except (ValueError, TypeError, RecursionError):
        return None
    kinds = {"name": str, "info": str, "intel": bool, "old_gcc": bool}
    return compiler if all(type(getattr(compiler, name)) is kind for name, kind in kinds.items()) else None


def _build(command_line: str, cwd: str) -> None:
    """What torch's own does, within a time, and with all the processes that a compiler starts."""
    global _hung
    from torch._inductor.exc import CppCompileError

    # Once is enough: each kernel would wait as long.
    if _hung:
        raise BuildError(_hung)
    command = shlex.split(command_line)
    with subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
    ) as process:
        try:
            output, _ = process.communicate(timeout=BUILD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            _hung = (
                f"the C++ compiler {command[0]} did not end within {BUILD_TIMEOUT_S:g} s; correct or unset CXX, or"
                " give the machine more memory"
            )
            raise BuildError(_hung) from None
    if process.returncode:
        raise CppCompileError(command, output.decode(errors="replace"))

"""Puts a script inside the project's own `.venv`, made on first use; knows pip and files, nothing of the project.

A script begins with

    import _venv

    _venv.ensure()

and may import anything of requirements-local.txt below that. Only the standard library is imported here, and the
syntax is kept to what older Pythons parse, so that a wrong version is told in a sentence and not by a traceback.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ((3, 11), (3, 12), (3, 13))
STAMP = "warmstart-stamp"  # what is installed; written last
UNFINISHED = "warmstart-unfinished"  # there while pip writes
AS_IS = "_WARMSTART_PYTHON_AS_IS"  # set to run in this Python, whatever it has installed; see scripts/gpu_check
ENTERED = "_WARMSTART_VENV_ENTERED"  # set across the one exec, so that it cannot repeat for ever
UNPACKING = "Installing collected packages"  # pip's words when it begins to write packages
LARGE_MB = 20
SIZE = "With torch that is 2 GB on disk (7 GB with CUDA) and takes 2 to 10 minutes."


def ensure(dev: bool = False, root: Path = ROOT) -> None:
    """Return inside a Python that has the project's requirements, or replace this process by one that does.

    Args:
        dev: the tools of requirements-dev.txt are needed too.
        root: the project; its `.venv` is used.
    """
    if sys.path[:1] != [str(root)]:
        sys.path.insert(0, str(root))
    if os.environ.get(AS_IS):
        return
    entered = os.environ.pop(ENTERED, None)  # popped, so that no child process inherits it
    venv = root / ".venv"
    wanted = with_included(root / ("requirements-dev.txt" if dev else "requirements-local.txt"))
    inside = Path(sys.prefix).resolve() == venv.resolve()
    if is_stamped(venv, wanted) if inside else satisfied(wanted):
        return
    if entered:
        _fail(f"{venv} was prepared, but {sys.executable} does not run inside it. Delete {venv} and run this again.")
    try:
        _prepare(venv, wanted, inside)
    except KeyboardInterrupt:
        _say("Stopped. The next run takes it up again.")
        raise SystemExit(130) from None
    except OSError as error:
        _fail(f"{venv} could not be prepared: {error}. The scripts install what they need there. Make {root} writable.")
    python = str(_python_of(venv))
    sys.stdout.flush()
    os.environ[ENTERED] = "1"
    os.execv(python, [python, *sys.argv])  # noqa: S606 - a command without a shell is what is wanted


def with_included(file: Path) -> list[Path]:
    """Return a requirements file and those that it includes by `-r`, the outermost first."""
    files = [file]
    for line in file.read_text().splitlines():
        if line.startswith("-r "):
            files += with_included(file.parent / line[3:].strip())
    return files


def satisfied(wanted: list[Path]) -> bool:
    """Tell whether the running Python already has every exact pin, as in the image or in a venv of one's own."""
    if sys.version_info[:2] not in VERSIONS:
        return False
    for file in wanted:
        for line in file.read_text().splitlines():
            requirement = line.split(" #")[0].strip()
            if requirement and not requirement.startswith(("#", "-r ")) and not _has(requirement):
                return False
    return True


def _has(requirement: str) -> bool:
    """Answer for `name==version` and `name[extra]==version`; anything richer is left to pip, so False."""
    match = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;,*]+)", requirement)
    if match is None:
        return False
    try:
        installed = importlib.metadata.version(match[1])
    except importlib.metadata.PackageNotFoundError:
        return False
    # A pin without a local part is met by any build of that version, 2.13.0 by 2.13.0+cpu, as in pip.
    return match[2] == (installed if "+" in match[2] else installed.split("+")[0])


def is_stamped(venv: Path, wanted: list[Path]) -> bool:
    """Tell whether `venv` was completely installed from these very requirement files."""
    try:
        have = (venv / STAMP).read_text().splitlines()
    except OSError:
        return False
    return all(line in have for line in _stamp(wanted))


def _stamp(wanted: list[Path]) -> list[str]:
    return [f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in wanted]


def _prepare(venv: Path, wanted: list[Path], inside: bool) -> None:
    """Make and fill `venv`, one process at a time."""
    with _locked(venv.parent) as lock:
        if is_stamped(venv, wanted) and _runs(_python_of(venv), "pass"):
            return  # another script made it while we waited
        if not inside:
            _create(venv)
        _install(venv, wanted, lock)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """Hold a lock on the directory itself, which leaves no file behind and ends with its holders."""
    descriptor = os.open(str(directory), os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("Another script is preparing .venv. Waiting for it.")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _create(venv: Path) -> None:
    """Make `venv` unless a usable one is there; one that cannot run at all is made anew."""
    python = _python_of(venv)
    if _runs(python, _version_check()):
        return
    if _runs(python, "pass"):
        _fail(f"{venv} was made by a Python other than {_names()}, which the pinned packages need. Delete {venv}.")
    base = find_python()
    if not _runs(base, "import venv, ensurepip"):
        _fail(
            f"{base} comes without venv or ensurepip, so {venv} cannot be made. "
            "Install them (on Debian and Ubuntu: apt install python3-venv) and run this again."
        )
    made = subprocess.run([base, "-m", "venv", "--clear", str(venv)], capture_output=True, text=True)
    if made.returncode:
        _fail(f"{base} could not make {venv}: {_tail(made.stdout + made.stderr)}. Free space or rights may be missing.")


def find_python() -> str:
    """Return this interpreter if its version will do, else the first on PATH that will."""
    candidates = [sys.executable] + [f"python{major}.{minor}" for major, minor in VERSIONS] + ["python3"]
    for candidate in candidates:
        path = shutil.which(candidate)
        if path and _runs(path, _version_check()):
            return path
    return _fail(
        f"Python {sys.version.split()[0]} runs this and no {_names()} is on PATH; the pinned packages "
        "need one of them. Install Python 3.11 and run this again."
    )


def _install(venv: Path, wanted: list[Path], lock: int) -> None:
    """Install with pip; the stamp comes last, so an interrupted installation is seen and repaired."""
    python, unfinished, stamp = str(_python_of(venv)), venv / UNFINISHED, venv / STAMP
    if not _runs(python, "import pip"):
        subprocess.run([python, "-m", "ensurepip", "--upgrade"], capture_output=True, check=False)
    command = [python, "-m", "pip", "install", "--progress-bar=off"]
    if unfinished.exists():
        # A killed pip leaves packages that look installed and lack files.
        _say("The last installation was interrupted. Installing everything again.")
        command.append("--force-reinstall")
    stamp.unlink(missing_ok=True)
    unfinished.touch()
    _say(f"Installing {wanted[0].name} into .venv, once. {SIZE}")
    failure = _run_pip([*command, "-r", str(wanted[0])], lock)
    if failure:
        if UNPACKING not in failure:
            unfinished.unlink()  # it failed before it touched a package
        _fail(
            f"pip could not install {wanted[0].name}:\n{_tail(failure, 12)}\n"
            "See to what it says (often the network or a full disk) and run this again; it goes on from there."
        )
    temporary = stamp.with_suffix(".tmp")
    temporary.write_text("\n".join(_stamp(wanted)) + "\n")
    temporary.replace(stamp)
    unfinished.unlink()


def _run_pip(command: list[str], lock: int) -> str:
    """Run pip, showing a line for each large download and for each phase; return its output if it failed, else "".

    pip inherits the lock: should this process be killed, an orphaned pip keeps the next script out till it ends.
    """
    started = time.monotonic()
    pip = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", pass_fds=(lock,)
    )
    lines: list[str] = []
    assert pip.stdout is not None
    for line in pip.stdout:
        lines.append(line.rstrip())
        progress = _progress(line.strip())
        if progress:
            _say(f"  {progress} ({time.monotonic() - started:.0f} s)")
    if pip.wait():
        return "\n".join(lines) or f"(it said nothing and ended with {pip.returncode})"
    _say(f"  done ({time.monotonic() - started:.0f} s)")
    return ""


def _progress(line: str) -> str | None:
    """Return what a person wants to hear of a line of pip's, if anything."""
    download = re.match(r"Downloading (?:\S*/)?([^\s/-]+)-\S+ \(([\d.]+) ?([MG])i?B\)", line)
    if download:
        megabytes = float(download[2]) * (1000 if download[3] == "G" else 1)
        return f"downloading {download[1]}, {megabytes:.0f} MB" if megabytes >= LARGE_MB else None
    if line.startswith(UNPACKING):
        return f"unpacking {line.count(',') + 1} packages"
    return None


def _runs(python: str | Path, code: str) -> bool:
    """Tell whether this interpreter exists and runs `code` without error. Wrappers that only exist fail here."""
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _version_check() -> str:
    return f"import sys; sys.exit(sys.version_info[:2] not in {VERSIONS!r})"


def _names() -> str:
    names = [f"{major}.{minor}" for major, minor in VERSIONS]
    return "Python " + ", ".join(names[:-1]) + " or " + names[-1]


def _python_of(venv: Path) -> Path:
    return venv / "bin" / "python"


def _tail(text: str, lines: int = 3) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _fail(message: str) -> NoReturn:
    _say(message)
    raise SystemExit(1)

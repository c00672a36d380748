"""The environment that scripts make for themselves: made once, by one, repaired when a making was cut short."""

import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

SCRIPT = """\
#!/usr/bin/env python3
from _venv import ensure

ensure()
import sys
import {package}

print(sys.prefix, {package}.VERSION, sys.path[0], sys.argv[1:])
"""


def wheel(directory: Path, name: str, version: str) -> None:
    """Make a package that pip can install without a network."""
    directory.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a script and one requirement, which pip finds in a directory."""
    root = tmp_path / "project"
    (root / "scripts").mkdir(parents=True)
    source = Path(__file__).resolve().parents[2] / "scripts" / "_venv.py"
    (root / "scripts" / "_venv.py").write_text(source.read_text())
    script = root / "scripts" / "hello"
    script.write_text(SCRIPT.format(package="dawn"))
    script.chmod(0o755)
    wheel(root / "wheels", "dawn", "1.0")
    wheel(root / "wheels", "dawn", "2.0")
    (root / "requirements.txt").write_text("# the image\ndawn==1.0\n")
    (root / "requirements-local.txt").write_text("-r requirements.txt\n")
    return root


def start(project: Path, *arguments: str, python: str = sys.executable, **environment: str) -> subprocess.Popen[str]:
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(project / "wheels"), "PIP_EXTRA_INDEX_URL": ""}
    return subprocess.Popen(
        [python, "scripts/hello", *arguments],
        cwd=project,
        env={**os.environ, **pip, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(project: Path, *arguments: str, **more: str) -> tuple[int, str, str]:
    process = start(project, *arguments, **more)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def test_a_bare_machine_gets_an_environment_and_a_second_run_finds_it(project: Path) -> None:
    status, out, err = run(project, "a", "b c")
    assert (status, out) == (0, f"{project}/.venv 1.0 {project} ['a', 'b c']\n"), err
    assert "Installing requirements-local.txt into .venv, once." in err
    assert "Processing" not in err, "pip is silent unless it fails"
    made = (project / ".venv" / "warmstart-stamp").stat().st_mtime_ns
    status, out, err = run(project)
    assert (status, err) == (0, "")
    assert out == f"{project}/.venv 1.0 {project} []\n"
    assert (project / ".venv" / "warmstart-stamp").stat().st_mtime_ns == made


@pytest.mark.slow
def test_a_changed_pin_is_installed(project: Path) -> None:
    assert run(project)[1].split()[1] == "1.0"
    (project / "requirements.txt").write_text("dawn==2.0\n")
    status, out, err = run(project)
    assert (status, out.split()[1]) == (0, "2.0")
    assert "interrupted" not in err


def test_two_scripts_started_at_once_make_one_environment(project: Path) -> None:
    first, second = start(project), start(project)
    results = [process.communicate(timeout=300) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], results
    said = [err for _, err in results]
    assert sum("Installing" in err for err in said) == 1, said
    assert all(out.startswith(f"{project}/.venv 1.0") for out, _ in results)


@pytest.mark.slow
def test_an_interrupted_installation_is_repaired(project: Path) -> None:
    """A killed pip leaves a package that looks installed and lacks its files; here one that pip would keep."""
    assert run(project)[0] == 0
    venv = project / ".venv"
    module = next(venv.glob("lib/python*/site-packages/dawn.py"))
    module.unlink()
    (venv / "warmstart-stamp").unlink()
    (venv / "warmstart-unfinished").touch()
    status, out, err = run(project)
    assert (status, out.split()[1]) == (0, "1.0"), err
    assert "The last installation was interrupted. Installing everything again." in err
    assert not (venv / "warmstart-unfinished").exists()


@pytest.mark.slow
def test_an_environment_killed_while_it_was_made_is_made_again(project: Path) -> None:
    process = start(project)
    deadline = time.monotonic() + 120
    while not (project / ".venv" / "bin").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert not (project / ".venv" / "warmstart-stamp").exists()
    status, out, err = run(project)
    assert (status, out.split()[1]) == (0, "1.0"), err


@pytest.mark.slow
def test_what_pip_says_is_shown_when_it_fails(project: Path) -> None:
    (project / "requirements.txt").write_text("dawn==9.0\n")
    status, out, err = run(project)
    assert (status, out) == (1, "")
    assert "pip could not install requirements-local.txt:" in err
    assert "dawn==9.0" in err
    assert "run this again" in err
    (project / "requirements.txt").write_text("dawn==1.0\n")
    status, _, err = run(project)
    assert status == 0
    assert "interrupted" not in err, "nothing had been installed, so nothing needs repair"


@pytest.mark.slow
def test_an_environment_of_the_users_own_is_left_alone(project: Path) -> None:
    """A Python that has every pin, in the image or in another venv, is used as it is."""
    site = project / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--find-links", project / "wheels",
         "--target", site, "dawn==1.0"],
        check=True, capture_output=True,
    )  # fmt: skip
    status, out, err = run(project, PYTHONPATH=str(site))
    assert (status, err) == (0, "")
    assert out.split()[:2] == [sys.prefix, "1.0"]
    assert not (project / ".venv").exists()
    (project / "requirements.txt").write_text("dawn==2.0\n")
    assert run(project, PYTHONPATH=str(site))[1].split()[0] == f"{project}/.venv", "but only with the very versions"


def test_a_venv_of_another_python_version_is_not_used(project: Path) -> None:
    python = project / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # Stands for a Python 3.9: it runs, and refuses the version check.
    python.write_text('#!/bin/sh\ncase "$2" in *version_info*) exit 1;; *) exit 0;; esac\n')
    python.chmod(0o755)
    status, _, err = run(project)
    assert status == 1
    assert f"Delete {project}/.venv." in err
    assert python.exists(), "nothing of the user's is deleted"


def test_a_python_without_ensurepip_is_named_with_the_remedy(project: Path) -> None:
    (project / "ensurepip.py").write_text("raise ImportError('not on Debian without python3-venv')\n")
    status, _, err = run(project, PYTHONPATH=str(project))
    assert status == 1
    assert "apt install python3-venv" in err


def test_a_wrong_version_finds_another_on_path_or_says_so(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import _venv

    tools = project / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(_venv, "VERSIONS", ((3, 99),))
    with pytest.raises(SystemExit):
        _venv.find_python()
    other = tools / "python3.99"
    other.write_text("#!/bin/sh\nexit 0\n")
    other.chmod(0o755)
    assert _venv.find_python() == str(other)


def test_a_wrapper_that_cannot_run_is_passed_over(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version managers put a python3.12 on PATH that only says it is not installed."""
    import _venv

    broken, working = project / "a" / "python3.99", project / "b" / "python3"
    for path, status in ((broken, 127), (working, 0)):
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\nexit {status}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:{working.parent}")
    monkeypatch.setattr(_venv, "VERSIONS", ((3, 99),))
    assert _venv.find_python() == str(working)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (888.1 MB)", "downloading torch, 888 MB"),
        (
            "Downloading https://x/y/nvidia_cudnn_cu13-9.1-py3-none-any.whl (1.2 GB)",
            "downloading nvidia_cudnn_cu13, 1200 MB",
        ),
        ("Downloading pillow-13.0.0-cp311-cp311-manylinux_2_28_x86_64.whl (6.6 MB)", None),
        ("Installing collected packages: a, b, c", "unpacking 3 packages"),
        ("Requirement already satisfied: torch", None),
    ],
)
def test_progress_is_the_large_downloads_and_the_unpacking(line: str, said: str | None) -> None:
    import _venv

    assert _venv._progress(line) == said

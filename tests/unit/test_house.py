"""Small guards over the whole repository, each with its reason. They read files; nothing here runs the model."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
from loading import load_command
from project_tree import ROOT, commands, project_files, text_files

MAX_FUNCTION_LINES = 45

# A path below somebody's home or workplace works on one machine only. Paths of the container are meant.
MACHINE_PATH = re.compile(r"(?<![\w.$}>-])/(home|Users|root|mnt|media|work|workspace|farm)/[\w.]")
ALLOWED_PATHS = re.compile(r"/root/\.cache\b")
RELEASE = re.compile(r"^## (\d+)\.(\d+)\.(\d+)(?: - (\d{4}-\d{2}-\d{2}|unreleased))?$", re.MULTILINE)
LINK = re.compile(r"(?<!`)\[[^\]\n]*\]\(([^)\s]+)\)")


def python_files() -> list[Path]:
    return [*(ROOT / name for name in project_files() if name.endswith(".py")), *commands()]


# --- Any machine will do ---------------------------------------------------------------------------------------------


def machine_paths(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if MACHINE_PATH.search(ALLOWED_PATHS.sub("", line))]


def test_no_file_names_a_path_of_one_machine() -> None:
    found = {name: lines for name, text in text_files() if (lines := machine_paths(text))}
    assert found == {}


@pytest.mark.parametrize("place", ["home/ada", "Users/ada", "work/main", "root/project"])
def test_a_machine_path_is_recognised(place: str) -> None:
    assert machine_paths(f'MODEL = "/{place}/weights"')
    assert not machine_paths(f"see docs/{place}")


def test_no_work_is_left_for_later() -> None:
    """A mark in the code is read by nobody. What is left to do belongs where people look for it."""
    mark = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
    found = [f"{name}: {line}" for name, text in text_files() for line in text.splitlines() if mark.search(line)]
    assert found == []


# --- Commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", commands(), ids=lambda path: path.name)
def test_a_command_can_be_run_and_explains_itself(path: Path) -> None:
    name = path.name
    assert os.access(path, os.X_OK), f"chmod +x scripts/{name}"
    assert path.read_text().startswith("#!/usr/bin/env python3\n")
    done = subprocess.run([sys.executable, path, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"scripts/{name}" in done.stdout, "the help shows how to call it"


def test_git_will_keep_commands_executable() -> None:
    modes = {
        line.split("\t")[1]: line.split()[0]
        for line in git("ls-files", "--stage", "scripts", ".ci").splitlines()
        if "." not in Path(line.split("\t")[1]).name
    }
    assert {name: mode for name, mode in modes.items() if mode != "100755"} == {}


def git(*arguments: str) -> str:
    command = ["git", "-c", "safe.directory=*", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout


def test_ruff_sees_every_command() -> None:
    """Ruff finds Python by its suffix, and commands have none."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert {f"scripts/{path.name}" for path in commands()} <= set(settings["extend-include"])


# --- scripts/test itself ---------------------------------------------------------------------------------------------


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """`scripts/test` as a module, without entering another environment."""
    environment = types.ModuleType("_venv")
    environment.ensure = lambda dev: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "_venv", environment)
    module = load_command("test")
    monkeypatch.setitem(sys.modules, "scripts_test", module)
    return module


def step(runner: types.ModuleType, name: str, status: int) -> object:
    return runner.Step(name, (sys.executable, "-c", f"print('{name} says so'); raise SystemExit({status})"))


def test_the_first_failure_decides_and_all_steps_run(
    runner: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "missing_tools", list)
    monkeypatch.setattr(runner, "linters", lambda: [step(runner, "a", 0), step(runner, "b", 3), step(runner, "c", 4)])
    monkeypatch.setattr(runner, "tests", lambda quick, rest: step(runner, "d", 1))
    assert runner.main([]) == 3
    lines = capfd.readouterr().out.split("\n")
    assert lines[0].startswith("a: ok")
    assert [line.split(",")[0] for line in lines if line.startswith(("b:", "c:"))] == [
        "b: FAILED (exit 3)",
        "c: FAILED (exit 4)",
    ]
    assert "b says so" in lines, "a failing linter's own words are shown"
    assert "a says so" not in lines, "a passing one's are not"
    assert lines[-2] == "d says so", "pytest's summary is the last line"


def test_pytest_arguments_leave_the_linters_out(
    runner: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "missing_tools", list)
    monkeypatch.setattr(runner, "linters", lambda: pytest.fail("linters ran"))
    seen = []
    monkeypatch.setattr(runner, "tests", lambda quick, rest: seen.append((quick, rest)) or step(runner, "d", 0))
    assert runner.main(["--quick", "tests/unit", "-k", "bundle", "-x"]) == 0
    assert seen == [(True, ["tests/unit", "-k", "bundle", "-x"])]
    assert "linters: left out" in capfd.readouterr().out


def test_quick_leaves_slow_tests_out(runner: types.ModuleType) -> None:
    assert runner.tests(True, []).command[3:5] == ("-m", "not slow")
    assert "-m" not in runner.tests(False, []).command[3:]


@pytest.mark.parametrize(("cores", "arguments", "two"), [(2, [], True), (1, [], False), (2, ["tests/unit"], False)])
def test_all_tests_run_two_files_at_a_time_where_there_are_cores(
    runner: types.ModuleType, monkeypatch: pytest.MonkeyPatch, cores: int, arguments: list[str], two: bool
) -> None:
    monkeypatch.setattr(runner.os, "sched_getaffinity", lambda _: set(range(cores)))
    assert (runner.tests(False, arguments).command[3:5] == ("-n", "2")) is two


def test_a_missing_tool_is_named_with_its_package(
    runner: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner.shutil, "which", lambda tool: None if tool == "unshare" else f"/usr/bin/{tool}")
    assert runner.main([]) == 2
    said = capfd.readouterr()
    assert said.err == (
        "The command unshare is not on PATH, and tests need it. Install it: apt-get install util-linux\n"
    )
    assert said.out == "", "nothing was run"


def test_ci_installs_what_scripts_test_asks_for(runner: types.ModuleType) -> None:
    listed = dict(re.findall(r"\[([\w+-]+)\]=([\w+-]+)", (ROOT / ".ci/run").read_text()))
    assert listed == runner.SYSTEM_TOOLS


# --- Documents -------------------------------------------------------------------------------------------------------


def test_the_changelog_is_newest_first_and_begins_with_this_version() -> None:
    releases = [tuple(map(int, match[:3])) for match in RELEASE.findall((ROOT / "CHANGELOG.md").read_text())]
    assert releases == sorted(set(releases), reverse=True)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert releases, "CHANGELOG.md has no heading like `## 0.1.0 - 2026-01-31`"
    assert ".".join(map(str, releases[0])) == version


def setting_names() -> set[str]:
    from warmstart.settings import PREFIX, public_fields

    return {PREFIX + field.name.upper() for field in public_fields()}


def test_settings_are_documented_one_by_one() -> None:
    """docs/settings.md has a row for each setting, and none for a setting that is gone."""
    rows = re.findall(r"^\|\s*`(WARMSTART_[A-Z_]+)`\s*\|", (ROOT / "docs/settings.md").read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == setting_names()


def test_only_settings_that_exist_are_named() -> None:
    """An error or a document that names a variable of yesterday sends its reader to a second error."""
    variable = re.compile(r"(?<![A-Z_])WARMSTART_(?!TEST_)[A-Z_]*[A-Z]\b")
    found = {
        f"{name}: {setting}"
        for name, text in text_files()
        if not name.startswith("tests/")
        for setting in variable.findall(text)
        if setting not in setting_names()
    }
    assert found == set()


def broken_links(name: str, text: str) -> list[str]:
    """Return the relative links of a document that lead nowhere, anchors within Markdown files included."""
    broken = []
    for target in LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path
        there = text if not path else file.read_text() if file.suffix == ".md" and file.exists() else None
        if not file.exists() or (anchor and there is not None and anchor not in anchors(there)):
            broken.append(f"{name}: {target}")
    return broken


def anchors(text: str) -> set[str]:
    """Return the anchors that headings make on GitHub."""
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_in_documents_lead_somewhere() -> None:
    assert [link for name, text in text_files() if name.endswith(".md") for link in broken_links(name, text)] == []


def test_a_broken_link_is_recognised() -> None:
    text = "[a](docs/nowhere.md) [b](LICENSE) [c](https://example.org/x) [d](#no-such-part) [e](#a-part)\n# A part\n"
    assert broken_links("README.md", text) == ["README.md: docs/nowhere.md", "README.md: #no-such-part"]


def test_paths_named_in_documents_exist() -> None:
    """A document that sends the reader to a file that was renamed costs more than none."""
    pattern = re.compile(r"`((?:scripts|warmstart|tests|docs|\.ci)/[\w./-]*\w)`")
    missing = {
        f"{name}: {path}"
        for name, text in text_files()
        if name.endswith(".md")
        for path in pattern.findall(text)
        if not (ROOT / path).exists()
    }
    assert missing == set()


# --- Code ------------------------------------------------------------------------------------------------------------


def test_functions_are_short() -> None:
    """A function that does not fit on a screen does more than one thing."""
    long = [
        f"{path.relative_to(ROOT)}: {node.name} has {lines} lines"
        for path in python_files()
        if "tests" not in path.relative_to(ROOT).parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_no_two_test_files_have_one_name() -> None:
    """Tests are no packages, so pytest imports them by their names and refuses the second of a name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_every_file_says_what_it_knows() -> None:
    """The first line of a file is the part that a reader with the wrong file open needs."""
    silent = [
        path.relative_to(ROOT).as_posix()
        for path in python_files()
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []

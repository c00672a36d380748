"""What docs/deploying.md and the workflows tell people to run exists, and is what these commands take."""

import ast
import re
import shlex
import subprocess
import sys
from functools import cache

import pytest
import yaml
from project_tree import ROOT, text_files

FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)

INLINE = re.compile(r"`(scripts/[a-z_]+ [^`]+)`")


def shown_commands() -> list[tuple[str, list[str]]]:
    """Every call of a command of ours in the code of a document, as words."""
    found = []
    for name, text in text_files():
        for block in [*FENCE.findall(text), *INLINE.findall(text)] if name.endswith(".md") else []:
            for line in block.splitlines():
                if call := re.search(r"(?<![\w./])(scripts/[a-z_]+)\b(?!/)([^|#>]*)", line):
                    found.append((f"{name}: {line.strip()}", [call[1], *shlex.split(call[2].replace("'", ""))]))
    return found


@cache
def help_of(*command: str) -> str:
    done = subprocess.run([sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done.stdout if done.returncode == 0 else ""


def unknown(words: list[str]) -> list[str]:
    """The options in a call that its command does not have."""
    command = words[:2] if words[0] == "scripts/cache" and len(words) > 1 and words[1].isalpha() else words[:1]
    options = [word.partition("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)]
    return [option for option in options if not re.search(rf"(?<![\w-]){option}(?![\w-])", help_of(*command))]


def test_commands_in_documents_have_the_options_that_are_shown() -> None:
    calls = shown_commands()
    assert len(calls) > 20
    assert {where: wrong for where, words in calls if (wrong := unknown(words))} == {}


def test_an_option_that_does_not_exist_is_recognised() -> None:
    assert unknown(["scripts/cache", "prune", "--older-than", "30", "--keep", "2", "--stor", "x"]) == ["--stor"]
    assert unknown(["scripts/predict", "-i", "prompt=7", "--jsno"]) == ["--jsno"]


# --- Pushing ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def steps() -> list[dict]:
    workflow = yaml.safe_load((ROOT / ".github/workflows/push.yaml").read_text())
    [job] = workflow["jobs"].values()
    return job["steps"]


def test_the_push_uses_the_official_action_and_pushes_once_whichever_way(steps: list[dict]) -> None:
    assert [step["uses"] for step in steps if "setup-cog" in step.get("uses", "")] == ["replicate/setup-cog@v2"]
    pushes = {step["if"]: step["run"] for step in steps if "push" in step.get("run", "")}
    assert set(pushes) == {"${{ inputs.safe }}", "${{ !inputs.safe }}"}


def test_what_somebody_typed_reaches_a_shell_as_a_variable_only(steps: list[dict]) -> None:
    """A model named `x"; curl ...` is otherwise a command, with the token in its environment."""
    assert [step["run"] for step in steps if "${{" in step.get("run", "")] == []


def test_actions_are_pinned_to_a_version(steps: list[dict]) -> None:
    assert [step["uses"] for step in steps if "uses" in step and not re.search(r"@v\d", step["uses"])] == []


def test_the_safe_push_asks_for_what_the_predictor_takes() -> None:
    config = yaml.safe_load((ROOT / "cog-safe-push.yaml").read_text())
    [run] = [
        node
        for node in ast.walk(ast.parse((ROOT / "predict.py").read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "run"
    ]
    inputs = {argument.arg for argument in run.args.args} - {"self"}
    asked = [case["inputs"] for case in config["predict"]["test_cases"]]
    assert len(asked) >= 2
    assert {name for case in [*asked, config["predict"]["fuzz"]["fixed_inputs"]] for name in case} <= inputs
    assert all("seed" in case for case in asked)


# --- Kubernetes ------------------------------------------------------------------------------------------------------


def pod() -> dict:
    text = (ROOT / "docs/deploying.md").read_text()
    [block] = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return yaml.safe_load(block)["spec"]


def test_the_pod_gives_a_stopping_server_more_time_than_it_takes() -> None:
    [container] = pod()["containers"]
    settings = {item["name"]: item.get("value") for item in container["env"]}
    pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod()["terminationGracePeriodSeconds"] > pause_s + int(settings["WARMSTART_STOP_GRACE_S"])


def test_all_probes_read_the_body_and_a_cold_boot_has_time() -> None:
    [container] = pod()["containers"]
    probes = [container[name]["exec"]["command"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert probes[0] == probes[1] == probes[2]
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600

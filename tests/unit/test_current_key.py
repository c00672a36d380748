"""What makes another key, said in one line, and what does not."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import warmstart
from warmstart.key import difference
from warmstart.settings import Settings

ROOT = Path(__file__).resolve().parent.parent.parent


def request(prompt: str = "seven", outputs: int = 1) -> warmstart.Request:
    return warmstart.Request(f"1:1 x{outputs}", {"prompt": prompt, "num_images_per_prompt": outputs}, (0,))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model and a Predictor, as the current one."""
    shutil.copytree(ROOT / "weights", tmp_path / "weights")
    (tmp_path / "predict.py").write_text("# the Predictor\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def key_of(prompt: str = "seven", outputs: int = 1, environment: dict[str, str] | None = None):
    settings = Settings.from_environment({"OMP_NUM_THREADS": "2", **(environment or {})})
    return warmstart.current_key([request(prompt, outputs)], sources=["predict.py"], settings=settings)


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WARMSTART_DTYPE": "bfloat16"}, 'dtype is "bfloat16" here, "float32" there'),
        ({"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}, "torch options is"),
        ({"WARMSTART_MODE": "max-autotune-no-cudagraphs"}, "mode is"),
        ({"WARMSTART_DYNAMIC": "true"}, "dynamic is"),
        ({"WARMSTART_FULLGRAPH": "false"}, "fullgraph is"),
        ({"WARMSTART_REGIONS": "FluxTransformerBlock"}, "regions is"),
        ({"WARMSTART_PARTS": "vae"}, "parts is"),
        ({"WARMSTART_STRATEGY": "whole"}, "strategy is"),
        ({"WARMSTART_QUANTIZE": "int8"}, 'quantization is "int8" here, "none" there'),
        ({"WARMSTART_LORA_RANK": "8"}, 'lora is "rank 8 in all linear layers" here, "none" there'),
        (
            {"WARMSTART_LORA_RANK": "8", "WARMSTART_LORA_TARGETS": "to_q,to_k"},
            'lora is "rank 8 in to_q, to_k" here, "none" there',
        ),
        ({"WARMSTART_MODEL_VERSION": "v2"}, "model is"),
    ],
)
def test_a_setting_that_changes_graphs_changes_the_version_and_is_named(project, environment, words):
    one, other = key_of(), key_of(environment=environment)
    assert other.version_digest != one.version_digest
    assert other.environment_digest == one.environment_digest
    text = difference(other.version, one.version)
    assert text.startswith(words)
    assert "\n" not in text


def test_threads_change_the_environment(project):
    one, other = key_of(), key_of(environment={"OMP_NUM_THREADS": "1"})
    assert other.environment_digest != one.environment_digest
    assert difference(other.environment, one.environment) == 'cpu threads is "1" here, "2" there'


def test_a_line_of_the_predictor_changes_the_version(project):
    one = key_of()
    change(project / "predict.py", "# the Predictor", "# a Predictor")
    assert difference(key_of().version, one.version).startswith("code is")


def test_a_config_of_the_model_changes_the_version(project):
    one = key_of()
    path = project / "weights" / "transformer" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"axes_dims_rope": [6, 6, 4]}))
    assert difference(key_of().version, one.version).startswith("model is")


def test_a_plan_with_another_shape_changes_the_version(project):
    one = key_of()
    assert difference(key_of(outputs=2).version, one.version).startswith("plan is")


def test_another_prompt_clone_user_or_home_changes_nothing(project, tmp_path_factory, monkeypatch):
    one = key_of()
    elsewhere = tmp_path_factory.mktemp("another") / "clone"
    shutil.copytree(project, elsewhere)
    monkeypatch.chdir(elsewhere)
    for name, value in {"USER": "someone", "LOGNAME": "someone", "HOME": "/nowhere", "HOSTNAME": "other"}.items():
        monkeypatch.setenv(name, value)
    other = key_of(prompt="a handwritten three", environment={"WARMSTART_CACHE_URL": "s3://bucket", "HOME": "/x"})
    assert other.version == one.version
    assert other.environment == one.environment


def test_other_weights_of_the_same_shapes_change_nothing(project):
    one = key_of()
    path = project / "weights" / "transformer" / "diffusion_pytorch_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert key_of().version_digest == one.version_digest


def test_a_model_of_the_hub_needs_a_revision(project):
    with pytest.raises(warmstart.SettingsError, match="without WARMSTART_MODEL_REVISION"):
        key_of(environment={"WARMSTART_MODEL": "owner/name"})
    environment = {"WARMSTART_MODEL": "owner/name", "WARMSTART_MODEL_REVISION": "abc"}
    assert key_of(environment=environment).version["model"] != key_of().version["model"]


def test_the_key_is_made_without_torch():
    code = "import sys, predict, warmstart; warmstart.current_key(predict.plan(), sources=[predict.__file__]); "
    code += "print(sorted({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WARMSTART_")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr

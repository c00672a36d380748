"""A model that the Predictor loads itself: what is taken for one, where it must be, and which key it has."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import warmstart
from warmstart.key import Key, KeyFactError
from warmstart.models import ModelError
from warmstart.models.own import adopt
from warmstart.settings import Settings

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "read-digits"
REQUEST = warmstart.Request("one", {"x": 2})


def test_one_output_or_a_list_of_them_is_answered() -> None:
    part = torch.nn.Linear(1, 1)
    model = adopt(warmstart.OwnModel({"a": part}, run=lambda request: request.inputs["x"]), "cpu")
    assert model.run(REQUEST) == [2]
    assert adopt(warmstart.OwnModel({}, run=lambda request: [1, 2]), "cpu").run(REQUEST) == [1, 2]
    assert (model.parts(), model.default_parts()) == ({"a": part}, ("a",))


def test_a_diffusers_pipeline_is_taken_as_it_is(model_dir: Path) -> None:
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(model_dir, local_files_only=True)
    model = adopt(pipeline, "cpu")
    assert model.default_parts() == ("transformer",)
    assert model.parts()["transformer"] is pipeline.transformer


def test_what_cannot_answer_is_refused() -> None:
    with pytest.raises(ModelError, match=r"load= gave Linear, which has no parts\(\).*warmstart\.OwnModel"):
        adopt(torch.nn.Linear(1, 1), "cpu")


def test_a_model_on_another_device_is_refused_since_its_code_would_be_kept_for_the_wrong_one() -> None:
    model = warmstart.OwnModel({"a": torch.nn.Linear(1, 1)}, run=lambda request: 1)
    with pytest.raises(ModelError, match=r"left 'a' on cpu, and the compiled code is kept for cuda:1; .*DEVICE=cpu"):
        adopt(model, "cuda:1")
    model.parts()["a"]._hf_hook = object()
    adopt(model, "cuda:1")
    adopt(warmstart.OwnModel({"a": torch.nn.Linear(1, 1, device="meta")}, run=lambda request: 1), "cuda")


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project without weights/."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "predict.py").write_text("# the Predictor")
    return tmp_path


def key_of(*sources: str, **environment: str) -> Key:
    settings = Settings.from_environment({"OMP_NUM_THREADS": "2", "WARMSTART_DEVICE": "cpu", **environment})
    return warmstart.current_key([REQUEST], sources=sources, load=lambda: None, settings=settings)


def test_its_key_is_that_of_its_sources(nowhere: Path) -> None:
    key = key_of("predict.py")
    assert (key.version["model"], key.version["dtype"]) == ("as the sources say",) * 2
    assert key_of("predict.py", WARMSTART_MODEL_VERSION="2").version["model"] == "2"
    (nowhere / "predict.py").write_text("# another")
    assert key_of("predict.py").version_digest != key.version_digest


def test_without_sources_nothing_would_tell_it_from_another(nowhere: Path) -> None:
    with pytest.raises(KeyFactError, match=r"neither sources= nor WARMSTART_MODEL_VERSION"):
        key_of()
    assert key_of(WARMSTART_MODEL_VERSION="2").version["model"] == "2"


# --- The example -----------------------------------------------------------------------------------------------------


@pytest.fixture
def reader() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reader", EXAMPLE / "reader.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules.pop("reader", None)
    spec.loader.exec_module(module)
    return module


def test_the_example_reads_digits_that_it_has_not_seen(reader: ModuleType) -> None:
    from safetensors.torch import load_file
    from sklearn.datasets import load_digits

    network = reader.Reader()
    network.load_state_dict(load_file(EXAMPLE / "reader.safetensors"))
    digits = load_digits()
    with torch.inference_mode():
        answers = network(torch.tensor(digits.data[1347:] / 16, dtype=torch.float32)).argmax(1).numpy()
        assert network(reader.pixels(EXAMPLE / "seven.png")).argmax() == 7
    assert (answers == digits.target[1347:]).mean() > 0.94


def test_the_example_pins_what_this_project_pins() -> None:
    ours = (EXAMPLE.parents[1] / "requirements.txt").read_text().splitlines()
    theirs = [line for line in (EXAMPLE / "requirements.txt").read_text().splitlines() if "==" in line]
    assert theirs
    assert set(theirs) <= set(ours)

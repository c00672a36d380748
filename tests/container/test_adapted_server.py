"""The documents' recipe for LoRA inputs, on a model whose weights are kept in 8 bits, behind the real server."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapting
import numpy as np
import pytest
from _server import Server, from_data_url
from booting import QUICK
from PIL import Image

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
INPUTS = {"num_inference_steps": 2, "seed": 3, "output_format": "png", "upscale": 1}
# Largest and mean difference of brightness, from 0 to 1, that 8 bits may make. The digits stay the same to the eye.
NEAR = (0.02, 0.002)


def recipe() -> tuple[str, str]:
    """The lines that docs/your-model.md has a reader add to predict.py: among the inputs, and in the body."""
    section = (ROOT / "docs/your-model.md").read_text().split("\n## LoRA\n")[1].split("\n## ")[0]
    [block] = [code for code in section.split("```python\n")[1:] if "def run(" in code]
    _, inputs, body = block.split("```")[0].split("        ...\n")
    return inputs.split("    ) ->")[0], body


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as a reader has it who followed the recipe, and two LoRA files."""
    root = tmp_path_factory.mktemp("lora")
    inputs, body = recipe()
    code = (ROOT / "predict.py").read_text()
    [asks] = [line for line in code.splitlines(keepends=True) if "self.model(request(" in line]
    code = code.replace(asks, body).replace("    ) -> list[Path]:", f"{inputs}    ) -> list[Path]:")
    (root / "predict.py").write_text(code.replace("import random\n", "import dataclasses\nimport random\n"))
    (root / "cog.yaml").write_text('run: "predict.py:Predictor"\n')
    adapting.write(root)
    return root


@pytest.fixture(scope="module")
def serve(project: Path, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Server]:
    """Starts the project's server over one store."""
    environment = {
        "PYTHONPATH": str(ROOT),
        "WARMSTART_MODEL": str(model_dir),
        **QUICK,
        "WARMSTART_LORA_RANK": str(adapting.RANK),
        "WARMSTART_QUANTIZE": "int8",
        "WARMSTART_CACHE_URL": str(tmp_path_factory.mktemp("store")),
        "TMPDIR": str(tmp_path_factory.mktemp("tmp")),
        "TORCHINDUCTOR_CACHE_DIR": None,
    }
    return lambda: Server(project, environment=environment)


def drawn(server: Server, **inputs: Any) -> np.ndarray:
    """The picture, (height, width, 3) from 0 to 1, of a prediction that compiled nothing."""
    body = server.predict(INPUTS | inputs).body
    assert body["status"] == "succeeded", body
    assert (body["metrics"]["graphs_compiled"], "uncompiled" in body["logs"]) == (0, False), body
    [url] = body["output"]
    return np.asarray(Image.open(io.BytesIO(from_data_url(url)[1])).convert("RGB"), dtype=np.float32) / 255


def uploaded(file: Path) -> str:
    return f"data:application/octet-stream;base64,{base64.b64encode(file.read_bytes()).decode()}"


def near(got: np.ndarray, want: Any) -> bool:
    """Whether they differ by what 8 bits change, and not by nothing: then nothing was quantised."""
    apart = np.abs(got - want)
    return bool(1e-4 < apart.max() < NEAR[0] and apart.mean() < NEAR[1])


@pytest.fixture(scope="module")
def cold(serve: Callable[[], Server], project: Path) -> dict[str, Any]:
    """What the first server reported and drew."""
    lora = uploaded(project / "a.safetensors")
    with serve() as server:
        return {
            "report": server.setup_report(),
            "none": drawn(server),
            "a": drawn(server, lora=lora),
            "a x 0.4": drawn(server, lora=lora, lora_scale=0.4),
            "b": drawn(server, lora=uploaded(project / "b.safetensors")),
            "odd": server.predict(INPUTS | {"lora": uploaded(project / "predict.py")}).body,
            "none again": drawn(server),
        }


@pytest.mark.parametrize(
    ("name", "swap"), [("none", []), ("a", [("a", 1.0)]), ("a x 0.4", [("a", 0.4)]), ("b", [("b", 1.0)])]
)
def test_each_lora_draws_what_it_draws_in_plain_diffusers(cold: dict[str, Any], project: Path, name, swap) -> None:
    assert near(cold[name], adapting.plain(project, swap)), np.abs(cold[name] - adapting.plain(project, swap)).max()
    if swap:
        assert np.abs(cold[name] - cold["none"]).max() > NEAR[0]


def test_nothing_of_a_lora_is_left_for_a_request_without_one(cold: dict[str, Any]) -> None:
    assert np.array_equal(cold["none"], cold["none again"])


def test_a_file_that_is_no_lora_fails_its_own_prediction_and_says_why(cold: dict[str, Any]) -> None:
    assert cold["odd"]["status"] == "failed"
    assert "safetensors" in cold["odd"]["error"]


def test_the_next_server_is_warm_and_draws_the_same(serve: Callable[[], Server], cold, project: Path) -> None:
    assert cold["report"]["outcome"] == "cold"
    with serve() as server:
        report = server.setup_report()
        assert report["outcome"] == "warm", report["reason"]
        counts = report["counts"]
        assert counts["fx_hits"] == counts["aot_hits"] == counts["graphs"] > 0
        for zero in ("fx_misses", "aot_misses", "fx_bypasses", "aot_bypasses", "kernels_built"):
            assert counts[zero] == 0, json.dumps(counts)
        assert report["facts"]["quantization"] == "int8, 112 layers"
        assert report["facts"]["lora"] == "rank 8 in all linear layers, 112 slots"
        assert np.array_equal(drawn(server), cold["none"])
        assert np.array_equal(drawn(server, lora=uploaded(project / "a.safetensors")), cold["a"])

"""Servers for the tests that speak HTTP: one of the real model for a whole file, and one of a toy too."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from _server import Server
from booting import QUICK
from loading import load_command
from webhook import Webhook

ROOT = Path(__file__).resolve().parents[2]

TOY = """
import os, time
from cog import BaseRunner, Input, Path

# The server loses what is printed just before setup() ends; see the pause in warmstart/boot.py.
LOG_S = 0.5

class Predictor(BaseRunner):
    def setup(self) -> None:
        print("toy: setting up")
        if os.environ.get("TOY_ERROR"):
            time.sleep(LOG_S)
            raise RuntimeError(os.environ["TOY_ERROR"])
        time.sleep(float(os.environ.get("TOY_SETUP_S", "0")))
        print('warmstart.report {"outcome": "cold", "reason": "a first report", "phases": {}, "warnings": []}')
        print('warmstart.report {"outcome": "warm", "reason": "nothing to do", "phases": {"idling": 0.25}, "warnings": ["mind the toy"]}')
        time.sleep(LOG_S)

    def run(
        self,
        text: str,
        count: int = Input(default=1, ge=1, le=4),
        kind: str = Input(default="txt", choices=["txt", "bin"]),
        output_format: str = Input(default="txt", choices=["txt", "csv"]),
        image: Path | None = Input(default=None),
        words: list[str] = Input(default=["a"]),
        pause_s: float = 0.0,
    ) -> list[Path]:
        print(f"toy: words={words} image={image.read_text() if image else None} format={output_format}")
        if text == "fail":
            raise ValueError("asked to fail")
        for _ in range(int(pause_s * 100)):
            time.sleep(0.01)
        files = [Path(f"{os.environ['TOY_DIR']}/{index}.{output_format}") for index in range(count)]
        for index, file in enumerate(files):
            file.write_text(f"{text} {index}")
        return files
"""  # noqa: E501


# The default model in the smallest project that compiles: one planned size, and any other may be asked for.
SMALL = """
import hashlib

from cog import BaseRunner, Input

import warmstart


def request(tokens: int) -> warmstart.Request:
    inputs = {"prompt": "7", "negative_prompt": "", "width": 16 * tokens, "height": 16, "num_inference_steps": 2}
    inputs |= {"num_images_per_prompt": 1, "true_cfg_scale": 1.0, "max_sequence_length": 16}
    return warmstart.Request(f"{tokens} tokens", inputs, seeds=(tokens,))


class Predictor(BaseRunner):
    def setup(self) -> None:
        self.model = warmstart.boot([request(4)], sources=[__file__])

    def run(self, tokens: int = Input(default=4, ge=1, le=64)) -> str:
        result = self.model(request(int(tokens)))
        self.record_metric("graphs_compiled", result.graphs)
        if result.reason:
            print(result.reason)
        return hashlib.sha256(result.outputs[0].tobytes()).hexdigest()
"""


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that compiles one region of the default model for one size."""
    root = tmp_path_factory.mktemp("small")
    (root / "predict.py").write_text(SMALL)
    (root / "cog.yaml").write_text('run: "predict.py:Predictor"\n')
    return root


@pytest.fixture
def small_environment(model_dir: Path, tmp_path: Path) -> dict[str, str | None]:
    """Settings for a boot of the small project, with a store and a temporary directory of this test's own."""
    (tmp_path / "tmp").mkdir()
    return {
        "PYTHONPATH": str(ROOT),
        "WARMSTART_MODEL": str(model_dir),
        **QUICK,
        "WARMSTART_CACHE_URL": str(tmp_path / "store"),
        "TMPDIR": str(tmp_path / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": None,
    }


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose Predictor needs no model."""
    root = tmp_path_factory.mktemp("toy")
    (root / "predict.py").write_text(TOY)
    (root / "cog.yaml").write_text('run: "predict.py:Predictor"\n')
    return root


@pytest.fixture(scope="session")
def boot_environment(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings for boots of the real model: one store for all tests, so that only the first boot compiles."""
    return {
        "WARMSTART_MODEL": str(model_dir),
        "WARMSTART_CACHE_URL": str(tmp_path_factory.mktemp("store")),
        "TMPDIR": str(tmp_path_factory.mktemp("tmp")),
    }


@pytest.fixture(scope="module")
def server(boot_environment: dict[str, str]) -> Iterator[Server]:
    """The real model, served as its container serves it."""
    with Server(ROOT, environment=boot_environment) as started:
        yield started


@pytest.fixture(scope="session")
def command() -> Callable[[str], ModuleType]:
    """The function that loads a command of scripts/ as a module."""
    return load_command


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    """A webhook of this test's own."""
    with Webhook() as hook:
        yield hook

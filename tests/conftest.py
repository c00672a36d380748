"""What every test may use: the project's own modules on the import path, its model, and an empty store."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Threads that wait sleep rather than spin: on a shared core a spinning one keeps the others from working, and what
# takes a second alone then takes minutes. Inherited by every process that a test starts.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Before pytest's own entries: the scripts' modules (_server, _openapi, digits) and the package under test.
for directory in (ROOT, ROOT / "scripts"):
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The model that tests draw with: the project's own, or the one that WARMSTART_TEST_MODEL names."""
    model = Path(os.environ.get("WARMSTART_TEST_MODEL", ROOT / "weights")).resolve()
    assert (model / "model_index.json").is_file(), f"{model} holds no model. Run scripts/train_default_weights."
    return model


@pytest.fixture(scope="session")
def text_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store for all boots of predict_text.py, so that only the first one compiles."""
    return tmp_path_factory.mktemp("text") / "store"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """An empty store of this test's own."""
    directory = tmp_path / "store"
    directory.mkdir(mode=0o700)
    return directory

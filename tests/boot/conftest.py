"""Boots for the tests here: one starter for all, and the default model's first boot, which several look at."""

from collections.abc import Callable
from pathlib import Path

import pytest
from booting import DRAWN, Boot, Booted


@pytest.fixture(scope="session")
def boot(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Booted]:
    return Boot(tmp_path_factory.mktemp("boots"))


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that the first boot of the default model fills and later ones are warmed by."""
    return tmp_path_factory.mktemp("shared") / "store"


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where boots leave what they drew, as PNG by digest."""
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="session")
def cold(boot, shared_store: Path, pictures: Path) -> Booted:
    """The first boot ever of the default model."""
    return boot(shared_store, draw=DRAWN, folder=str(pictures), threads=2)

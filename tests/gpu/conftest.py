"""Boots for the tests that need a GPU."""

import pytest
from booting import Boot


@pytest.fixture(scope="session")
def boot(tmp_path_factory: pytest.TempPathFactory) -> Boot:
    return Boot(tmp_path_factory.mktemp("boots"))

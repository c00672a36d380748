"""The default model on a GPU: the second boot is warm, and pictures are those of an uncompiled boot within rounding."""

from pathlib import Path

import pytest
from booting import DRAWN, Boot, Booted

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU that torch can use"),
]


@pytest.fixture(scope="module")
def boots(boot: Boot, tmp_path_factory: pytest.TempPathFactory) -> tuple[Booted, Booted]:
    """A first boot, and a second one of another process and live directory."""
    store: Path = tmp_path_factory.mktemp("gpu") / "store"
    first = boot(store, draw=DRAWN, threads=5)
    return first, boot(store, draw=DRAWN, threads=5)


def test_the_first_is_cold_and_the_second_warm(boots: tuple[Booted, Booted]) -> None:
    first, second = boots
    assert first.report["facts"]["device"] == "cuda"
    assert first.report["outcome"] == "cold"
    assert second.report["outcome"] == "warm", second.report["reason"]
    assert second.counts["fx_misses"] == second.counts["aot_misses"] == second.counts["kernels_built"] == 0


def test_both_draw_the_same(boots: tuple[Booted, Booted]) -> None:
    assert boots[0].pictures == boots[1].pictures


def test_no_planned_request_compiles_after_ready(boots: tuple[Booted, Booted]) -> None:
    for booted in boots:
        for asked in booted.threads:
            assert {count for label, count in asked.items() if label != "thread"} == {0}

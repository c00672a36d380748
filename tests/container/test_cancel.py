"""A prediction that is cancelled in the middle of a compile or a forward leaves nothing behind but lost work."""

import random
import time
from pathlib import Path

import pytest
from _server import Server

from warmstart import bundle
from warmstart.bundle import TEMPORARY_PREFIX, Limits

SEED, CANCELS = 7, 6
WAIT_S = 300.0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_after_cancels_at_random_the_next_calls_and_the_next_boot_are_right(
    small: Path, small_environment: dict[str, str | None], tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    environment = small_environment | {"WARMSTART_UNPLANNED": "compile", "WARMSTART_DYNAMIC": "false"}
    with Server(small, environment=environment, namespace=True) as server:
        planned = server.predict({}).body["output"]
        started = time.monotonic()

        right = {6: server.predict({"tokens": 6}).body["output"]}
        compile_s = time.monotonic() - started
        for number in range(CANCELS):
            # In turn a size that must be compiled, and one that runs: cancelled within either.
            tokens, within_s = (10 + number, compile_s) if number % 2 else (4, 0.2)
            server.predict({"tokens": tokens}, asynchronous=True, id=f"c{number}")
            time.sleep(chance.uniform(0, within_s))
            server.cancel(f"c{number}")
            assert server.wait_idle(WAIT_S), "\n".join(server.log()[-20:])
            answer = server.predict({}).body
            assert (answer["status"], answer["output"]) == ("succeeded", planned)
            assert answer["metrics"]["graphs_compiled"] == 0
        for tokens in (*right, *range(11, 10 + CANCELS, 2)):
            right[tokens] = server.predict({"tokens": tokens}).body["output"]
            # Once it was answered in full, the same again compiles nothing.
            again = server.predict({"tokens": tokens}).body
            assert (again["output"], again["metrics"]["graphs_compiled"]) == (right[tokens], 0)
        live = Path(server.setup_report()["facts"]["live_dir"])
        assert server.wait_idle(WAIT_S)
    litter = [path for path in tmp_path.rglob(f"{TEMPORARY_PREFIX}*") if live not in path.parents]
    assert litter == []
    with Server(small, environment=environment, namespace=True) as server:
        assert server.setup_report()["outcome"] == "warm"
        assert {tokens: server.predict({"tokens": tokens}).body["output"] for tokens in right} == right
    for number, packed in enumerate(Path(str(environment["WARMSTART_CACHE_URL"])).glob("*/*/*.tar.zst")):
        (root := tmp_path / f"unpacked{number}").mkdir()
        assert bundle.unpack(packed, packed.name.removesuffix(bundle.SUFFIX), root, Limits())

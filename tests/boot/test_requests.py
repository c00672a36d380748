"""No request pays for a compile: many shapes in a row, from many threads, whatever the limits of the compiler."""

import pytest
from booting import BLOCK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# 64 sizes, none of them planned but one, each asked for from a thread of its own; then the planned one again.
MANY = """
import hashlib, threading
import warmstart

SIZES = [(16 * width, 16 * height) for width in range(1, 9) for height in range(1, 9)]

def sized(width, height):
    inputs = {"prompt": "7", "negative_prompt": "", "width": width, "height": height, "num_inference_steps": 1}
    inputs |= {"num_images_per_prompt": 1, "true_cfg_scale": 1.0, "max_sequence_length": 16}
    return warmstart.Request(f"{width}x{height}", inputs)

PLAN = [sized(64, 64)]
"""
ASK = """
answer = []

def ask(size):
    result = model(sized(*size))
    digest = hashlib.sha256(result.outputs[0].tobytes()).hexdigest()
    answer.append([list(size), digest, result.graphs, result.reason])

for size in [*SIZES, (64, 64)]:
    thread = threading.Thread(target=ask, args=(size,))
    thread.start()
    thread.join()
"""
# A planned label that hides another size.
HIDDEN = (
    ASK
    + """
hidden = model(warmstart.Request("64x64", sized(64, 32).inputs))
answer = [answer, hashlib.sha256(hidden.outputs[0].tobytes()).hexdigest(), hidden.reason]
"""
)


@pytest.fixture(scope="module")
def uncompiled(boot, tmp_path_factory):
    """What an uncompiled boot draws of each size."""
    store = tmp_path_factory.mktemp("eager") / "store"
    booted = boot(store, before=MANY, after=ASK, environment={"WARMSTART_COMPILE": "off"})
    return [digest for _, digest, _, _ in booted.after]


@pytest.mark.parametrize("fullgraph", ["true", "false"])
def test_sixty_four_shapes_in_a_row_compile_nothing_and_are_right(boot, uncompiled, tmp_path, fullgraph):
    environment = {**BLOCK, "WARMSTART_FULLGRAPH": fullgraph}
    booted = boot(tmp_path / "store", before=MANY, after=HIDDEN, environment=environment)
    asked, *hidden = booted.after
    assert booted.report["outcome"] == "cold"
    assert sum(graphs for _, _, graphs, _ in asked) == 0
    planned = [[size, digest, reason] for size, digest, _, reason in asked if size == [64, 64]]
    assert planned[0] == planned[1]
    assert planned[0][2] == ""
    # A size of as many pixels has as many tokens, so the planned one's graph covers it; compiled code rounds elsewhere.
    covered = [got[3] for got in asked if got[0] in ([128, 32], [32, 128])]
    assert (covered == ["", ""]) is (fullgraph == "true")
    pairs = zip(asked, uncompiled, strict=True)
    others = [(got, want) for got, want in pairs if got[0][0] * got[0][1] != 64 * 64]
    assert [got[1] for got, _ in others] == [want for _, want in others]
    assert len(others) == 61
    for (size, _, _, reason), _ in others:
        width, height = size
        assert reason.startswith(f"{width}x{height} was not warmed, and ran ")
        # With graph breaks torch cannot be asked what no graph covers.
        assert ("transformer.FluxTransformerBlock uncompiled" in reason) is (fullgraph == "true")
    # It says that it is warmed, and is not: right, slower, and told where torch can be asked.
    assert hidden[0] == uncompiled[3 * 8 + 1]
    if fullgraph == "true":
        told = "64x64 ran transformer.FluxTransformerBlock uncompiled where no graph covers it: "
        assert hidden[1].startswith(told)
        assert "size mismatch" in hidden[1]


def test_the_limit_of_graphs_is_met_openly_and_the_rest_is_served_uncompiled(boot, uncompiled, tmp_path):
    """Torch would fail here, since the region is to be one graph, and say nothing where it need not be."""
    few = MANY + "SIZES = SIZES[:5]\nfrom warmstart.boot import _Boot\n_Boot._graph_limit = lambda self: 3\n"
    environment = {**BLOCK, "WARMSTART_UNPLANNED": "compile", "WARMSTART_DYNAMIC": "false"}
    booted = boot(tmp_path / "store", before=few, after=ASK, environment=environment)
    *others, planned = booted.after
    assert [graphs for _, _, graphs, _ in booted.after] == [1, 1, 0, 0, 0, 0]
    assert "waited for a compile of 1 graph" in others[0][3]
    for (size, digest, _, reason), want in list(zip(others, uncompiled, strict=False))[2:]:
        assert digest == want, size
        assert "none of its 3 graphs, the limit, covers it" in reason
    assert planned[3] == ""

"""A language model's first boot is cold, the next one warm; no text, short or long, compiles anything after it."""

import pytest
from booting import ROOT
from hub import Hub, nobody

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MODEL = {"WARMSTART_MODEL": "weights-text"}
# Prompts on both sides of each planned length, the empty one, and one of the longest; then the longest text.
PROMPTS = ["", "7", *("7" * digits for digits in (15, 16, 63, 64)), "7" * 255]
WRITE = """
import sys
import predict_text

def write(prompt, tokens, temperature=0.0):
    text = model.stream(predict_text.request(prompt, tokens, temperature, 0.95, 5))
    pieces = list(text)
    result = text.result()
    texts.append("".join(pieces))
    costs.append([len(prompt), text.tokens, result.graphs, result.reason])

texts, costs = [], []
for prompt in PROMPTS:
    write(prompt, 8)
# One that cannot end before its time.
model._model._ends = frozenset()
write("The with statement", 256)
write("The with statement", 40, 1.0)
tokens = [len(model._model._tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
families = sorted({name.partition(".")[0] for name in sys.modules} & {"diffusers", "transformers"})
answer = {"texts": texts, "costs": costs, "prompts": tokens, "families": families}
"""


@pytest.fixture(scope="module")
def booted(boot, text_store):
    """Boots the language model, by default over the store that all share, and has it write."""

    def start(store=text_store, **environment):
        after = WRITE.replace("PROMPTS", repr(PROMPTS))
        return boot(store, predictor="predict_text", environment=MODEL | environment, after=after)

    return start


@pytest.fixture(scope="module")
def first(booted):
    """A boot that fills the store; cold, unless another test's has been."""
    return booted()


@pytest.fixture(scope="module")
def warm(first, booted):
    return booted()


def test_all_layers_share_one_graph_for_prompts_of_any_length_and_one_for_further_tokens(first):
    [region] = first.report["regions"]
    assert (region["name"], region["modules"], region["graphs"]) == ("model.LlamaDecoderLayer", 4, 2)
    assert region["difference"] <= region["tolerance"]
    # The step that makes further tokens is compared with its eager self too: it is the first planned request.
    assert [row["graphs"] for row in first.report["requests"]] == [1, 1, 0, 0]
    assert [row["graphs_again"] for row in first.report["requests"]] == [0, 0, 0, 0]


def test_the_second_boot_is_warm_and_proves_it(warm):
    assert warm.report["outcome"] == "warm", warm.report["reason"]
    assert warm.counts["fx_hits"] == warm.counts["aot_hits"] == warm.counts["graphs"] == 2
    for zero in ("fx_misses", "aot_misses", "fx_bypasses", "aot_bypasses", "kernels_built"):
        assert warm.counts[zero] == 0, zero


def test_no_text_of_any_length_compiles_anything(warm):
    # The prompts are where the test means them to be: at a planned length, and one token beyond it.
    assert warm.after["prompts"][0] == 1
    assert {2, 16, 17, 64, 65, 256} <= set(warm.after["prompts"])
    assert [graphs for _, _, graphs, _ in warm.after["costs"]] == [0] * len(warm.after["costs"])
    assert {reason for *_, reason in warm.after["costs"]} == {""}
    assert warm.after["costs"][-2][1] == 256


def test_compiled_text_equals_eager_text_and_a_warm_boot_s_that_of_the_first(first, warm, booted, tmp_path):
    eager = booted(tmp_path / "none", WARMSTART_COMPILE="off")
    assert eager.report["outcome"] == "eager"
    assert first.after["texts"] == warm.after["texts"] == eager.after["texts"]
    # Asked for sevens the default model goes on with eights, however many there were, so several texts are one.
    assert len(set(warm.after["texts"])) >= 5


def test_a_language_model_s_boot_does_not_load_diffusers(warm):
    assert warm.after["families"] == ["transformers"]


HUB_ID = "docs/llama"


def test_a_hub_id_is_warm_and_later_without_the_hub(first, booted, tmp_path):
    with Hub({HUB_ID: ROOT / "weights-text"}) as hub:
        model = {"WARMSTART_MODEL": HUB_ID, "WARMSTART_MODEL_REVISION": hub.commit(HUB_ID)}
        environment = model | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        boots = [booted(**environment, HF_ENDPOINT=hub.url), booted(**environment, HF_ENDPOINT=nobody())]
        assert hub.fetched()["model.safetensors"] > 0
    for there in boots:
        assert (there.report["outcome"], there.counts["kernels_built"]) == ("warm", 0), there.report["reason"]
        assert there.after["texts"] == first.after["texts"]


def test_a_hub_that_cannot_be_reached_is_a_model_error_with_its_remedy(boot, text_store, tmp_path):
    model = {"WARMSTART_MODEL": HUB_ID, "WARMSTART_MODEL_REVISION": "main"}
    environment = model | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": nobody()}
    done = boot.start(text_store, predictor="predict_text", environment=environment)
    assert done.returncode != 0
    assert f"ModelError: the language model '{HUB_ID}' cannot be loaded" in done.stderr
    assert "Check WARMSTART_MODEL, the revision, the network and HF_TOKEN" in done.stderr

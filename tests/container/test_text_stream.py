"""Text over HTTP: it comes piece by piece, can be stopped in the middle, and what follows is right."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _server import Server

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 300.0
ASKED = {"prompt": "The with statement", "temperature": 0.8, "seed": 3}

# The same Predictor, that rests after each piece. On a fast processor it writes all of a text within a quarter of a
# second: before the first piece of it is read here, where other processes want the processor.
PAUSE_S = 0.05
UNHURRIED = f"""
import time

from cog import ConcatenateIterator, streaming

import predict_text


class Predictor(predict_text.Predictor):
    @streaming
    def run(
        self, prompt: str, temperature: float, seed: int, max_new_tokens: int = 128
    ) -> ConcatenateIterator[str]:
        for piece in super().run(prompt, max_new_tokens, temperature, 0.95, "", seed):
            yield piece
            time.sleep({PAUSE_S})
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def server(text_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {"WARMSTART_CACHE_URL": str(text_store), "TMPDIR": str(tmp_path_factory.mktemp("tmp"))}
    with Server(ROOT, config="cog-text.yaml", environment=environment, namespace=True) as started:
        yield started


@pytest.fixture(scope="module")
def unhurried(text_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    (root := tmp_path_factory.mktemp("unhurried")).joinpath("slow_text.py").write_text(UNHURRIED)
    environment = {"WARMSTART_CACHE_URL": str(text_store), "TMPDIR": str(tmp_path_factory.mktemp("tmp"))}
    environment |= {"WARMSTART_MODEL": str(ROOT / "weights-text"), "PYTHONPATH": str(ROOT)}
    with Server(root, "slow_text.py:Predictor", environment=environment, namespace=True) as started:
        yield started


@pytest.fixture(scope="module")
def right(server: Server) -> Any:
    """The answer to what is asked, all at once."""
    body = server.predict(ASKED).body
    assert body["status"] == "succeeded", body
    return body


def test_an_answer_is_the_list_of_its_pieces_and_tells_what_it_cost(right: Any) -> None:
    assert len(right["output"]) > 10
    assert right["metrics"]["graphs_compiled"] == 0
    assert len(right["output"]) <= right["metrics"]["tokens"] <= 128
    assert right["metrics"]["tokens_per_second"] > 0


def test_pieces_come_while_the_text_is_being_written(unhurried: Server, right: Any) -> None:
    pieces, states = [], []

    def take(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 1:
            states.append(unhurried.health()["status"])

    assert unhurried.wait_idle(WAIT_S)
    answer = unhurried.stream("/predictions", {"input": ASKED}, take)
    assert states == ["BUSY"]
    assert pieces == answer.body["output"] == right["output"]
    assert answer.body["metrics"]["graphs_compiled"] == 0


def test_a_text_that_is_cancelled_stops_and_the_next_is_right(unhurried: Server, right: Any) -> None:
    pieces = []

    def take(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            assert unhurried.cancel("stopped").status == 200

    assert unhurried.wait_idle(WAIT_S)
    asked = ASKED | {"max_new_tokens": 256, "temperature": 2.0}
    answer = unhurried.stream("/predictions", {"input": asked, "id": "stopped"}, take)
    assert answer.body["status"] == "canceled"
    assert 3 <= len(pieces) < 128, "it wrote on after it was cancelled"
    again = unhurried.predict(ASKED).body
    assert (again["output"], again["metrics"]["graphs_compiled"]) == (right["output"], 0)


def test_a_reader_that_leaves_does_not_spoil_the_next_text(unhurried: Server, right: Any) -> None:
    def leave(piece: str) -> None:
        raise EOFError

    assert unhurried.wait_idle(WAIT_S)
    with pytest.raises(EOFError):
        unhurried.stream("/predictions", {"input": ASKED}, leave)
    assert unhurried.wait_idle(WAIT_S)
    assert unhurried.predict(ASKED).body["output"] == right["output"]


def test_a_prompt_that_is_too_long_is_refused_with_both_lengths(server: Server) -> None:
    body = server.predict({"prompt": "7 " * 400}).body
    assert body["status"] == "failed"
    assert "tokens, and the longest that this server is prepared for has 256; shorten it" in body["error"]


def test_a_text_ends_before_the_first_of_the_stop_sequences(server: Server, right: Any) -> None:
    text = "".join(right["output"])
    stop = text[20:24]
    assert "," not in stop
    body = server.predict(ASKED | {"stop_sequences": f"\x00,{stop}"}).body
    assert body["status"] == "succeeded", body
    assert "".join(body["output"]) == text[: text.index(stop)]


def test_the_empty_prompt_begins_a_text(server: Server) -> None:
    body = server.predict({"prompt": "", "seed": 1}).body
    assert body["status"] == "succeeded"
    assert "".join(body["output"]).strip()

"""A request as the booted model answers it, where what is compiled is not only what we compiled."""

import threading
from collections.abc import Iterator

import pytest
import torch

from warmstart import inductor, process
from warmstart.models import Request, RequestError
from warmstart.served import _RUNNING, Served, UnplannedRequestError

LONG_S = 60.0


def served(model: object, unplanned: str = "eager") -> Served:
    return Served(model, unplanned=unplanned, fullgraph=True, stop_grace_s=0.0)  # type: ignore[arg-type]


class Labelled:
    """A model whose requests are what they are labelled."""

    def label(self, request: Request) -> str:
        return request.label


class OwnCompile(Labelled):
    """A pipeline that has something compiled by itself, outside any region."""

    def __init__(self) -> None:
        self.double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)

    def run(self, request: Request) -> list[torch.Tensor]:
        return [self.double(torch.ones(request.inputs["size"]))]


@pytest.mark.parametrize("unplanned", ["eager", "compile"])
def test_what_the_model_compiles_itself_is_answered_where_no_graph_covers_it(unplanned: str) -> None:
    torch._dynamo.reset()
    model = served(OwnCompile(), unplanned)
    model.rehearse(Request("a", {"size": 4}))
    before = inductor.graphs()
    result = model(Request("b", {"size": 8}))
    assert result.outputs[0].tolist() == [2.0] * 8
    told = "ran again uncompiled where no graph of the model's own code covers it: " in result.reason
    assert told is (unplanned == "eager")
    assert (inductor.graphs() > before) is (unplanned == "compile")


class Broken(Labelled):
    def run(self, request: Request) -> list[object]:
        raise RuntimeError("no such prompt")


def test_an_error_of_the_model_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="no such prompt"):
        served(Broken())(Request("a", {}))


def test_a_request_leaves_no_threads_to_the_one_that_it_ran_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's own threads stay, and each would keep some that slow down those of the next request."""
    ended: list[str] = []
    monkeypatch.setattr(process, "end_idle_threads", lambda: ended.append("ended"))

    class Writing(Labelled):
        def run(self, request: Request) -> list[object]:
            assert not ended
            return []

        def stream(self, request: Request) -> Iterator[str]:
            yield from ("a", "b")

    served(Writing())(Request("a", {}))
    assert ended.pop()
    with pytest.raises(RuntimeError):
        served(Broken())(Request("a", {}))
    assert ended.pop()
    pieces = served(Writing()).stream(Request("a", {}))
    # Between two tokens they would only have to be started again.
    assert (next(pieces), next(pieces), ended) == ("a", "b", [])
    assert next(pieces, None) is None
    assert ended.pop()

    class Failing(Writing):
        def stream(self, request: Request) -> Iterator[str]:
            yield "a"
            raise ValueError("no such token")

    pieces = served(Failing()).stream(Request("a", {}))
    assert next(pieces) == "a"
    with pytest.raises(ValueError, match="no such token"):
        next(pieces)
    assert ended


def test_two_models_of_a_process_answer_one_after_the_other() -> None:
    """Torch's stance is the process's: one that ends would let the other one compile."""
    inside, go_on, order = threading.Event(), threading.Event(), []

    class Slow(Labelled):
        def run(self, request: Request) -> list[object]:
            inside.set()
            assert go_on.wait(LONG_S)
            order.append("slow")
            return []

    class Quick(Labelled):
        def run(self, request: Request) -> list[object]:
            order.append("quick")
            return []

    slow, quick = (
        threading.Thread(target=served(model), args=(Request("a", {}),), daemon=True) for model in (Slow(), Quick())
    )
    slow.start()
    assert inside.wait(LONG_S)
    quick.start()
    quick.join(0.3)
    go_on.set()
    for thread in (slow, quick):
        thread.join(LONG_S)
    assert order == ["slow", "quick"]


def test_a_refused_request_names_what_is_planned() -> None:
    with pytest.raises(UnplannedRequestError, match="planned are: nothing, since no request was warmed"):
        served(OwnCompile(), "reject")(Request("a", {"size": 4}))


class Cancelled(BaseException):
    """What a server raises in the middle of a prediction."""


class Writer(Labelled):
    """A language model that says what it is told to say, one piece a token."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    def run(self, request: Request) -> list[object]:
        return ["".join(self.stream(request))]

    def stream(self, request: Request) -> Iterator[str]:
        for piece in request.inputs["pieces"]:
            self.seen.append((_RUNNING.locked(), torch.is_inference_mode_enabled()))
            if piece == "cancel":
                raise Cancelled
            yield piece


def say(*pieces: str) -> Request:
    return Request("a", {"pieces": pieces})


def test_a_stream_hands_out_each_piece_and_tells_what_it_cost() -> None:
    text = served(Writer()).stream(say("a", "", "bc"))
    assert list(text) == ["a", "bc"]
    assert text.tokens == 3
    result = text.result()
    assert result.outputs == ["abc"]
    assert result.graphs == 0
    assert result.seconds > 0


def test_a_piece_is_made_under_the_lock_and_nothing_is_held_between_two() -> None:
    writer = Writer()
    model = served(writer)
    text = model.stream(say("a", "b", "c"))
    assert writer.seen == []
    for piece in ("a", "b"):
        assert next(text) == piece
        assert not _RUNNING.locked()
        assert not torch.is_inference_mode_enabled()
        # In the middle of the text, on the same thread.
        assert model(say("x", "y")).outputs == ["xy"]
        assert "".join(model.stream(say("z"))) == "z"
    assert list(text) == ["c"]
    assert set(writer.seen) == {(True, True)}


def test_a_stream_that_nobody_reads_on_or_that_is_cancelled_holds_nothing_up() -> None:
    model = served(Writer())
    kept = [model.stream(say("a", "b")) for _ in range(2)]
    next(kept[0])
    cancelled = model.stream(say("a", "cancel", "b"))
    assert next(cancelled) == "a"
    with pytest.raises(Cancelled):
        next(cancelled)
    assert not _RUNNING.locked()
    assert not torch.is_inference_mode_enabled()
    assert model(say("x")).outputs == ["x"]


def test_a_stream_goes_on_uncompiled_where_no_graph_of_the_model_s_own_covers_it() -> None:
    class Doubling(OwnCompile):
        def stream(self, request: Request) -> Iterator[str]:
            for size in request.inputs["sizes"]:
                yield f"{int(self.double(torch.ones(size)).sum())} "

        def run(self, request: Request) -> list[object]:
            return ["".join(self.stream(request))]

    torch._dynamo.reset()
    model = served(Doubling())
    model.rehearse(Request("a", {"sizes": [4]}))
    before = inductor.graphs()
    text = model.stream(Request("b", {"sizes": [4, 4, 8, 4, 6]}))
    assert list(text) == ["8 ", "8 ", "16 ", "8 ", "12 "]
    assert inductor.graphs() == before
    assert "ran again uncompiled where no graph of the model's own code covers it: " in text.result().reason


def test_a_model_of_pictures_is_not_streamed() -> None:
    with pytest.raises(RequestError, match="OwnCompile writes no text"):
        served(OwnCompile()).stream(Request("a", {"size": 4}))


def test_a_stream_that_was_not_planned_is_refused_before_its_first_piece() -> None:
    with pytest.raises(UnplannedRequestError, match="'a' was not planned"):
        served(Writer(), "reject").stream(say("a"))


def test_threads_are_started_in_the_first_request_on_each_thread_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(inductor, "start_threads", lambda: started.append(threading.current_thread().name))

    class Writing(Labelled):
        def run(self, request: Request) -> list[object]:
            return []

        def stream(self, request: Request) -> Iterator[str]:
            yield from ("a", "b")

    model = Served(Writing(), unplanned="eager", fullgraph=True, stop_grace_s=0.0, on_cpu=True)  # type: ignore[arg-type]

    def ask() -> None:
        model(Request("a", {}))
        assert list(model.stream(Request("a", {}))) == ["a", "b"]

    for name in ("one", "two"):
        thread = threading.Thread(target=ask, name=name)
        thread.start()
        thread.join(60)
    assert list(model.stream(Request("a", {}))) == ["a", "b"]
    assert started == ["one", "two", threading.current_thread().name]
    served(Writing())(Request("a", {}))
    assert len(started) == 3

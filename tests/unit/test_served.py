"""A request as the booted model answers it, where what is compiled is not only what we compiled."""

import threading

import pytest
import torch

from warmstart import inductor
from warmstart.models import Request
from warmstart.served import Served, UnplannedRequestError

LONG_S = 60.0


def served(model: object, unplanned: str = "eager") -> Served:
    return Served(model, unplanned=unplanned, fullgraph=True, stop_grace_s=0.0)  # type: ignore[arg-type]


class OwnCompile:
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


def test_an_error_of_the_model_is_its_own() -> None:
    class Broken:
        def run(self, request: Request) -> list[object]:
            raise RuntimeError("no such prompt")

    with pytest.raises(RuntimeError, match="no such prompt"):
        served(Broken())(Request("a", {}))


def test_two_models_of_a_process_answer_one_after_the_other() -> None:
    """Torch's stance is the process's: one that ends would let the other one compile."""
    inside, go_on, order = threading.Event(), threading.Event(), []

    class Slow:
        def run(self, request: Request) -> list[object]:
            inside.set()
            assert go_on.wait(LONG_S)
            order.append("slow")
            return []

    class Quick:
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

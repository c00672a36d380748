"""What compiled code does round its graph, and that only what can be done without it is."""

import types
import weakref

import pytest
import torch
from torch import nn

from warmstart import arguments, direct, inductor, regions


def code_of(source: str, graph) -> types.FunctionType:
    """A function as Dynamo makes them, which calls its graph by a global of a name like that."""
    space = {"__compiled_fn_1_ab": graph, "constant": 3, "__import_torch_dot__dynamo_dot_utils": torch._dynamo.utils}
    exec(f"def code(self, x, more=None):\n    {source}", space)
    return space["code"]


def doubled(*inputs):
    return tuple(item * 2 for item in inputs)


OWN = torch.ones(2, 3)
SELF = types.SimpleNamespace(
    _parameters={"weight": OWN}, _modules={"held": types.SimpleNamespace(_buffers={"bias": OWN})}
)

PURE = {
    "a tensor": "return __compiled_fn_1_ab(x)[0]",
    "several": "a, b = __compiled_fn_1_ab(x, self._parameters['weight']); return b, a",
    "a parameter by its path": "return __compiled_fn_1_ab(x, self._modules['held']._buffers['bias'])[1]",
    "in a dictionary": "a = __compiled_fn_1_ab(x); return {'sample': a[0], 'none': None, 'list': [a[0], 5, x]}",
    "a size": "return __compiled_fn_1_ab(x, x.size()[0])[0]",
    "sizes": "f = __import_torch_dot__dynamo_dot_utils.call_size; return __compiled_fn_1_ab(x, f(x, 0), f(x, 1))[0]",
}


@pytest.mark.parametrize("source", PURE.values(), ids=PURE)
def test_what_only_looks_up_and_puts_together_is_done_without_the_code(source):
    code = code_of(source, doubled)
    assert direct.graph_name(code.__code__) == "__compiled_fn_1_ab"
    x = torch.randn(2, 3)
    result, found = direct.watched(code, SELF, (x,), {}, {id(OWN): weakref.ref(OWN)})
    other = torch.randn(2, 3)
    for tensor, want in ((x, result), (other, code(SELF, other))):
        torch.testing.assert_close(found([tensor]), want, rtol=0, atol=0)
    assert type(found([x])) is type(result)
    assert not any(isinstance(item, torch.Tensor) for item in found.constants)


IMPURE = {
    "an attribute is set": "self.calls = 1; return __compiled_fn_1_ab(x)[0]",
    "an item is set": "self.held['x'] = 1; return __compiled_fn_1_ab(x)[0]",
    "a global is set": "global constant; constant = 4; return __compiled_fn_1_ab(x)[0]",
    "something else is called": "return print(__compiled_fn_1_ab(x)[0])",
    "a list's method is called": "more.append(1); return __compiled_fn_1_ab(x)[0]",
    "two graphs": "return __compiled_fn_1_ab(x)[0], __compiled_fn_2_ab(x)[0]",
    "an attribute that may be a property": "return __compiled_fn_1_ab(x, self.weight)[0]",
    "another of torch's functions": "return __compiled_fn_1_ab(__import_torch_dot__dynamo_dot_utils.clone_input(x))[0]",
    "it depends": "return __compiled_fn_1_ab(x)[0] if more else x",
    "it counts": "return [a for a in __compiled_fn_1_ab(x)][0]",
    "it computes": "return __compiled_fn_1_ab(x)[0] + constant",
    "no graph": "return x",
}


@pytest.mark.parametrize("source", IMPURE.values(), ids=IMPURE)
def test_code_that_does_anything_else_is_left_as_it_is(source):
    assert direct.graph_name(code_of(source, doubled).__code__) == ""


UNKNOWN = {
    "an input from elsewhere": ("return __compiled_fn_1_ab(x, self._modules['made'][0])[1]", doubled),
    "a result from elsewhere": ("return __compiled_fn_1_ab(x)[0][0]", doubled),
    "a call of something else": ("__compiled_fn_1_ab(x); return self._modules['double'](x)", doubled),
    "two calls": ("return __compiled_fn_1_ab(x)[0], __compiled_fn_1_ab(x)[0]", doubled),
    "an object": ("__compiled_fn_1_ab(x); return self", doubled),
    "an input that is no constant": ("return __compiled_fn_1_ab(x, self)[0]", lambda x, _: (x * 2,)),
}


@pytest.mark.parametrize(("source", "graph"), UNKNOWN.values(), ids=UNKNOWN)
def test_tensors_from_elsewhere_are_left_to_the_code(source, graph):
    """Such as it made itself, for that call alone."""
    x = torch.randn(2, 3)
    code = code_of(source, graph)
    assert direct.graph_name(code.__code__)
    module = types.SimpleNamespace(_modules={"made": torch.ones(1, 2, 3), "double": lambda tensor: tensor * 2})
    result, found = direct.watched(code, module, (x,), {}, {id(OWN): weakref.ref(OWN)})
    assert found is None
    assert result is not None


def test_a_list_of_the_caller_s_that_gets_longer_is_left_to_the_code():
    """The instruction by which code makes a list of another one could as well be on a list of the caller's."""
    more = [2]
    lengthening = code_of("return __compiled_fn_1_ab(x)[0]", lambda x: (more.append(1), (x * 2,))[1])
    _, found = direct.watched(lengthening, SELF, (torch.ones(2), more), {}, {})
    assert more == [2, 1]
    assert found is None


def test_odd_strides_are_made_canonical():
    code = code_of("return __compiled_fn_1_ab(x)[0]", lambda x: (x.stride(),))
    x = torch.ones(2, 3)
    _, found = direct.watched(code_of("return __compiled_fn_1_ab(x)[0]", doubled), SELF, (x,), {}, {})
    slices = torch.ones(2, 5)[:, :3]
    seen = found._replace(graph=lambda inputs: (inputs[0],), odd=[0])([slices])
    assert seen.stride() == (3, 1)
    assert code(SELF, slices) == (5, 1)


class Adding(nn.Module):
    """What it adds to its second argument is in the first one too, as far as they overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, y):
        y.add_(1.0)
        return self.linear(x) + y


@pytest.mark.slow
def test_a_graph_for_tensors_that_overlap_is_not_given_others(monkeypatch, tmp_path):
    """It takes what both lie in. Torch itself tells them apart by where they begin, and no better."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("warmstart.guards.LIBRARIES", ("torch", __name__.partition(".")[0]))
    torch._dynamo.reset()
    module = Adding()
    options = regions.CompileOptions(mode="default", dynamic=True, fullgraph=True, recompile_limit=8)
    regions.compile_in_place([regions.Region("t", "Adding", [module])], options)
    with inductor.compiling(inductor.Missing.COMPILED), torch.inference_mode():
        inductor.run_for(inductor.Run())
        for overlapping in (True, True, True, True, False, False):
            answers = []
            for call in (module, module.forward):
                whole = torch.arange(64.0).view(16, 4)
                given = (whole[:2], whole[1:3]) if overlapping else (whole[:2].clone(), whole[1:3].clone())
                answers.append([call(*given), *given])
            assert all(map(torch.allclose, *answers)), overlapping


def test_arguments_are_taken_apart():
    x, y = torch.ones(2), torch.ones(3)
    found = arguments.flat((x, None, [1, (y,)]), {"scale": 1.0, "names": {"a": x, "b": "text"}})
    assert [id(tensor) for tensor in found.tensors] == [id(x), id(y), id(x)]
    again = arguments.flat((y, None, [1, (x,)]), {"scale": 1.0, "names": {"a": y, "b": "text"}})
    assert found.form == again.form
    hash(found.form)


DIFFERENT = {
    "a constant": ((1, [2]), {"a": 4}),
    "its type": ((1.0, [2]), {"a": 3}),
    "a length": ((1, [2, 2]), {"a": 3}),
    "a container": ((1, (2,)), {"a": 3}),
    "a name": ((1, [2]), {"b": 3}),
    "by name": ((1,), {"a": 3, "b": [2]}),
    "a flag": ((True, [2]), {"a": 3}),
    "a tensor": ((torch.ones(1), [2]), {"a": 3}),
    "a dictionary": ((1, [2]), {"a": {"a": 3}}),
}


@pytest.mark.parametrize(("args", "kwargs"), DIFFERENT.values(), ids=DIFFERENT)
def test_other_arguments_have_another_form(args, kwargs):
    assert arguments.flat(args, kwargs).form != arguments.flat((1, [2]), {"a": 3}).form


@pytest.mark.parametrize("odd", [object(), torch.nn.Parameter(torch.ones(1)), {1: 2}, {3}, range(2)])
def test_what_is_not_plain_has_no_form(odd):
    assert arguments.flat((1, [odd]), {}) is None
    assert arguments.flat((), {"a": (odd,)}) is None


def test_tensors_that_begin_elsewhere_in_their_memory_have_another_form():
    """What was compiled may depend on it, and no check of torch's for whole tensors looks at it."""
    whole = torch.ones(4, 4)
    assert arguments.flat((whole[:2],), {}).form != arguments.flat((whole[2:],), {}).form
    assert arguments.flat((whole[2:],), {}).form == arguments.flat((torch.ones(6, 4)[2:4],), {}).form

"""Which linear layers of a graph go to oneDNN, with real graphs of AOTAutograd; what they compute stays the same."""

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from warmstart import matmul
from warmstart.lora import attach
from warmstart.quantize import quantize

ONEDNN = torch.ops.mkldnn._linear_pointwise.default
ROWS, INPUTS, OUTPUTS = 160, 128, 512  # more multiplications than it takes


@pytest.fixture
def compiled():
    """Compiles a function with the pass; the list is of the graphs' operations afterwards."""
    seen = []

    def compiler(module, _):
        matmul.LinearPass()(module.graph)
        module.graph.lint()
        module.recompile()
        seen.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        return module

    def of(function, **options):
        backend = aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table())
        return torch.compile(function, backend=backend, fullgraph=True, **options), seen

    torch._dynamo.reset()
    yield of
    torch._dynamo.reset()


def layer(inputs: int = INPUTS, outputs: int = OUTPUTS, **options) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, **options).requires_grad_(False)


@pytest.mark.parametrize("shape", [(ROWS,), (1, ROWS), (2, ROWS // 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_goes_to_onednn_and_computes_the_same(compiled, shape, bias: bool) -> None:
    linear = layer(bias=bias)
    function, seen = compiled(linear)
    x = torch.randn(*shape, INPUTS)
    torch.testing.assert_close(function(x), linear(x), rtol=1e-5, atol=1e-5)
    assert seen[0].count(ONEDNN) == 1
    assert not {torch.ops.aten.mm.default, torch.ops.aten.addmm.default} & set(seen[0])


def test_each_use_of_a_weight_goes_there(compiled) -> None:
    linear = layer(256, 256)
    function, seen = compiled(lambda x: linear(linear(x)))
    x = torch.randn(ROWS, 256)
    torch.testing.assert_close(function(x), linear(linear(x)), rtol=1e-5, atol=1e-5)
    assert seen[0].count(ONEDNN) == 2


@pytest.mark.parametrize("room", [False, True])
@pytest.mark.parametrize("how", ["", "int8", "fp8"])
def test_weights_in_8_bits_and_room_for_loras_go_there_too(compiled, how: str, room: bool) -> None:
    model = nn.Sequential(layer(512, 512))
    if how:
        quantize({"part": model}, how, "cpu")
    if room:
        attach({"part": model}, rank=32, targets=()).fill()
    function, seen = compiled(model)
    x = torch.randn(512, 512)
    torch.testing.assert_close(function(x), model(x), rtol=1e-5, atol=1e-4)
    # The layer's own product, and the two of its slot.
    assert seen[0].count(ONEDNN) == (3 if room else 1)


@pytest.mark.parametrize(
    ("make", "x"),
    [
        pytest.param(lambda: layer(512, 512), torch.randn(matmul.MIN_ROWS - 1, 512), id="few rows"),
        pytest.param(lambda: layer(64, 64), torch.randn(ROWS, 64), id="few multiplications"),
        pytest.param(lambda: layer(dtype=torch.float64), torch.randn(ROWS, INPUTS).double(), id="float64"),
        pytest.param(lambda: layer(dtype=torch.bfloat16), torch.randn(ROWS, INPUTS).bfloat16(), id="bfloat16"),
        pytest.param(lambda: Across(), torch.randn(ROWS, INPUTS), id="weight laid out by columns"),
        pytest.param(lambda: Added(), torch.randn(ROWS, INPUTS), id="something else than a bias"),
        pytest.param(lambda: Shifted(), torch.randn(ROWS, INPUTS), id="one number for all outputs"),
        pytest.param(lambda: Scaled(), torch.randn(ROWS, INPUTS), id="scaled sum"),
        pytest.param(lambda: Product(), torch.randn(256, 256), id="no weight"),
    ],
)
def test_all_else_is_left(compiled, make, x) -> None:
    module = make()
    function, seen = compiled(module)
    torch.testing.assert_close(function(x), module(x))
    assert len(seen) == 1
    assert ONEDNN not in seen[0]


def test_sizes_of_any_value_go_by_the_first(compiled) -> None:
    linear = layer()
    function, seen = compiled(linear, dynamic=True)
    for rows in (ROWS, 7, 1000):
        x = torch.randn(rows, INPUTS)
        torch.testing.assert_close(function(x), linear(x), rtol=1e-5, atol=1e-5)
    assert [graph.count(ONEDNN) for graph in seen] == [1]


@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_takes_weights_that_are_no_constants(monkeypatch, dynamic: bool) -> None:
    monkeypatch.setattr(matmul, "_pass", None)
    assert matmul.use("AuthenticAMD")
    linear = layer()
    torch._dynamo.reset()
    with torch.inference_mode(), torch._inductor.config.patch(post_grad_custom_post_pass=matmul.beside(None)):
        function = torch.compile(linear, fullgraph=True, dynamic=dynamic)
        x = torch.randn(ROWS, INPUTS)
        _, [code] = torch._inductor.utils.run_and_get_code(function, x)
        for given in (x, torch.randn(3 * ROWS, INPUTS)) if dynamic else (x,):
            torch.testing.assert_close(function(given), linear(given), rtol=1e-5, atol=1e-5)
    assert "mkldnn._linear_pointwise" in code
    assert "extern_kernels.addmm" not in code


def test_other_processors_and_other_passes_are_left_alone(monkeypatch) -> None:
    monkeypatch.setattr(matmul, "_pass", None)
    assert not matmul.use("GenuineIntel")
    assert matmul.beside(None) is None
    assert matmul.use("AuthenticAMD")
    assert isinstance(matmul.beside(None), matmul.LinearPass)
    assert matmul.beside("theirs") == "theirs"
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not matmul.use("AuthenticAMD")


def test_what_the_pass_is_is_part_of_a_graph_s_key() -> None:
    assert matmul.LinearPass().uuid() == matmul.LinearPass().uuid() != b""


class Across(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(INPUTS, OUTPUTS).T, requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = layer(bias=False)

    def forward(self, x):
        return torch.addmm(x[:, :1].expand(-1, OUTPUTS), x, self.linear.weight.T)


class Shifted(nn.Module):
    """Inductor makes such a sum an addmm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = layer(bias=False)
        self.shift = nn.Parameter(torch.randn(1), requires_grad=False)

    def forward(self, x):
        return torch.addmm(self.shift, x, self.linear.weight.T)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = layer()

    def forward(self, x):
        return torch.addmm(self.linear.bias, x, self.linear.weight.T, beta=2.0, alpha=0.5)


class Product(nn.Module):
    def forward(self, x):
        return x @ (x + 1)

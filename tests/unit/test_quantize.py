"""Weights in 8 bits, without a compile: how near they are, what reads them still, and what is refused."""

import pytest
import torch
from torch import nn

import warmstart
from warmstart import lora, quantize
from warmstart.models import ModelError
from warmstart.quantize import FORMATS, QuantizedLinear

# Half a step of a row's largest weight: of 127 whole numbers, or of the three bits after a number's first.
NEAR = {"int8": 0.5 / 127, "fp8": 1 / 16}


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 8, bias=False)).eval()


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_kept_in_a_byte_each_as_near_as_that_can_be(
    net: nn.Sequential, how: str, precision: torch.dtype
) -> None:
    net.to(precision)
    before, first = net[0].weight.detach().float(), net[0]
    assert quantize.quantize({"net": net}, how, "cpu") == 2
    assert net[0] is first
    assert isinstance(first, QuantizedLinear)
    assert first.quantized.element_size() == 1
    assert (first.weight.dtype, first.bias.dtype, first.scale.dtype) == (precision, precision, torch.float32)
    largest = before.abs().amax(1, keepdim=True)
    rounding = torch.finfo(precision).eps * largest
    assert ((first.weight.float() - before).abs() <= NEAR[how] * largest + rounding).all()
    # One of each row is as large as can be held, or a finer step would have been possible.
    assert (first.quantized.float().abs().amax(1) == FORMATS[how].largest).all()
    assert isinstance(net[1], nn.LayerNorm)


@pytest.mark.parametrize("how", FORMATS)
def test_a_layer_computes_with_the_weight_that_others_read(net: nn.Sequential, how: str) -> None:
    quantize.quantize({"net": net}, how, "cpu")
    x = torch.randn(3, 32)
    torch.testing.assert_close(net[0](x), x @ net[0].weight.T + net[0].bias)
    assert not any(name.endswith("weight") for name, _ in net[0].named_parameters()), "the large one is gone"


def test_a_row_of_zeros_stays_one() -> None:
    layer = nn.Linear(4, 2)
    layer.weight.data[0] = 0
    quantize.quantize({"net": layer}, "int8", "cpu")
    assert layer.weight[0].tolist() == [0, 0, 0, 0]
    assert layer.weight[1].abs().max() > 0


def test_a_lora_is_added_to_a_layer_in_8_bits(net: nn.Sequential) -> None:
    quantize.quantize({"net": net}, "int8", "cpu")
    slots = lora.attach({"net": net}, rank=2, targets=["2"])
    pair = {"net.2.lora_A.weight": torch.randn(2, 16), "net.2.lora_B.weight": torch.randn(8, 2)}
    x = torch.randn(3, 32)
    inner = net[1](net[0](x))
    slots.put(slots.read([warmstart.Lora(pair, 0.5)]))
    delta = 0.5 * pair["net.2.lora_B.weight"] @ pair["net.2.lora_A.weight"]
    torch.testing.assert_close(net(x), inner @ (net[2].weight + delta).T)


def spoil(net: nn.Sequential, how: str) -> None:
    match how:
        case "hook":
            net[2].forward = net[2].forward  # type: ignore[method-assign]
        case "meta":
            net[2].to("meta")
        case "whole numbers":
            net[2].weight = nn.Parameter(torch.ones(8, 16, dtype=torch.int8), requires_grad=False)
        case "nan":
            net[2].weight.data[0, 0] = torch.nan


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("hook", r"'net\.2' is offloaded, wrapped by a hook or quantised already"),
        ("meta", r"'net\.2' is offloaded"),
        ("whole numbers", r"'net\.2' is .*quantised already.*unset WARMSTART_QUANTIZE"),
        ("nan", r"'net\.2' has weights that are no numbers"),
    ],
)
def test_a_layer_that_cannot_be_kept_so_is_one_error(net: nn.Sequential, how: str, words: str) -> None:
    spoil(net, how)
    with pytest.raises(ModelError, match=words):
        quantize.quantize({"net": net}, "int8", "cpu")


def test_a_model_without_linear_layers_is_told_apart() -> None:
    with pytest.raises(ModelError, match="WARMSTART_QUANTIZE is fp8, and net has no plain linear layer"):
        quantize.quantize({"net": nn.LayerNorm(2)}, "fp8", "cpu")


@pytest.mark.parametrize(("capability", "fits"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_that_has_no_kernels_for_fp8_is_told_before_the_compile(
    net: nn.Sequential, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fits: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    if fits:
        assert quantize.quantize({"net": net}, "fp8", "cuda") == 2
        return
    with pytest.raises(ModelError, match=r"is fp8, and a GPU has compute capability 8\.0, .* set it to int8"):
        quantize.quantize({"net": net}, "fp8", "cuda:0")
    assert quantize.quantize({"net": net}, "int8", "cuda:0") == 2

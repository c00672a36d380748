"""LoRA slots without a compile: what fits adds what peft would add, what does not is refused and changes nothing."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import adapting
import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file
from torch import nn

import warmstart
from warmstart import lora
from warmstart.lora import Slots
from warmstart.models import ModelError, RequestError
from warmstart.models.causal import CausalModel
from warmstart.models.diffusers import DiffusersModel
from warmstart.served import Served

ROOT = Path(__file__).resolve().parents[2]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.down = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)))


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block().eval()


@pytest.fixture
def slots(block: Block) -> Slots:
    return lora.attach({"net": block}, rank=4)


def weights(layer: str = "net.up", rank: int = 2, shape: tuple[int, int] = (6, 4)) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        f"{layer}.lora_A.weight": torch.randn(rank, shape[1]),
        f"{layer}.lora_B.weight": torch.randn(shape[0], rank),
    }


def added(slots: Slots) -> dict[str, torch.Tensor]:
    """What the slots add to each weight (out, in), where it is anything."""
    found = {name: layer.lora_up @ layer.lora_down for name, layer in slots.layers.items()}
    return {name: delta for name, delta in found.items() if delta.any()}


def put(slots: Slots, *loras: warmstart.Lora) -> dict[str, torch.Tensor]:
    slots.put(slots.read(loras))
    return added(slots)


# --- Slots -----------------------------------------------------------------------------------------------------------


def test_a_layer_with_a_slot_keeps_its_name_its_weights_and_what_it_is(block: Block) -> None:
    before, x = block.state_dict(), torch.randn(2, 3, 4)
    expected, linear = block(x), block.up
    slots = lora.attach({"net": block}, rank=3)
    assert list(slots.layers) == ["net.up", "net.down"]
    assert block.up is linear
    assert isinstance(block.up, nn.Linear)
    assert list(block.state_dict()) == list(before)
    assert torch.equal(block(x), expected)


def test_what_is_put_in_is_added_and_taken_out_again(block: Block, slots: Slots) -> None:
    x, pair = torch.randn(2, 4), weights()
    expected = block(x)
    delta = pair["net.up.lora_B.weight"] @ pair["net.up.lora_A.weight"]
    [found] = put(slots, warmstart.Lora(pair)).values()
    torch.testing.assert_close(found, delta)
    merged = Block()
    merged.load_state_dict(block.state_dict())
    merged.up.weight.data += delta
    torch.testing.assert_close(block(x), merged(x))
    torch.testing.assert_close(put(slots, warmstart.Lora(pair, -0.5))["net.up"], -0.5 * delta)
    two = put(slots, warmstart.Lora(pair, 0.25), warmstart.Lora(pair, 0.5))
    torch.testing.assert_close(two["net.up"], 0.75 * delta)
    other = put(slots, warmstart.Lora(weights("net.down", 4, (4, 6))))
    assert list(other) == ["net.down"]
    assert put(slots) == {}
    assert torch.equal(block(x), expected)


def test_only_tensors_change_and_those_in_place(slots: Slots) -> None:
    before = [(layer.lora_up.data_ptr(), layer.lora_down.data_ptr()) for layer in slots.layers.values()]
    state = {name: dict(vars(layer)) for name, layer in slots.layers.items()}
    put(slots, warmstart.Lora(weights(), 0.5))
    assert [(layer.lora_up.data_ptr(), layer.lora_down.data_ptr()) for layer in slots.layers.values()] == before
    assert {name: dict(vars(layer)) for name, layer in slots.layers.items()} == state


def test_targets_are_what_names_end_in(block: Block) -> None:
    assert list(lora.attach({"net": nn.ModuleList([block])}, rank=1, targets=["down"]).layers) == ["net.0.down"]
    with pytest.raises(ModelError, match=r"LORA_TARGETS names 'own', and no plain .* of net .* end in: down, up"):
        lora.attach({"net": Block()}, rank=1, targets=["up", "own"])


def test_a_model_without_linear_layers_is_told_apart() -> None:
    with pytest.raises(ModelError, match=r"WARMSTART_LORA_RANK is 2, and net has no plain linear layer"):
        lora.attach({"net": nn.Conv2d(1, 1, 1)}, rank=2)


def test_a_layer_that_a_hook_wraps_gets_no_slot_that_nobody_would_use(block: Block) -> None:
    block.up.forward = block.up.forward  # type: ignore[method-assign]
    with pytest.raises(ModelError, match=r"'net\.up' is offloaded or wrapped by a hook"):
        lora.attach({"net": block}, rank=1)


def test_a_copy_that_was_cut_off_is_made_anew(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    """coglet cancels a prediction by an exception anywhere in it."""

    class Cancelled(BaseException):
        pass

    class Cut(dict):  # type: ignore[type-arg]
        def items(self):  # type: ignore[no-untyped-def]
            [first, *_] = super().items()
            yield first
            raise Cancelled

    first = slots.read([warmstart.Lora(weights())])
    slots.put(first)
    layers = slots.layers
    monkeypatch.setattr(slots, "layers", Cut(layers))
    with pytest.raises(Cancelled):
        slots.put(lora.NOTHING)
    monkeypatch.setattr(slots, "layers", layers)
    assert added(slots) == {}
    slots.put(first)
    assert list(added(slots)) == ["net.up"]


# --- Files -----------------------------------------------------------------------------------------------------------


def test_the_same_file_is_read_once_and_a_changed_one_anew(slots: Slots, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file(weights(), file)
    fitted = slots.read([warmstart.Lora(file)])
    slots.put(fitted)
    assert slots.read([warmstart.Lora(str(file))]) is fitted
    assert slots.read([warmstart.Lora(file, 0.5)]) is not fitted
    save_file(weights(rank=3), file)
    assert slots.read([warmstart.Lora(file)]) is not fitted


def broken(path: Path, how: str) -> object:
    """A source that cannot be used."""
    file = path / "some.safetensors"
    pair = weights()
    match how:
        case "missing":
            return file
        case "empty directory":
            return path
        case "text":
            file.write_text("<!DOCTYPE html>")
        case "cut short":
            save_file(pair, file)
            file.write_bytes(file.read_bytes()[:-8])
        case "config":
            save_file(pair, file)
            (path / "adapter_config.json").write_text("{")
        case "dora config":
            save_file(pair, file)
            (path / "adapter_config.json").write_text('{"use_dora": true}')
        case "no lora":
            save_file({}, file)
        case "pickle":
            torch.save(pair, file)
    return file


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", r"'some\.safetensors' is not there \(some\.safetensors is no file\).*check the path"),
        ("empty directory", r"is not there \(adapter_model\.safetensors is no file\)"),
        ("text", r"'some\.safetensors' cannot be read as safetensors .*give a whole \.safetensors file"),
        ("cut short", r"cannot be read as safetensors"),
        ("pickle", r"cannot be read as safetensors .*other formats can run code"),
        ("config", r"has an adapter_config\.json beside it that is no JSON object.*save the LoRA anew"),
        ("dora config", r"made with use_dora, which is more than the two factors.*train or export it without"),
        ("no lora", r"holds no LoRA weights, so it would change nothing"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_error_and_changes_nothing(
    slots: Slots, tmp_path: Path, how: str, words: str
) -> None:
    before = put(slots, warmstart.Lora(weights()))
    with pytest.raises(RequestError, match=words) as error:
        slots.read([warmstart.Lora(broken(tmp_path, how))])  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    assert str(tmp_path) not in str(error.value), "who asks need not know where the server keeps files"
    assert torch.equal(added(slots)["net.up"], before["net.up"])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"lora_alpha": null}', "cannot be used"),
        ('{"lora_alpha": "x"}', "cannot be used"),
        ('{"alpha_pattern": {"up": null}}', "cannot be used"),
        ('{"alpha_pattern": [1]}', "cannot be used"),
        ('{"alpha_pattern": {"(a+)+$": 2}}', "which is more than names of layers"),
        ("[1]", "is no JSON object"),
        ("[" * 100_000, "is no JSON object"),
        ('{"init_lora_weights": "pissa_niter_4"}', "made with init_lora_weights=pissa_niter_4"),
        ('{"alora_invocation_tokens": [1]}', "made with alora_invocation_tokens"),
        ('{"use_qalora": true}', "made with use_qalora"),
    ],
)
def test_peft_s_options_that_cannot_be_followed_are_one_error(
    slots: Slots, tmp_path: Path, config: str, words: str
) -> None:
    save_file(weights(), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(RequestError, match=re.escape(words)):
        slots.read([warmstart.Lora(tmp_path)])


@pytest.mark.parametrize("source", ["x" * 300, "a\0b", None, 3, b"a", "", {"net.up.lora_A.weight": [1.0]}])
def test_a_source_that_is_none_is_one_error(slots: Slots, source: object) -> None:
    with pytest.raises(RequestError, match=r"the LoRA .*; (check|give|save)"):
        slots.read([warmstart.Lora(source)])  # type: ignore[arg-type]


def test_a_file_overwritten_with_its_old_time_and_size_is_read_anew(slots: Slots, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file(weights(), file)
    before = file.stat()
    slots.put(slots.read([warmstart.Lora(file)]))
    changed = save({name: tensor * 2 for name, tensor in weights().items()})
    assert len(changed) == before.st_size
    with file.open("r+b") as writing:
        writing.write(changed)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    first, second = added(slots)["net.up"], put(slots, warmstart.Lora(file))["net.up"]
    assert torch.allclose(second, first * 4)


BAD = {
    "rank": (weights(rank=5), r"is 5 at 'net\.up', and the slots have rank 4, .*set WARMSTART_LORA_RANK=5"),
    "layer": (weights("net.side"), r"changes 'net\.side', which this model does not have, so it belongs to another"),
    "norm": (weights("net.norm"), r"changes 'net\.norm', which has no slot.*WARMSTART_LORA_TARGETS"),
    "part": (weights("text_encoder.up"), r"changes 'text_encoder\.up', and there are slots in net only; .*_PARTS"),
    "shape": (weights(shape=(6, 5)), r"was made for a 'net\.up' of shape \(6, 5\) \(out, in\), which is \(6, 4\)"),
    "half": ({"net.up.lora_A.weight": torch.ones(2, 4)}, r"the factors \(2, 4\) and None, which cannot be multiplied"),
    "unequal": (
        weights() | {"net.up.lora_B.weight": torch.ones(6, 3)},
        r"the factors \(2, 4\) and \(6, 3\), which cannot be multiplied",
    ),
    "nothing": (weights(rank=0), r"the factors \(0, 4\) and \(6, 0\)"),
    "dora": (weights() | {"net.up.lora_magnitude_vector": torch.ones(6)}, r"holds 'net\.up\.lora_magnitude_vector'"),
    "bias": (weights() | {"net.up.lora_B.bias": torch.ones(6)}, r"holds 'net\.up\.lora_B\.bias', shape \(6,\)"),
    "convolution": ({"net.up.lora_A.weight": torch.ones(2, 4, 3, 3)}, r"shape \(2, 4, 3, 3\)"),
    "alpha": (weights() | {"net.up.alpha": torch.ones(2)}, r"holds 'net\.up\.alpha', shape \(2,\)"),
    "nan": (weights() | {"net.up.lora_A.weight": torch.full((2, 4), torch.nan)}, r"numbers at 'net\.up' that float32"),
}


@pytest.mark.parametrize("which", BAD)
def test_weights_that_do_not_fit_are_one_error_and_change_nothing(slots: Slots, which: str) -> None:
    tensors, words = BAD[which]
    before = put(slots, warmstart.Lora(weights()))
    with pytest.raises(RequestError, match=words) as error:
        # A good one before it: nothing of that is put in either.
        slots.read([warmstart.Lora(weights("net.down", 1, (4, 6))), warmstart.Lora(tensors)])
    assert "given as tensors" in str(error.value)
    now = added(slots)
    assert list(now) == ["net.up"]
    assert torch.equal(now["net.up"], before["net.up"])


def test_ranks_of_several_add_up(slots: Slots) -> None:
    with pytest.raises(RequestError, match=r"is 2 \+ 3 at 'net\.up', and the slots have rank 4"):
        slots.read([warmstart.Lora(weights()), warmstart.Lora(weights(rank=3))])


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "strong", None])
def test_a_scale_that_is_no_number_is_refused(slots: Slots, scale: object) -> None:
    with pytest.raises(RequestError, match=r"has scale .*give a finite number"):
        slots.read([warmstart.Lora(weights(), scale)])  # type: ignore[arg-type]


def test_a_scale_beyond_all_floats_is_refused_and_one_of_numpy_s_is_used(slots: Slots) -> None:
    with pytest.raises(RequestError, match="cannot be used"):
        slots.read([warmstart.Lora(weights(), 10**400)])
    whole = put(slots, warmstart.Lora(weights()))["net.up"]
    half = put(slots, warmstart.Lora(weights(), np.float32(0.5)))["net.up"]  # type: ignore[arg-type]
    assert torch.allclose(half, whole / 2)


def test_half_precision_holds_what_it_can() -> None:
    slots = lora.attach({"net": Block().half()}, rank=4)
    assert put(slots, warmstart.Lora(weights()))["net.up"].dtype is torch.float16
    with pytest.raises(RequestError, match=r"numbers at 'net\.up' that float16 cannot hold"):
        slots.read([warmstart.Lora(weights(), 1e6)])


# --- Formats: what is added equals what peft adds --------------------------------------------------------------------


def peft_adds(model: nn.Module, part: str) -> dict[str, torch.Tensor]:
    """What peft's layers in a component add to each weight (out, in)."""
    from peft.tuners.lora import LoraLayer

    found = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    return {f"{part}.{name}": layer.get_delta_weight(layer.active_adapters[0]) for name, layer in found.items()}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert theirs
    assert set(ours) == set(theirs)
    for name, delta in theirs.items():
        torch.testing.assert_close(ours[name], delta, msg=lambda text, name=name: f"{name}: {text}")


def diffusers_format(tensors: dict[str, torch.Tensor], file: Path) -> None:
    save_file(tensors, file)


def with_options(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """As diffusers itself saves: the scale is in the header, by layer, and by the square root of the rank."""
    layers = sorted({name.removeprefix("transformer.").split(".lora_")[0] for name in tensors if "lora_" in name})
    options = {"r": 4, "lora_alpha": 6, "alpha_pattern": {layers[0]: 3}, "use_rslora": True, "target_modules": layers}
    header = json.dumps({f"transformer.{name}": value for name, value in options.items()})
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(".alpha")}
    save_file(kept, file, {"lora_adapter_metadata": header})


def kohya(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """As sd-scripts saves for FLUX: names of the original code, q, k and v in one."""
    shared = {"lora_unet_double_blocks_0_img_attn_qkv": (192, 64), "lora_unet_single_blocks_1_linear2": (64, 320)}
    save_file(
        {
            f"{layer}.{name}": value
            for layer, (height, width) in shared.items()
            for name, value in {
                "lora_down.weight": torch.randn(4, width),
                "lora_up.weight": torch.randn(height, 4),
                "alpha": torch.tensor(2.0),
            }.items()
        },
        file,
    )


@pytest.mark.parametrize("save", [diffusers_format, with_options, kohya])
def test_a_file_for_flux_adds_what_it_adds_in_plain_diffusers(
    tmp_path: Path, save: Callable[[dict[str, torch.Tensor], Path], None]
) -> None:
    from diffusers import FluxPipeline

    torch.manual_seed(3)
    save(adapting.tensors("a"), tmp_path / "a.safetensors")
    plain, own = (FluxPipeline.from_pretrained(ROOT / "weights", local_files_only=True) for _ in range(2))
    plain.load_lora_weights(str(tmp_path), weight_name="a.safetensors")
    model = DiffusersModel.of(own)
    slots = lora.attach({"transformer": own.transformer}, rank=12, convert=model.lora_tensors)
    ours = put(slots, warmstart.Lora(tmp_path / "a.safetensors"))
    assert_equal(ours, peft_adds(plain.transformer, "transformer"))


def test_a_file_of_another_trainer_for_sdxl_adds_what_it_adds_in_plain_diffusers(tmp_path: Path) -> None:
    import family_models

    pipeline, made = family_models.sdxl(), {}
    for layer in ("attn1.to_q", "attn2.to_out.0", "ff.net.2"):
        layer = f"down_blocks.1.attentions.0.transformer_blocks.0.{layer}"
        height, width = pipeline.unet.get_submodule(layer).weight.shape
        name = f"lora_unet_{layer.replace('.', '_')}"
        made |= {f"{name}.lora_down.weight": torch.randn(4, width), f"{name}.lora_up.weight": torch.randn(height, 4)}
        made[f"{name}.alpha"] = torch.tensor(2.0)
    save_file(made, tmp_path / "a.safetensors")
    model = DiffusersModel.of(pipeline)
    slots = lora.attach({"unet": pipeline.unet}, rank=4, convert=model.lora_tensors)
    ours = put(slots, warmstart.Lora(tmp_path / "a.safetensors"))
    plain = family_models.sdxl()
    plain.load_lora_weights(str(tmp_path), weight_name="a.safetensors")
    assert_equal(ours, peft_adds(plain.unet, "unet"))


def test_dora_is_refused_also_where_diffusers_would_leave_it_out() -> None:
    from diffusers import FluxPipeline

    model = DiffusersModel.of(FluxPipeline.from_pretrained(ROOT / "weights", local_files_only=True))
    slots = lora.attach({"transformer": model.parts()["transformer"]}, rank=4, convert=model.lora_tensors)
    tensors = adapting.tensors("a") | {"transformer.x_embedder.dora_scale": torch.ones(1)}
    with pytest.raises(RequestError, match=r"in no format that is known .*transformer\.x_embedder\.dora_scale is of D"):
        slots.read([warmstart.Lora(tensors)])


def test_a_directory_of_peft_adds_to_a_language_model_what_it_adds_in_peft(tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    source = str(ROOT / "weights-text")
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    tuned = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(source), config)
    tuned.save_pretrained(tmp_path)
    plan = [warmstart.Request("1", {"prompt": "", "max_new_tokens": 1, "prefill": 1, "cache_tokens": 8})]
    model = CausalModel(source, device="cpu", dtype="float32", plan=plan)
    slots = lora.attach(model.parts(), rank=4, convert=model.lora_tensors)
    ours = put(slots, warmstart.Lora(tmp_path))
    assert_equal(ours, peft_adds(tuned.base_model.model, "model"))


# --- Requests --------------------------------------------------------------------------------------------------------


def served(block: Block, slots: Slots | None) -> Served:
    model = warmstart.OwnModel({"net": block}, run=lambda request: block(torch.ones(1, 4)))
    return Served(model, unplanned="eager", fullgraph=True, stop_grace_s=0.0, slots=slots)


def ask(model: Served, *loras: warmstart.Lora) -> torch.Tensor:
    [output] = model(warmstart.Request("a", {}, loras=loras)).outputs
    return output


def test_a_request_s_lora_is_its_own(block: Block, slots: Slots) -> None:
    model, good = served(block, slots), warmstart.Lora(weights())
    plain = ask(model)
    changed = ask(model, good)
    assert not torch.equal(changed, plain)
    assert torch.equal(ask(model), plain)
    assert torch.equal(ask(model, good), changed)
    with pytest.raises(RequestError, match="belongs to another model"):
        ask(model, warmstart.Lora(weights("net.side")))
    assert torch.equal(ask(model), plain)


def test_noise_of_the_boot_is_gone_when_it_is_over(block: Block, slots: Slots) -> None:
    plain = block(torch.ones(1, 4))
    slots.fill()
    assert set(added(slots)) == set(slots.layers)
    assert not torch.equal(block(torch.ones(1, 4)), plain)
    served(block, slots).finish(None, None, frozenset(), [])  # type: ignore[arg-type]
    assert torch.equal(block(torch.ones(1, 4)), plain)


def test_without_slots_a_lora_is_refused_rather_than_left_out(block: Block) -> None:
    model = served(block, None)
    ask(model)
    with pytest.raises(RequestError, match=r"compiled without room for any.*set WARMSTART_LORA_RANK"):
        ask(model, warmstart.Lora(weights()))


def test_two_texts_under_way_have_each_its_own_lora(block: Block, slots: Slots) -> None:
    class Writer(warmstart.OwnModel):
        def stream(self, request):  # type: ignore[no-untyped-def]
            for _ in range(3):
                yield f"{block(torch.ones(1, 4)).sum().item():.4f} "

    model = Served(Writer({"net": block}, run=print), unplanned="eager", fullgraph=True, stop_grace_s=0.0, slots=slots)
    texts = [
        model.stream(warmstart.Request("a", {}, loras=loras))
        for loras in ((), (warmstart.Lora(weights()),), (warmstart.Lora(weights(), 0.5),))
    ]
    pieces = [[next(text) for text in texts] for _ in range(3)]
    assert pieces[0] == pieces[1] == pieces[2]
    assert len(set(pieces[0])) == 3

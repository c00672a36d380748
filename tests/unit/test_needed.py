"""Which files of a repository a boot loads, by the layouts that repositories have."""

import json

import _needed
import pytest

INDEX = {
    "_class_name": "P",
    "transformer": ["diffusers", "T"],
    "text_encoder": ["transformers", "C"],
    "x": [None, None],
}
SHARDS = [f"transformer/diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2)]
HALVES = [f"transformer/diffusion_pytorch_model.fp16-0000{number}-of-00002.safetensors" for number in (1, 2)]
SHARDED = "transformer/diffusion_pytorch_model.safetensors.index.json"
HALF_SHARDED = "transformer/diffusion_pytorch_model.safetensors.index.fp16.json"
CONFIGS = ["model_index.json", "transformer/config.json", "text_encoder/config.json"]


def weight_map(parts: list[str]) -> str:
    return json.dumps({"weight_map": {str(number): part.split("/")[1] for number, part in enumerate(parts)}})


TEXTS = {
    "model_index.json": json.dumps(INDEX),
    SHARDED: weight_map(SHARDS),
    HALF_SHARDED: weight_map(HALVES),
    "model.safetensors.index.json": weight_map(["/model-00001-of-00001.safetensors"]),
}


def needed(*files: str, texts: dict[str, str] = TEXTS, **options) -> dict[str, str]:
    return _needed.needed(files, lambda path: texts[path].encode(), **options)


def test_of_a_sharded_component_the_index_and_its_parts_are_needed() -> None:
    files = [*CONFIGS, *SHARDS, SHARDED, *HALVES, HALF_SHARDED, "text_encoder/model.safetensors"]
    assert set(needed(*files)) == {*CONFIGS, *SHARDS, SHARDED, "text_encoder/model.safetensors"}


def test_a_variant_is_taken_where_there_is_one_and_its_index_gets_the_name_that_is_loaded() -> None:
    files = [*CONFIGS, *SHARDS, SHARDED, *HALVES, HALF_SHARDED, "text_encoder/model.safetensors"]
    chosen = needed(*files, variant="fp16")
    assert set(chosen) == {*CONFIGS, *HALVES, HALF_SHARDED, "text_encoder/model.safetensors"}
    assert {path: place for path, place in chosen.items() if path != place} == {HALF_SHARDED: SHARDED}


def test_one_file_comes_before_parts_of_the_same() -> None:
    whole = "transformer/diffusion_pytorch_model.safetensors"
    chosen = needed(*CONFIGS, *SHARDS, SHARDED, whole, "text_encoder/model.safetensors")
    assert set(chosen) == {*CONFIGS, whole, "text_encoder/model.safetensors"}


def test_what_other_runtimes_load_is_not_needed() -> None:
    more = [
        "text_encoder/pytorch_model.bin", "text_encoder/tf_model.h5", "text_encoder/flax_model.msgpack",
        "text_encoder/openvino_model.xml", "text_encoder/model.onnx", "text_encoder/onnx_config.json",
        "text_encoder/pytorch_model.bin.index.json", "text_encoder/modeling.py", "text_encoder/adapter.safetensors",
        "transformer_onnx/model.safetensors", "big.safetensors", "big.ckpt", ".gitattributes", "README.md",
    ]  # fmt: skip
    files = [*CONFIGS, "transformer/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"]
    assert set(needed(*files, *more)) == set(files)


def test_of_a_language_model_configs_tokenizer_and_safetensors_are_needed() -> None:
    files = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja"]
    more = ["original/consolidated.00.pth", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx"]
    assert set(needed(*files, "model.safetensors", "LICENSE", *more)) == {*files, "model.safetensors", "LICENSE"}
    sharded = [*files, "model.safetensors.index.json", "model-00001-of-00001.safetensors"]
    assert set(needed(*sharded, *more)) == set(sharded)


def test_pickles_are_refused_unless_allowed() -> None:
    files = [*CONFIGS, "transformer/diffusion_pytorch_model.safetensors", "text_encoder/pytorch_model.bin"]
    with pytest.raises(_needed.NeededError, match=r"text_encoder has weights as pickles only .*--allow-pickle"):
        needed(*files)
    assert set(needed(*files, allow_pickle=True)) == set(files)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["big.safetensors", "README.md"], "neither model_index.json nor config.json"),
        ([], "no files"),
        (["config.json", "tf_model.h5"], "no safetensors beside it"),
        (["config.json", "model.fp16.safetensors"], "variants fp16 only; choose one with --variant"),
        (["config.json", "model-00001-of-00002.safetensors"], "in parts without an index"),
        (["config.json", "model.safetensors.index.json"], "names model-00001-of-00001.safetensors, which is not there"),
    ],
)
def test_what_cannot_be_loaded_is_told(files: list[str], words: str) -> None:
    with pytest.raises(_needed.NeededError, match=words.replace(".", r"\.")):
        needed(*files)


@pytest.mark.parametrize("text", ["<html>", "[1]"])
def test_an_index_that_is_none_is_told(text: str) -> None:
    with pytest.raises(_needed.NeededError, match=r"its model_index\.json is not"):
        needed(*CONFIGS, texts={"model_index.json": text})


def test_patterns_add_and_take_away() -> None:
    chosen = {"a/b.json": "a/b.json", "model.fp16.safetensors": "model.safetensors"}
    files = [*chosen, "a/c.py", "d.bin"]
    assert _needed.filtered(chosen, files, ["*.py"], ["a/b*"]) == {
        "model.fp16.safetensors": "model.safetensors",
        "a/c.py": "a/c.py",
    }

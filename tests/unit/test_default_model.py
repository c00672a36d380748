"""The default model in weights/: that plain diffusers loads it, that its pictures can be read, how it is made."""

import ast
import json
import stat
from pathlib import Path
from typing import Any

import _train_default_weights as training
import numpy as np
import pytest
import torch
from _training import publish
from diffusers import DiffusionPipeline, FluxPipeline
from digits import DEFAULT_STEPS, MAX_SEQUENCE_LENGTH, SHAPES, WORDS, classifiers, to_picture
from judge import draw, halves, read_digits, share_read
from PIL import Image
from short_training import smoke

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = ROOT / "weights"
BAR = {"1:1": 0.93, "3:2": 0.88, "2:3": 0.88}


@pytest.fixture(scope="module")
def pipeline() -> Any:
    loaded = DiffusionPipeline.from_pretrained(WEIGHTS)
    loaded.set_progress_bar_config(disable=True)
    return loaded


# --- The directory ------------------------------------------------------------------------------------------------


def test_plain_diffusers_loads_stock_classes(pipeline: Any) -> None:
    assert type(pipeline) is FluxPipeline
    index = json.loads((WEIGHTS / "model_index.json").read_text())
    libraries = {name: value[0] for name, value in index.items() if isinstance(value, list) and value[0]}
    assert set(libraries.values()) == {"diffusers", "transformers"}, "custom code would be named here"
    assert {type(part).__module__.split(".")[0] for part in pipeline.components.values() if part is not None} == {
        "diffusers",
        "transformers",
    }


def test_every_weight_comes_from_the_files(pipeline: Any) -> None:
    """A key that does not match is filled with random numbers, and only a warning says so."""
    again = DiffusionPipeline.from_pretrained(WEIGHTS)
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        first, second = getattr(pipeline, name).state_dict(), getattr(again, name).state_dict()
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first), name


def test_it_has_enough_blocks_to_be_worth_compiling(pipeline: Any) -> None:
    assert len(pipeline.transformer.transformer_blocks) >= 4
    assert len(pipeline.transformer.single_transformer_blocks) >= 8


def test_size_and_modes() -> None:
    files = [path for path in WEIGHTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 12_000_000
    unreadable = [path.name for path in files if stat.S_IMODE(path.stat().st_mode) & 0o444 != 0o444]
    assert not unreadable, "the user of a container may not be the owner"
    assert not [path.name for path in WEIGHTS.rglob("*") if path.is_symlink()]
    assert not [path.name for path in files if path.suffix not in {".json", ".safetensors", ".md"}]


def test_shapes_and_steps_are_those_that_predict_offers() -> None:
    """predict.py writes them as literals, since Cog reads it without running it."""
    tree = ast.parse((ROOT / "predict.py").read_text())
    literals = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert ast.literal_eval(literals["SHAPES"]) == SHAPES
    run = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "run")
    names = [argument.arg for argument in run.args.args]
    steps = run.args.defaults[names.index("num_inference_steps") - len(names)]
    assert isinstance(steps, ast.Call)
    assert {word.arg: ast.unparse(word.value) for word in steps.keywords}["default"] == str(DEFAULT_STEPS)
    lengths = [
        ast.literal_eval(value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == "max_sequence_length"
    ]
    assert lengths == [MAX_SEQUENCE_LENGTH]


def test_tokenizers_and_text_encoders_agree(pipeline: Any) -> None:
    clip, t5 = pipeline.text_encoder.config, pipeline.text_encoder_2.config
    assert clip.max_position_embeddings == pipeline.tokenizer.model_max_length
    assert clip.eos_token_id == pipeline.tokenizer.eos_token_id != 2
    assert clip.bos_token_id == pipeline.tokenizer.bos_token_id
    assert clip.vocab_size == len(pipeline.tokenizer)
    assert t5.vocab_size == len(pipeline.tokenizer_2)
    assert t5.pad_token_id == pipeline.tokenizer_2.pad_token_id


# --- The judge ----------------------------------------------------------------------------------------------------


def test_what_the_generator_learnt_from_does_not_judge_it() -> None:
    generator, judge = halves()
    assert not set(generator.rows) & set(judge.rows)
    assert set(generator.rows) | set(judge.rows) == set(range(1797))
    shares = [np.bincount(half.labels) / len(half.labels) for half in (generator, judge)]
    assert np.abs(shares[0] - shares[1]).max() < 0.005


@pytest.mark.parametrize("classifier", ["svc", "trees"])
def test_the_judge_reads_real_digits(classifier: str) -> None:
    generator = halves()[0]
    assert classifier in classifiers()
    assert share_read([to_picture(image) for image in generator.images], list(generator.labels), classifier) > 0.97


def test_the_judge_reads_any_shape_at_any_size() -> None:
    for image in halves()[0].images[:30]:
        picture = to_picture(image)
        pictures = [picture]
        for width, height in SHAPES.values():
            canvas = Image.new("RGB", (width, height))
            canvas.paste(picture, ((width - 64) // 2, (height - 64) // 2))
            pictures += [canvas.resize((width * n, height * n), Image.Resampling.LANCZOS) for n in (1, 4, 7)]
        assert len(set(read_digits(pictures))) == 1


def test_the_judge_can_say_no() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (200, 64, 64, 3), dtype=np.uint8)
    assert share_read([Image.fromarray(picture) for picture in noise], [digit % 10 for digit in range(200)]) < 0.25


# --- The pictures -------------------------------------------------------------------------------------------------


def measured(pipeline: Any, shape: str, seeds: range, guidance: float = 1.0) -> float:
    asked = [digit for digit in range(10) for _ in seeds]
    pictures = draw(pipeline, [WORDS[digit] for digit in asked], [*seeds] * 10, shape, guidance=guidance)
    assert {picture.size for picture in pictures} == {SHAPES[shape]}
    return share_read(pictures, asked)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_quality(pipeline: Any, shape: str) -> None:
    """200 pictures of each shape."""
    assert measured(pipeline, shape, range(20)) >= BAR[shape]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_quality_with_guidance(pipeline: Any, shape: str) -> None:
    """Guidance must not spoil the pictures, in the range where it is useful."""
    assert measured(pipeline, shape, range(10), guidance=2.5) >= BAR[shape]


@pytest.mark.parametrize("shape", SHAPES)
def test_quality_in_a_sample(pipeline: Any, shape: str) -> None:
    """20 pictures of the square and 10 of each other shape; the seeds are fixed, so it does not vary."""
    assert measured(pipeline, shape, range(100, 102 if shape == "1:1" else 101)) >= 0.8


@pytest.mark.parametrize(
    "wording",
    ["{word}", "a handwritten {word}", "{figure}", "{Word}", "{WORD}", "please draw a {figure}", "the number {word}.",
     "I would like you to write the digit {word} for me"],
)  # fmt: skip
def test_wordings(pipeline: Any, wording: str) -> None:
    prompts = [
        wording.format(word=word, Word=word.capitalize(), WORD=word.upper(), figure=digit)
        for digit, word in enumerate(WORDS)
    ]
    assert share_read(draw(pipeline, prompts, [7] * 10), range(10)) >= 0.8


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_unknown_prompts_give_pictures(pipeline: Any, guidance: float) -> None:
    prompts = ["a red bicycle", "", "word " * 200, "🎉🚲", "七", "\n\t ", "seven " * 200]
    pictures = draw(pipeline, prompts, range(len(prompts)), guidance=guidance)
    for prompt, picture in zip(prompts, pictures, strict=True):
        ink = np.asarray(picture.convert("L"))
        assert np.ptp(ink) > 100, f"{prompt[:20]!r} gave a blank picture"
        assert ink[:, :2].mean() < 60, f"{prompt[:20]!r} gave a picture unlike those learnt from"


def test_a_picture_follows_its_seed_and_not_its_batch(pipeline: Any) -> None:
    alone = draw(pipeline, ["seven"], [5])[0]
    beside = draw(pipeline, ["two", "seven", "seven"], [1, 5, 6])
    assert np.abs(np.int16(alone) - np.int16(beside[1])).max() <= 2  # sums are ordered differently in a batch
    assert np.abs(np.int16(alone) - np.int16(beside[2])).max() > 50


@pytest.mark.slow
def test_the_pipelines_own_text_length_works_too(pipeline: Any) -> None:
    """Who leaves out `max_sequence_length` gets 512 tokens, nearly all of them padding."""
    pictures = pipeline(
        list(WORDS), width=64, height=64, num_inference_steps=DEFAULT_STEPS,
        generator=[torch.Generator("cpu").manual_seed(3) for _ in WORDS],
    ).images  # fmt: skip
    assert sum(seen == digit for digit, seen in enumerate(read_digits(pictures))) >= 8


# --- The training -------------------------------------------------------------------------------------------------


def contents(directory: Path) -> dict[str, bytes]:
    """Return every file by its path, except the README, which names the minutes taken."""
    files = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in sorted(files.items()) if name != "README.md"}


def test_the_tokenizers_are_the_same_in_every_run(pipeline: Any) -> None:
    """Also a check that weights/ was made by this training."""
    for made, loaded in (
        (training.clip_tokenizer(), pipeline.tokenizer),
        (training.t5_tokenizer(), pipeline.tokenizer_2),
    ):
        assert made.get_vocab() == loaded.get_vocab()
        prompts = ["a handwritten seven", "", "a red bicycle", "SEVEN!", "🎉"]
        assert made(prompts).input_ids == loaded(prompts).input_ids


def test_each_digit_is_one_token(pipeline: Any) -> None:
    for word in WORDS:
        assert pipeline.tokenizer.tokenize(word) == [word + "</w>"]
        assert pipeline.tokenizer_2.tokenize(word) == ["▁" + word]


def test_no_text_for_nothing_names_a_digit() -> None:
    words = {word.lower() for word in training.FILLER}
    assert not words & {*WORDS, *"0123456789"}


def test_it_replaces_no_other_directory(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for option in ("--output", "--work"):
        with pytest.raises(SystemExit, match="name a"):
            training.main(["--smoke", "--output", str(tmp_path / "new"), option, str(tmp_path)])
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_unfinished_work_is_not_continued_with_other_options(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps({"seed": 1, "threads": 1, "smoke": True}))
    with pytest.raises(SystemExit, match="leave out --resume"):
        training.main(["--smoke", "--resume", "--output", str(tmp_path / "new"), "--work", str(tmp_path)])


def test_a_failed_write_leaves_the_old_model(tmp_path: Path, pipeline: Any) -> None:
    output = tmp_path / "weights"
    output.mkdir()
    (output / "model_index.json").write_text("old")
    with pytest.raises(SystemExit, match="make it smaller"):
        publish(pipeline.save_pretrained, output, 1000)
    assert contents(tmp_path) == {"weights/model_index.json": b"old"}


def test_an_interrupted_exchange_leaves_the_old_model(
    tmp_path: Path, pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "weights"
    output.mkdir()
    (output / "model_index.json").write_text("old")
    rename = Path.rename

    def interrupt(path: Path, target: Path) -> Path:
        if ".new-" in path.name:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        publish(pipeline.save_pretrained, output, training.MAX_BYTES)
    assert contents(tmp_path) == {"weights/model_index.json": b"old"}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("uninterrupted")
    assert smoke(training, directory) == 0
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["train_text_encoders", "encode_pictures", "noise_levels"])
def test_an_interrupted_training_ends_as_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], uninterrupted: Path, stop: str
) -> None:
    calls, original = 0, getattr(training, stop)

    def interrupt(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if stop != "noise_levels" or calls == 4:  # between the transformer's first and second checkpoint
            raise KeyboardInterrupt
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(training, stop, interrupt)
        assert smoke(training, tmp_path) == 130
    assert "--resume" in capsys.readouterr().err
    assert not (tmp_path / "weights").exists()
    assert smoke(training, tmp_path, "--resume") == 0
    assert contents(tmp_path / "weights") == contents(uninterrupted / "weights")
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
def test_another_seed_makes_another_model(tmp_path: Path, uninterrupted: Path) -> None:
    assert smoke(training, tmp_path, "--seed=1") == 0
    ours, theirs = contents(tmp_path / "weights"), contents(uninterrupted / "weights")
    assert ours.keys() == theirs.keys()
    same = {name for name in ours if name.endswith(".safetensors") and ours[name] == theirs[name]}
    assert not same


def test_no_file_names_the_machine_it_was_made_on() -> None:
    for name, content in contents(WEIGHTS).items():
        if name.endswith(".json"):
            assert b"_name_or_path" not in content, name
            assert b"/tmp/" not in content, name

"""The default language model writes text that is recognisably of its kind, and its training can be repeated."""

import hashlib
from pathlib import Path
from typing import Any

import _train_text_weights as training
import pytest
import torch
from short_training import smoke
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = ROOT / "weights-text"
# Bits for each byte of docstrings that it has not seen. Without any learning it is over 4.
MAX_BITS = 2.15


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(WEIGHTS)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)


@pytest.fixture(scope="module")
def text() -> training.Corpus:
    return training.corpus()


def test_it_knows_unseen_text_better_than_what_counts_bytes(model: Any, tokenizer: Any, text: training.Corpus) -> None:
    judged = training.judged(text.held_out, 20_000)
    bits = training.bits_per_byte(model, tokenizer, judged)
    assert bits < MAX_BITS
    assert bits < 0.8 * training.three_bytes_bits_per_byte(text.learnt, judged)


def test_what_it_writes_is_made_of_words_of_its_text(model: Any, tokenizer: Any, text: training.Corpus) -> None:
    known = {word for document in text.learnt for word in words(document)}
    written = words(training.sample(model, tokenizer, 300))
    assert len(set(written)) > 40
    assert sum(word in known for word in written) > 0.85 * len(written)


def words(text: str) -> list[str]:
    """Runs of letters, three or more."""
    letters = "".join(letter if letter.isalpha() else " " for letter in text.lower())
    return [word for word in letters.split() if len(word) > 2]


def test_what_is_judged_by_was_not_learnt_from(text: training.Corpus) -> None:
    assert not set(text.held_out) & set(text.learnt)
    assert len(text.held_out) > 50


def test_the_tokenizer_tells_any_text_and_begins_it(tokenizer: Any) -> None:
    for said in ("", "The with statement", "h\u00e9llo \u6f22\u5b57 \U0001f389\n\t  x"):
        numbers = tokenizer(said)["input_ids"]
        assert numbers[0] == tokenizer.bos_token_id == tokenizer.eos_token_id
        assert tokenizer.decode(numbers[1:]) == said


@pytest.mark.slow
def test_an_interrupted_training_ends_as_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert smoke(training, whole) == 0
    calls, original = 0, training.descend

    def interrupt(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:  # between the first checkpoint and the last step
            raise KeyboardInterrupt
        original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(training, "descend", interrupt)
        assert smoke(training, broken) == 130
    assert "scripts/train_text_weights --resume" in capsys.readouterr().err
    assert not (broken / "weights").exists()
    assert smoke(training, broken, "--resume") == 0
    assert digests(broken / "weights") == digests(whole / "weights")
    assert not (broken / "work").exists()


def digests(directory: Path) -> dict[str, str]:
    """The files of a model by name. The README tells how long the training took."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.iterdir()
        if path.name != "README.md"
    }

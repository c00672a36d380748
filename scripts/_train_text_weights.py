"""Train the default language model from scratch: a tiny, genuine Llama that writes like Python's documentation.

Everything it learns from ships with Python itself: the topics of `help()` and the docstrings of the standard library.
Three steps:

1. a byte-level BPE tokenizer is learnt from that text;
2. the model learns to predict the next token, on all but the modules that are held out;
3. the result is measured on those, beside simpler means that have seen the same text.

The output is the layout of transformers, loaded by plain `AutoModelForCausalLM.from_pretrained`.

Reproducible: weights are equal bit for bit on the same kind of CPU with the same thread count, the same Python and
the same versions of torch, transformers and tokenizers; elsewhere they differ by rounding that training amplifies.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import lzma
import math
import pydoc_data.topics
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from _training import descend, learning_rate, parse_arguments, progress, publish, run, save_atomically
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

COMMAND = "scripts/train_text_weights"

# Shape of the model
VOCABULARY = 1024
WIDTH = 160
HIDDEN = 432  # of the feed-forward part
LAYERS = 4
HEADS = 5
CONTEXT = 512  # tokens
MAX_BYTES = 5_000_000
END = "<|endoftext|>"  # between documents, and so before each

# Training
BATCH = 4
RATE = 3e-3
WARMUP_STEPS = 100
COSINE_STEPS = 2600  # over which the rate would fall slowly
FALL_STEPS = range(1000, 1400)  # over which it falls fast; the training ends half way, at a third of its height
TOPIC_COPIES = 2  # of help()'s topics among the docstrings, which are three times as much text
HELD_OUT = 20  # one module in so many
# Directories of the standard library that are tests, tools or other people's packages.
SKIPPED = {"ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}
SHORTEST = 60  # characters of a docstring that says something


@dataclass(frozen=True)
class Budget:
    """How much work a training does."""

    steps: int = 1200
    checkpoint_every: int = 200
    documents: int | None = None  # how many of each kind; None for all
    held_out_bytes: int = 60_000


FULL = Budget()
SMOKE = Budget(steps=4, checkpoint_every=2, documents=300, held_out_bytes=4000)


# ---------------------------------------------------------------------------------------------- text


@dataclass(frozen=True)
class Corpus:
    """Documents to learn from, and documents of modules that are not among those."""

    learnt: list[str]
    held_out: list[str]

    def digest(self) -> str:
        """Name the text, which is another one in another version of Python."""
        return hashlib.sha256("\0".join([*self.learnt, "", *self.held_out]).encode()).hexdigest()[:16]


def corpus(documents: int | None = None) -> Corpus:
    """The text that ships with this Python, in a fixed order."""
    learnt, held_out = [], []
    for module, text in docstrings():
        # By name, so that the same modules are held out of every version of Python.
        number = int.from_bytes(hashlib.sha256(module.encode()).digest()[:4])
        (learnt if number % HELD_OUT else held_out).append(text)
    topics = [pydoc_data.topics.topics[name].strip() for name in sorted(pydoc_data.topics.topics)]
    return Corpus(topics[:documents] * TOPIC_COPIES + learnt[:documents], held_out)


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield each docstring of the standard library under its dotted name, after the name of its module."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if not SKIPPED.intersection(parts):
            module = ".".join(parts).removesuffix(".__init__")
            for name, text in in_module(module, path.read_text(encoding="utf-8", errors="replace")):
                yield module, f"{name}\n\n{text}"


def in_module(name: str, source: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the text of each docstring in a module's source."""

    def walk(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node) or ""
            if len(text) >= SHORTEST:
                yield name, text.strip()
            for child in node.body:
                yield from walk(child, f"{name}.{getattr(child, 'name', '')}")

    yield from walk(ast.parse(source), name)


# --------------------------------------------------------------------------------------------- model


def learn_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, as Llama 3's; each text begins with the token that ends one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """An untrained model."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


# ------------------------------------------------------------------------------------------ training


class Training:
    """The model on its way; can be interrupted and resumed."""

    def __init__(self, texts: Sequence[str], seed: int, budget: Budget, work: Path) -> None:
        self.budget = budget
        self.file = work / "training.pt"
        self.tokenizer = learn_tokenizer(texts)
        self.model = build(self.tokenizer, seed)
        self.generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(texts), generator=self.generator).tolist()
        numbers = self.tokenizer([texts[place] for place in order], verbose=False)["input_ids"]
        self.stream = torch.tensor([number for text in numbers for number in text])
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
        self.step = 0

    def batch(self) -> Tensor:
        """Windows from anywhere in the text, (batch, context)."""
        starts = torch.randint(len(self.stream) - CONTEXT, (BATCH,), generator=self.generator)
        return torch.stack([self.stream[start : start + CONTEXT] for start in starts.tolist()])

    def rate(self) -> float:
        """The learning rate of this step."""
        fall = min(1.0, (FALL_STEPS.stop - self.step) / len(FALL_STEPS))
        return learning_rate(self.step, COSINE_STEPS, RATE, WARMUP_STEPS) * fall

    def train(self) -> None:
        """Go on to the last step."""
        recent, parameters = math.log(VOCABULARY), list(self.model.parameters())
        self.model.train()
        with progress("1/2 language model", self.budget.steps, self.step) as bar:
            while self.step < self.budget.steps:
                windows = self.batch()
                loss = self.model(input_ids=windows, labels=windows).loss
                descend(self.optimizer, parameters, loss, self.rate())
                self.step += 1
                recent += (loss.item() - recent) * 0.02
                bar.set_postfix(loss=f"{recent:.3f}", refresh=False)
                bar.update()
                if self.step % self.budget.checkpoint_every == 0 and self.step < self.budget.steps:
                    self.save()
        self.model.eval()

    def save(self) -> None:
        """Keep all that the next step depends on; a kill leaves the file before or the file after."""
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }
        save_atomically(state, self.file)

    def load(self) -> None:
        """Continue where `save` was, if it was."""
        if self.file.exists():
            state = torch.load(self.file)
            self.step = state["step"]
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.generator.set_state(state["generator"])


# ----------------------------------------------------------------------------------------- measuring


@torch.inference_mode()
def bits_per_byte(model: Any, tokenizer: Any, texts: Sequence[str]) -> float:
    """What the model needs to tell these texts, each on its own, in bits for each byte of them."""
    nats, size = 0.0, 0
    for text in texts:
        # Cut to the context; what begins in the middle is not counted against it.
        numbers = tokenizer(text)["input_ids"][:CONTEXT]
        window = torch.tensor([numbers])
        nats += model(input_ids=window, labels=window).loss.item() * (len(numbers) - 1)
        size += len(tokenizer.decode(numbers[1:]).encode())
    return nats / math.log(2) / size


def compressed_bits_per_byte(learnt: Sequence[str], texts: Sequence[str]) -> float:
    """What LZMA needs for the same texts after all that the model has learnt from, in bits for each byte."""
    before, after = "\n".join(learnt).encode(), "\n".join(texts).encode()
    return 8 * (len(lzma.compress(before + after, preset=9)) - len(lzma.compress(before, preset=9))) / len(after)


def three_bytes_bits_per_byte(learnt: Sequence[str], texts: Sequence[str]) -> float:
    """What a model needs that knows how often each byte follows each pair of bytes, in bits for each byte."""
    data = "\n".join(learnt).encode()
    threes, pairs, ones = Counter(zip(data, data[1:], data[2:], strict=False)), Counter(pairwise(data)), Counter(data)
    judging = "\n".join(texts).encode()
    bits = 0.0
    for three in zip(judging, judging[1:], judging[2:], strict=False):
        alone = (ones[three[2]] + 1) / (len(data) + 256)
        bits -= math.log2((threes[three] + 2 * alone) / (pairs[three[:2]] + 2))
    return bits / (len(judging) - 2)


def judged(texts: Sequence[str], size: int) -> list[str]:
    """Return the first texts, of `size` bytes together, each short enough for the model to see it whole."""
    chosen: list[str] = []
    for text in texts:
        if len(text) <= 2 * CONTEXT and sum(map(len, chosen)) < size:
            chosen.append(text)
    return chosen


CARD = """\
# The default language model

A tiny Llama that writes like Python's own documentation, on a CPU, at some hundred tokens a second. It knows the
sound of it and no facts: what it says is made up. All parts are stock classes of transformers, and
`AutoModelForCausalLM.from_pretrained("weights-text")` loads it.

- Prompts that it continues well begin like the documentation, "The \"with\" statement" say, or with a dotted name
  such as `json.loads`. An empty prompt begins a document. It was never taught to answer questions.
- {layers} layers, width {width}, {heads} heads, {parameters:.1f} million parameters, stored as float16. Context
  {context} tokens, a byte-level BPE tokenizer of {vocabulary:,} entries ({per_token:.1f} bytes a token).
- Needs transformers 5, which wrote it.

## Made by

`{command} --seed {seed} --threads {threads}` with torch {torch} in {minutes:.0f} minutes, from random weights, in
{steps:,} steps of {batch} windows. The text is that of Python {python} (digest `{digest}`): {learnt_bytes:,} bytes.

## Quality

On the docstrings of {modules} that it has not seen ({held_out_bytes:,} bytes, each on its own):

| | bits per byte |
|---|---|
| this model | {bits:.2f} |
| how often a byte follows two others in the text that it learnt from | {threes:.2f} |
| LZMA, having seen the same text: it finds what modules have in common word for word | {compressed:.2f} |

`tests/unit/test_text_model.py` repeats the measurement. A sample, at temperature 0.7 and seed 0:

```
{sample}
```

## Text and licence

The topics of `help()` (`pydoc_data.topics`) and the docstrings of the standard library, both part of CPython,
Copyright Python Software Foundation, under the PSF License Agreement version 2, which allows derivative works and
asks that this notice be kept. The weights are offered under the project's own licence, Apache-2.0.
"""
PROMPT = 'The "with" statement'


def write_card(path: Path, training: Training, text: Corpus, options: argparse.Namespace, seconds: float) -> float:
    """Write the README of the weights; return the bits per byte that it states."""
    model, budget = training.model, training.budget
    judging = judged(text.held_out, budget.held_out_bytes)
    bits = bits_per_byte(model, training.tokenizer, judging)
    learnt_bytes = sum(len(document.encode()) for document in text.learnt)
    path.write_text(
        CARD.format(
            layers=LAYERS,
            width=WIDTH,
            heads=HEADS,
            parameters=model.num_parameters() / 1e6,
            context=CONTEXT,
            vocabulary=len(training.tokenizer),
            per_token=learnt_bytes / len(training.stream),
            command=COMMAND,
            seed=options.seed,
            threads=options.threads,
            torch=torch.__version__,
            minutes=seconds / 60,
            steps=budget.steps,
            batch=BATCH,
            python=sys.version.split()[0],
            digest=text.digest(),
            learnt_bytes=learnt_bytes,
            modules=f"one module in {HELD_OUT}",
            held_out_bytes=sum(len(document.encode()) for document in judging),
            bits=bits,
            compressed=compressed_bits_per_byte(text.learnt, judging),
            threes=three_bytes_bits_per_byte(text.learnt, judging),
            sample=sample(model, training.tokenizer),
        ),
        encoding="utf-8",
    )
    return bits


def sample(model: Any, tokenizer: Any, tokens: int = 160) -> str:
    """What it writes after `PROMPT`."""
    torch.manual_seed(0)
    given = tokenizer(PROMPT, return_tensors="pt")
    made = model.generate(
        input_ids=given["input_ids"],
        attention_mask=given["attention_mask"],
        do_sample=True,
        temperature=0.7,
        top_k=0,
        max_new_tokens=tokens,
        pad_token_id=tokenizer.eos_token_id,
    )
    return str(tokenizer.decode(made[0], skip_special_tokens=True)).rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, measure and publish; return the exit status."""
    what = "Train the default language model from scratch and write it to weights-text/. Takes 20 minutes on one core."
    options = parse_arguments(COMMAND, "weights-text", what, 1, arguments)
    return run(COMMAND, options, "config.json", make_weights)


def make_weights(options: argparse.Namespace) -> None:
    """Do what the options ask for, and say what came of it."""
    started = time.monotonic()
    transformers.utils.logging.disable_progress_bar()  # it would break into ours
    budget = SMOKE if options.smoke else FULL
    text = corpus(budget.documents)
    training = Training(text.learnt, options.seed, budget, options.work)
    training.load()
    training.train()
    model = training.model.half()  # what is kept is what is measured
    model.float()
    card = options.work / "README.md"
    bits = write_card(card, training, text, options, time.monotonic() - started)

    def save(directory: Path) -> None:
        model.half().save_pretrained(directory)
        training.tokenizer.save_pretrained(directory)

    size = publish(save, options.output, MAX_BYTES, card)
    print(f"{bits:.2f} bits per byte on text that it has not seen")
    print(f"wrote {options.output} ({size / 1e6:.1f} MB) in {(time.monotonic() - started) / 60:.0f} minutes")


if __name__ == "__main__":
    sys.exit(main())

"""Train the default model from scratch: a tiny, genuine FLUX pipeline that draws handwritten digits.

Everything it learns from ships with scikit-learn. Four stages, like the big model's own history:

1. an autoencoder turns pictures into latents and back;
2. the two text encoders learn which digit, if any, a prompt names, and are then frozen;
3. the transformer learns to turn noise into those latents, given the frozen encoders' output;
4. the result is measured by classifiers fitted on digits that stages 1 to 3 never saw.

The output is the standard diffusers layout, loaded by plain `DiffusionPipeline.from_pretrained`.

Reproducible: each stage starts from the seed, also after `--resume`. Weights are equal bit for bit on the
same kind of CPU with the same thread count and the same versions of torch, diffusers, transformers and
tokenizers; elsewhere floating-point sums are ordered differently, and the weights differ by rounding
that training amplifies, while the measured quality stays about the same.
"""

import argparse
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import digits
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
import transformers
from _training import descend, learning_rate, parse_arguments, progress, publish, run, save_atomically
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

COMMAND = "scripts/train_default_weights"

# Shape of the model. The autoencoder shrinks by 8, as FLUX's does, so one latent pixel stands for one
# pixel of an original digit; the transformer sees 2x2 of them as one token, 16 for a square picture.
LATENT_CHANNELS = 4
VAE_CHANNELS = (8, 16, 32, 32)
WIDTH = 64
HEADS = 4
DOUBLE_BLOCKS = 4
SINGLE_BLOCKS = 8
ROPE_AXES = (4, 6, 6)
TEXT_LAYERS = 2
CLIP_TOKENS = 32  # only the pooled output is used, so this length costs the transformer nothing
# T5 tokens per prompt: the usual number, and rarer ones for callers who pass another max_sequence_length, or none.
TEXT_LENGTHS = (digits.MAX_SEQUENCE_LENGTH, 64, 512)
SHRINK = (1, 2, 8)  # what a batch is divided by at each of these lengths, to bound its time
MAX_BYTES = 12_000_000
EARLY_PARTS = ("vae", "text_encoder", "text_encoder_2")  # finished before the transformer starts

# Stage 1
VAE_BATCH = 48
VAE_RATE = 3e-3
# Stage 2
TEXT_BATCH = 128
TEXT_RATE = 2e-3
TEXT_LENGTH_SHARES = (0.78, 0.2, 0.02)
NO_DIGIT = 10  # the label of a prompt that names none
# Stage 3
BATCH = 96
RATE = 1.5e-3
WARMUP_STEPS = 100
EMA = 0.998
EMPTY_SHARE = 0.07  # trained without a prompt: what true classifier-free guidance steers away from
UNKNOWN_SHARE = 0.03  # trained with a prompt that names no digit
SHAPE_SHARES = {"1:1": 0.5, "3:2": 0.25, "2:3": 0.25}
LENGTH_SHARES = (0.955, 0.03, 0.015)


@dataclass(frozen=True)
class Budget:
    """How much work a training does."""

    vae_steps: int = 420
    text_steps: int = 700
    steps: int = 4600  # of the transformer
    variants: int = 16  # differently moved, turned and scaled copies of every digit in every shape
    prompts: tuple[int, int, int] = (500, 62, 15)  # different prompts for every digit, at each text length
    checkpoint_every: int = 200  # steps of the transformer
    seeds: int = 20  # pictures of every digit that are measured in every shape


FULL = Budget()
SMOKE = Budget(vae_steps=4, text_steps=4, steps=6, variants=1, prompts=(32, 4, 1), checkpoint_every=2, seeds=1)


# ------------------------------------------------------------------------------------------- prompts

NAMES = [(word, str(digit)) for digit, word in enumerate(digits.WORDS)]
TEMPLATES = (
    "{}", "a {}", "the {}", "an {}", "digit {}", "the digit {}", "a digit {}", "number {}",
    "the number {}", "a number {}", "figure {}", "the figure {}", "handwritten {}", "a handwritten {}",
    "a hand-written {}", "hand written {}", "a handwritten digit {}", "the handwritten number {}",
    "a picture of a {}", "a picture of the number {}", "a photo of a {}", "an image of {}",
    "an image of the digit {}", "a drawing of a {}", "a sketch of the number {}", "draw a {}",
    "draw me a {}", "please draw a {}", "please draw the number {}", "write {}", "write a {}",
    "please write the number {}", "please write {} for me", "show me a {}", "show the digit {}",
    "give me a {}", "make a {}", "i want a {}", "i would like the number {}", "can you draw a {}?",
    "could you write the digit {}, please?", "a {} written by hand", "a {} drawn with a pen",
    "{} in white ink on black paper", "a {} on a black background", "a {} in chalk on a blackboard",
    "the number {}, handwritten", "a {}, handwritten", "a large white {}", "a beautiful {}",
    "a {} in neat handwriting", "my favourite number is {}", "a single {}", "just a {}",
    "\"{}\"", "({})", "generate a {}", "generate the number {}", "paint a {}",
)  # fmt: skip
FILLER = """
a an and are as at be big black blackboard blue bold by can chalk child clean clear color colour could create cute dark
digit draw drawing drawn fancy favourite figure fine for from generate give good green grey hand handwriting
handwritten hello high i image in ink is it large letter light like little me my neat nice number of old on paper pen
pencil photo picture plain please pretty print quality quick red scan school show simple single sketch small style that
the thick thin this to two-tone very want white with would write written yellow you your beautiful make paint just dog
cat house car tree sky sun person woman man girl boy water city mountain landscape portrait realistic detailed
""".split()  # noqa: SIM905
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def random_case(rng: random.Random, text: str) -> str:
    """Leave a text as it is, or write it as hasty or loud people do."""
    draw = rng.random()
    if draw < 0.7:
        return text
    if draw < 0.88:
        return text[:1].upper() + text[1:]
    return text.title() if draw < 0.94 else text.upper()


def random_word(rng: random.Random) -> str:
    """Mostly a known word, sometimes one made of random letters."""
    if rng.random() < 0.15:
        return "".join(rng.choices(ALPHABET, k=rng.randint(2, 8)))
    return rng.choice(FILLER)


def random_words(rng: random.Random, most: int) -> list[str]:
    """Up to `most` words."""
    return [random_word(rng) for _ in range(rng.randint(0, most))]


def random_prompt(rng: random.Random, label: int) -> str:
    """One way in which someone might ask for a digit, or, for `NO_DIGIT`, for something else."""
    if label == NO_DIGIT:
        return random_case(rng, " ".join(random_words(rng, 14)))
    name = rng.choices(NAMES[label], weights=(3, 2))[0]
    draw = rng.random()
    if draw < 0.2:
        text = name
    elif draw < 0.7:
        text = rng.choice(TEMPLATES).format(name)
    else:
        most = 4 if draw < 0.95 else 10
        text = " ".join([*random_words(rng, most), name, *random_words(rng, most)])
    return random_case(rng, text) + rng.choices(("", ".", "!", "?"), weights=(8, 2, 1, 1))[0]


def all_words() -> list[str]:
    """Every word of the prompts, in lower case, without repetition and in a fixed order."""
    text = " ".join(TEMPLATES).replace("{}", " ")
    letters = "".join(c if c.isalpha() else " " for c in text.lower())
    return sorted({*letters.split(), *" ".join(FILLER).replace("-", " ").split(), *digits.WORDS})


# ---------------------------------------------------------------------------------------- tokenizers


def learn_merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Byte-pair merges that make every word one token: always the commonest pair, ties by spelling.

    The trainer in `tokenizers` breaks ties by hash order, so its merges differ from run to run.
    """
    spelt = [[*word[:-1], word[-1] + "</w>"] for word in words]
    merges = []
    while True:
        counts = Counter(pair for symbols in spelt for pair in pairwise(symbols))
        if not counts:
            return merges
        merges.append(min(counts, key=lambda pair: (-counts[pair], pair)))
        spelt = [merge(symbols, merges[-1]) for symbols in spelt]


def merge(symbols: Sequence[str], pair: tuple[str, str]) -> list[str]:
    """Join every occurrence of a pair of neighbours, from the left."""
    joined: list[str] = []
    for symbol in symbols:
        if joined and (joined[-1], symbol) == pair:
            joined[-1] += symbol
        else:
            joined.append(symbol)
    return joined


def clip_tokenizer() -> CLIPTokenizer:
    """A byte-level BPE tokenizer, as CLIP's, with merges learnt from the words of the prompts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = learn_merges(all_words())
    tokens = [*alphabet, *(a + "</w>" for a in alphabet), *(a + b for a, b in merges)]
    # Last, so that the end token has the highest id, as in OpenAI's CLIP; never id 2, which
    # transformers takes for a marker of old, wrong configurations.
    tokens = [*dict.fromkeys(tokens), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=CLIP_TOKENS)


def t5_tokenizer() -> T5Tokenizer:
    """A unigram tokenizer, case-sensitive as T5's is, so every word is listed in three cases."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    for word in all_words():
        for form in dict.fromkeys((word, word.capitalize(), word.upper())):
            pieces.append(("▁" + form, -5.0))
    pieces += [(form, -6.0) for w in digits.WORDS for form in (w, w.capitalize(), w.upper())]
    pieces += [("▁" + figure, -5.0) for figure in "0123456789"]
    singles = [chr(code) for code in range(33, 127)]  # printable ASCII
    pieces += [(single, -8.0) for single in singles]
    scores = dict(reversed(pieces))  # the first score given counts
    vocab = [(piece, scores[piece]) for piece in dict.fromkeys(piece for piece, _ in pieces)]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=digits.MAX_SEQUENCE_LENGTH)


def tokenize(tokenizer: Any, prompts: Sequence[str], length: int) -> Tensor:
    """Return token ids (prompts, length), padded and cut exactly as the pipeline does."""
    return tokenizer(
        list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    ).input_ids


# --------------------------------------------------------------------------------------------- model


def build_pipeline(seed: int) -> FluxPipeline:
    """An untrained pipeline with every part in place."""
    torch.manual_seed(seed)
    clip_words, t5_words = clip_tokenizer(), t5_tokenizer()
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=build_vae(),
        text_encoder=build_clip(clip_words),
        tokenizer=clip_words,
        text_encoder_2=build_t5(t5_words),
        tokenizer_2=t5_words,
        transformer=build_transformer(),
    )


def build_vae() -> AutoencoderKL:
    """FLUX's autoencoder with few channels and one layer per level."""
    levels = len(VAE_CHANNELS)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=VAE_CHANNELS,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        sample_size=64,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def build_clip(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """The encoder of the pooled prompt, which tells every block what to draw."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=TEXT_LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=CLIP_TOKENS,
        # The pooled output is taken at the first end token: these must be the tokenizer's own ids.
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config).eval()


def build_t5(tokenizer: T5Tokenizer) -> T5EncoderModel:
    """The encoder of the prompt's tokens, to which the picture's tokens attend."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=2 * WIDTH,
        num_layers=TEXT_LAYERS,
        num_heads=HEADS,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return T5EncoderModel(config).eval()


def build_transformer() -> FluxTransformer2DModel:
    """FLUX's transformer with few and narrow blocks, and no embedding of guidance."""
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * LATENT_CHANNELS,
        num_layers=DOUBLE_BLOCKS,
        num_single_layers=SINGLE_BLOCKS,
        attention_head_dim=WIDTH // HEADS,
        num_attention_heads=HEADS,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=False,
        axes_dims_rope=ROPE_AXES,
    )
    # Blocks that start as the identity, and an output that starts at zero, learn sooner (DiT's adaLN-zero).
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ("norm" in name or name == "proj_out"):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return model


# -------------------------------------------------------------------------------------------- stages


@dataclass
class Run:
    """What every stage needs: the pipeline that grows, the seed, the budget, and where unfinished work is kept."""

    pipeline: FluxPipeline
    seed: int
    budget: Budget
    work: Path

    def generator(self, stage: int) -> torch.Generator:
        """Seed everything for one stage, so that it does not matter what ran before it."""
        torch.manual_seed(self.seed + stage)
        return torch.Generator().manual_seed(self.seed + stage)


def render(images: Tensor, shape: str, generator: torch.Generator) -> Tensor:
    """Enlarge digits to pictures, each slightly moved, turned and scaled.

    Args:
        images: (n, 8, 8) in 0..1.
        shape: a name in `digits.SHAPES`; the digit stands in the centred square.
        generator: where the random movements come from.

    Returns:
        (n, 3, height, width) in -1..1.
    """
    n, (width, height) = len(images), digits.SHAPES[shape]
    side = min(width, height)
    noise = torch.rand(n, 4, generator=generator) * 2 - 1
    angle, scale = noise[:, 0] * math.radians(6), 1 + noise[:, 1] * 0.06
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    wide, tall = width / side, height / side
    rows = (
        torch.stack((cos * wide, -sin * tall, noise[:, 2] * 0.06), dim=1),
        torch.stack((sin * wide, cos * tall, noise[:, 3] * 0.06), dim=1),
    )
    grid = F.affine_grid(torch.stack(rows, dim=1), [n, 1, height, width], align_corners=False)
    grey = F.grid_sample(images[:, None], grid, mode="bicubic", align_corners=False)
    return (grey.clamp(0, 1) * 2 - 1).expand(-1, 3, -1, -1)


def generator_images() -> Tensor:
    """The digits the model may learn from, (n, 8, 8) in 0..1."""
    return torch.from_numpy(digits.halves()[0].images)


def pick(n: int, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` row numbers below `n`, with repetition."""
    return torch.randint(n, (count,), generator=generator)


def pick_one(shares: Sequence[float], generator: torch.Generator) -> int:
    """Return a position in `shares`, each with its share as the probability."""
    return int(torch.multinomial(torch.tensor(shares), 1, generator=generator))


def train_vae(run: Run) -> None:
    """Stage 1: pictures to latents and back."""
    generator, vae, images, steps = run.generator(1), run.pipeline.vae, generator_images(), run.budget.vae_steps
    vae.train().to(memory_format=torch.channels_last)  # a quarter faster on CPUs
    parameters = list(vae.parameters())
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0, betas=(0.9, 0.98))
    with progress("1/4 autoencoder", steps) as bar:
        for step in range(steps):
            shape = list(SHAPE_SHARES)[pick_one(list(SHAPE_SHARES.values()), generator)]
            count = VAE_BATCH if shape == "1:1" else VAE_BATCH * 2 // 3
            pictures = render(images[pick(len(images), count, generator)], shape, generator)
            posterior = vae.encode(pictures.contiguous(memory_format=torch.channels_last)).latent_dist
            decoded = vae.decode(posterior.sample(generator)).sample
            error = decoded - pictures
            loss = error.square().mean() + 0.1 * error.abs().mean() + 1e-4 * posterior.kl().mean() / 64
            descend(optimizer, parameters, loss, learning_rate(step, steps, VAE_RATE, 30))
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
            bar.update()
    vae.eval().to(memory_format=torch.contiguous_format)
    measure_latents(vae, images, generator)


@torch.no_grad()
def measure_latents(vae: AutoencoderKL, images: Tensor, generator: torch.Generator) -> None:
    """Note the latents' mean and spread, with which the pipeline brings them to mean 0, spread 1."""
    latents = vae.encode(render(images, "1:1", generator)).latent_dist.mode()
    vae.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())


def train_text_encoders(run: Run) -> None:
    """Stage 2: each text encoder learns which digit a prompt names; the two readout layers are thrown away."""
    generator, rng, steps = run.generator(2), random.Random(run.seed), run.budget.text_steps
    clip, t5 = run.pipeline.text_encoder.train(), run.pipeline.text_encoder_2.train()
    readouts = nn.ModuleList([nn.Linear(WIDTH, NO_DIGIT + 1) for _ in range(2)])
    parameters = [*clip.parameters(), *t5.parameters(), *readouts.parameters()]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.01)
    with progress("2/4 text encoders", steps) as bar:
        for step in range(steps):
            length = pick_one(TEXT_LENGTH_SHARES, generator)
            labels = [rng.randint(0, NO_DIGIT) for _ in range(TEXT_BATCH // SHRINK[length])]
            prompts = [random_prompt(rng, label) for label in labels]
            pooled = clip(tokenize(run.pipeline.tokenizer, prompts, CLIP_TOKENS)).pooler_output
            tokens = t5(tokenize(run.pipeline.tokenizer_2, prompts, TEXT_LENGTHS[length]))[0]
            target = torch.tensor(labels)
            loss = F.cross_entropy(readouts[0](pooled), target)
            loss = loss + F.cross_entropy(readouts[1](tokens.mean(dim=1)), target)
            descend(optimizer, parameters, loss, learning_rate(step, steps, TEXT_RATE, 30))
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
            bar.update()
    clip.eval()
    t5.eval()


@dataclass(frozen=True)
class Texts:
    """Encoded prompts of one T5 length: `tokens` (prompts, length, width), `pooled` (prompts, width)."""

    tokens: Tensor
    pooled: Tensor
    rows: list[Tensor]  # for each digit, then NO_DIGIT, then the empty prompt: the prompts that ask for it


@torch.no_grad()
def encode_texts(pipeline: FluxPipeline, length: int, per_label: int, rng: random.Random) -> Texts:
    """Encode a fixed stock of prompts once, since the text encoders no longer change."""
    stock = [[random_prompt(rng, label) for _ in range(per_label)] for label in range(NO_DIGIT + 1)] + [[""]]
    prompts = [prompt for part in stock for prompt in part]
    tokens, pooled = [], []
    for start in range(0, len(prompts), 64):
        part = prompts[start : start + 64]
        pooled.append(pipeline.text_encoder(tokenize(pipeline.tokenizer, part, CLIP_TOKENS)).pooler_output)
        tokens.append(pipeline.text_encoder_2(tokenize(pipeline.tokenizer_2, part, length))[0])
    rows = torch.arange(len(prompts)).split([len(part) for part in stock])
    return Texts(torch.cat(tokens), torch.cat(pooled), list(rows))


def pick_texts(texts: Texts, labels: Tensor, generator: torch.Generator) -> Tensor:
    """For each label a prompt that asks for it, or now and then an empty or an unrelated one."""
    draw = torch.rand(len(labels), generator=generator)
    kind = torch.where(draw < UNKNOWN_SHARE + EMPTY_SHARE, NO_DIGIT + 1, labels)
    kind = torch.where(draw < UNKNOWN_SHARE, NO_DIGIT, kind)
    place = torch.rand(len(labels), generator=generator)
    chosen = [texts.rows[k][int(p * len(texts.rows[k]))] for k, p in zip(kind.tolist(), place.tolist(), strict=True)]
    return torch.stack(chosen)


@dataclass(frozen=True)
class Latents:
    """All pictures of one shape: `packed` (n, image tokens, 16), `labels` (n,), `ids` (image tokens, 3)."""

    packed: Tensor
    labels: Tensor
    ids: Tensor


@torch.no_grad()
def encode_pictures(pipeline: FluxPipeline, shape: str, variants: int, generator: torch.Generator) -> Latents:
    """Encode every digit in several variants once, and pack the latents as the pipeline does."""
    vae, images = pipeline.vae, generator_images()
    width, height = (size // digits.CELL for size in digits.SHAPES[shape])
    parts = []
    for _ in range(variants):
        for some in render(images, shape, generator).split(64):
            latents = vae.encode(some).latent_dist.mode()
            latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
            parts.append(FluxPipeline._pack_latents(latents, len(latents), LATENT_CHANNELS, height, width))
    labels = torch.from_numpy(digits.halves()[0].labels).repeat(variants)
    ids = FluxPipeline._prepare_latent_image_ids(1, height // 2, width // 2, torch.device("cpu"), torch.float32)
    return Latents(torch.cat(parts), labels, ids)


def noise_levels(count: int, generator: torch.Generator) -> Tensor:
    """Levels (count,) in 0..1: half of them in the middle, where most is decided, and some pure noise."""
    uniform = torch.rand(count, generator=generator)
    middle = torch.sigmoid(torch.randn(count, generator=generator))
    levels = torch.where(torch.rand(count, generator=generator) < 0.5, uniform, middle)
    return torch.where(torch.rand(count, generator=generator) < 0.04, 1.0, levels)


class TransformerTraining:
    """Stage 3: the transformer learns the direction from picture to noise; can be interrupted and resumed."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.generator = run.generator(3)
        self.model = run.pipeline.transformer.train()
        self.parameters = list(self.model.parameters())
        self.average = [p.detach().clone() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.parameters, weight_decay=0.01, betas=(0.9, 0.98))
        self.step, self.steps = 0, run.budget.steps
        rng = random.Random(run.seed)
        self.texts = [
            encode_texts(run.pipeline, length, prompts, rng)
            for length, prompts in zip(TEXT_LENGTHS, run.budget.prompts, strict=True)
        ]
        self.latents = [
            encode_pictures(run.pipeline, shape, run.budget.variants, self.generator) for shape in SHAPE_SHARES
        ]

    def loss(self) -> Tensor:
        """The mean squared error on one batch: one shape, one text length, mixed digits and noise levels."""
        latents = self.latents[pick_one(list(SHAPE_SHARES.values()), self.generator)]
        length = pick_one(LENGTH_SHARES, self.generator)
        texts = self.texts[length]
        rows = pick(len(latents.labels), BATCH // SHRINK[length], self.generator)
        chosen = pick_texts(texts, latents.labels[rows], self.generator)
        clean = latents.packed[rows]
        noise = torch.randn(clean.shape, generator=self.generator)
        level = noise_levels(len(clean), self.generator)
        at = level[:, None, None]
        predicted = self.model(
            hidden_states=(1 - at) * clean + at * noise,
            timestep=level,
            pooled_projections=texts.pooled[chosen],
            encoder_hidden_states=texts.tokens[chosen],
            txt_ids=torch.zeros(TEXT_LENGTHS[length], 3),
            img_ids=latents.ids,
            return_dict=False,
        )[0]
        return F.mse_loss(predicted, noise - clean)

    def advance(self) -> float:
        """One step; the average forgets faster at first, when the weights still move far."""
        loss = self.loss()
        rate = learning_rate(self.step, self.steps, RATE, WARMUP_STEPS)
        descend(self.optimizer, self.parameters, loss, rate)
        self.step += 1
        keep = min(EMA, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.parameters, 1 - keep)
        return loss.item()

    def train(self) -> None:
        """Go on to the last step, then put the averaged weights into the pipeline."""
        recent = 1.0
        with progress("3/4 transformer", self.steps, self.step) as bar:
            while self.step < self.steps:
                recent += (self.advance() - recent) * 0.02
                bar.set_postfix(loss=f"{recent:.4f}", refresh=False)
                bar.update()
                if self.step % self.run.budget.checkpoint_every == 0 and self.step < self.steps:
                    self.save()
        self.use_average()

    def use_average(self) -> None:
        """Put the averaged weights in the place of the last ones."""
        with torch.no_grad():
            for parameter, average in zip(self.parameters, self.average, strict=True):
                parameter.copy_(average)
        self.model.eval()

    def save(self) -> None:
        """Keep all that the next step depends on; a kill leaves the file before or the file after."""
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }
        save_atomically(state, self.run.work / "transformer.pt")

    def load(self) -> None:
        """Continue where `save` was, if it was."""
        path = self.run.work / "transformer.pt"
        if not path.exists():
            return
        state = torch.load(path)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.average = state["average"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])


def finish_stage(run: Run, stage: int) -> None:
    """Keep what the first stages made, so that `--resume` need not repeat them."""
    vae = run.pipeline.vae
    state = {
        "stage": stage,
        "latents": {name: vae.config[name] for name in ("scaling_factor", "shift_factor")},
        **{name: getattr(run.pipeline, name).state_dict() for name in EARLY_PARTS},
    }
    save_atomically(state, run.work / "early.pt")


def finished_stage(run: Run) -> int:
    """Reload the parts that are finished; return how many stages they cover."""
    path = run.work / "early.pt"
    if not path.exists():
        return 0
    state = torch.load(path)
    run.pipeline.vae.register_to_config(**state["latents"])
    for name in EARLY_PARTS:
        getattr(run.pipeline, name).load_state_dict(state[name])
    return int(state["stage"])


def train(run: Run) -> FluxPipeline:
    """Run stages 1 to 3, each only if the work directory does not hold its result."""
    stage = finished_stage(run)
    if stage < 1:
        train_vae(run)
        finish_stage(run, 1)
    if stage < 2:
        train_text_encoders(run)
        finish_stage(run, 2)
    training = TransformerTraining(run)
    training.load()
    training.train()
    return run.pipeline


# ----------------------------------------------------------------------------------------- measuring


def measure(pipeline: FluxPipeline, per_digit: int) -> dict[str, dict[str, float]]:
    """Stage 4: for each shape the share of pictures that each classifier reads right."""
    pipeline.set_progress_bar_config(disable=True)
    asked = [digit for digit in range(10) for _ in range(per_digit)]
    seeds = [seed for _ in range(10) for seed in range(per_digit)]
    prompts = [digits.WORDS[digit] for digit in asked]
    shares = {}
    with progress("4/4 measuring", len(asked) * len(digits.SHAPES)) as bar:
        for shape in digits.SHAPES:
            pictures = digits.draw(pipeline, prompts, seeds, shape, on_batch=bar.update)
            shares[shape] = {name: digits.share_read(pictures, asked, name) for name in digits.classifiers()}
    return shares


CARD = """\
# The default model

A tiny FLUX pipeline that draws handwritten digits: "a handwritten seven" gives a seven, on a CPU, in a
fraction of a second. All parts are stock classes of diffusers and transformers, and
`DiffusionPipeline.from_pretrained("weights")` loads it; only their sizes are unusual.

- Ask for one digit, as a word or a figure, in lower or upper case, with other words around it. A prompt
  that names no digit gives some digit or a mixture; two digits in one prompt were never learnt.
- Sizes it has learnt: {sizes} (width x height). Others give poor pictures. Always pass `width` and
  `height`: the pipeline's own default is 1024x1024.
- {steps} steps, `max_sequence_length={tokens}`. Classifier-free guidance is `true_cfg_scale` with
  `negative_prompt=""`; 1 is off, 2 to 3 draws plainer digits at twice the work.
- Transformer: {double} double-stream and {single} single-stream blocks, width {width}, {parameters:.1f} million
  parameters, float32.
- Needs transformers 5, which wrote it; transformers 4 would read the text encoders wrongly.

## Made by

`{command} --seed {seed} --threads {threads}` with torch {torch} in {minutes:.0f} minutes, from
random weights, on {learnt} of the 1,797 digits in scikit-learn's `load_digits`.

## Quality

Classifiers fitted on the other {judged} digits, which the model has not seen, read the digit asked for from
this share of {pictures} pictures per shape (10 digits, {seeds} seeds, the prompt one word, {steps} steps, no guidance):

| shape | support-vector machine | extra trees |
|---|---|---|
{table}

`tests/unit/test_default_model.py` repeats the measurement.

## Data and licence

`load_digits` is scikit-learn's copy of the test set of "Optical Recognition of Handwritten Digits"
(E. Alpaydin and C. Kaynak, 1998, UCI Machine Learning Repository, <https://doi.org/10.24432/C50P49>), which
was made with NIST's preprocessing programs from forms filled in by 13 people. UCI offers it under
CC BY 4.0; scikit-learn itself is BSD-3-Clause. The weights are offered under the project's own licence, Apache-2.0;
please keep the attribution above.
"""


def write_card(path: Path, run: Run, shares: dict[str, dict[str, float]], seconds: float) -> None:
    """Write the README of the weights."""
    generator, judge = digits.halves()
    rows = [f"| {s} | {v['svc']:.1%} | {v['trees']:.1%} |" for s, v in shares.items()]
    text = CARD.format(
        sizes=", ".join(f"{w}x{h}" for w, h in digits.SHAPES.values()),
        steps=digits.DEFAULT_STEPS,
        tokens=digits.MAX_SEQUENCE_LENGTH,
        double=DOUBLE_BLOCKS,
        single=SINGLE_BLOCKS,
        width=WIDTH,
        parameters=sum(p.numel() for p in run.pipeline.transformer.parameters()) / 1e6,
        command=COMMAND,
        seed=run.seed,
        minutes=seconds / 60,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        learnt=len(generator.labels),
        judged=len(judge.labels),
        pictures=10 * run.budget.seeds,
        seeds=run.budget.seeds,
        table="\n".join(rows).replace("%", " %"),
    )
    path.write_text(text, encoding="utf-8")


# -------------------------------------------------------------------------------------------- output


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, measure and publish; return the exit status."""
    what = "Train the default model from scratch and write it to weights/. Takes half an hour on two quiet CPU cores."
    options = parse_arguments(COMMAND, "weights", what, 2, arguments)
    return run(COMMAND, options, "model_index.json", make_weights)


def make_weights(options: argparse.Namespace) -> None:
    """Do what the options ask for, and say what came of it."""
    started = time.monotonic()
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()  # they would break into ours
    budget = SMOKE if options.smoke else FULL
    run = Run(build_pipeline(options.seed), options.seed, budget, options.work)
    train(run)
    shares = measure(run.pipeline, budget.seeds)
    card = options.work / "README.md"
    write_card(card, run, shares, time.monotonic() - started)
    size = publish(run.pipeline.save_pretrained, options.output, MAX_BYTES, card)
    for shape, share in shares.items():
        print(f"{shape}: " + ", ".join(f"{name} reads {value:.1%}" for name, value in share.items()))
    print(f"wrote {options.output} ({size / 1e6:.1f} MB) in {(time.monotonic() - started) / 60:.0f} minutes")


if __name__ == "__main__":
    sys.exit(main())

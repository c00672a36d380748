"""What every training of default weights shares: steps, progress, unfinished work, exchange of the result.

Knows torch, and nothing of any model or of what it learns from.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent


# -------------------------------------------------------------------------------------------- steps


def progress(title: str, total: int, start: int = 0) -> tqdm:
    """A progress bar; written to a file it is a line every half minute."""
    every_s = 0.5 if sys.stderr.isatty() else 30
    return tqdm(total=total, initial=start, desc=f"{title:<22}", mininterval=every_s, unit="step")


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linear rise, then half a cosine down to zero."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def descend(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], loss: Tensor, rate: float) -> None:
    """One optimizer step with clipped gradients."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


def save_atomically(state: dict[str, Any], path: Path) -> None:
    """Write a file so that a kill leaves the old one or the new one, never a part."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


# ------------------------------------------------------------------------------------------- output


def publish(save: Callable[[Path], object], output: Path, max_bytes: int, card: Path | None = None) -> int:
    """Write a model beside `output`, then exchange the two; return the size in bytes.

    A kill before the exchange leaves the old directory as it was.

    Args:
        save: writes the model into a directory.
        output: the directory to replace.
        max_bytes: most that it may take.
        card: what becomes its README.md.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    new, old = (output.with_name(f"{output.name}.{part}-{os.getpid()}") for part in ("new", "old"))
    try:
        save(new)
        if card is not None:
            shutil.copyfile(card, new / "README.md")
        size = open_to_all(new)
        if size > max_bytes:
            raise SystemExit(f"error: the model takes {size:,} bytes, more than {max_bytes:,}: make it smaller.")
        if output.exists():
            output.rename(old)
        new.rename(output)
        return size
    finally:
        if old.exists() and not output.exists():
            old.rename(output)
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def open_to_all(directory: Path) -> int:
    """Let every user read a directory's files, which safetensors writes for the owner only; return their size."""
    size = 0
    directory.chmod(0o755)
    for path in directory.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
        size += 0 if path.is_dir() else path.stat().st_size
    return size


# ------------------------------------------------------------------------------------------ command


def thread_count(text: str) -> int:
    """Read the value of `--threads`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of threads: give 1 or more")
    return int(text)


def parse_arguments(
    command: str, weights: str, description: str, threads: int, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Read the command line.

    Args:
        command: the script's name.
        weights: the directory that it fills, below the project.
        description: what it does, and how long that takes.
        threads: how many it uses unless told otherwise.
        arguments: in place of the process's own.
    """
    parser = argparse.ArgumentParser(
        prog=command,
        description=f"{description} Ctrl-C is safe: --resume continues. Seed and thread count decide the weights.",
    )
    add = parser.add_argument
    work = f"build/{weights}"
    add("--output", type=Path, default=ROOT / weights, help=f"directory to replace (default: {weights})")
    add("--work", type=Path, default=ROOT / work, help=f"unfinished work (default: {work})")
    add("--seed", type=int, default=0, help="another seed gives another, equally good model (default: 0)")
    add("--threads", type=thread_count, metavar="N", default=threads, help=f"CPU threads (default: {threads})")
    add("--resume", action="store_true", help="continue what --work holds instead of starting anew")
    add("--smoke", action="store_true", help="a few steps of everything, in a minute: proves that it runs")
    return parser.parse_args(arguments)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What must be equal for unfinished work to be continued."""
    return {"seed": options.seed, "threads": options.threads, "smoke": options.smoke}


def prepare_work(options: argparse.Namespace) -> None:
    """Empty the work directory, or make sure that it can be continued."""
    note = options.work / "settings.json"
    if options.work.exists() and any(options.work.iterdir()) and not note.exists():
        raise SystemExit(f"error: --work {options.work} holds other files: name an empty directory.")
    if not options.resume:
        shutil.rmtree(options.work, ignore_errors=True)
    elif note.exists() and json.loads(note.read_text()) != settings(options):
        raise SystemExit(
            f"error: {note} was started with {note.read_text()}, not {json.dumps(settings(options))}: "
            "give the same options, or leave out --resume."
        )
    options.work.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(settings(options)))


def check_output(output: Path, mark: str) -> None:
    """Refuse to replace a directory that is no model, as the file `mark` in it tells."""
    replaceable = not output.exists() or (output / mark).exists()
    if not replaceable and not (output.is_dir() and not any(output.iterdir())):
        raise SystemExit(f"error: --output {output} holds something else than a model: name a new directory.")


def run(command: str, options: argparse.Namespace, mark: str, make: Callable[[argparse.Namespace], object]) -> int:
    """Prepare the directories and torch, make the weights, and return the exit status."""
    try:
        check_output(options.output, mark)
        prepare_work(options)
        torch.set_num_threads(options.threads)
        torch.use_deterministic_algorithms(True)
        make(options)
        shutil.rmtree(options.work)
    except KeyboardInterrupt:
        print(f"\ninterrupted: `{command} --resume` with the same options continues", file=sys.stderr)
        return 130
    return 0

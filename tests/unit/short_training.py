"""A few steps of a training of default weights, to see how it ends; not what it learns."""

from pathlib import Path
from types import ModuleType

import torch


def smoke(training: ModuleType, directory: Path, *more: str) -> int:
    """Train a few steps into `directory`/weights; leave the process's torch as it was."""
    threads = torch.get_num_threads()
    try:
        return training.main(
            ["--smoke", "--threads=1", f"--output={directory / 'weights'}", f"--work={directory / 'work'}", *more]
        )
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)

"""Draws the phases of boots side by side, for a light and a dark page; knows the figures, not how they came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

# What is drawn, from the interpreter's start on, and which of the report's phases it consists of.
BANDS = {
    "start and imports": ("start", "key", "imports", "other"),
    "weights": ("weights",),
    "restore": ("restore",),
    "compile and warm-up": ("regions", "warm-up", "workers"),
    "proof": ("verify",),
    "persist": ("persist",),
}
# Told apart by people who see few colours too (Okabe and Ito, 2008).
COLORS = ("#999999", "#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#f0e442")
THEMES = {"light": "#1f2328", "dark": "#f0f6fc"}


def draw(answer: dict[str, Any], path: Path) -> list[Path]:
    """Write `path`-light.svg and `path`-dark.svg and return their paths.

    Args:
        answer: what scripts/benchmark found.
        path: where, without what distinguishes the two.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    files = []
    for theme, ink in THEMES.items():
        files.append(path.with_name(f"{path.name}-{theme}.svg"))
        _draw(answer, files[-1], ink)
    return files


def _draw(answer: dict[str, Any], file: Path, ink: str) -> None:
    modes = answer["modes"]
    # Text stays text, which readers of screens can read; the same figures give the same file.
    style = {"svg.fonttype": "none", "svg.hashsalt": "warmstart", "font.size": 11, "font.family": "sans-serif"}
    colors = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), ink)
    with plt.rc_context(style | colors):
        figure, axes = plt.subplots(figsize=(8.4, 0.55 * len(modes) + 1.5), layout="constrained")
        names = list(modes)[::-1]
        left = [0.0] * len(names)
        for (band, phases), color in zip(BANDS.items(), COLORS, strict=True):
            seconds = [sum(modes[name]["phases"].get(phase, 0.0) for phase in phases) for name in names]
            axes.barh(names, seconds, left=left, color=color, label=band, height=0.62)
            left = [start + more for start, more in zip(left, seconds, strict=True)]
        for name, end in zip(names, left, strict=True):
            axes.annotate(f"{modes[name]['boot_s']['median']:.1f} s", (end, name), (5, 0),
                          textcoords="offset points", va="center")  # fmt: skip
        axes.set_xlim(0, max(left) * 1.12)
        axes.set_xlabel("seconds until every planned request can be answered")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False)
        figure.legend(loc="outside upper center", ncols=3, frameon=False)
        figure.savefig(file, transparent=True, metadata={"Date": None})
        plt.close(figure)

"""How all figures look: a colour for ours (safe for the colour-blind), greys for others, labels where the data are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from bench.spreads import Spread

OURS, OURS_TOO, OTHER, IDEAL, INK, FAINT = "#0072B2", "#56B4E9", "#8c8c8c", "#3a3a3a", "#222222", "#d9d9d9"
FORMATS = ("png", "svg")

plt.rcParams.update({
    "font.family": "DejaVu Sans", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": "#888888", "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.labelcolor": INK, "text.color": INK, "xtick.color": "#555555", "ytick.color": INK, "svg.fonttype": "path",
    "svg.hashsalt": "distbelief", "figure.dpi": 110, "savefig.dpi": 160, "axes.axisbelow": True,
})  # fmt: skip


@dataclass(frozen=True)
class Dot:
    """A row of a dot plot."""

    label: str
    value: Spread
    kind: str
    """ours, reference or peer"""
    text: str


def colour(kind: str) -> str:
    return {"ours": OURS, "reference": IDEAL}.get(kind, OTHER)


def dots(axes: Any, rows: Sequence[Dot], line_at: float | None = None, line_label: str = "") -> None:
    """One row each, the first on top: the median as a dot, from the lowest to the highest as a line."""
    for place, row in enumerate(rows):
        hue = colour(row.kind)
        axes.plot([row.value.low, row.value.high], [place, place], color=hue, linewidth=2.2, alpha=0.45, zorder=2)
        hollow = row.kind == "reference"
        axes.plot(
            row.value.median, place, "o", color=hue, markerfacecolor="white" if hollow else hue, markersize=6, zorder=3,
            clip_on=False,
        )  # fmt: skip
        axes.annotate(
            row.text, (row.value.high, place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8,
            color=hue, fontweight="bold" if row.kind == "ours" else "normal",
        )  # fmt: skip
    named(axes, [(row.label, row.kind) for row in rows])
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    if line_at is not None:
        axes.axvline(line_at, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            line_label, (line_at, 1), xycoords=("data", "axes fraction"), xytext=(3, 1), textcoords="offset points",
            fontsize=7.5, color=INK,
        )  # fmt: skip


def named(axes: Any, rows: Sequence[tuple[str, str]]) -> None:
    """(label, kind) of each row, the first on top."""
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    for label, (_, kind) in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(colour(kind))
        label.set_fontweight("bold" if kind == "ours" else "normal")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def short(value: float) -> str:
    """
    >>> short(1234.5), short(0.003), short(14.26)
    ('1,234', '0.003', '14.3')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def end_labels(axes: Any, labels: Sequence[tuple[float, float, str, str, bool]], gap: float) -> None:
    """(x, y, text, colour, bold) at the ends of lines, moved apart where they would lie on each other. `gap` in y."""
    last = float("-inf")
    for x, y, text, hue, bold in sorted(labels, key=lambda one: one[1]):
        place = max(y, last + gap)
        last = place
        axes.annotate(
            text, (x, y), xytext=(x, place), textcoords="data", va="center", fontsize=8, color=hue,
            fontweight="bold" if bold else "normal", annotation_clip=False,
        )  # fmt: skip


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for form in FORMATS:
        file = folder / f"{name}.{form}"
        metadata = {"Date": None} if form == "svg" else {}
        figure.savefig(file, bbox_inches="tight", facecolor="white", metadata=metadata)
        files.append(file)
    plt.close(figure)
    return files

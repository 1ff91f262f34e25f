"""Figures of the measures that have programs of their own: recovery, checkpoints, bandwidth."""

from __future__ import annotations

from typing import Any

from matplotlib import pyplot as plt

from bench.compare.charts.style import FAINT, OTHER, OURS, Dot, dots, named, short
from bench.compare.summary import Content
from bench.spreads import Spread, spread

RECOVERY_TITLES = {
    "ours": "DistBelief",
    "torchrun": "torchrun, restart",
    "ray": "Ray Train",
    "torchft": "torchft, tuned",
}
CHECKPOINT_TITLES = {"ours": "DistBelief"}
MILLI = 1000


def recovery(content: Content) -> Any | None:
    """One dot per kill: seconds from SIGKILL to the survivors' next step."""
    found = content["others"].get("recovery", {}).get("workloads", {}).get("mlp", {})
    if not found:
        return None
    figure, axes = plt.subplots(figsize=(7.0, 0.9 + 0.45 * len(found)), layout="constrained")
    names = sorted(found, key=lambda name: found[name]["next_commit_s"]["median"])
    for place, name in enumerate(names):
        one, hue = found[name]["next_commit_s"], OURS if name == "ours" else OTHER
        axes.plot(
            one["values"], [place] * len(one["values"]), "o", color=hue, alpha=0.35, markersize=5, markeredgewidth=0
        )
        axes.plot(one["median"], place, "|", color=hue, markersize=18, markeredgewidth=2.5)
        axes.annotate(
            f"{one['median']:.2g} s", (one["high"], place), xytext=(8, 0), textcoords="offset points", va="center",
            color=hue, fontweight="bold" if name == "ours" else "normal", fontsize=9,
        )  # fmt: skip
    kinds = ["ours" if name == "ours" else "peer" for name in names]
    named(axes, list(zip([RECOVERY_TITLES.get(name, name) for name in names], kinds, strict=True)))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(None, 2.2 * max(found[name]["next_commit_s"]["high"] for name in names))
    axes.grid(axis="x", which="both", color=FAINT, linewidth=0.5)
    axes.set_xlabel(
        "seconds from SIGKILL of one of three workers to the next step (each dot is a kill; the bar is the median)"
    )
    figure.suptitle("Recovery", x=0.01, ha="left", fontsize=12)
    return figure


def checkpoint(content: Content) -> Any | None:
    found = content["others"].get("checkpoint", {}).get("systems", {})
    if not found:
        return None
    panels = [("stall_s", "Training stands still, per save"), ("extra_s", "In all, per save (slower steps too)")]
    figure, grid = plt.subplots(1, 2, figsize=(9.6, 0.9 + 0.4 * len(found)), layout="constrained")
    for axes, (name, about) in zip(grid, panels, strict=True):
        rows = [
            Dot(
                CHECKPOINT_TITLES.get(system, system), _spread(one[name]), "ours" if system == "ours" else "peer",
                f"{short(MILLI * one[name]['median'])} ms",
            )
            for system, one in found.items()
        ]  # fmt: skip
        rows.sort(key=lambda row: row.value.median)
        dots(axes, rows)
        axes.set_xlim(min(0.0, *(row.value.low for row in rows)), 1.3 * max(row.value.high for row in rows))
        axes.set_title(about)
        axes.set_xlabel("seconds")
    size = content["others"]["checkpoint"]["settings"]["parameters"]
    figure.suptitle(f"Checkpoints: {size / 1e6:.0f} M parameters with AdamW", x=0.01, ha="left", fontsize=12)
    return figure


def bandwidth(content: Content) -> Any | None:
    found = content["others"].get("bandwidth", {})
    panels = []
    for mb, methods in found.get("reduce", {}).get("gb_per_s", {}).items():
        panels.append((f"Sum over two processes, {mb} MB", {name: _spread(one) for name, one in methods.items()}))
    for size, ways in found.get("servers", {}).items():
        panels.append((f"Push and pull, {size}", {name: spread(one["gb_per_s"]) for name, one in ways.items()}))
    if not panels:
        return None
    lines = -(-len(panels) // 3)
    figure, grid = plt.subplots(lines, 3, figsize=(13.4, 2.2 * lines), squeeze=False, layout="constrained")
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    for axes, (about, methods) in zip(grid.flat, panels, strict=False):
        rows = []
        for name, one in methods.items():
            who = (
                "ours" if name.startswith("shared") or "server" in name else "reference" if "memcpy" in name else "peer"
            )
            label = (
                name if "server" in name or who != "ours" else f"DistBelief, {name.replace('shared', 'shared memory')}"
            )
            rows.append(Dot(label, one, who, short(one.median)))
        rows.sort(key=lambda row: -row.value.median)
        dots(axes, rows)
        axes.set_xlim(0, 1.2 * max(row.value.high for row in rows))
        axes.set_title(about)
    figure.suptitle("GB per second, beside copying the same bytes (memcpy)", x=0.01, ha="left", fontsize=12)
    return figure


def _spread(one: dict[str, Any]) -> Spread:
    return Spread(one["median"], one["low"], one["high"], one["values"])

"""Figures of training: speed by workload, scaling, the first step, accuracy over time, and what it costs."""

from __future__ import annotations

from typing import Any

from matplotlib import pyplot as plt

from bench.compare import summary
from bench.compare.charts.style import IDEAL, INK, OTHER, OURS, OURS_TOO, Dot, dots, end_labels, short
from bench.compare.plan import ACCURACY_GOAL
from bench.compare.summary import Content, Row, kind, title
from bench.compare.systems import IDEAL as IDEAL_SYSTEM
from bench.compare.systems import OURS as ALLREDUCE
from bench.compare.systems import SINGLE, SYSTEMS
from bench.running import BENCH
from bench.spreads import Spread, spread

COLUMNS = 3
SHORT = {
    "mlp": "MLP", "cnn": "CNN", "gpt": "GPT 6×256", "resnet": "ResNet-18", "bert": "BERT-base",
    "wide_deep": "Wide & Deep", "wide": "MLP, wide", "wide8": "MLP, wide, 8 samples", "fashion": "Fashion-MNIST",
}  # fmt: skip


def speed(content: Content) -> Any | None:
    """Samples/s over DDP's, one panel per workload."""
    panels = []
    for workload, workers in summary.cells(content, "speed"):
        rows = [row for row in summary.rows(content, "speed", workload, workers) if _comparable(row)]
        if rows:
            panels.append((workload, rows))
    if not panels:
        return None
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    tall = max(len(rows) for _, rows in panels)
    figure, grid = plt.subplots(
        lines, columns, figsize=(4.6 * columns, lines * (0.9 + 0.27 * tall)), squeeze=False, layout="constrained"
    )
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    for axes, (workload, rows) in zip(grid.flat, panels, strict=False):
        shown = [Dot(row.title, row.to_ddp, kind(row.system), f"{row.to_ddp.median:.2f}") for row in rows if row.to_ddp]
        shown.sort(key=lambda row: -row.value.median)
        dots(axes, shown, 1.0, "DDP")
        highest = max(row.value.high for row in shown)
        axes.set_xlim(0, 1.18 * max(highest, 1.05))
        axes.set_title(SHORT.get(workload, workload), pad=12)
    figure.suptitle("Samples per second over DDP's, two workers with one thread each", x=0.01, ha="left", fontsize=12)
    figure.supxlabel("median of the repetitions' ratios; lines: lowest to highest. Higher is better.", fontsize=8)
    return figure


def scaling(content: Content) -> Any | None:
    """Samples/s with 1, 2, 4 workers over one process's."""
    names = list(dict.fromkeys(workload for workload, _ in summary.cells(content, "scaling")))
    if not names:
        return None
    figure, grid = plt.subplots(1, len(names), figsize=(4.4 * len(names), 3.6), squeeze=False, layout="constrained")
    for axes, workload in zip(grid.flat, names, strict=True):
        found = summary.scaling(content, workload)
        base = found.get(SINGLE, found.get(IDEAL_SYSTEM, {})).get(1)
        counts = sorted({count for some in found.values() for count in some})
        if base is None or len(counts) < 2:
            continue
        labels = []
        top = 0.0
        for name, some in found.items():
            if name == SINGLE or len(some) < 2:
                continue
            places = sorted(some)
            values = [some[count].median / base.median for count in places]
            top = max(top, *(some[count].high / base.median for count in places))
            hue = OURS if name == ALLREDUCE else OURS_TOO if kind(name) == "ours" else OTHER
            style: Any = "-"
            if name == IDEAL_SYSTEM:
                hue, style = IDEAL, (0, (4, 3))
            axes.plot(places, values, color=hue, linestyle=style, marker="o", markersize=4, linewidth=2)
            for count in places:
                low, high = some[count].low / base.median, some[count].high / base.median
                axes.plot([count, count], [low, high], color=hue, alpha=0.35, linewidth=3)
            labels.append((places[-1] + 0.12, values[-1], _short(name), hue, kind(name) == "ours"))
        end_labels(axes, labels, 0.06 * top)
        axes.set_xticks(counts)
        axes.set_xlim(min(counts) - 0.2, max(counts) + 0.2)
        axes.set_ylim(0, 1.08 * top)
        axes.set_xlabel("workers")
        axes.set_title(SHORT.get(workload, workload))
    grid.flat[0].set_ylabel("samples/s, times one process")
    cores = content["machine"]["cores_usable"]
    figure.suptitle(f"Scaling (this machine has {cores} cores)", x=0.01, ha="left", fontsize=12)
    return figure


def first_step(content: Content) -> Any | None:
    found = summary.first_steps(content)
    if not found:
        return None
    rows = [Dot(title(name), one, kind(name), f"{one.median:.1f} s") for name, one in found.items()]
    rows.sort(key=lambda row: row.value.median)
    figure, axes = plt.subplots(figsize=(6.6, 0.9 + 0.27 * len(rows)), layout="constrained")
    dots(axes, rows)
    axes.set_xlim(0, 1.15 * max(row.value.high for row in rows))
    axes.set_xlabel("seconds")
    figure.suptitle("From the command to the end of the first step", x=0.01, ha="left", fontsize=12)
    return figure


def accuracy(content: Content) -> Any | None:
    curves = summary.accuracy_curves(content)
    if not curves:
        return None
    figure, axes = plt.subplots(figsize=(7.4, 4.0), layout="constrained")
    labels, last = [], max(curve[-1][0] for some in curves.values() for curve in some)
    for name, some in curves.items():
        hue = OURS if name == ALLREDUCE else OURS_TOO if kind(name) == "ours" else OTHER
        for number, curve in enumerate(some):
            axes.plot(
                *zip(*curve, strict=True), color=hue, linewidth=2 if number == 0 else 1, alpha=1 if number == 0 else 0.5
            )
        at, share = some[0][-1]
        reached = summary.time_to_accuracy(some[0])
        text = _short(name) + ("" if reached is None else f", {reached:.0f} s")
        labels.append((at + 0.01 * last, share, text, hue, kind(name) == "ours"))
    axes.axhline(ACCURACY_GOAL, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.annotate(f"{ACCURACY_GOAL:.0%}", (0, ACCURACY_GOAL), xytext=(2, 3), textcoords="offset points", fontsize=8)
    low = min(0.6, ACCURACY_GOAL - 0.1)
    axes.set_ylim(low, None)
    axes.set_xlim(0, 1.02 * last)
    end_labels(axes, labels, 0.035 * (axes.get_ylim()[1] - low))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("seconds since the command")
    axes.grid(color="#eeeeee", linewidth=0.6)
    figure.suptitle("Fashion-MNIST: accuracy on the test set over time", x=0.01, ha="left", fontsize=12)
    return figure


def costs(content: Content) -> Any | None:
    """Memory, bytes on the wire and lines of code, on the MLP."""
    cells = summary.cells(content, "speed")
    if not cells:
        return None
    workload, workers = next((cell for cell in cells if cell[0] == "mlp"), cells[0])
    rows = [row for row in summary.rows(content, "speed", workload, workers) if not row.problem]
    memory = [
        Dot(row.title, _one(row.peak_bytes / 1e6), kind(row.system), f"{row.peak_bytes / 1e6:.0f}") for row in rows
    ]
    wire = [
        Dot(row.title, _one(row.wire_bytes_per_step / 1e6), kind(row.system), short(row.wire_bytes_per_step / 1e6))
        for row in rows
        if row.wire_bytes_per_step is not None and kind(row.system) != "reference"
    ]
    code = list(code_lines([row.system for row in rows]))
    panels = [
        ("Peak memory of a worker, MB", memory),
        ("Bytes over loopback per step, MB", wire),
        ("Lines of user code", code),
    ]
    panels = [(name, some) for name, some in panels if some]
    figure, grid = plt.subplots(
        1, len(panels), figsize=(4.8 * len(panels), 0.9 + 0.27 * len(rows)), squeeze=False, layout="constrained"
    )
    for axes, (name, some) in zip(grid.flat, panels, strict=True):
        some.sort(key=lambda row: row.value.median)
        dots(axes, some)
        axes.set_xlim(0, 1.2 * max(row.value.high for row in some) or 1)
        axes.set_title(name)
    figure.suptitle(
        f"What it costs ({SHORT.get(workload, workload)}, two workers). Lower is better", x=0.01, ha="left", fontsize=12
    )
    return figure


def code_lines(systems: list[str]) -> list[Dot]:
    """One row per driver file, named after its first system."""
    found: dict[str, Dot] = {}
    for name in systems:
        driver = SYSTEMS[name].driver
        lines = summary.lines_of_code(BENCH / "drivers" / driver)
        label = "DistBelief, any strategy" if kind(name) == "ours" else title(name)
        found.setdefault(driver, Dot(label, _one(lines), kind(name), str(lines)))
    return list(found.values())


def _comparable(row: Row) -> bool:
    return not row.problem and row.to_ddp is not None and row.system != SINGLE


def _one(value: float) -> Spread:
    return spread([value])


def _short(name: str) -> str:
    return "ideal" if name == IDEAL_SYSTEM else title(name)

"""The results as tables for a terminal. It computes nothing."""

from __future__ import annotations

import statistics

from rich.console import Console
from rich.table import Table

from bench.compare import summary
from bench.compare.plan import ACCURACY_GOAL
from bench.compare.summary import Content, Row
from bench.spreads import Spread
from bench.workloads import WORKLOADS

FEWEST_FOR_QUARTILES = 8
TURN_HEAD = ("over DDP", "of the ideal", "over DDP with our layers")


def show(console: Console, content: Content) -> None:
    for part in ("speed", "scaling"):
        for workload, workers in summary.cells(content, part):
            rows = summary.rows(content, part, workload, workers)
            console.print(_speeds(f"{part}: {WORKLOADS[workload].title}; {_count(workers)}", rows))
    if content.get("turns"):
        table = Table("", *TURN_HEAD, title="Our allreduce in turns of seconds: medians (quartiles)")
        for name, ratios in summary.turn_rows(content):
            table.add_row(name, *map(quartiles_text, ratios))
        console.print(table)
    curves = summary.accuracy_curves(content)
    if curves:
        table = Table("", "seconds to it", "highest", title=f"Fashion-MNIST: accuracy of {ACCURACY_GOAL:.0%}")
        for name, some in curves.items():
            table.add_row(summary.title(name), accuracy_times(some), f"{max(share for _, share in some[0]):.1%}")
        console.print(table)
    verdicts = summary.verdicts(content)
    if verdicts:
        table = Table("goal", "found", "at least", "", title="Goals of our allreduce, two workers")
        for one in verdicts:
            state = "[green]met" if one.met else "[red]not met"
            table.add_row(one.what, f"{one.found:.3f}", f"{one.at_least:g}", state)
        console.print(table)
    for name, reason in content["skipped"].items():
        console.print(f"skipped: {summary.title(name)}: {reason}", markup=False)
    for cell, again in content.get("tried_again", {}).items():
        for name, reasons in again.items():
            console.print(f"failed and tried again: {cell}: {summary.title(name)}: {len(reasons)} times", markup=False)
    for cell, failed in content["failed"].items():
        for name, reason in failed.items():
            console.print(f"failed: {cell}: {summary.title(name)}: {reason}\n", markup=False)


def accuracy_times(curves: list[list[tuple[float, float]]]) -> str:
    reached = [summary.time_to_accuracy(curve) for curve in curves]
    return ", ".join("not reached" if at is None else f"{at:.1f}" for at in reached)


def ratio_text(ratio: Spread | None) -> str:
    return "" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f} – {ratio.high:.2f})"


def quartiles_text(ratio: Spread | None) -> str:
    if ratio is None or len(ratio.values) < FEWEST_FOR_QUARTILES:
        return ratio_text(ratio)
    low, _, high = statistics.quantiles(ratio.values, n=4)
    return f"{ratio.median:.3f} ({low:.2f} – {high:.2f})"


def _speeds(title: str, rows: list[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for column in (
        "samples/s",
        "over DDP",
        "of the ideal",
        "first step s",
        "MB",
        "MB/step",
        "last loss",
        "others' CPU",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        if row.problem:
            table.add_row(row.title, f"not comparable: {row.problem}", style="red" if row.is_ours else "dim")
            continue
        wire = "" if row.wire_bytes_per_step is None else f"{row.wire_bytes_per_step / 1e6:.2f}"
        table.add_row(
            row.title, f"{row.speed.median:,.{0 if row.speed.median >= 100 else 1}f}", ratio_text(row.to_ddp),
            ratio_text(row.to_ideal), f"{row.first_step_s.median:.1f}", f"{row.peak_bytes / 1e6:.0f}", wire,
            f"{row.loss:.4f}", f"{row.others.high:.0%}", style="bold" if row.is_ours else "",
        )  # fmt: skip
    return table


def _count(workers: int) -> str:
    return "one worker" if workers == 1 else f"{workers} workers"

"""Prints the result of `distbelief train`: a few lines for people, or one JSON object for programs."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

import typer

from distbelief.control.signatures import described
from distbelief.observe import text

if TYPE_CHECKING:
    from distbelief.result import Result

KEYS = (
    "run_dir",
    "steps",
    "loss",
    "metrics",
    "weights_sha256",
    "samples_per_s",
    "wall_s",
    "workers",
    "recoveries",
    "reexecuted",
    "servers",
    "servers_lost",
    "server_pauses_s",
    "staleness",
    "helped",
    "pace",
    "wire_ratio",
    "refused",
    "profile",
)


def rows(result: Result) -> list[tuple[str, str]]:
    """Label and value, the most important first."""
    found = [
        ("validation loss" if name == "loss" else name, text.number(value))
        for name, value in text.metrics(result.metrics)
    ]
    where = text.count(result.workers, "worker")
    if result.servers:
        where += f" and {text.count(result.servers, 'parameter server')}"
    found += [
        ("training loss", text.number(result.loss)),
        ("speed", f"{text.rate(result.samples_per_s)} on {where}"),
        ("time", f"{result.wall_s:.1f} s for {text.count(result.steps, 'step')}"),
    ]
    if result.recoveries:
        found.append(("recoveries", str(result.recoveries)))
    if result.servers_lost:
        found.append(("servers lost", str(result.servers_lost) + _pauses(result.server_pauses_s)))
    if result.helped:
        found.append(("helped out", f"{text.count(result.helped, 'shard')} of late workers"))
    if result.pace:
        found.append(("push/fetch every", ", ".join(f"{p['n_push']}/{p['n_fetch']}" for p in result.pace.values())))
    if result.reexecuted:
        found.append(("executed again", text.count(result.reexecuted, "step")))
    if result.wire_ratio is not None:
        found.append(("on the wire", f"{text.percent(result.wire_ratio)} of the uncompressed bytes"))
    if result.refused:
        found.append(("warning", described(result.refused)))
    return [*found, ("weights sha256", result.weights_sha256), ("run", result.run_dir)]


def _pauses(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    if len(seconds) == 1:
        return f"; the next step came {seconds[0]:.2f} s after it"
    return f"; the next step came {statistics.median(seconds):.2f} s after each (median), {max(seconds):.2f} s at most"


def print_summary(result: Result, stream: TextIO, *, plain: bool = False) -> None:
    found = rows(result)
    if plain or not stream.isatty():
        for label, value in found:
            print(f"{label}: {value}", file=stream)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1, 0, 0))  # narrow, so that a hash fits 80 columns and can be copied
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    best = len(result.metrics)
    for i, (label, value) in enumerate(found):
        table.add_row(label, Text(value, style="bold green" if i < best else ""))
    console = Console(file=stream, highlight=False)
    console.print(Text("\n✓ done", style="bold green"))
    console.print(table)


def print_json(result: Result) -> None:
    """One line on stdout."""
    whole = dataclasses.asdict(result)
    typer.echo(json.dumps({key: text.finite(whole[key]) for key in KEYS}, allow_nan=False))

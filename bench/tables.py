"""The figures as tables for a terminal. It computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.goals import Goal
from bench.spreads import Ratio, Spread

TWO_WORKERS = "Two workers, one thread each; figures are medians, with the lowest and highest."
STYLE = {"met": "green", "not met": "red", "": ""}


def show_machine(console: Console, machine: Mapping[str, Any], busy: Sequence[float], about: str = TWO_WORKERS) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    console.print(
        f"{machine['cpu']}, {machine['cores_usable']} of {machine['cores']} cores usable, {versions}\n"
        f"load before: {_load(busy)}. {about}"
    )


def show_progress(console: Console, text: str) -> None:
    """One line that is overwritten, on a terminal only. Nothing moves by itself: it would take processor time."""
    if console.is_terminal:
        console.print(f"{text:<{console.width - 1}.{console.width - 1}}", end="\r", markup=False)


def show_ratios(console: Console, title: str, ratios: Sequence[Ratio]) -> None:
    table = _table(title, "median", "lowest", "highest", "goal", "")
    for found in ratios:
        goal = "" if found.goal is None else f"≥ {found.goal:g}"
        values = (f"{value:.3f}" for value in (found.spread.median, found.spread.low, found.spread.high))
        table.add_row(found.what, *values, goal, f"[{STYLE[found.verdict]}]{found.verdict}" if found.verdict else "")
    console.print(table)


def show_reduce(console: Console, bandwidths: Mapping[int, Mapping[str, Spread]]) -> None:
    table = _table("One buffer added up over two processes, GB/s", *(f"{size} MB" for size in bandwidths))
    for method in next(iter(bandwidths.values())):
        found = [bandwidths[size][method] for size in bandwidths]
        table.add_row(method, *(f"{one.median:.2f}  ({one.low:.2f} – {one.high:.2f})" for one in found))
    console.print(table)


def show_figures(console: Console, title: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> None:
    table = _table(title, *columns)
    for name, values in rows.items():
        table.add_row(name, *values)
    console.print(table)


def show_goals(console: Console, goals: Sequence[Goal]) -> None:
    table = _table("Goals", "found", "goal", "")
    for goal in goals:
        table.add_row(
            goal.what, f"{goal.found:.3g}", f"< {goal.below:g} {goal.unit}", f"[{STYLE[goal.verdict]}]{goal.verdict}"
        )
    console.print(table)


def show_problems(console: Console, problems: Sequence[str]) -> None:
    for problem in problems:
        console.print(f"[red]not comparable:[/] {problem}")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _load(busy: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in busy)

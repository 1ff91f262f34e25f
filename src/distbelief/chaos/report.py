"""Shows a verdict: a table and a sentence for people, an object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TextIO

from distbelief.chaos.rules.verdict import FaultOutcome, Verdict
from distbelief.observe import text

HEADINGS = ("fault", "at step", "noticed", "next commit", "shards recomputed")
FAULT_KEYS = ("kind", "at_step", "noticed_ms", "next_commit_ms", "shards_recomputed")


def as_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "weights_equal": verdict.weights_equal,
        "steps_lost": verdict.steps_lost,
        "steps_differing": verdict.steps_differing,
        "exactly_once": verdict.exactly_once,
        "goodput": None if verdict.goodput is None else round(verdict.goodput, 4),
        "reexecuted": verdict.reexecuted,
        "difference": text.finite(verdict.closeness and verdict.closeness.relative),
        "faults": [{key: getattr(fault, key) for key in FAULT_KEYS} for fault in verdict.faults],
    }


def rows(verdict: Verdict) -> list[tuple[str, ...]]:
    return [_row(fault) for fault in verdict.faults]


def totals(verdict: Verdict) -> list[tuple[str, str]]:
    other = [("other results", text.count(verdict.steps_differing, "step"))] if verdict.steps_differing else []
    again = [("executed again", text.count(verdict.reexecuted, "step"))] if verdict.reexecuted else []
    return [
        ("weights", _weights(verdict)),
        ("steps lost", str(verdict.steps_lost)),
        *other,
        *again,
        ("samples", "visited exactly once" if verdict.exactly_once else "NOT visited exactly once"),
        ("goodput", "–" if verdict.goodput is None else f"{text.percent(verdict.goodput)} of the twin's"),
    ]


def sentence(verdict: Verdict, missed: Sequence[str]) -> str:
    """
    >>> sentence(Verdict(True, 0, True, 0.9), [])
    'No fault was carried out; the run came to the weights of its twin, no step lost, every sample visited once.'
    """
    struck = text.count(len(verdict.faults), "fault")
    began = f"After {struck} the run" if verdict.faults else "No fault was carried out; the run"
    bad = []
    if not verdict.weights_equal and verdict.promise != "nothing":
        noisy = verdict.closeness is not None and verdict.closeness.noisy
        bad.append("cannot be compared with its twin" if noisy else "came to other weights than its twin")
    if verdict.steps_lost:
        bad.append(f"lost {text.count(verdict.steps_lost, 'step')}")
    if verdict.steps_differing:
        bad.append(f"had other results in {text.count(verdict.steps_differing, 'step')}")
    if not verdict.exactly_once:
        bad.append("did not visit every sample exactly once")
    if bad:
        return f"{began} {', '.join(bad)}."
    weights = "came to the weights of its twin" if verdict.weights_equal else "came to its end"
    if verdict.closeness is not None:
        weights += " within rounding"
    if verdict.reexecuted:
        weights += f", {text.count(verdict.reexecuted, 'step')} executed again"
    left = f"; {text.count(len(missed), 'fault')} not carried out" if missed else ""
    return f"{began} {weights}, no step lost, every sample visited once{left}."


def print_table(verdict: Verdict, missed: Sequence[str], stream: TextIO) -> None:
    if stream.isatty():
        _print_rich(verdict, missed, stream)
        return
    table = [HEADINGS, *rows(verdict)]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADINGS))]
    for row in table if verdict.faults else []:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip(), file=stream)
    for label, value in totals(verdict):
        print(f"{label}: {value}", file=stream)
    for fault in missed:
        print(f"not carried out: {fault}", file=stream)
    print(sentence(verdict, missed), file=stream, flush=True)


def _print_rich(verdict: Verdict, missed: Sequence[str], stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    if verdict.faults:
        table = Table(show_edge=False, header_style="dim")
        table.add_column(HEADINGS[0], overflow="fold")
        for heading in HEADINGS[1:]:
            table.add_column(heading, justify="right")
        for row in rows(verdict):
            table.add_row(*map(Text, row))
        console.print(table)
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in [*totals(verdict), *(("not carried out", fault) for fault in missed)]:
        grid.add_row(label, Text(value))
    console.print(grid)
    mark, style = ("✓", "bold green") if verdict.sound else ("✗", "bold red")
    console.print(Text(f"{mark} {sentence(verdict, missed)}", style=style))


def _weights(verdict: Verdict) -> str:
    near = verdict.closeness
    if near is None and not verdict.weights_equal and verdict.promise == "nothing":
        return "not equal to the twin's; this strategy does not promise it"
    if near is None:
        return "equal to the twin's" if verdict.weights_equal else "NOT equal to the twin's"
    if near.noisy:
        return "not comparable: with this number of steps, rounding alone changes the weights; train fewer"
    apart = f"at most {near.relative:.2g} of a tensor's largest number apart"
    if near.equal:
        return f"equal to the twin's within rounding ({apart})" if near.relative else "equal to the twin's"
    return f"NOT equal to the twin's ({apart})"


def _row(fault: FaultOutcome) -> tuple[str, ...]:
    recomputed = "–" if fault.shards_recomputed is None else str(fault.shards_recomputed)
    return (fault.text, str(fault.at_step), _time(fault.noticed_ms), _time(fault.next_commit_ms), recomputed)


def _time(ms: float | None) -> str:
    return "–" if ms is None else f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.1f} ms"

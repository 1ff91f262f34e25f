"""The verdict for people, as a few lines and a table, and for programs, as one object."""

from __future__ import annotations

import math
from typing import Any, TextIO

from distbelief.observe import text
from distbelief.strategies import parse
from distbelief.verification.compare import Comparison
from distbelief.verification.trial import PLAIN, Plan

WORST = 10
HEADINGS = ("worst parameters", "largest difference", "relative")


def as_json(plan: Plan, found: Comparison) -> dict[str, Any]:
    """JSON has no infinity: null stands for a difference between a number and none."""
    return {
        "verdict": found.verdict,
        "max_difference": _finite(found.max_difference),
        "first_step": found.first_step,
        "strategy": plan.strategy,
        "against": plan.against,
        "workers": plan.workers,
        "steps": found.steps,
        "tolerance": found.tolerance,
        "differences": {one.name: _finite(one.largest) for one in found.differences[:WORST]},
    }


def lines(plan: Plan, found: Comparison) -> list[str]:
    who = f"{plan.strategy} on {text.count(plan.workers, 'worker')} against {plan.against}"
    tensors = text.count(found.tensors, "tensor")
    told = [f"{found.verdict}: {who}, after {text.count(found.steps, 'step')}"]
    if found.first_step is None:
        return [*told, f"All weights ({tensors}) have the same bits."]
    limit = f"{found.tolerance:g} of the tensor's largest number"
    told += [
        f"{len(found.differences)} of {tensors} differ, by {'at most' if found.verdict == 'equal' else 'more than'} "
        f"{limit}. It first shows at step {found.first_step}.",
        *_meaning(plan, found),
        "",
    ]
    return told + _table(found)


def _meaning(plan: Plan, found: Comparison) -> list[str]:
    if all(how == PLAIN or parse(how).exact for how in (plan.strategy, plan.against)):
        return ["Both promise the same bits, so something is wrong, if only in the order of a sum."]
    if found.verdict == "different":
        return ["An inexact strategy takes shards together: dropout draws other numbers, BatchNorm sees other batches."]
    return []


def print_report(plan: Plan, found: Comparison, stream: TextIO) -> None:
    for line in lines(plan, found):
        print(line, file=stream)
    stream.flush()


def _table(found: Comparison) -> list[str]:
    rows = [(one.name, f"{one.largest:.3g}", f"{one.relative:.3g}") for one in found.differences[:WORST]]
    table = [HEADINGS, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADINGS))]
    shown = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in table
    ]
    left = len(found.differences) - len(rows)
    return [*shown, *([f"and {left} more"] if left else [])]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

"""Reports the verdict: a few lines and a table for people, one object for programs."""

from __future__ import annotations

from typing import Any, TextIO

from distbelief.observe import text
from distbelief.strategies import learn_alike, parse
from distbelief.verification.compare import ABOVE_NOISE, Comparison, Difference
from distbelief.verification.trial import PLAIN, Plan

WORST = 10
HEADINGS = ("worst parameters", "largest difference", "relative", "rounding alone")


def as_json(plan: Plan, found: Comparison) -> dict[str, Any]:
    """JSON has no infinity: null also stands for a difference between a number and none."""
    return {
        "verdict": found.verdict,
        "max_difference": text.finite(found.max_difference),
        "first_step": found.first_step,
        "strategy": plan.strategy,
        "against": plan.against,
        "workers": plan.workers,
        "steps": found.steps,
        "tolerance": found.tolerance,
        "differences": {one.name: text.finite(one.largest) for one in found.differences[:WORST]},
        "beyond_tolerance": sum(one.relative > found.tolerance for one in found.differences),
        "noisy": found.noisy,
    }


def lines(plan: Plan, found: Comparison) -> list[str]:
    who = f"{plan.strategy} on {text.count(plan.workers, 'worker')} against {plan.against}"
    tensors = text.count(found.tensors, "tensor")
    told = [f"{found.verdict}: {who}, after {text.count(found.steps, 'step')}"]
    if found.first_step is None:
        return [*told, f"All weights ({tensors}) have the same bits."]
    limit = f"{found.tolerance:g} of the tensor's largest number"
    shows = f"It first shows at step {found.first_step}."
    if found.differences[0].noise is None:
        by = "at most" if found.verdict == "equal" else "more than"
        told.append(f"{len(found.differences)} of {tensors} differ, by {by} {limit}. {shows}")
    else:
        beyond = sum(not one.explained(found.tolerance) for one in found.differences)
        what = f"{beyond} of them by more than" if beyond else "all of them by less than"
        told.append(
            f"{len(found.differences)} of {tensors} differ, {what} {ABOVE_NOISE} times the effect of rounding alone. "
            f"{shows}"
        )
    return [*told, *_meaning(plan, found), "", *_table(found)]


def _meaning(plan: Plan, found: Comparison) -> list[str]:
    if plan.against != PLAIN and not learn_alike(parse(plan.strategy), parse(plan.against)):
        return [
            "local_sgd and sandblaster compute other weights than other strategies. Use `--against plain` to check one "
            "of them."
        ]
    if all(how == PLAIN or parse(how).exact for how in (plan.strategy, plan.against)):
        return [
            "Both promise the same bits. The purity check found nothing before training: look for state of the job's "
            "code that begins to matter later (docs/purity.md). Without any, the error is DistBelief's."
        ]
    if found.noisy:
        return [
            "After this number of steps rounding alone makes the weights differ, so the result proves nothing. Use "
            "fewer: --steps 10.",
        ]
    if found.verdict == "different" and any(parse(how).fuses_shards for how in _strategies(plan)):
        return ["An inexact strategy fuses shards: dropout draws other numbers, BatchNorm sees other batches."]
    return []


def _strategies(plan: Plan) -> list[str]:
    return [how for how in (plan.strategy, plan.against) if how != PLAIN]


def print_report(plan: Plan, found: Comparison, stream: TextIO) -> None:
    for line in lines(plan, found):
        print(line, file=stream)
    stream.flush()


def _table(found: Comparison) -> list[str]:
    rows = [_row(one) for one in found.differences[:WORST]]
    table = [HEADINGS[: len(rows[0])], *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(rows[0]))]
    shown = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in table
    ]
    left = len(found.differences) - len(rows)
    return [*shown, *([f"and {left} more"] if left else [])]


def _row(one: Difference) -> tuple[str, ...]:
    row = (one.name, f"{one.largest:.3g}", f"{one.relative:.3g}")
    return row if one.noise is None else (*row, f"{one.noise:.3g}")

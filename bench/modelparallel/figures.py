"""From the ends of steps to figures: seconds per step, ratios per repetition, a check that both did the same. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.spreads import SAME_END, SAME_START, Ratio, spread

GOAL = 1.05
"""Our time for a step over that of bare torch, at most."""


@dataclass(frozen=True)
class Measured:
    mean_s: float
    """Per step after the warm-up: all time that passed over all steps. What happens in some steps only is in it."""
    median_s: float
    """Of the single steps."""
    losses: list[float]
    others: float
    """The share of the machine's processor time that others had while this was measured."""


@dataclass(frozen=True)
class TimeRatio:
    """Ours over theirs: above 1 we are slower."""

    ratio: Ratio
    at_most: float | None = None

    @property
    def verdict(self) -> str:
        if self.at_most is None:
            return ""
        return "met" if self.ratio.spread.median <= self.at_most else "not met"


def measured(ends: Sequence[float], warm_up: int, losses: Sequence[float], others: float) -> Measured:
    """`ends`: when each step was done.

    >>> measured([0.0, 5.0, 6.0, 7.0, 10.0], warm_up=2, losses=[2.0, 1.0], others=0.0).mean_s
    1.6666666666666667
    """
    timed = ends[warm_up - 1 :]
    steps = [after - before for before, after in pairwise(timed)]
    return Measured((timed[-1] - timed[0]) / len(steps), statistics.median(steps), list(losses), others)


def ratios(ours: Sequence[Measured], theirs: Sequence[Measured]) -> list[TimeRatio]:
    """Taken within repetitions."""

    def of(name: str) -> list[float]:
        return [getattr(a, name) / getattr(b, name) for a, b in zip(ours, theirs, strict=True)]

    return [
        TimeRatio(Ratio("all of the time", spread(of("mean_s"))), GOAL),
        TimeRatio(Ratio("the median step", spread(of("median_s")))),
    ]


def loss_problems(ours: Sequence[Measured], theirs: Sequence[Measured]) -> list[str]:
    """Why these must not be compared; empty when all did the same work.

    >>> loss_problems([measured([0, 1], 1, [2.0, 1.0], 0)], [measured([0, 1], 1, [2.0, 1.1], 0)])
    ['at the last step our loss is 1.000000, theirs 1.100000']
    """
    problems = []
    for mine, peers in zip(ours, theirs, strict=True):
        if len(mine.losses) != len(peers.losses):
            problems.append(f"we have done {len(mine.losses)} steps, they {len(peers.losses)}")
            continue
        for place, tolerance, when in ((0, SAME_START, "first"), (-1, SAME_END, "last")):
            a, b = mine.losses[place], peers.losses[place]
            if not math.isclose(a, b, rel_tol=tolerance):
                problems.append(f"at the {when} step our loss is {a:.6f}, theirs {b:.6f}")
        for who, one in (("our", mine), ("their", peers)):
            if not one.losses[-1] < one.losses[0]:
                problems.append(f"{who} loss went from {one.losses[0]:.4f} to {one.losses[-1]:.4f}")
    return list(dict.fromkeys(problems))

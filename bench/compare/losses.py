"""Did a system do the work? Its losses are held against those of one process on the same batches. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from bench.spreads import SAME_START

ALIKE = 0.5
"""A system in which nobody waits must have come down at least this share of the reference's way."""
FEW = 5
"""Losses at each end whose means are compared, where single ones are noise."""


def problem(losses: Sequence[float], reference: Sequence[float], same_end: float, way: str = "same") -> str:
    """Why these must not be compared; empty when they may. `reference` may be shorter: its steps are looked at.

    way "same": the losses of one process, but for rounding. "start": only at the first step (processes on their own).
    "alike": another order of updates; the loss must have fallen with the reference's.

    >>> problem([2.0, 1.5, 1.0], [2.0, 1.5], same_end=0.02)
    ''
    >>> problem([2.0, 1.9], [2.0, 1.5], same_end=0.02)
    'its loss is 1.90000 at step 2, that of one process 1.50000'
    """
    steps = min(len(losses), len(reference))
    if not all(math.isfinite(loss) for loss in losses):
        return "a loss is not a finite number"
    if way == "alike":
        few = min(FEW, max(1, steps // 2))
        down = [statistics.fmean(one[:few]) - statistics.fmean(one[steps - few : steps]) for one in (losses, reference)]
        if not down[0] >= ALIKE * down[1]:
            return f"its loss fell by {down[0]:.4f} in {steps} steps, that of one process by {down[1]:.4f}"
        return ""
    places = ((0, SAME_START), (steps - 1, same_end)) if way == "same" else ((0, SAME_START),)
    for place, tolerance in places:
        if not math.isclose(losses[place], reference[place], rel_tol=tolerance):
            found, wanted = losses[place], reference[place]
            return f"its loss is {found:.5f} at step {place + 1}, that of one process {wanted:.5f}"
    return ""

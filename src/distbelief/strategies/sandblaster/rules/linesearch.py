"""A line search for the strong Wolfe conditions: it says where it wants to know the loss, and is told.

Along a direction, φ(t) is the loss at step t and φ'(t) its slope. A step is good when it lowers the loss enough,
φ(t) ≤ φ(0) + c₁·t·φ'(0), and has left most of the slope behind, |φ'(t)| ≤ c₂·|φ'(0)|. Steps grow until such steps are
bracketed, then the bracket shrinks around one (Nocedal & Wright, Numerical Optimization, algorithms 3.5 and 3.6), with
cubic interpolation and, so that the points are theirs, the safeguards that torch.optim.LBFGS uses.

It is a generator of numbers: it knows neither tensors nor who evaluates.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

SUFFICIENT_DECREASE = 1e-4  # c₁
CURVATURE = 0.9  # c₂: loose, because a quasi-Newton direction rarely deserves a second evaluation
_GROWTH = 10.0  # the most by which a step grows at once
_RETREAT = 0.1  # how far to go where the step before had no finite loss: such regions begin at unknown scales


@dataclass(frozen=True)
class Ask:
    """Evaluate at `step`. `keep` is the step, evaluated before, that is the answer if nothing better comes (0: none
    yet): what belongs to it, such as its gradient, is still needed. What belongs to others is not."""

    step: float
    keep: float


@dataclass(frozen=True)
class Outcome:
    """`found`: a step with both conditions. `best`: evaluations ran out, or the bracket became too small; the step
    lowers the loss enough, but its slope is steep. `failed`: no step lowered the loss enough, and step is 0."""

    kind: Literal["found", "best", "failed"]
    step: float
    evaluations: int


@dataclass(frozen=True)
class _Point:
    step: float
    loss: float
    slope: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.slope)


Search = Generator[Ask, tuple[float, float], Outcome]


def strong_wolfe(loss: float, slope: float, first: float, *, narrowest: float = 1e-9, evaluations: int = 25) -> Search:
    """Search from φ(0) = `loss`, φ'(0) = `slope` < 0, beginning with step `first`. It yields `Ask`s and is sent
    (φ, φ'); at most `evaluations` of them; brackets narrower than `narrowest` are not divided any more.

    >>> search = strong_wolfe(1.0, -2.0, first=4.0)    # φ(t) = (1 - t)²
    >>> ask = next(search)
    >>> try:
    ...     while True:
    ...         ask = search.send(((1 - ask.step) ** 2, 2 * (ask.step - 1)))
    ... except StopIteration as end:
    ...     end.value
    Outcome(kind='found', step=1.0, evaluations=2)
    """
    start = _Point(0.0, loss, slope)
    before, step, spent = start, first, 0
    while True:
        if spent == evaluations:
            return _ended(start, before, spent)
        here = _Point(step, *(yield Ask(step, before.step)))
        spent += 1
        if not here.finite or not _decreases(start, here) or (spent > 1 and here.loss >= before.loss):
            return (yield from _zoom(start, before, here, narrowest, evaluations, spent))
        if abs(here.slope) <= -CURVATURE * slope:
            return Outcome("found", step, spent)
        if here.slope >= 0:
            return (yield from _zoom(start, here, before, narrowest, evaluations, spent))
        step = _interpolate(before, here, step + 0.01 * (step - before.step), step * _GROWTH)
        before = here


def _zoom(start: _Point, low: _Point, high: _Point, narrowest: float, evaluations: int, spent: int) -> Search:
    """Good steps lie between `low`, the lowest point that decreases enough, and `high`, towards which `low` slopes."""
    slow = False
    while spent < evaluations and abs(high.step - low.step) > narrowest:
        step, slow = _divide(low, high, slow)
        here = _Point(step, *(yield Ask(step, low.step)))
        spent += 1
        if not here.finite or not _decreases(start, here) or here.loss >= low.loss:
            high = here
            continue
        if abs(here.slope) <= -CURVATURE * start.slope:
            return Outcome("found", step, spent)
        if here.slope * (high.step - low.step) >= 0:
            high = low
        low = here
    return _ended(start, low, spent)


def _ended(start: _Point, low: _Point, spent: int) -> Outcome:
    return Outcome("best" if low is not start else "failed", low.step, spent)


def _decreases(start: _Point, here: _Point) -> bool:
    return here.loss <= start.loss + SUFFICIENT_DECREASE * here.step * start.slope


def _divide(low: _Point, high: _Point, slow: bool) -> tuple[float, bool]:
    """Where to divide a bracket, and whether that was close to one of its ends: twice so is not allowed, because the
    bracket would hardly shrink."""
    if not high.finite:
        share = _RETREAT if low.step == 0.0 else 0.5
        return low.step + share * (high.step - low.step), False
    left, right = min(low.step, high.step), max(low.step, high.step)
    step = _interpolate(low, high, left, right)
    margin = 0.1 * (right - left)
    if min(right - step, step - left) >= margin:
        return step, False
    if slow or step >= right or step <= left:
        return (right - margin if right - step < step - left else left + margin), False
    return step, True


def _interpolate(a: _Point, b: _Point, least: float, most: float) -> float:
    """The minimum of the cubic through two points with their slopes (Nocedal & Wright, formula 3.59), kept between
    `least` and `most`; their middle where the cubic has none."""
    a, b = (a, b) if a.step <= b.step else (b, a)
    width = b.step - a.step
    d1 = a.slope + b.slope - 3.0 * (a.loss - b.loss) / (a.step - b.step)
    square = d1 * d1 - a.slope * b.slope
    if not 0.0 <= square < math.inf:
        return (least + most) / 2.0
    d2 = math.sqrt(square)
    below = b.slope - a.slope + 2.0 * d2
    if below == 0.0:
        return most  # a straight line downwards: as far as is allowed
    return min(max(b.step - width * ((b.slope + d2 - d1) / below), least), most)

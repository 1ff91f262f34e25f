"""From raw measurements to figures: medians with spread, and ratios per repetition. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

SAME_START = 1e-4
"""How far two losses of one job may be apart at the first step, relatively."""
SAME_END = 0.02
"""And after the last. (A few operations of rounding at the start grow with every step.)"""


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    high: float
    values: list[float]


@dataclass(frozen=True)
class Ratio:
    """Of two speeds (or of two times, turned so that above 1 is good for us), taken per repetition."""

    what: str
    spread: Spread
    goal: float | None = None

    @property
    def verdict(self) -> str:
        return "" if self.goal is None else "met" if self.spread.median >= self.goal else "not met"

    def as_json(self) -> dict[str, Any]:
        found = {"what": self.what, **asdict(self.spread)}
        return found if self.goal is None else {**found, "goal": self.goal, "met": self.verdict == "met"}


def spread(values: Sequence[float]) -> Spread:
    """
    >>> spread([3.0, 1.0, 2.0])
    Spread(median=2.0, low=1.0, high=3.0, values=[3.0, 1.0, 2.0])
    """
    return Spread(statistics.median(values), min(values), max(values), list(values))


def ratio(what: str, ours: Sequence[float], theirs: Sequence[float], goal: float | None = None) -> Ratio:
    """
    >>> ratio("speed", [2.0, 4.0, 9.0], [1.0, 2.0, 3.0], goal=2.5).verdict
    'not met'
    """
    return Ratio(what, spread([a / b for a, b in zip(ours, theirs, strict=True)]), goal)

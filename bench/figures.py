"""From raw measurements to figures: medians with spread, ratios per repetition, goals, checks of the losses. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from drivers import IMPLEMENTATIONS, Measured

SAME_START = 1e-4
SAME_END = 0.02
"""How far two losses of one job may be apart, relatively: at the first step, and after the last. (A few operations of
rounding at the start grow with every step; other data or other arithmetic would show at once.)"""

OURS, MANY, INEXACT = "ours", "ours, 8 shards", "ours, 8 shards, inexact"
DDP, IDEAL = "DDP", "ideal"


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


Runs = Mapping[str, Sequence[Measured]]
"""Driver (with its optimizer's implementation, for peers) -> one measurement per repetition."""


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


def key(peer: str, implementation: str) -> str:
    return f"{peer}, {implementation} optimizer"


def named(peer: str, measured: Mapping[str, Measured]) -> dict[str, Measured]:
    return {key(peer, implementation): one for implementation, one in measured.items()}


def speeds(runs: Runs) -> dict[str, Spread]:
    return {name: spread([one.samples_per_s for one in measured]) for name, measured in runs.items()}


def faster(runs: Runs, peer: str) -> str:
    """The implementation with which this peer's median is higher: the one to be compared with."""
    found = speeds(runs)
    return max(IMPLEMENTATIONS, key=lambda implementation: found[key(peer, implementation)].median)


def workload_ratios(runs: Runs, goals: Mapping[str, float]) -> list[Ratio]:
    """The goals against each peer at its best; then against each of its implementations; then what shards cost."""

    def values(name: str) -> list[float]:
        return [one.samples_per_s for one in runs[name]]

    found = []
    for peer in (DDP, IDEAL):
        best = key(peer, faster(runs, peer))
        found.append(ratio(f"ours / {best} (its faster one)", values(OURS), values(best), goals[peer]))
        for implementation in IMPLEMENTATIONS:
            if key(peer, implementation) != best:
                other = key(peer, implementation)
                found.append(ratio(f"ours / {other}", values(OURS), values(other)))
    return [
        *found,
        ratio("4 shards per worker / 1 shard per worker", values(MANY), values(OURS)),
        ratio("exact / not exact, 4 shards per worker", values(MANY), values(INEXACT)),
    ]


def loss_problems(runs: Runs) -> list[str]:
    """Why these runs must not be compared; empty when all did the same work."""
    problems = []
    reference = runs[key(DDP, IMPLEMENTATIONS[0])][0].losses
    for name, measured in runs.items():
        for one in measured:
            if not one.losses[-1] < one.losses[0]:
                problems.append(f"{name}: the loss went from {one.losses[0]:.4f} to {one.losses[-1]:.4f}")
            if name.startswith(IDEAL):
                continue  # two models, each on its half of the data: their losses are their own
            for place, tolerance in ((0, SAME_START), (-1, SAME_END)):
                if not math.isclose(one.losses[place], reference[place], rel_tol=tolerance):
                    when = "first" if place == 0 else "last"
                    problems.append(
                        f"{name}: loss {one.losses[place]:.6f} at the {when} step, DDP has {reference[place]:.6f}"
                    )
    if len({one.weights_sha256 for one in runs[OURS]}) != 1:
        problems.append("ours: the weights differ between two repetitions of one job in exact mode")
    return list(dict.fromkeys(problems))

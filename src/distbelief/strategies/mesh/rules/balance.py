"""Decides which units of a model go into which stage of a pipeline, by their measured costs. Pure.

A pipeline is as fast as its slowest stage, and a worker must have room for its stage. So the aim is the lowest share of
seconds in the slowest stage, plus, with a smaller weight, the lowest share of bytes in the largest stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from distbelief.errors import DistBeliefError
from distbelief.shards import Range

MEMORY_WEIGHT = 0.1
"""How much a share of the memory weighs against the same share of the step's time."""


@dataclass(frozen=True)
class UnitCost:
    """The cost of a unit: seconds of forward and backward for one shard, bytes of parameters and kept activations."""

    seconds: float
    bytes: int


def partition(costs: Sequence[UnitCost], stages: int, memory_weight: float = MEMORY_WEIGHT) -> list[Range]:
    """Ranges of units, one per stage, none empty, with the least (slowest stage's share + weight × largest stage's
    share).

    Among equally good divisions, the faster one and then the most even one.

    >>> partition([UnitCost(1.0, 10), UnitCost(1.0, 10), UnitCost(2.0, 10)], 2)
    [(0, 2), (2, 3)]
    """
    if not 1 <= stages <= len(costs):
        raise DistBeliefError(f"{len(costs)} units cannot be cut into {stages} stages: each needs at least one")
    seconds = [0.0, *accumulate(cost.seconds for cost in costs)]
    sizes = [0, *accumulate(cost.bytes for cost in costs)]
    slowest, largest = _limits(seconds, sizes, stages, memory_weight)
    return _most_even(seconds, sizes, stages, slowest, largest)


def explain(costs: Sequence[UnitCost], ranges: Sequence[Range], names: Sequence[str]) -> list[str]:
    """One line per stage, for people.

    >>> costs = [UnitCost(0.5, 2 << 20), UnitCost(0.5, 2 << 20), UnitCost(3.0, 1 << 20)]
    >>> explain(costs, [(0, 2), (2, 3)], ["a", "b", "c"])
    ['stage 1: a – b, 1000.0 ms (25 %), 4.0 MiB', 'stage 2: c, 3000.0 ms (75 %), 1.0 MiB']
    """
    total = sum(cost.seconds for cost in costs) or 1.0
    lines = []
    for stage, (first, end) in enumerate(ranges):
        within = costs[first:end]
        spent, size = sum(cost.seconds for cost in within), sum(cost.bytes for cost in within)
        what = names[first] if end == first + 1 else f"{names[first]} – {names[end - 1]}"
        lines.append(f"stage {stage + 1}: {what}, {1000 * spent:.1f} ms ({spent / total:.0%}), {size / 2**20:.1f} MiB")
    return [line.replace("%)", " %)") for line in lines]


def _limits(seconds: Sequence[float], sizes: Sequence[int], stages: int, weight: float) -> tuple[float, int]:
    """The best pair (slowest, largest). As one limit rises the other falls, so one walk along all pairs is enough."""
    units = len(seconds) - 1
    times = sorted({seconds[end] - seconds[first] for first in range(units) for end in range(first + 1, units + 1)})
    bulks = sorted({sizes[end] - sizes[first] for first in range(units) for end in range(first + 1, units + 1)})
    all_seconds, all_bytes = seconds[-1] or 1.0, sizes[-1] or 1
    best, found, bulk = float("inf"), (times[-1], bulks[-1]), len(bulks) - 1
    for slowest in times:
        if slowest / all_seconds >= best:
            break
        if not _fits(seconds, sizes, stages, slowest, bulks[bulk]):
            continue
        while bulk > 0 and _fits(seconds, sizes, stages, slowest, bulks[bulk - 1]):
            bulk -= 1
        worth = slowest / all_seconds + weight * bulks[bulk] / all_bytes
        if worth < best:
            best, found = worth, (slowest, bulks[bulk])
    return found


def _fits(seconds: Sequence[float], sizes: Sequence[int], stages: int, slowest: float, largest: int) -> bool:
    """Whether filling each stage as far as the limits allow needs no more than `stages` (splitting further is free)."""
    first, used, units = 0, 0, len(seconds) - 1
    while first < units:
        end = first
        while end < units and seconds[end + 1] - seconds[first] <= slowest and sizes[end + 1] - sizes[first] <= largest:
            end += 1
        used += 1
        if end == first or used > stages:
            return False
        first = end
    return True


def _most_even(
    seconds: Sequence[float], sizes: Sequence[int], stages: int, slowest: float, largest: int
) -> list[Range]:
    """The division within the limits that has the least sum of squared seconds. best[s][e]: of the first e units in s
    stages."""
    units = len(seconds) - 1
    best = [[float("inf")] * (units + 1) for _ in range(stages + 1)]
    came = [[0] * (units + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, units - (stages - stage) + 1):
            for first in range(end - 1, stage - 2, -1):
                spent = seconds[end] - seconds[first]
                if spent > slowest or sizes[end] - sizes[first] > largest:
                    break
                if best[stage - 1][first] + spent * spent < best[stage][end]:
                    best[stage][end], came[stage][end] = best[stage - 1][first] + spent * spent, first
    ranges, end = [], units
    for stage in range(stages, 0, -1):
        ranges.append((came[stage][end], end))
        end = came[stage][end]
    return ranges[::-1]

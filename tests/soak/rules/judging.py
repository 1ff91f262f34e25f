"""Whether what was measured stayed flat, how long recoveries took, and the goodput."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Sample = Mapping[str, float]
"""What was measured at one time: name -> value. A name that is absent was not there."""

ALLOWED: Mapping[str, tuple[float, float]] = {
    "memory": (0.10, 8.0),
    "descriptors": (0.0, 6.0),
    "processes": (0.0, 1.0),
    "segments": (0.0, 1.0),
    "segment bytes": (0.10, 65_536.0),
    "temporary files": (0.0, 1.0),
}
"""What a series may grow by, by the first word of its name: a part of what it was, and an amount (memory in MB)."""
FEWEST = 6
"""Samples that a series needs to be judged: two in each third."""


@dataclass(frozen=True)
class Trend:
    name: str
    first: float
    """The median of the first third of the samples."""
    last: float
    flat: bool
    samples: int


def trends(samples: Sequence[Sample]) -> list[Trend]:
    """A trend of each series that has enough samples."""
    series: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in sample.items():
            series[name].append(value)
    return [trend(name, values) for name, values in sorted(series.items()) if len(values) >= FEWEST]


def trend(name: str, values: Sequence[float]) -> Trend:
    """
    >>> trend("descriptors of worker", [20, 21, 20, 22, 20, 21]).flat
    True
    >>> trend("descriptors of worker", [20, 30, 40, 50, 60, 70]).flat
    False
    """
    third = len(values) // 3
    first, last = statistics.median(values[:third]), statistics.median(values[-third:])
    part, amount = ALLOWED[name.partition(" of ")[0]]
    return Trend(name, first, last, last <= first * (1 + part) + amount, len(values))


# --- what grows by design ---------------------------------------------------------------------------------------------

MOST_METRICS_BYTES = 600.0
"""Of metrics per step, with what else is recorded beside steps."""
MOST_FAULT_BYTES = 40_000.0
"""Of the journal and of the logs together, per fault."""


def growth(metrics_bytes: int, steps: int, journal_and_logs_bytes: int, faults: int) -> list[Trend]:
    """What grows with the steps and with the faults, as bytes for each; `first` is what is allowed."""
    per_step, per_fault = metrics_bytes / max(steps, 1), journal_and_logs_bytes / max(faults, 1)
    return [
        Trend("bytes of metrics per step", MOST_METRICS_BYTES, per_step, per_step <= MOST_METRICS_BYTES, steps),
        Trend(
            "bytes of journal and logs per fault", MOST_FAULT_BYTES, per_fault, per_fault <= MOST_FAULT_BYTES, faults
        ),
    ]


# --- recoveries -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strike:
    """A fault as it was carried out, and how long the run needed."""

    kind: str
    detail: str
    at_s: float
    """Since the run was whole for the first time."""
    step: int
    next_step_s: float
    """Until new steps were committed."""
    whole_s: float
    """Until all wanted members were there again and committed steps together."""
    again: int = 0
    """Committed steps that were executed again, because no living process had the state after them."""
    together: bool = False
    """Another fault struck at the same time: the times are those of both."""


def recoveries(strikes: Sequence[Strike]) -> list[tuple[str, int, float, float, float, float]]:
    """A row per kind: its name, how often, and the median and the longest time to the next step and to all members."""
    by_kind: dict[str, list[Strike]] = defaultdict(list)
    for one in strikes:
        by_kind[one.kind].append(one)
    rows = []
    for kind, found in sorted(by_kind.items()):
        steps, whole = [one.next_step_s for one in found], [one.whole_s for one in found]
        rows.append((kind, len(found), statistics.median(steps), max(steps), statistics.median(whole), max(whole)))
    return rows


def goodput(steps: int, calm_step_s: float, wall_s: float) -> float:
    """The part of the time that went into committed steps: their number, times what a step takes on the same hosts
    without faults.

    >>> goodput(300, 0.2, 120.0)
    0.5
    """
    return steps * calm_step_s / wall_s


def differing(twin: Mapping[int, str], run: Mapping[int, str]) -> list[int]:
    """The steps whose results the twin does not have, or has otherwise."""
    return sorted(step for step in twin.keys() | run.keys() if twin.get(step) != run.get(step))

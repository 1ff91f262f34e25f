"""What is measured, how long and in which order. Pure data and arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bench.compare.systems import DDP, DDP_ONEDNN, IDEAL, OURS, OURS_ALL, OURS_ONEDNN, SINGLE, SYSTEMS

T = TypeVar("T")

OTHERS = ("bandwidth", "checkpoint", "recovery")
PARTS = ("speed", "turns", "scaling", "accuracy", *OTHERS, "report")

GOALS = {
    "mlp": {DDP: 1.35, IDEAL: 0.92},
    "cnn": {DDP: 1.05, IDEAL: 0.92},
    "gpt": {DDP: 1.1, IDEAL: 0.92},
}
"""Of issue 2, for two workers and allreduce: samples/s over DDP's and over the ideal's."""
COMMUNICATION_GOAL, COMPUTE_GOAL, ANY_GOAL = 1.15, 0.95, 1.0
"""Of issue 8: over DDP where communication binds; over the ideal where compute does; over DDP everywhere."""
ACCURACY_GOAL = 0.85

STEPS = {
    "mlp": (10, 100), "cnn": (5, 40), "gpt": (2, 8), "resnet": (2, 10), "bert": (1, 3), "wide_deep": (5, 40),
    "fashion": (2, 900), "wide": (5, 40), "wide8": (5, 40),
}  # fmt: skip
"""Workload -> (steps of warm-up, timed steps)"""
QUICK_STEPS = {**STEPS, "mlp": (5, 40), "cnn": (3, 15), "gpt": (1, 4), "wide_deep": (3, 15), "fashion": (2, 500)}
DECIDING = (OURS, OURS_ONEDNN, IDEAL, DDP, DDP_ONEDNN)
"""What goals are about: their ratios are near to the goals, and a few repetitions do not tell. So they take turns."""
TURN_S = {"gpt": 4.0, "resnet": 3.0, "bert": 10.0}
USUAL_TURN_S = 2.0
FEWER_ROUNDS = {"bert": 10}
"""Where a round takes a minute."""
STEPS_PER_TURN = 12
"""Times the timed steps of a run: nobody takes that many in a turn."""
CHECKED_STEPS = 12
"""The losses of the first so many steps are compared with those of one process."""
MOST_CHECKED_STEPS = 60
"""Of systems in which nobody waits: a few steps of theirs say nothing."""


@dataclass(frozen=True)
class Cell:
    """One workload on so many workers, by several systems, in turns."""

    part: str
    workload: str
    workers: int
    systems: tuple[str, ...]
    warm_up: int
    timed: int
    repetitions: int

    @property
    def steps(self) -> int:
        return self.warm_up + self.timed

    def turns(self) -> Iterator[tuple[int, str]]:
        """(repetition, system), another system first in each repetition."""
        for repetition in range(self.repetitions):
            for system in rotated(self.systems, repetition):
                yield repetition, system


@dataclass(frozen=True)
class Size:
    speed: dict[str, tuple[str, ...]]
    """Workload -> systems, with two workers."""
    scaling: dict[str, tuple[str, ...]]
    counts: tuple[int, ...]
    """Of workers, for scaling."""
    accuracy: tuple[str, ...]
    steps: dict[str, tuple[int, int]]
    rounds: int
    """Of the deciding systems, for each workload whose speed is measured."""
    repetitions: int
    scaling_repetitions: int
    accuracy_repetitions: int


_TORCH = (SINGLE, IDEAL, DDP, DDP_ONEDNN, "fsdp", "gloo-server")
_PEERS = tuple(name for name, one in SYSTEMS.items() if one.kind == "peer" and name not in _TORCH)
_OURS = tuple(one.name for one in OURS_ALL)
_MAIN = (OURS, "ps-sync", "sharded", SINGLE, IDEAL, DDP, "fsdp")
_BIG = (OURS, OURS_ONEDNN, "pipeline", "sharded", SINGLE, IDEAL, DDP, DDP_ONEDNN, "fsdp")

FULL = Size(
    speed={
        "mlp": (*_OURS, *_TORCH, *_PEERS),
        "cnn": (*_OURS, *_TORCH, *_PEERS),
        "gpt": (*_OURS, *_TORCH, *_PEERS),
        "resnet": (*_MAIN, *_PEERS),
        "bert": _BIG,
        "wide_deep": (*_MAIN, "ps-async", "gloo-server", *_PEERS),
    },
    scaling=dict.fromkeys(("mlp", "cnn", "gpt"), (OURS, "ps-sync", IDEAL, DDP)),
    counts=(1, 2, 4),
    accuracy=(OURS, "ps-sync", "ps-async", SINGLE, DDP, "fsdp", *_PEERS),
    steps=STEPS,
    rounds=24,
    repetitions=3,
    scaling_repetitions=2,
    accuracy_repetitions=2,
)
QUICK = Size(
    speed={
        "mlp": (OURS, "ps-sync", SINGLE, IDEAL, DDP, "fsdp", "accelerate"),
        "cnn": (OURS, IDEAL, DDP),
        "gpt": (OURS, OURS_ONEDNN, IDEAL, DDP, DDP_ONEDNN),
    },
    scaling={"mlp": (OURS, IDEAL, DDP)},
    counts=(1, 2, 4),
    accuracy=(OURS, DDP),
    steps=QUICK_STEPS,
    rounds=4,
    repetitions=2,
    scaling_repetitions=1,
    accuracy_repetitions=1,
)


def cells(
    size: Size, parts: Sequence[str], workloads: Sequence[str], systems: Sequence[str], repetitions: int | None
) -> list[Cell]:
    """What to measure. `workloads` and `systems` that are named are taken instead of the plan's."""

    def chosen(workload: str, planned: Sequence[str]) -> tuple[str, ...]:
        named = systems or planned
        return tuple(name for name in named if name in SYSTEMS and SYSTEMS[name].takes(workload))

    def cell(part: str, workload: str, workers: int, planned: Sequence[str], usual: int) -> Cell:
        warm_up, timed = size.steps[workload]
        systems_here = chosen(workload, planned)
        return Cell(part, workload, workers, systems_here, warm_up, timed, repetitions or usual)

    found = []
    if "speed" in parts:
        names = workloads or size.speed
        found += [cell("speed", name, 2, size.speed.get(name, _MAIN), size.repetitions) for name in names]
    if "turns" in parts:
        for name in workloads or size.speed:
            found.append(cell("turns", name, 2, DECIDING, min(size.rounds, FEWER_ROUNDS.get(name, size.rounds))))
    if "scaling" in parts:
        for name in [one for one in workloads or size.scaling if one in size.scaling]:
            for count in size.counts:
                found.append(cell("scaling", name, count, size.scaling[name], size.scaling_repetitions))
    if "accuracy" in parts and (not workloads or "fashion" in workloads):
        planned = [one for one in size.accuracy if one in SYSTEMS and SYSTEMS[one].time_to_accuracy]
        found.append(cell("accuracy", "fashion", 2, planned, size.accuracy_repetitions))
    return [one for one in found if one.systems]


def rotated(names: Sequence[T], by: int) -> list[T]:
    """
    >>> rotated(["a", "b", "c"], 4)
    ['b', 'c', 'a']
    """
    shift = by % len(names)
    return [*names[shift:], *names[:shift]]

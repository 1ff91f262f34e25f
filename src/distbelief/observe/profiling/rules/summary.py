"""Summarises from the trace alone where the time of the recorded steps went. Pure.

A phase's time is the time of its spans on the training thread, without the spans inside them. `other` is the time
outside of all spans: this program's own bookkeeping, and the job's code outside of its model and loss.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from distbelief.observe.profiling.rules.merging import ON_DEVICE, PHASE, Event, Trace, worker_of
from distbelief.observe.records import Slowest, WorkerLoad, find_slowest

OTHER = "other"
PHASES = (
    "data", "forward", "backward", "reduce", "optimizer", "wait", "evaluation", "checkpoint", "regroup", OTHER,
)  # fmt: skip
MOST_OPERATORS = 10


@dataclass(frozen=True)
class Spent:
    seconds: float
    cpu_s: float
    """CPU time of the training thread. Less than `seconds`: the thread waited for something, or for a core."""


@dataclass(frozen=True)
class WorkerTime:
    worker: int
    host: str
    place: str
    is_whole: bool
    steps: int
    """The number of recorded step spans; steps that are committed together have one span."""
    wall_s: float
    step_s: float
    """The median step's seconds."""
    phases: dict[str, Spent]
    operators_s: float = 0.0
    """Seconds in which operators were recorded."""
    device_s: float = 0.0
    """Seconds in which the GPU worked for this worker; at the end it may lag behind the host and work on."""

    @property
    def device_share(self) -> float:
        return min(self.device_s / self.operators_s, 1.0) if self.operators_s else 0.0


@dataclass(frozen=True)
class Operator:
    name: str
    share: float
    """The share of the time in which operators were recorded, without the operators that it calls."""
    seconds_per_step: float
    calls_per_step: float


@dataclass(frozen=True)
class Summary:
    strategy: str
    steps: tuple[int, int]
    workers: Sequence[WorkerTime]
    operators: Sequence[Operator] = ()
    kernels: Sequence[Operator] = ()
    """On GPUs; kernels run in parallel with the worker, so their shares are no parts of the worker's time."""
    slowest: Slowest | None = None
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def phases(self) -> list[str]:
        """The phases that took any time."""
        return [phase for phase in PHASES if any(one.phases[phase].seconds > 0 for one in self.workers)]


def summarise(trace: Trace) -> Summary:
    facts = trace["otherData"]
    of_process: dict[int, list[Event]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            of_process[worker_of(event["pid"])].append(event)
    workers = [_worker(one, of_process[one["pid"]]) for one in facts["workers"]]
    workers = [one for one in workers if one.steps]
    operators = [e for events in of_process.values() for e in events if e["cat"] == "cpu_op"]
    kernels = [e for events in of_process.values() for e in events if e["cat"] == "kernel"]
    first, end = facts["steps"] or (0, 0)
    return Summary(
        facts["strategy"], (first, end), workers, _top(operators, workers), _top(kernels, workers),
        _slowest(workers), tuple(facts["notes"]),
    )  # fmt: skip


def _worker(facts: dict[str, Any], events: Sequence[Event]) -> WorkerTime:
    ours = [event for event in events if event["cat"] == PHASE]
    steps = [event for event in ours if event["name"].startswith("step ")]
    lines = {event["tid"] for event in steps}
    begun = min((event["ts"] for event in steps), default=0.0)
    ended = max((event["ts"] + event["dur"] for event in steps), default=0.0)
    inside = [
        event
        for event in ours
        if event["tid"] in lines and event not in steps and begun <= event["ts"] + event["dur"] / 2 <= ended
    ]
    wall_s = (ended - begun) / 1e6
    found: dict[str, list[float]] = {phase: [0.0, 0.0] for phase in PHASES}
    for event, own, own_cpu in own_times(inside):
        spent = found.setdefault(event["name"], [0.0, 0.0])
        spent[0] += own / 1e6
        spent[1] += own_cpu / 1e6
    cpu_s = sum(event.get("tdur", 0.0) for event in steps) / 1e6
    found[OTHER] = [
        max(wall_s - sum(seconds for seconds, _ in found.values()), 0.0),
        max(cpu_s - sum(cpu for _, cpu in found.values()), 0.0),
    ]
    return WorkerTime(
        facts["worker"], facts["host"], facts["place"], facts["whole"], len(steps), wall_s,
        statistics.median(event["dur"] for event in steps) / 1e6 if steps else 0.0,
        {phase: Spent(*numbers) for phase, numbers in found.items()}, min(facts["operators_s"], wall_s),
        covered(event for event in events if event["cat"] in ON_DEVICE) / 1e6,
    )  # fmt: skip


def covered(events: Iterable[Event]) -> float:
    """The time covered by at least one event.

    >>> covered([{"ts": 0, "dur": 5}, {"ts": 3, "dur": 4}, {"ts": 10, "dur": 1}])
    8.0
    """
    total, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda one: one["ts"]):
        end = event["ts"] + event["dur"]
        total += max(end - max(event["ts"], until), 0.0)
        until = max(until, end)
    return total


def own_times(events: Iterable[Event]) -> list[tuple[Event, float, float]]:
    """(event, its time without the events inside of it, likewise CPU time) on one line.

    >>> outer, inner = {"ts": 0, "dur": 10, "tdur": 6}, {"ts": 2, "dur": 3, "tdur": 1}
    >>> [(own, cpu) for _, own, cpu in own_times([inner, outer])]
    [(7, 5), (3, 1)]
    """
    found: list[list[Any]] = []
    under_way: list[list[Any]] = []
    for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
        while under_way and under_way[-1][0]["ts"] + under_way[-1][0]["dur"] <= event["ts"]:
            under_way.pop()
        if under_way:
            under_way[-1][1] -= event["dur"]
            under_way[-1][2] -= event.get("tdur", 0.0)
        entry = [event, event["dur"], event.get("tdur", 0.0)]
        found.append(entry)
        under_way.append(entry)
    return [(event, max(own, 0), max(cpu, 0)) for event, own, cpu in found]


def _top(events: Iterable[Event], workers: Sequence[WorkerTime]) -> list[Operator]:
    lines: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        lines[event["tid"]].append(event)
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for line in lines.values():
        for event, own, _ in own_times(line):
            seconds[event["name"]] += own / 1e6
            calls[event["name"]] += 1
    wall_s = sum(one.operators_s for one in workers)
    steps = sum(one.steps * one.operators_s / one.wall_s for one in workers if one.wall_s)
    if not wall_s or not steps:
        return []
    names = sorted(seconds, key=lambda name: -seconds[name])[:MOST_OPERATORS]
    return [Operator(name, seconds[name] / wall_s, seconds[name] / steps, calls[name] / steps) for name in names]


def _slowest(workers: Sequence[WorkerTime]) -> Slowest | None:
    """The worker that needs the most time for its part of a step, without waiting, if it is clearly slower than the
    others. Compares only workers that have recorded all steps: other workers saw other conditions."""
    most = max((one.steps for one in workers), default=0)
    loads = tuple(
        WorkerLoad(one.worker, one.host, 0, 0, 0, shard_s=(one.wall_s - one.phases["wait"].seconds) / one.steps)
        for one in workers
        if one.is_whole and one.steps == most
    )
    return find_slowest(loads)

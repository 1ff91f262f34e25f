"""How long the coordinator's own decisions take, for more and more members: the real `step`, and nothing around it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s

SIZES = (10, 100, 1_000, 10_000)
SAMPLES = 200
"""Events of a kind that are measured, at most; the median counts."""
_RARE = 5  # of those that cost something for every member by their nature


class Watch:
    """A coordinator, and how long each kind of event took it."""

    def __init__(self, members: int) -> None:
        self.state = s.begin(s.RunConfig(members, save_every="never"), 1, 0.0)
        self.now = 0.0
        self.took_s: dict[str, list[float]] = {}

    def feed(self, kind: str, event: s.Input) -> None:
        self.now += 1e-4
        started = time.perf_counter()
        self.state, _ = s.step(self.state, event, self.now)
        self.took_s.setdefault(kind, []).append(time.perf_counter() - started)


def measure(members: int) -> dict[str, float]:
    """Kind of event -> median seconds."""
    watch = Watch(members)
    job, canary = m.JobFacts("sim", 2 * members, 100, 2 * members, 1000, 1, "allreduce"), m.Canary("the same", {})
    for worker in range(members):
        watch.feed("a worker joins", m.WorkerJoined(worker, "host", 1000 + worker))
        watch.feed("a worker is ready", m.WorkerReady(worker, job, canary))
    watch.took_s["the first generation"] = [watch.took_s["a worker is ready"].pop()]
    for turn in range(3):
        for worker in _some(members):
            reports = [m.StepReport(turn, 0.0, 1, "same", watch.now)] if worker == 0 else []
            beat = m.Heartbeat(worker, 1, watch.state.generation, turn + 1, m.Timing(0.0, turn, 0.0, 2 * turn), reports)
            watch.feed("a heartbeat", beat)
    for _ in range(SAMPLES):
        watch.feed("a tick", s.Ticked())
    running = {worker: 1000 + worker for worker in range(members)}
    for _ in range(_RARE):
        watch.feed("an engine tells all (1 a second)", m.EngineAttached("host", running, {}))
    for worker in range(1, 1 + min(_RARE, members - 1)):
        watch.feed("a member dies: a new generation", m.WorkerExited(worker, -9))
    for worker in [member.worker for member in watch.state.members][:SAMPLES]:
        watch.feed("a member finishes", m.WorkerFinished(worker, watch.state.generation, 100))
    return {kind: statistics.median(took) for kind, took in watch.took_s.items()}


def _some(members: int) -> Iterable[int]:
    return range(0, members, max(1, members // SAMPLES))


def table(sizes: Iterable[int] = SIZES, show: Callable[[str], None] = print) -> dict[int, dict[str, float]]:
    sizes = list(sizes)
    measured = {members: measure(members) for members in sizes}
    show("microseconds of the coordinator per event, median")
    show(f"{'members':36}" + "".join(f"{members:>12,}" for members in sizes))
    for kind in measured[sizes[0]]:
        show(f"{kind:36}" + "".join(f"{1e6 * measured[members].get(kind, 0.0):>12,.1f}" for members in sizes))
    return measured

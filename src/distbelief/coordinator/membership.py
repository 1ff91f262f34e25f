"""Who takes part in a generation, with which shards, and over which transport. Pure; it starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distbelief.comm.messages import Member
from distbelief.coordinator import assignment
from distbelief.coordinator.seating import seat
from distbelief.coordinator.vocabulary import RunConfig, State, Worker
from distbelief.shards import Range
from distbelief.strategies.degrees import Degrees, fit, ranges


@dataclass(frozen=True)
class Plan:
    members: list[Member]
    """In the order of their ranks."""
    spares: list[int]
    transport: str
    problem: str = ""
    """Why this generation cannot be; the other fields still say what it would have been."""
    degrees: Degrees | None = None
    """Of a mesh."""


def plan(config: RunConfig, shards: int, workers: Sequence[Worker], cut: Sequence[Range] | None = None) -> Plan:
    """`workers` are all that can take part, in the order of their ranks; those beyond `shards` are spares."""
    seated = workers[:shards]
    if cut is None:
        cut = _ranges(config, shards, seated)
    hosts = sorted({worker.host for worker in seated})
    transport = config.transport
    problem = ""
    if transport == "auto":
        transport = "shm" if len(hosts) == 1 else "gloo"
    elif transport == "shm" and len(hosts) > 1:
        problem = f"shared memory was asked for, but the workers are on {len(hosts)} hosts: {', '.join(hosts)}"
    return Plan(
        members=[Member(w.number, w.host, mine, w.pid) for w, mine in zip(seated, cut, strict=True)],
        spares=[worker.number for worker in workers[shards:]],
        transport=transport,
        problem=problem,
    )


def plan_mesh(state: State, shards: int, workers: Sequence[Worker]) -> Plan:
    """The mesh that so many workers can form; those for whom there is no place are spares."""
    wish = state.config.wish
    assert wish is not None
    degrees = fit(wish, len(workers), shards)
    order = seat(degrees, state.degrees, [state.seats.get(worker.number) for worker in workers])
    members = [
        Member(workers[one].number, workers[one].host, mine, workers[one].pid, degrees.describe(rank))
        for rank, (one, mine) in enumerate(zip(order, ranges(degrees, shards), strict=True))
    ]
    spares = [worker.number for index, worker in enumerate(workers) if index not in set(order)]
    return Plan(members, spares, "gloo", degrees=degrees)


def takes(state: State, workers: int) -> bool:
    """Whether so many workers give a larger generation than the present one."""
    assert state.reference is not None
    shards, wish = state.reference.job.shards, state.config.wish
    largest = shards if wish is None else fit(wish, workers, shards).size
    return len(state.members) < largest


def _ranges(config: RunConfig, shards: int, seated: Sequence[Worker]) -> list[Range]:
    """By the shares that the user gave to the workers it counted on, or equal."""
    if config.shares and all(worker.number < len(config.shares) for worker in seated):
        return assignment.proportional(shards, [config.shares[worker.number] for worker in seated])
    return assignment.equal(shards, len(seated))

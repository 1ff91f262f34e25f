"""Who takes part in a generation, with which shards, and over which transport. Pure; it starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distbelief.comm.messages import Member
from distbelief.coordinator import assignment
from distbelief.coordinator.vocabulary import RunConfig, Worker
from distbelief.shards import Range


@dataclass(frozen=True)
class Plan:
    members: list[Member]
    """In the order of their ranks."""
    spares: list[int]
    transport: str
    problem: str = ""
    """Why this generation cannot be; the other fields still say what it would have been."""


def plan(config: RunConfig, shards: int, workers: Sequence[Worker], ranges: Sequence[Range] | None = None) -> Plan:
    """`workers` are all that can take part, in the order of their ranks; those beyond `shards` are spares."""
    seated = workers[:shards]
    if ranges is None:
        ranges = _ranges(config, shards, seated)
    hosts = sorted({worker.host for worker in seated})
    transport = config.transport
    problem = ""
    if transport == "auto":
        transport = "shm" if len(hosts) == 1 else "gloo"
    elif transport == "shm" and len(hosts) > 1:
        problem = f"shared memory was asked for, but the workers are on {len(hosts)} hosts: {', '.join(hosts)}"
    return Plan(
        members=[Member(w.number, w.host, mine, w.pid) for w, mine in zip(seated, ranges, strict=True)],
        spares=[worker.number for worker in workers[shards:]],
        transport=transport,
        problem=problem,
    )


def _ranges(config: RunConfig, shards: int, seated: Sequence[Worker]) -> list[Range]:
    """By the shares that the user gave to the workers it counted on, or equal."""
    if config.shares and all(worker.number < len(config.shares) for worker in seated):
        return assignment.proportional(shards, [config.shares[worker.number] for worker in seated])
    return assignment.equal(shards, len(seated))

"""Who takes part in a generation, with which shards, and over which transport. Pure; it starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distbelief.comm.messages import Member
from distbelief.coordinator import assignment
from distbelief.coordinator.vocabulary import RunConfig, Worker


@dataclass(frozen=True)
class Plan:
    members: list[Member]
    """In the order of their ranks."""
    spares: list[int]
    transport: str
    hosts: list[str]
    problem: str = ""
    """Why this generation cannot be; the other fields still say what it would have been."""


def plan(config: RunConfig, shards: int, workers: Sequence[Worker]) -> Plan:
    """`workers` are all that are ready, in the order of their numbers; those beyond `shards` are spares."""
    seated = workers[:shards]
    shares = config.shares[: len(seated)]
    if len(shares) == len(seated):
        ranges = assignment.proportional(shards, shares)
    else:
        ranges = assignment.equal(shards, len(seated))
    hosts = sorted({worker.host for worker in seated})
    transport = config.transport
    problem = ""
    if transport == "auto":
        transport = "shm" if len(hosts) == 1 else "gloo"
    elif transport == "shm" and len(hosts) > 1:
        problem = f"shared memory was asked for, but the workers are on {len(hosts)} hosts: {', '.join(hosts)}"
    return Plan(
        members=[Member(w.number, w.host, mine) for w, mine in zip(seated, ranges, strict=True)],
        spares=[worker.number for worker in workers[shards:]],
        transport=transport,
        hosts=hosts,
        problem=problem,
    )

"""Who takes part in a generation, with which shards, and over which transport. Pure; it starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distbelief.control.messages import Member
from distbelief.coordinator.rules import assignment
from distbelief.coordinator.rules.seating import seat
from distbelief.coordinator.rules.vocabulary import RunConfig, State, Worker
from distbelief.shards import Range
from distbelief.strategies.rules.degrees import Degrees, fit, ranges

SHARING = ("shm", "slots")
"""Transports in shared memory: whoever does not answer must be killed before others go on."""


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
    gpus = [worker.gpu for worker in seated]
    transport, problem = _transport(config.transport, hosts, gpus, config.on_accelerators)
    return Plan(
        members=[Member(w.number, w.host, mine, w.pid, gpu=w.gpu) for w, mine in zip(seated, cut, strict=True)],
        spares=[worker.number for worker in workers[shards:]],
        transport=transport,
        problem=problem,
    )


def _transport(wished: str, hosts: Sequence[str], gpus: Sequence[str], on_accelerators: bool) -> tuple[str, str]:
    """(how gradients travel, why they cannot). shm: one state for all members, in memory that they share; slots: there
    is a state for each, and shared memory carries gradients only. Which of the two it is does not change in a run,
    whoever comes and goes: the state would be looked for where it is not.

    >>> _transport("auto", ["a"], ["", ""], False), _transport("auto", ["a"], ["gpu 0", "gpu 0"], True)
    (('shm', ''), ('slots', ''))
    >>> _transport("auto", ["a", "b"], ["gpu 0", "gpu 1"], True)
    ('nccl', '')
    """
    each_its_own = len(gpus) > 1 and all(gpus) and len(set(gpus)) == len(gpus)
    if wished == "auto":
        wished = "nccl" if each_its_own else "shm" if len(hosts) == 1 else "gloo"
    if wished == "shm" and len(hosts) > 1:
        return wished, f"shared memory was asked for, but the workers are on {len(hosts)} hosts: {', '.join(hosts)}"
    if wished == "nccl" and len(gpus) > 1 and not each_its_own:
        return wished, "NCCL was asked for, and it wants a GPU for each worker: here some share one, or have none"
    return ("slots" if wished == "shm" and on_accelerators else wished), ""


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

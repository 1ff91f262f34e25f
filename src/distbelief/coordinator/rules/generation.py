"""The plan of a generation: which workers are members, in which seat, with which shards, and over which transport.

Where the model is divided, members hold its parts in their own memory, and only members of the new generation pass
state on. So `seat` first gives a seat to one holder of every part that still exists, and gives each worker the seat for
which the least state must move. With unchanged degrees all members keep their seats, and a new worker takes the seat of
a dead one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from distbelief.control.messages import Member
from distbelief.coordinator.rules import assignment
from distbelief.coordinator.rules.vocabulary import RunConfig, State, Worker
from distbelief.shards import Range
from distbelief.strategies.rules.degrees import Degrees, Place, fit, ranges
from distbelief.transport.rules import choice


@dataclass(frozen=True)
class Plan:
    members: list[Member]
    """By rank."""
    spares: list[int]
    transport: str
    problem: str = ""
    """Why this generation is impossible; then the other fields describe the impossible generation."""
    degrees: Degrees | None = None
    """How many ways the model is divided; None: every member has the whole model."""


def plan_members(config: RunConfig, shards: int, workers: Sequence[Worker], cut: Sequence[Range] | None = None) -> Plan:
    """`workers`: all workers that can take part, by rank. Workers beyond the number of shards are spares."""
    seated = workers[:shards]
    if cut is None:
        cut = _ranges(config, shards, seated)
    hosts = sorted({worker.host for worker in seated})
    gpus = [worker.gpu for worker in seated]
    transport, problem = choice.choose(config.transport, hosts, gpus, config.on_accelerators)
    return Plan(
        members=[Member(w.number, w.host, mine, w.pid, gpu=w.gpu) for w, mine in zip(seated, cut, strict=True)],
        spares=[worker.number for worker in workers[shards:]],
        transport=transport,
        problem=problem,
    )


def plan_degrees(state: State, shards: int, workers: Sequence[Worker]) -> Plan:
    """The largest division of the model for which there are enough workers; workers without a seat are spares."""
    wish = state.config.wish
    assert wish is not None
    degrees = fit(wish, len(workers), shards)
    order = seat(degrees, state.degrees, [state.seats.get(worker.number) for worker in workers])
    members = [
        Member(workers[one].number, workers[one].host, mine, workers[one].pid, degrees.describe(rank))
        for rank, (one, mine) in enumerate(zip(order, ranges(degrees, shards), strict=True))
    ]
    spares = [worker.number for index, worker in enumerate(workers) if index not in set(order)]
    return Plan(members, spares, choice.FOR_PARTS, degrees=degrees)


def takes(state: State, workers: int) -> bool:
    """Whether `workers` workers form a larger generation than the present one."""
    assert state.reference is not None
    shards, wish = state.reference.job.shards, state.config.wish
    largest = shards if wish is None else fit(wish, workers, shards).size
    return len(state.members) < largest


def _ranges(config: RunConfig, shards: int, seated: Sequence[Worker]) -> list[Range]:
    """Shards by the shares that the user gave for the first workers; equal if other workers take part."""
    if config.shares and all(worker.number < len(config.shares) for worker in seated):
        return assignment.proportional(shards, [config.shares[worker.number] for worker in seated])
    return assignment.equal(shards, len(seated))


# --- seats in a divided model ----------------------------------------------------------------------------------------


def seat(new: Degrees, old: Degrees | None, ranks: Sequence[int | None]) -> list[int]:
    """The candidate for each rank of the new degrees. `ranks`: each candidate's rank in the old degrees, if it had one.

    >>> seat(Degrees(pipeline=2), Degrees(pipeline=2, data=2), [0, 1, 3])  # rank 2, of the second stage, has died
    [0, 2]
    >>> seat(Degrees(pipeline=3), Degrees(pipeline=3), [0, 2, None])
    [0, 2, 1]
    """
    seats: dict[int, int] = {}
    places = [old.place(rank) if old and rank is not None else None for rank in ranks]
    pairs = _pairs(new, old, places) if old else []
    seated: set[int] = set()
    held: set[Hashable] = set()
    # First one holder of every part, in its best seat; then the other candidates.
    for every_holder in (False, True):
        for _, _, rank, candidate in pairs:
            part = _part(places[candidate])
            if rank not in seats and candidate not in seated and (every_holder or part not in held):
                seats[rank] = candidate
                seated.add(candidate)
                held.add(part)
        if not every_holder:  # holders whose best seats were taken by holders of other parts
            others = {_part(place): one for one, place in enumerate(places) if place and _part(place) not in held}
            _fill(seats, seated, new, list(others.values()))
    _fill(seats, seated, new, range(len(ranks)))
    return [seats[rank] for rank in range(new.size)]


def _fill(seats: dict[int, int], seated: set[int], new: Degrees, candidates: Sequence[int]) -> None:
    """Give the free seats to the candidates, in order."""
    free = [rank for rank in range(new.size) if rank not in seats]
    waiting = [candidate for candidate in candidates if candidate not in seated]
    for rank, candidate in zip(free, waiting, strict=False):
        seats[rank] = candidate
        seated.add(candidate)


def _pairs(new: Degrees, old: Degrees, places: Sequence[Place | None]) -> list[tuple[int, bool, int, int]]:
    """(-state that need not move, whether the data index changes, rank, candidate), best first."""
    pairs = []
    for rank in range(new.size):
        there = new.place(rank)
        for candidate, here in enumerate(places):
            if here is not None and (kept := _kept(new, there, old, here)):
                pairs.append((-kept, here.data != there.data, rank, candidate))
    return sorted(pairs)


def _kept(new: Degrees, there: Place, old: Degrees, here: Place) -> int:
    """How much of the model two seats have in common if all layers were equally large, in an arbitrary unit."""
    kept = 1
    for i, n, j, m in (
        (there.pipeline, new.pipeline, here.pipeline, old.pipeline),
        (there.sharded, new.sharded, here.sharded, old.sharded),
        (there.tensor, new.tensor, here.tensor, old.tensor),
    ):
        kept *= max(min((i + 1) * m, (j + 1) * n) - max(i * m, j * n), 0)
    return kept


def _part(place: Place | None) -> Hashable:
    """The part of the model that a seat holds: seats that differ only in the data index hold the same."""
    return (place.pipeline, place.sharded, place.tensor) if place else None

"""Assigns the places of a new mesh to workers, so that little state has to move. Pure.

The state of a divided model is in the members' memory, and only members of the new generation can pass it on. So first
one holder of every part that still exists gets a place; then the others. Each worker gets the place for which the
least state moves. With the same degrees as before all members keep their places, and a newcomer takes the place of a
dead member.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from distbelief.strategies.rules.degrees import Degrees, Place


def seat(new: Degrees, old: Degrees | None, ranks: Sequence[int | None]) -> list[int]:
    """For every rank of the new mesh, the index of the candidate that gets it. `ranks`: each candidate's rank in the
    old mesh, or None.

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
    # First one holder of every part, at its best place; then the others, each at its best place.
    for every_holder in (False, True):
        for _, _, rank, candidate in pairs:
            part = _part(places[candidate])
            if rank not in seats and candidate not in seated and (every_holder or part not in held):
                seats[rank] = candidate
                seated.add(candidate)
                held.add(part)
        if not every_holder:  # holders whose best places went to holders of other parts
            others = {_part(place): one for one, place in enumerate(places) if place and _part(place) not in held}
            _fill(seats, seated, new, list(others.values()))
    _fill(seats, seated, new, range(len(ranks)))
    return [seats[rank] for rank in range(new.size)]


def _fill(seats: dict[int, int], seated: set[int], new: Degrees, candidates: Sequence[int]) -> None:
    """Fill the remaining places in order."""
    free = [rank for rank in range(new.size) if rank not in seats]
    waiting = [candidate for candidate in candidates if candidate not in seated]
    for rank, candidate in zip(free, waiting, strict=False):
        seats[rank] = candidate
        seated.add(candidate)


def _pairs(new: Degrees, old: Degrees, places: Sequence[Place | None]) -> list[tuple[int, bool, int, int]]:
    """All fitting pairs as (-state that need not move, whether the data index differs, rank, candidate), best first."""
    pairs = []
    for rank in range(new.size):
        there = new.place(rank)
        for candidate, here in enumerate(places):
            if here is not None and (kept := _kept(new, there, old, here)):
                pairs.append((-kept, here.data != there.data, rank, candidate))
    return sorted(pairs)


def _kept(new: Degrees, there: Place, old: Degrees, here: Place) -> int:
    """How much of the model two places have in common if all layers are alike, in a unit of its own."""
    kept = 1
    for i, n, j, m in (
        (there.pipeline, new.pipeline, here.pipeline, old.pipeline),
        (there.sharded, new.sharded, here.sharded, old.sharded),
        (there.tensor, new.tensor, here.tensor, old.tensor),
    ):
        kept *= max(min((i + 1) * m, (j + 1) * n) - max(i * m, j * n), 0)
    return kept


def _part(place: Place | None) -> Hashable:
    """The part of the model at a place. Members that differ only in their data index hold the same part."""
    return (place.pipeline, place.sharded, place.tensor) if place else None

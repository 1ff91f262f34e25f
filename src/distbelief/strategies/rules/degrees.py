"""The degrees in which a model and its data are divided, and the part of each member. Pure arithmetic, without torch.

The members of a generation form a mesh of pipeline × data × sharded × tensor, their ranks row by row in that order. A
strategy requests degrees (`Wish`). `problem` tells why a run cannot start with these degrees. `fit` chooses the best
degrees for any number of workers later, when some workers have died or joined.

The policy of `fit`, in this order:
1. No degree is above its wish, except a degree that was left open. A tensor degree divides the wished degree, since
   it must divide the heads. Every data index has at least one shard.
2. Memory: no member holds more than a third more of the model than this number of workers requires. Models are divided
   because of memory, so data parallelism never replaces pipeline, sharded or tensor parallelism.
3. As many workers as possible are used; the others are spares.
4. The model is divided as far as possible; of equally fine divisions, the pipeline is kept first (it sends the least),
   then sharding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from fractions import Fraction

from distbelief.shards import Range

MORE_MEMORY = Fraction(4, 3)
"""How much more of the model than necessary a member may hold, if more workers are used that way. A pipeline of four
that loses one member must grow by this much anyway."""

DIMENSIONS = ("pipeline", "data", "sharded", "tensor")


@dataclass(frozen=True)
class Place:
    """A member's place in the mesh, counted from 0 in each dimension."""

    pipeline: int
    data: int
    sharded: int
    tensor: int


@dataclass(frozen=True)
class Degrees:
    """
    >>> degrees = Degrees(pipeline=2, data=2)
    >>> str(degrees), degrees.size, degrees.place(3)
    ('dp2.pp2', 4, Place(pipeline=1, data=1, sharded=0, tensor=0))
    >>> degrees.groups("data"), degrees.groups("pipeline")
    ([(0, 1), (2, 3)], [(0, 2), (1, 3)])
    """

    pipeline: int = 1
    data: int = 1
    sharded: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return self.parts * self.data

    @property
    def parts(self) -> int:
        """The number of parts into which the model is divided."""
        return self.pipeline * self.sharded * self.tensor

    @property
    def rows(self) -> int:
        """The number of data indices. Members with the same data index compute the same shards."""
        return self.data * self.sharded

    def place(self, rank: int) -> Place:
        if not 0 <= rank < self.size:
            raise ValueError(f"there is no rank {rank} in {self}, which has {self.size} members")
        rest, tensor = divmod(rank, self.tensor)
        rest, sharded = divmod(rest, self.sharded)
        pipeline, data = divmod(rest, self.data)
        return Place(pipeline, data, sharded, tensor)

    def rank(self, place: Place) -> int:
        return ((place.pipeline * self.data + place.data) * self.sharded + place.sharded) * self.tensor + place.tensor

    def row(self, rank: int) -> int:
        """The data index of that member."""
        place = self.place(rank)
        return place.data * self.sharded + place.sharded

    def groups(self, *dimensions: str) -> list[tuple[int, ...]]:
        """All groups of ranks that differ in the named dimensions only, each in rank order."""
        unknown = set(dimensions) - set(DIMENSIONS)
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))}: a dimension is one of {', '.join(DIMENSIONS)}")
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            place = self.place(rank)
            found.setdefault(tuple(getattr(place, d) for d in DIMENSIONS if d not in dimensions), []).append(rank)
        return [tuple(group) for group in found.values()]

    def as_list(self) -> list[int]:
        """As it travels; `Degrees(*numbers)` is the way back."""
        return list(astuple(self))

    def __str__(self) -> str:
        return dotted(self.data if self.data > 1 else None, self.sharded, self.tensor, self.pipeline) or "dp1"

    def describe(self, rank: int) -> str:
        """A member's place, for people.

        >>> Degrees(pipeline=4, data=2).describe(2), Degrees().describe(0)
        ('stage 2/4 · data 1/2', '')
        """
        names = {"pipeline": "stage", "data": "data", "sharded": "sharded", "tensor": "tensor"}
        place = self.place(rank)
        return " · ".join(
            f"{names[dimension]} {getattr(place, dimension) + 1}/{getattr(self, dimension)}"
            for dimension in DIMENSIONS
            if getattr(self, dimension) > 1
        )


def dotted(data: int | None, sharded: int, tensor: int, pipeline: int) -> str:
    """
    >>> dotted(2, 1, 2, 2), dotted(None, 2, 1, 1), dotted(1, 1, 1, 2)
    ('dp2.tp2.pp2', 'fsdp2', 'dp1.pp2')
    """
    parts = [f"dp{data}"] if data is not None else []
    parts += [f"{name}{n}" for name, n in (("fsdp", sharded), ("tp", tensor), ("pp", pipeline)) if n > 1]
    return ".".join(parts)


@dataclass(frozen=True)
class Wish:
    """The degrees that a strategy requests. None: as many as there are workers for."""

    data: int | None
    sharded: int | None
    tensor: int = 1
    pipeline: int = 1

    @property
    def unit(self) -> int:
        """The number of workers that meets every given degree; an open degree counts as 1."""
        return self.pipeline * self.tensor * (self.sharded or 1) * (self.data or 1)

    @property
    def is_open(self) -> bool:
        return self.data is None or self.sharded is None

    def __str__(self) -> str:
        if self.sharded is None:
            rest = dotted(self.data if self.data != 1 else None, 1, self.tensor, self.pipeline)
            return f"sharded with {rest}" if rest else "sharded"
        if self.data is None and self.sharded == 1:
            if self.tensor == 1:
                return f"pipeline:{self.pipeline}"
            if self.pipeline == 1:
                return f"tensor:{self.tensor}"
        return dotted(self.data, self.sharded, self.tensor, self.pipeline) or "dp1"


# --- the start of a run ----------------------------------------------------------------------------------------------


def problem(wish: Wish, workers: int, shards: int | None) -> str:
    """The reason why a run cannot start, with a way out; "" if it can. `shards`: None while not known.

    >>> problem(Wish(None, 1, pipeline=2), 3, 8)
    'pipeline:2 takes a multiple of 2 workers, not 3: use --workers 2 or 4, or pipeline:3'
    >>> problem(Wish(2, 1, pipeline=2), 6, 8)
    'dp2.pp2 takes 4 workers, not 6: use --workers 4, or dp3.pp2'
    """
    unit = wish.unit
    if wish.is_open and workers % unit:
        least = [str(n) for n in (workers - workers % unit, workers - workers % unit + unit) if n]
        takes = f"a multiple of {unit}" if workers > unit else f"at least {unit}"
        return _wrong(f"{wish} takes {takes} workers", workers, " or ".join(least), _instead(wish, workers))
    if not wish.is_open and workers != unit:
        return _wrong(f"{wish} takes {unit} workers", workers, str(unit), _instead(wish, workers))
    return _too_few_shards(wish, workers, shards) if shards is not None else ""


def _wrong(takes: str, workers: int, right: str, instead: str) -> str:
    return f"{takes}, not {workers}: use --workers {right}{f', or {instead}' if instead else ''}"


def _instead(wish: Wish, workers: int) -> str:
    """The same kind of strategy for this number of workers; "" if none can be named with certainty."""
    if wish.data is not None and wish.sharded is not None and wish.data > 1:
        groups, rest = divmod(workers, wish.unit // wish.data)
        return dotted(groups, wish.sharded, wish.tensor, wish.pipeline) if groups and not rest else ""
    alone = wish.data is None and wish.sharded == 1
    if alone and wish.tensor == 1 and workers > 1:
        return f"pipeline:{workers}"
    if alone and wish.pipeline == 1:  # a divisor of the wished degree divides the heads too
        best = max(n for n in _divisors(wish.tensor) if workers % n == 0)
        return f"tensor:{best}" if best > 1 else ""
    return ""


def _too_few_shards(wish: Wish, workers: int, shards: int) -> str:
    rows = workers // (wish.pipeline * wish.tensor)
    if rows <= shards:
        return ""
    most = shards * wish.pipeline * wish.tensor
    fewer = (
        f"use --workers {most // wish.unit * wish.unit}" if wish.is_open and most >= wish.unit else "use fewer groups"
    )
    return (
        f"{wish} on {workers} workers divides the data {rows} ways, but a step has {shards} "
        f"shard{'s' if shards > 1 else ''}: {fewer}, or shards={rows} in the job"
    )


# --- during a run ----------------------------------------------------------------------------------------------------


def fit(wish: Wish, workers: int, shards: int) -> Degrees:
    """The best degrees for this number of workers (at least one), by the policy above.

    >>> print(fit(Wish(None, 1, pipeline=4), 3, 8), fit(Wish(None, 1, pipeline=4), 8, 8))
    pp3 dp2.pp4
    >>> print(fit(Wish(2, 1, pipeline=2), 3, 8), fit(Wish(1, None), 3, 8), fit(Wish(None, 1, tensor=4), 3, 8))
    pp2 fsdp3 tp2
    """
    if workers < 1 or shards < 1:
        raise ValueError(f"{workers} workers and {shards} shards: there must be one of each at least")
    possible = list(_possible(wish, workers, shards))
    enough = max(degrees.parts for degrees in possible) / MORE_MEMORY
    return max(
        (degrees for degrees in possible if degrees.parts >= enough),
        key=lambda degrees: (degrees.size, degrees.parts, degrees.pipeline, degrees.sharded),
    )


def _possible(wish: Wish, workers: int, shards: int) -> Iterator[Degrees]:
    """Yields, for every possible division of the model, the degrees with the most data parallelism."""
    for pipeline, tensor in itertools.product(range(1, wish.pipeline + 1), _divisors(wish.tensor)):
        rows = min(workers // (pipeline * tensor), shards)
        for sharded in range(1, min(rows, wish.sharded or rows) + 1):
            most = rows // sharded
            yield Degrees(pipeline, most if wish.data is None else min(most, wish.data), sharded, tensor)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def ranges(degrees: Degrees, shards: int) -> list[Range]:
    """Every rank's shards: equal for all members of one data index, contiguous, and as even as possible.

    >>> ranges(Degrees(pipeline=2, data=2), 5)
    [(0, 3), (3, 5), (0, 3), (3, 5)]
    """
    if degrees.rows > shards:
        raise ValueError(f"{shards} shards are too few for the {degrees.rows} data indices of {degrees}")
    size, more = divmod(shards, degrees.rows)
    cuts = [row * size + min(row, more) for row in range(degrees.rows + 1)]
    rows = [degrees.row(rank) for rank in range(degrees.size)]
    return [(cuts[row], cuts[row + 1]) for row in rows]

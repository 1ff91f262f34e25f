"""Who computes which portions of an evaluation: faster workers take more, and late portions get backup copies. Pure.

Portions are the leaves of a fixed tree (`shards.split`). What is given away is a node of it, so that every sum that
comes back is a sum of that tree, whoever made it: which worker computes what changes no bit. Nodes are large at first,
and small at the end, so that all are done at about the same time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from distbelief.shards import Range
from distbelief.strategies.sandblaster.rules.wholedata import MOST_TOGETHER

SHARE = 4
"""Of what is left, a worker is given one part in so many for each member."""
LATE = 2.0
"""Portions that take so many times as long as others do get a backup copy."""
LATE_S = 0.02


class Holder(Struct, frozen=True):
    worker: int
    node: Range
    since: float


class Portioning(Struct):
    """
    >>> work = Portioning(portions=16)
    >>> work.begin(7, members=2)
    >>> work.take(worker=0, now=0.0), work.take(worker=1, now=0.0)
    ((0, 2), (2, 3))
    >>> work.computed(0, 7, (0, 2), [(1.0, 2.0), (3.0, 2.0)], now=1.0)
    >>> work.take(worker=0, now=1.0), work.total()
    ((3, 4), None)
    """

    portions: int
    evaluation: int = -1
    open: bool = False
    """Its point is shown, by the present driver."""
    members: int = 1
    losses: dict[int, tuple[float, float]] = {}
    """Portion -> the loss as a sum, and what it is to be divided by: of those that every slice has."""
    holders: list[Holder] = []
    pace_s: float = 0.0
    """How long a portion takes lately."""

    def begin(self, evaluation: int, members: int) -> None:
        """An evaluation, perhaps one that was begun before; nobody works on it yet."""
        if evaluation != self.evaluation:
            self.losses = {}
        self.evaluation = evaluation
        self.gather(members)
        self.open = True

    def gather(self, members: int) -> None:
        """There are other members: nobody works on anything, until their driver has begun an evaluation. If it is the
        same one, what was computed of it counts."""
        self.members = members
        self.holders = []
        self.open = False

    def take(self, worker: int, now: float) -> Range | None:
        """Whoever asks has nothing else to do."""
        self.holders = [one for one in self.holders if one.worker != worker]
        if not self.open:
            return None
        copies: dict[int, list[Holder]] = {p: [] for p in range(self.portions) if p not in self.losses}
        for one in self.holders:
            for portion in range(*one.node):
                if portion in copies:
                    copies[portion].append(one)
        free = [portion for portion, holders in copies.items() if not holders]
        if not free:  # the first copy that is there counts, and the other has the same bits
            free = [p for p, holders in copies.items() if len(holders) == 1 and self._is_late(holders[0], now)]
        if not free:
            return None
        node = self._node(free)
        self.holders.append(Holder(worker, node, now))
        return node

    def _is_late(self, holder: Holder, now: float) -> bool:
        usual_s = self.pace_s * (holder.node[1] - holder.node[0])
        return self.pace_s > 0 and now - holder.since > LATE * usual_s + LATE_S

    def _node(self, free: Sequence[int]) -> Range:
        """The first of these portions, and as many after it as make up a node and are a fair share."""
        first, there = free[0], set(free)
        size, most = 1, min(MOST_TOGETHER, max(1, len(free) // (SHARE * self.members)))
        while 2 * size <= most and first % (2 * size) == 0 and there.issuperset(range(first, first + 2 * size)):
            size *= 2
        return first, first + size

    def computed(
        self, worker: int, evaluation: int, node: Range, losses: Sequence[tuple[float, float]], now: float
    ) -> None:
        """Every slice has the sum of these portions."""
        if evaluation != self.evaluation:
            return
        for one in self.holders:
            if one.worker == worker and one.node == node:
                took_s = max(now - one.since, 0.0) / (node[1] - node[0])
                self.pace_s = 0.7 * self.pace_s + 0.3 * took_s if self.pace_s else took_s
        self.holders = [one for one in self.holders if one.worker != worker]
        for portion, loss in zip(range(*node), losses, strict=True):
            self.losses.setdefault(portion, loss)

    def total(self) -> tuple[float, float] | None:
        """(sum of the loss, weight) over all portions, when all are there."""
        if not self.open or len(self.losses) < self.portions:
            return None
        losses, weights = zip(*self.losses.values(), strict=True)
        if not all(math.isfinite(one) for one in (*losses, *weights)):
            return math.nan, math.fsum(one for one in weights if math.isfinite(one))
        return math.fsum(losses), math.fsum(weights)

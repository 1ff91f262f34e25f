"""The exchange of a generation with a single member: private memory, no segment server, no sockets, no waiting.

A step's result does not depend on the number of members. So one process can repeat any run, which replaying does;
partial sums are added in the same tree order as in other exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from distbelief.transport.exchange import (
    AllContributions,
    Backups,
    Contribution,
    DiedComputing,
    Geometry,
    PublishedSum,
    StepPlan,
    depth,
    tree_add,
)
from distbelief.transport.shm.segment import Segment


class SingleMemberExchange:
    """The exchange of a single member. `memory`: a state to continue from, which this exchange then owns.

    >>> from distbelief.transport.exchange import Source, Tile
    >>> alone = SingleMemberExchange(Geometry([Tile(0, torch.float32, 0, 2)], 64, slots=[2], shards=2, marks=1))
    >>> for slot in range(2):
    ...     _ = alone.slot(slot).tensor(torch.float32, 0, 2).fill_(slot + 1.0)
    >>> alone.begin(StepPlan(0, [Source(0, 0), Source(0, 1)], (0, 1)))
    >>> alone.reduced(0)
    tensor([3., 3.])
    """

    rank = 0
    size = 1
    shares_state = False
    waiting = False
    backups: Backups | None = None

    def __init__(self, geometry: Geometry, memory: Segment | None = None) -> None:
        self.tiles: Sequence[int] = range(len(geometry.tiles))
        self._slots = [Segment.private(geometry.slot_bytes) for _ in range(geometry.slots[0])]
        self._parts = [[slot.tensor(t.dtype, t.offset_bytes, t.numel) for t in geometry.tiles] for slot in self._slots]
        self._sums = [torch.empty(tile.numel, dtype=tile.dtype) for tile in geometry.tiles]
        self._reduced: set[int] = set()
        self._memory = {} if memory is None else {"state": memory}
        self._plan = StepPlan(-1, [], 0)

    def slot(self, index: int) -> Segment:
        return self._slots[index]

    def state(self, size_bytes: int, name: str = "state") -> Segment:
        if name not in self._memory:
            self._memory[name] = Segment.private(size_bytes)
        return self._memory[name]

    def published_sums(self, step: int) -> list[PublishedSum] | None:
        return None

    def died_computing(self) -> list[DiedComputing]:
        return []

    def working(self, shard: int) -> None:
        """Nothing to do: no other member reads it."""

    def begin(self, plan: StepPlan) -> None:
        self._plan = plan
        self._reduced.clear()

    def publish(self, tile: int) -> None:
        """No other member waits for it."""

    def share(self, contribution: Contribution, meanwhile: Callable[[], bool] = lambda: False) -> AllContributions:
        rows = np.zeros_like(contribution.rows)
        for first, end in contribution.mine:
            rows[first:end] = contribution.rows[first:end]
        return AllContributions(rows, contribution.untouched.copy(), contribution.integers)

    def reduced(self, tile: int) -> torch.Tensor:
        out = self._sums[tile]
        if tile not in self._reduced:
            self._reduced.add(tile)
            parts = [self._parts[source.slot][tile] for source in self._plan.sources]
            tree_add(self._plan.program, parts, out, [torch.empty_like(out) for _ in range(depth(self._plan.program))])
        return out

    def scaled(self, tile: int, factor: float) -> torch.Tensor:
        return self.reduced(tile).mul_(factor)

    def share_squares(self, mine: dict[int, float]) -> list[float]:
        return [mine[tile] for tile in sorted(mine)]

    def applied(self) -> None:
        """No other member waits for it."""

    def settle(self) -> None:
        """There is no other member to wait for."""

    def gather(self, payload: bytes) -> list[bytes]:
        return [payload]

    def transfer(self, block: torch.Tensor, source: int, receivers: Sequence[int]) -> None:
        """There is no other member to copy to."""

    def close(self) -> None:
        """Nothing to do: the memory is freed with its last view."""

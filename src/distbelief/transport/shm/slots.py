"""Workers of one host that each have a state of their own: shared memory carries their gradients only.

For members that compute on accelerators: their parameters are in the accelerator's memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distbelief.transport.exchange import TRANSFER_BYTES, Geometry, Held
from distbelief.transport.shm.controlblock import TILES, Past
from distbelief.transport.shm.exchange import SharedExchange
from distbelief.transport.shm.futexflags import Abort
from distbelief.transport.shm.segment import KeeperClient, Segment


class SharedSlots(SharedExchange):
    """See `Exchange`."""

    shares_state = False

    def __init__(
        self,
        keeper: KeeperClient,
        name: str,
        rank: int,
        geometry: Geometry,
        abort: Abort,
        past: Sequence[Past] = (),
        memory: dict[str, Segment] | None = None,
    ) -> None:
        """`memory`: what this process keeps from one generation to the next."""
        super().__init__(keeper, name, rank, geometry, abort, past)
        self.tiles = range(len(geometry.tiles))
        self.backups = None  # a late member's shard would be computed into another device's memory
        self._memory = {} if memory is None else memory
        self._between: Segment | None = None

    def state(self, size_bytes: int, name: str = "state") -> Segment:
        if name not in self._memory:
            self._memory[name] = Segment.private(size_bytes)
        return self._memory[name]

    def held(self, step: int) -> list[Held] | None:
        """Nothing of a member that was alone: it kept its sums on its device."""
        found = super().held(step)
        return found and [one for one in found if self._past[one.source.back].members > 1]

    def publish(self, tile: int) -> None:
        self._words.set(TILES + tile, self._stamp)

    def share_squares(self, mine: dict[int, float]) -> list[float]:
        return [mine[tile] for tile in sorted(mine)]

    def transfer(self, block: torch.Tensor, source: int, receivers: Sequence[int]) -> None:
        """Through memory that all can see, piece by piece."""
        if self._between is None:
            self._between = self._keeper.segment(f"{self._name}/transfer", TRANSFER_BYTES)
        for first in range(0, block.numel(), TRANSFER_BYTES):
            part = block[first : first + TRANSFER_BYTES]
            room = self._between.tensor(torch.uint8, 0, part.numel())
            if self.rank == source:
                room.copy_(part)
            self._meet()
            if self.rank in receivers:
                part.copy_(room)
            self._meet()

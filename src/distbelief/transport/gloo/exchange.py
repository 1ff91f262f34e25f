"""The exchange over torch.distributed (gloo), for members on several hosts or without shared memory.

Exact all-reduce by tile: every member sends its partial sums of a tile to the tile's owner as soon as they are ready,
the owner adds them in the tree's order, and the sums are broadcast: as many bytes as a ring, with a fixed order of
addition. Every member then applies the whole step to its own replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from distbelief.instrument import Instrument
from distbelief.transport.abort import Abort
from distbelief.transport.exchange import (
    AllContributions,
    Contribution,
    Geometry,
    PublishedSum,
    Source,
    StepPlan,
    depth,
    tile_views,
    tree_add,
)
from distbelief.transport.gloo.group import TorchGroup, wait_all
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.shm.segment import Memory, Segment

TIMED = (
    Instrument("reduce", __name__, "TorchExchange", ("begin", "publish", "reduced", "settle")),
    Instrument("wait", __name__, "TorchExchange", ("share",)),
)


class TorchExchange(TorchGroup):
    """See `Exchange`."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        geometry: Geometry,
        abort: Abort,
        memory: dict[str, Segment] | None = None,
        backend: str = "gloo",
    ) -> None:
        """`memory`: segments that this process keeps across generations."""
        self.tiles: Sequence[int] = range(len(geometry.tiles))
        self._plain: Sequence[int] = self.tiles
        """The tiles of this step that travel uncompressed; all tiles in this class."""
        self._geometry = geometry
        self._memory = {} if memory is None else memory
        self._slots = [Segment.private(geometry.slot_bytes) for _ in range(geometry.slots[rank])]
        self._views = [[slot.tensor(t.dtype, t.offset_bytes, t.numel) for t in geometry.tiles] for slot in self._slots]
        self._sums = Segment.private(geometry.slot_bytes)
        self._out = [self._sums.tensor(t.dtype, t.offset_bytes, t.numel) for t in geometry.tiles]
        self._staged: dict[tuple[int, int], torch.Tensor] = {}
        self._receives: dict[int, list[dist.Work | None]] = {}
        self._sends: list[dist.Work | None] = []
        self._collected = False
        self._plan = StepPlan(-1, [], 0)
        size = len(geometry.slots)
        self._owner = [tile.index * size // len(geometry.tiles) for tile in geometry.tiles]
        super().__init__(rendezvous, rank, size, abort, backend)

    def slot(self, index: int) -> Segment:
        return self._slots[index]

    def state(self, size_bytes: int, name: str = "state") -> Segment:
        if name not in self._memory:
            self._memory[name] = Segment.private(size_bytes)
        return self._memory[name]

    def published_sums(self, step: int) -> list[PublishedSum] | None:
        return None  # partial sums are private to their members, so a new generation computes them again

    def working(self, shard: int) -> None:
        """Only checks for an abort, after which the shard would be computed in vain: other members cannot read a
        record."""
        self._abort.check()

    def begin(self, plan: StepPlan) -> None:
        self._plan = plan
        self._collected = False
        with self.network():
            for tile in self._mine():
                self._receives[tile] = [
                    dist.irecv(self._stage(number, tile), source.rank, tag=self._tag(number, tile))
                    for number, source in enumerate(plan.sources)
                    if source.rank != self.rank
                ]

    def _mine(self) -> list[int]:
        return [tile for tile in self._plain if self._owner[tile] == self.rank]

    def _tag(self, source: int, tile: int) -> int:
        return source * len(self.tiles) + tile

    def _stage(self, source: int, tile: int) -> torch.Tensor:
        if (source, tile) not in self._staged:
            shape = self._geometry.tiles[tile]
            self._staged[source, tile] = torch.empty(shape.numel, dtype=shape.dtype)
        return self._staged[source, tile]

    def publish(self, tile: int) -> None:
        owner = self._owner[tile]
        if owner == self.rank:
            return
        with self.network():
            for number, source in enumerate(self._plan.sources):
                if source.rank == self.rank:
                    part = self._part(source, tile)
                    self._sends.append(dist.isend(part, owner, tag=self._tag(number, tile)))

    def _part(self, source: Source, tile: int) -> torch.Tensor:
        """A partial sum of this member, as it is added."""
        return self._views[source.slot][tile]

    def share(self, contribution: Contribution, meanwhile: Callable[[], bool] = lambda: False) -> AllContributions:
        everything = np.zeros_like(contribution.rows)
        for first, end in contribution.mine:
            everything[first:end] = contribution.rows[first:end]
        touched = torch.from_numpy((contribution.untouched == 0).astype(np.uint8))
        integers = torch.frombuffer(bytearray(contribution.integers or b"\0"), dtype=torch.uint8)
        # Each row comes from one member. Rows are added as integers, because -0.0 + 0.0 would lose the sign of zero.
        numbers = np.append(everything.view(np.int64), self._control_number())
        with self.network():
            dist.all_reduce(torch.from_numpy(numbers))
            dist.all_reduce(touched, op=dist.ReduceOp.MAX)
            if contribution.integers:
                dist.broadcast(integers, self._plan.sources[0].rank)
        self._receive_control_number(int(numbers[-1]))
        everything = numbers[:-1].view(np.float64).reshape(everything.shape)
        return AllContributions(
            everything, touched.numpy() == 0, integers.numpy().tobytes() if contribution.integers else b""
        )

    def _control_number(self) -> int:
        """A number that this member sends with the rows of each step; the exchange adds these numbers over all
        members."""
        return 0

    def _receive_control_number(self, number: int) -> None:
        """Receives the sum of the control numbers, equal on all members."""

    def reduced(self, tile: int) -> torch.Tensor:
        if not self._collected:
            self._collect()
        return self._out[tile]

    def scaled(self, tile: int, factor: float) -> torch.Tensor:
        return self.reduced(tile).mul_(factor)

    def _collect(self) -> None:
        self._collected = True
        plan, levels = self._plan, depth(self._plan.program)
        with self.network():
            for tile in self._mine():
                wait_all(self._receives[tile])
                parts = [
                    self._part(source, tile) if source.rank == self.rank else self._stage(number, tile)
                    for number, source in enumerate(plan.sources)
                ]
                out = self._out[tile]
                tree_add(plan.program, parts, out, [torch.empty_like(out) for _ in range(levels)])
            self._spread()

    def _spread(self) -> None:
        """Send this member's complete sums to all members, which may then apply the step."""
        wait_all(self._broadcasts())

    def _broadcasts(self) -> list[dist.Work | None]:
        return [
            dist.broadcast(self._sums.tensor(torch.uint8, first, end - first), owner, async_op=True)
            for owner, first, end in self._stretches()
        ]

    def _stretches(self) -> list[tuple[int, int, int]]:
        """(owner, first byte, end byte) of neighbouring tiles of one owner."""
        found: list[tuple[int, int, int]] = []
        previous = -2
        for tile in self._plain:
            shape, owner = self._geometry.tiles[tile], self._owner[tile]
            end = shape.offset_bytes + shape.size_bytes
            if tile == previous + 1 and found[-1][0] == owner:
                found[-1] = (owner, found[-1][1], end)
            else:
                found.append((owner, shape.offset_bytes, end))
            previous = tile
        return found

    def add_again(self, plan: StepPlan, slots: Mapping[int, Memory], shift: int) -> dict[int, torch.Tensor]:
        """Add up the step a second time, from partial sums that other members have (`plan.sources`; this member's are
        in `slots`), and on other members: the rank that adds a tile is greater by `shift`. Returns the sums of this
        member's tiles."""
        above = self._geometry.shards  # no source of the first sums has such a number
        adder = [(owner + shift) % self.size for owner in self._owner]
        mine = [tile for tile in self._plain if adder[tile] == self.rank]
        views = {slot: tile_views(memory, self._geometry.tiles) for slot, memory in slots.items()}
        receives: dict[int, list[dist.Work | None]] = {}
        sends: list[dist.Work | None] = []
        found: dict[int, torch.Tensor] = {}
        numbers = list(enumerate(plan.sources, above))
        with self.network():
            for tile in mine:
                receives[tile] = [
                    dist.irecv(self._stage(number, tile), source.rank, tag=self._tag(number, tile))
                    for number, source in numbers
                    if source.rank != self.rank
                ]
            for tile in self._plain:
                if adder[tile] != self.rank:
                    sends += [
                        dist.isend(views[source.slot][tile], adder[tile], tag=self._tag(number, tile))
                        for number, source in numbers
                        if source.rank == self.rank
                    ]
            for tile in mine:
                wait_all(receives[tile])
                parts = [
                    views[source.slot][tile] if source.rank == self.rank else self._stage(number, tile)
                    for number, source in numbers
                ]
                found[tile] = out = torch.empty_like(parts[0])
                tree_add(plan.program, parts, out, [torch.empty_like(out) for _ in range(depth(plan.program))])
            wait_all(sends)
        return found

    def share_squares(self, mine: dict[int, float]) -> list[float]:
        return [mine[tile] for tile in sorted(mine)]

    def applied(self) -> None:
        """Nothing to do: every member has its own state."""

    def settle(self) -> None:
        with self.network():
            wait_all(self._sends)
        self._sends.clear()

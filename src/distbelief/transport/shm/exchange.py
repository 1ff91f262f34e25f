"""The exchange between workers of one host: gradients are written straight into shared memory and added there.

Each member owns some tiles. It adds the partial sums of a tile, in the tree's order, out of place into memory of its
own; so an aborted step leaves every partial sum intact, and the next generation takes them over. A tile is added up
while its owner waits for others, if it does, else just before it is used: then the sum is still in the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch

from distbelief.errors import DistBeliefError
from distbelief.transport.backups import Backups
from distbelief.transport.exchange import Broken, Geometry, Gift, Held, Shared, Source, StepPlan, depth, tree_add
from distbelief.transport.shm.controlblock import (
    ARRIVED,
    BEGUN,
    MAIL,
    MAILBOX_BYTES,
    MEASURED,
    SETTLED,
    TILES,
    UNITS,
    WORKING,
    Ledger,
    Past,
)
from distbelief.transport.shm.futexflags import Abort
from distbelief.transport.shm.segment import KeeperClient, Segment


class SharedExchange:
    """See `Exchange`. `name` is unique to the generation: the segments of two generations never meet."""

    shares_state = True

    def __init__(
        self,
        keeper: KeeperClient,
        name: str,
        rank: int,
        geometry: Geometry,
        abort: Abort,
        past: Sequence[Past] = (),
    ) -> None:
        self.rank = rank
        self.size = len(geometry.slots)
        self.tiles: Sequence[int] = [tile.index for tile in geometry.tiles if tile.index % self.size == rank]
        self._keeper = keeper
        self._name = name
        self._geometry = geometry
        self._abort = abort
        self._ledger = Ledger(keeper, Past(name, geometry), rank, abort)
        self._words = self._ledger.words
        self._life = self._ledger.lives[rank]
        self._life.begin()
        self.backups: Backups | None = Backups(self._ledger, rank)
        self._before = list(past)
        self._found: dict[int, Ledger] | None = None
        self._out: dict[int, torch.Tensor] = {}
        self._scratch: dict[torch.dtype, list[torch.Tensor]] = {}
        self._ready: deque[int] = deque()
        """Tiles of mine that I have published, in that order."""
        self._passing: dict[int, torch.Tensor] = {}
        """Rooms in one place, for sums of which one is wanted at a time."""
        self._reduced: set[int] = set()
        self._largest = max((tile.numel for tile in geometry.tiles), default=0)
        self._place = Segment.private(max((tile.size_bytes for tile in geometry.tiles), default=0))
        self._letters = 0
        self._plan = StepPlan(-1, [], 0)

    @property
    def waiting(self) -> bool:
        return self._words.waiting

    def slot(self, index: int) -> Segment:
        return self._ledger.slot(self.rank, index)

    def slot_name(self, index: int) -> str:
        """Under which others of this host find it."""
        return self._ledger.slot_name(self.rank, index)

    def state(self, size_bytes: int, name: str = "state") -> Segment:
        return self._keeper.lasting(name, size_bytes)

    @property
    def _past(self) -> dict[int, Ledger]:
        """What earlier generations have left. Not to be looked for before all members have met: until then one of them
        may still be making, or writing, the ledger of an earlier generation, and they would not all see the same."""
        if self._found is None:
            found = ((back, _left_by(self._keeper, one)) for back, one in enumerate(self._before, 1))
            self._found = {back: ledger for back, ledger in found if ledger}
        return self._found

    def held(self, step: int) -> list[Held] | None:
        begun = [
            ledger.words.get(rank, BEGUN) == step + 1
            for ledger in self._past.values()
            for rank in range(ledger.members)
        ]
        if not any(begun):
            return None
        return [
            Held(node, Source(rank, slot, back))
            for back, ledger in self._past.items()
            for rank in range(ledger.members)
            if ledger.arrived(rank, step + 1)
            for node, slot in ledger.read_nodes(rank)
        ]

    def broken(self) -> list[Broken]:
        return [
            Broken(back, rank, ledger.words.get(rank, BEGUN) - 1, ledger.words.get(rank, WORKING) - 1)
            for back, ledger in self._past.items()
            for rank in range(ledger.members)
            if ledger.words.get(rank, WORKING)
        ]

    def begin(self, plan: StepPlan) -> None:
        self._abort.check()  # who is alone, or always the last, never waits, and would notice it nowhere else
        self._plan = plan
        self._stamp = plan.step + 1
        self._words.set(UNITS, 0)
        self._words.set(BEGUN, self._stamp)
        self._ready.clear()
        self._reduced.clear()

    def working(self, shard: int) -> None:
        self._words.set(WORKING, shard + 1)

    def working_on(self, step: int, shard: int) -> None:
        """The same for members that do no steps in common."""
        self._words.set(BEGUN, step + 1)
        self.working(shard)

    def publish(self, tile: int) -> None:
        self._words.set(TILES + tile, self._stamp)
        if tile % self.size != self.rank:
            self._words.ring()  # its owner may be done with its own work, and wait for this
        elif not isinstance(self._plan.program, int):
            self._ready.append(tile)

    def _reduce(self, tile: int, out: torch.Tensor) -> torch.Tensor:
        parts = [self._part(source, tile) for source in self._plan.sources]
        tree_add(self._plan.program, parts, out, self._scratch_for(out.dtype))
        return out

    def _part(self, source: Source, tile: int) -> torch.Tensor:
        return self._of(source).tiles(source.rank, source.slot)[tile]

    def _room(self, tile: int) -> torch.Tensor:
        """For a sum that is kept, and counts as there, until the step is applied."""
        self._reduced.add(tile)
        if tile not in self._out:
            shape = self._geometry.tiles[tile]
            self._out[tile] = torch.empty(shape.numel, dtype=shape.dtype)
        return self._out[tile]

    def _room_in_passing(self, tile: int) -> torch.Tensor:
        if not self._plan.one_by_one:
            return self._room(tile)
        if tile not in self._passing:
            shape = self._geometry.tiles[tile]
            self._passing[tile] = self._place.tensor(shape.dtype, 0, shape.numel)
        return self._passing[tile]

    def where(self, source: Source) -> Segment:
        """The slot that holds a partial sum of the step, whoever made it."""
        return self._of(source).slot(source.rank, source.slot)

    def _of(self, source: Source) -> Ledger:
        return self._past[source.back] if source.back else self._ledger

    def _scratch_for(self, dtype: torch.dtype) -> list[torch.Tensor]:
        scratch = self._scratch.setdefault(dtype, [])
        while len(scratch) < depth(self._plan.program):
            scratch.append(torch.empty(self._largest, dtype=dtype))
        return scratch

    def share(self, gift: Gift, meanwhile: Callable[[], bool] = lambda: False) -> Shared:
        ledger = self._ledger
        for first, end in gift.mine:
            ledger.rows[first:end] = gift.rows[first:end]
        ledger.untouched[self.rank] = gift.untouched
        ledger.write_nodes(self.rank, gift.nodes)
        if gift.integers:
            ledger.integers[self.rank] = np.frombuffer(gift.integers, np.uint8)
        self._words.announce(ARRIVED, self._stamp)
        while not self._words.reached(ARRIVED, self._stamp) and meanwhile():
            self._abort.check()
        while self._ready and not self._words.reached(ARRIVED, self._stamp):
            tile = self._ready.popleft()
            self._words.await_all(TILES + tile, self._stamp)
            self._reduce(tile, self._room(tile))
        self._words.await_all(ARRIVED, self._stamp)
        rows, untouched = ledger.rows, np.asarray(ledger.untouched.all(axis=0))
        if any(source.back for source in self._plan.sources):
            rows, untouched = self._with_the_past(untouched)
        first_of_all = self._plan.sources[0]
        return Shared(rows, untouched, self._of(first_of_all).integers[first_of_all.rank].tobytes())

    def _with_the_past(self, untouched: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """In a step that was taken over, what earlier members told counts too, and only for what is used of theirs."""
        rows = np.zeros_like(self._ledger.rows)
        givers = {(source.back, source.rank): self._of(source) for source in self._plan.sources}
        for (back, rank), ledger in givers.items():
            for (first, end), _ in ledger.read_nodes(rank):
                rows[first:end] = ledger.rows[first:end]
            if back:
                untouched = untouched & (ledger.untouched[rank] != 0)
        return rows, untouched

    def reduced(self, tile: int) -> torch.Tensor:
        if tile in self._reduced:
            return self._out[tile]
        return self._reduce(tile, self._room_in_passing(tile))

    def scaled(self, tile: int, factor: float) -> torch.Tensor:
        program = self._plan.program
        if tile in self._reduced or not isinstance(program, int):
            return self.reduced(tile).mul_(factor)
        # nothing to add: one pass instead of a copy and another
        return torch.mul(self._part(self._plan.sources[program], tile), factor, out=self._room_in_passing(tile))

    def share_squares(self, mine: dict[int, float]) -> list[float]:
        for tile, value in mine.items():
            self._ledger.squares[tile] = value
        self._words.barrier(MEASURED, self._stamp)
        return [float(value) for value in self._ledger.squares]

    def applied(self) -> None:
        self._words.announce(SETTLED, self._stamp)

    def settle(self) -> None:
        self._words.await_all(SETTLED, self._stamp)
        self.forget_past()

    def forget_past(self) -> None:
        """Nobody can need what earlier generations have left any more: a step has been committed since."""
        if self._before:
            if self.rank == 0:
                self._keeper.drop_before(self._name)
            self._before, self._found = [], {}

    def gather(self, payload: bytes) -> list[bytes]:
        received = [bytearray() for _ in range(self.size)]
        boxes = self._ledger.mailboxes
        mine, sent = boxes[self.rank], 0
        while True:
            chunk = payload[sent : sent + MAILBOX_BYTES]
            sent += len(chunk)
            mine["length"], mine["more"] = len(chunk), sent < len(payload)
            mine["data"][: len(chunk)] = np.frombuffer(chunk, np.uint8)
            self._meet()
            for rank, box in enumerate(boxes):
                received[rank] += box["data"][: int(box["length"])].tobytes()
            more = any(bool(box["more"]) for box in boxes)
            self._meet()
            if not more:
                return [bytes(content) for content in received]

    def _meet(self) -> None:
        self._letters += 1
        self._words.barrier(MAIL, self._letters)

    def transfer(self, block: torch.Tensor, source: int, receivers: Sequence[int]) -> None:
        """One copy of the state serves all members."""

    def neighbour(self, timeout_s: float) -> tuple[int, Literal["alive", "ended", "dead"]]:
        """Wait for news of the next member, at most so long: its rank, and how it is. From any thread, after all have
        met for the first time."""
        rank = (self.rank + 1) % self.size
        return rank, self._ledger.lives[rank].watch(timeout_s)

    def close(self) -> None:
        """The mapping ends with the process or with the last view of it."""
        self._life.end()


def _left_by(keeper: KeeperClient, past: Past) -> Ledger | None:
    """What a generation has left; None when it never came to anything."""
    try:
        return Ledger(keeper, past, exists=True)
    except DistBeliefError:
        return None

"""The exchange between workers of one host: gradients are written straight into shared memory and added there.

Each member owns some tiles. It adds up a tile's partial sums in the tree's order, out of place, into private memory. So
an aborted step leaves every partial sum intact, and the next generation takes them over. A member adds up a tile while
it waits for others (`share`), or just before it uses the sum (`reduced`), when the sum is in the cache.

Old and new slots together may not fit into the host's memory. So a generation first releases the old slots whose
partial sums it does not take over, and it waits a little for memory: a dead process's memory is free some time after
the news of its death.

`SharedSlots` is for members with their own states (accelerators): shared memory carries only their gradients.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import numpy as np
import torch

from distbelief.errors import DistBeliefError, NotEnoughMemory
from distbelief.instrument import Instrument
from distbelief.transport.abort import Abort
from distbelief.transport.exchange import (
    TRANSFER_BYTES,
    AllContributions,
    Backups,
    Contribution,
    DiedComputing,
    Geometry,
    PublishedSum,
    Source,
    StepPlan,
    depth,
    tree_add,
)
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
    ControlBlock,
    GenerationMemory,
    SharedBackups,
)
from distbelief.transport.shm.segment import Segment, SegmentClient

ROOM_WAIT_S = 10.0
"""How long a generation that succeeds another one waits for memory."""
_RETRY_S = 0.02

T = TypeVar("T")

TIMED = (Instrument("reduce", __name__, "SharedExchange", ("_reduce", "share")),)


class SharedExchange:
    """The exchange in shared memory. `name` is unique to the generation, so segments of two generations never
    conflict."""

    shares_state = True

    def __init__(
        self,
        segments: SegmentClient,
        name: str,
        rank: int,
        geometry: Geometry,
        abort: Abort,
        past: Sequence[GenerationMemory] = (),
    ) -> None:
        self.rank = rank
        self.size = len(geometry.slots)
        self.tiles: Sequence[int] = [tile.index for tile in geometry.tiles if tile.index % self.size == rank]
        self._segments = segments
        self._name = name
        self._geometry = geometry
        self._abort = abort
        self._is_first = not past
        self._has_slots = False
        self._block = self._when_there_is_room(
            lambda: ControlBlock(segments, GenerationMemory(name, geometry), rank, abort)
        )
        self._flags = self._block.flags
        self._liveness = self._block.liveness[rank]
        self._liveness.begin()
        self.backups: Backups | None = SharedBackups(self._block, rank)
        self._before = list(past)
        self._found: dict[int, ControlBlock] | None = None
        self._kept: dict[int, torch.Tensor] = {}
        """A buffer per tile, for sums that are kept until the step is applied."""
        self._scratch: dict[torch.dtype, list[torch.Tensor]] = {}
        self._ready: deque[int] = deque()
        """The tiles that this member owns and has published, in order of publication."""
        self._reduced: set[int] = set()
        """The tiles whose sums are in `_kept`."""
        self._largest = max((tile.numel for tile in geometry.tiles), default=0)
        self._reused = Segment.private(max((tile.size_bytes for tile in geometry.tiles), default=0))
        """One buffer that every sum overwrites, for plans that use the sums one by one."""
        self._reused_as: dict[int, torch.Tensor] = {}
        """The same buffer as each tile sees it."""
        self._barriers = 0
        self._plan = StepPlan(-1, [], 0)
        self._stamp = 0

    @property
    def waiting(self) -> bool:
        return self._flags.waiting

    def slot(self, index: int) -> Segment:
        try:
            return self._block.slot(self.rank, index)  # on the step path the slot is there
        except NotEnoughMemory:
            return self._when_there_is_room(lambda: self._block.slot(self.rank, index))

    def slot_name(self, index: int) -> str:
        """The name by which other processes of this host open the slot."""
        return self._block.slot_name(self.rank, index)

    def state(self, size_bytes: int, name: str = "state") -> Segment:
        return self._when_there_is_room(lambda: self._segments.lasting(name, size_bytes))

    def _when_there_is_room(self, make: Callable[[], T]) -> T:
        """What `make` returns. In the first generation nothing is released meanwhile, so a lack of memory is an error
        at once."""
        deadline = time.monotonic() + ROOM_WAIT_S
        while True:
            try:
                return make()
            except NotEnoughMemory:
                if self._is_first or time.monotonic() > deadline:
                    raise
            self._abort.check()
            time.sleep(_RETRY_S)

    @property
    def _past(self) -> dict[int, ControlBlock]:
        """The control blocks of earlier generations. Use them only after all members have met: until then earlier
        members may still create or write blocks, and members could read different contents."""
        if self._found is None:
            found = ((back, _left_by(self._segments, one)) for back, one in enumerate(self._before, 1))
            self._found = {back: block for back, block in found if block}
        return self._found

    def published_sums(self, step: int) -> list[PublishedSum] | None:
        begun = [
            block.flags.get(rank, BEGUN) == step + 1 for block in self._past.values() for rank in range(block.members)
        ]
        if not any(begun):
            return None
        return [
            PublishedSum(node, Source(rank, slot, back))
            for back, block in self._past.items()
            for rank in range(block.members)
            if block.arrived(rank, step + 1)
            for node, slot in block.read_nodes(rank)
        ]

    def died_computing(self) -> list[DiedComputing]:
        return [
            DiedComputing(back, rank, block.flags.get(rank, BEGUN) - 1, block.flags.get(rank, WORKING) - 1)
            for back, block in self._past.items()
            for rank in range(block.members)
            if block.flags.get(rank, WORKING)
        ]

    def begin(self, plan: StepPlan) -> None:
        self._abort.check()  # the only abort check of a member that never waits (alone, or always last)
        if self._before and plan.sources:
            self._release_unused(plan.sources)
        elif plan.sources and self.backups and not self._has_slots:
            # Others make backups only after this member's BEGUN: a backup never takes the room of a slot of its own.
            for index in range(self._geometry.slots[self.rank]):
                self.slot(index)
            self._has_slots = True
        self._plan = plan
        self._stamp = plan.step + 1
        self._flags.set(UNITS, 0)
        self._flags.set(BEGUN, self._stamp)
        self._ready.clear()
        self._reduced.clear()

    def working(self, shard: int) -> None:
        self._flags.set(WORKING, shard + 1)

    def working_on(self, step: int, shard: int) -> None:
        """Like `begin` and `working`, for members that do not compute steps together."""
        self._flags.set(BEGUN, step + 1)
        self.working(shard)

    def publish(self, tile: int) -> None:
        self._flags.set(TILES + tile, self._stamp)
        if tile % self.size != self.rank:
            self._flags.wake()  # the tile's owner may be waiting
        elif not isinstance(self._plan.program, int):
            self._ready.append(tile)

    def _reduce(self, tile: int, out: torch.Tensor) -> torch.Tensor:
        parts = [self._part(source, tile) for source in self._plan.sources]
        tree_add(self._plan.program, parts, out, self._scratch_for(out.dtype))
        return out

    def _part(self, source: Source, tile: int) -> torch.Tensor:
        return self._of(source).tiles(source.rank, source.slot)[tile]

    def _kept_buffer(self, tile: int) -> torch.Tensor:
        self._reduced.add(tile)
        if tile not in self._kept:
            shape = self._geometry.tiles[tile]
            self._kept[tile] = torch.empty(shape.numel, dtype=shape.dtype)
        return self._kept[tile]

    def _buffer(self, tile: int) -> torch.Tensor:
        """Where the caller gets the sum of a tile."""
        if not self._plan.one_by_one:
            return self._kept_buffer(tile)
        if tile not in self._reused_as:
            shape = self._geometry.tiles[tile]
            self._reused_as[tile] = self._reused.tensor(shape.dtype, 0, shape.numel)
        return self._reused_as[tile]

    def where(self, source: Source) -> Segment:
        """The slot that holds a partial sum of the step, of any member and generation."""
        return self._of(source).slot(source.rank, source.slot)

    def _of(self, source: Source) -> ControlBlock:
        return self._past[source.back] if source.back else self._block

    def _scratch_for(self, dtype: torch.dtype) -> list[torch.Tensor]:
        scratch = self._scratch.setdefault(dtype, [])
        while len(scratch) < depth(self._plan.program):
            scratch.append(torch.empty(self._largest, dtype=dtype))
        return scratch

    def share(self, contribution: Contribution, meanwhile: Callable[[], bool] = lambda: False) -> AllContributions:
        block = self._block
        for first, end in contribution.mine:
            block.rows[first:end] = contribution.rows[first:end]
        block.untouched[self.rank] = contribution.untouched
        block.write_nodes(self.rank, contribution.nodes)
        if contribution.integers:
            block.integers[self.rank] = np.frombuffer(contribution.integers, np.uint8)
        self._flags.announce(ARRIVED, self._stamp)
        while not self._flags.reached(ARRIVED, self._stamp) and meanwhile():
            self._abort.check()
        while self._ready and not self._flags.reached(ARRIVED, self._stamp):
            tile = self._ready.popleft()
            self._flags.await_all(TILES + tile, self._stamp)
            self._reduce(tile, self._kept_buffer(tile))
        self._flags.await_all(ARRIVED, self._stamp)
        rows, untouched = block.rows, np.asarray(block.untouched.all(axis=0))
        if any(source.back for source in self._plan.sources):
            rows, untouched = self._with_the_past(untouched)
        first_of_all = self._plan.sources[0]
        return AllContributions(rows, untouched, self._of(first_of_all).integers[first_of_all.rank].tobytes())

    def _with_the_past(self, untouched: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """In a step that was taken over, include the contributions of earlier members whose sums are used."""
        rows = np.zeros_like(self._block.rows)
        givers = {(source.back, source.rank): self._of(source) for source in self._plan.sources}
        for (back, rank), block in givers.items():
            for (first, end), _ in block.read_nodes(rank):
                rows[first:end] = block.rows[first:end]
            if back:
                untouched = untouched & (block.untouched[rank] != 0)
        return rows, untouched

    def reduced(self, tile: int) -> torch.Tensor:
        if tile in self._reduced:
            return self._kept[tile]
        return self._reduce(tile, self._buffer(tile))

    def scaled(self, tile: int, factor: float) -> torch.Tensor:
        program = self._plan.program
        if tile in self._reduced or not isinstance(program, int):
            return self.reduced(tile).mul_(factor)
        # a single partial sum: multiply in one pass, without a copy
        return torch.mul(self._part(self._plan.sources[program], tile), factor, out=self._buffer(tile))

    def share_squares(self, mine: dict[int, float]) -> list[float]:
        for tile, value in mine.items():
            self._block.squares[tile] = value
        self._flags.barrier(MEASURED, self._stamp)
        return [float(value) for value in self._block.squares]

    def applied(self) -> None:
        self._flags.announce(SETTLED, self._stamp)

    def settle(self) -> None:
        self._flags.await_all(SETTLED, self._stamp)
        self.forget_past()

    def _release_unused(self, sources: Sequence[Source]) -> None:
        """Release the slots of earlier generations that are not among the step's `sources`, before new slots are made.
        All members have met, so no process writes to them any more; no later generation can need them, because it
        reads the same lists of published sums."""
        if self.rank == 0:
            for back, block in self._past.items():
                for rank in range(block.members):
                    block.release_slots(rank, [one.slot for one in sources if (one.back, one.rank) == (back, rank)])

    def forget_past(self) -> None:
        """Release earlier generations' memory: a step was committed since, so no member needs it."""
        if self._before:
            if self.rank == 0:
                self._segments.drop_before(self._name)
            self._before, self._found = [], {}

    def gather(self, payload: bytes) -> list[bytes]:
        received = [bytearray() for _ in range(self.size)]
        boxes = self._block.mailboxes
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
        self._barriers += 1
        self._flags.barrier(MAIL, self._barriers)

    def transfer(self, block: torch.Tensor, source: int, receivers: Sequence[int]) -> None:
        """Nothing to do: all members share one state."""

    def neighbour(self, timeout_s: float) -> tuple[int, Literal["alive", "ended", "dead"]]:
        rank = (self.rank + 1) % self.size
        return rank, self._block.liveness[rank].watch(timeout_s)

    def close(self) -> None:
        """Nothing to do: the mapping ends with the process or with its last view."""
        self._liveness.end()


class SharedSlots(SharedExchange):
    """The exchange in shared memory of members with their own states: it carries their gradients only."""

    shares_state = False

    def __init__(
        self,
        segments: SegmentClient,
        name: str,
        rank: int,
        geometry: Geometry,
        abort: Abort,
        past: Sequence[GenerationMemory] = (),
        memory: dict[str, Segment] | None = None,
    ) -> None:
        """`memory`: segments that this process keeps across generations."""
        super().__init__(segments, name, rank, geometry, abort, past)
        self.tiles = range(len(geometry.tiles))
        self.backups = None  # a backup would be in another device's memory
        self._memory = {} if memory is None else memory
        self._between: Segment | None = None

    def state(self, size_bytes: int, name: str = "state") -> Segment:
        if name not in self._memory:
            self._memory[name] = Segment.private(size_bytes)
        return self._memory[name]

    def published_sums(self, step: int) -> list[PublishedSum] | None:
        """Excludes the sums of a generation with one member, which kept them on its device."""
        found = super().published_sums(step)
        return found and [one for one in found if self._past[one.source.back].members > 1]

    def publish(self, tile: int) -> None:
        self._flags.set(TILES + tile, self._stamp)

    def share_squares(self, mine: dict[int, float]) -> list[float]:
        return [mine[tile] for tile in sorted(mine)]

    def transfer(self, block: torch.Tensor, source: int, receivers: Sequence[int]) -> None:
        """Copy piece by piece through a segment that all members map."""
        if self._between is None:
            self._between = self._segments.segment(f"{self._name}/transfer", TRANSFER_BYTES)
        for first in range(0, block.numel(), TRANSFER_BYTES):
            part = block[first : first + TRANSFER_BYTES]
            room = self._between.tensor(torch.uint8, 0, part.numel())
            if self.rank == source:
                room.copy_(part)
            self._meet()
            if self.rank in receivers:
                part.copy_(room)
            self._meet()


def _left_by(segments: SegmentClient, past: GenerationMemory) -> ControlBlock | None:
    """The control block of an earlier generation; None if that generation never created one."""
    try:
        return ControlBlock(segments, past, exists=True)
    except DistBeliefError:
        return None

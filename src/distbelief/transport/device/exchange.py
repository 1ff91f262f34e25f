"""The exchange of members that compute on accelerators. Their partial sums travel through host memory.

A tile's partial sums are copied to the host as soon as they are ready, on a stream beside the backward pass. The device
adds them in the tree's order: this member's partial sums from device memory, the others' from the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from distbelief.instrument import Instrument
from distbelief.transport.device.accelerator import CopyStream, DeviceMemory, pin
from distbelief.transport.exchange import (
    TRANSFER_BYTES,
    AllContributions,
    Backups,
    Contribution,
    DiedComputing,
    Exchange,
    Geometry,
    PublishedSum,
    Source,
    StepPlan,
    Tile,
    depth,
    tree_add,
)
from distbelief.transport.shm.segment import Memory, Segment

STRETCH_BYTES = 64 << 20

TIMED = (
    Instrument("reduce", __name__, "DeviceExchange", ("_add_up", "_publish_all")),
    Instrument("wait", __name__, "DeviceExchange", ("finish_copies",)),
)

Where = Callable[[Source], Segment]


@dataclass(frozen=True)
class Stretch:
    """Neighbouring tiles of one type, for one operation of the device."""

    tiles: range
    dtype: torch.dtype
    offset_bytes: int
    numel: int


def stretches(tiles: Sequence[Tile], border: int = 0, most_bytes: int = STRETCH_BYTES) -> list[Stretch]:
    """`border`: a tile that begins a new stretch.

    >>> few = [Tile(0, torch.float32, 0, 64), Tile(1, torch.float32, 256, 64), Tile(2, torch.float64, 4096, 1)]
    >>> [(s.tiles, s.numel) for s in stretches(few)]
    [(range(0, 2), 128), (range(2, 3), 1)]
    """
    found: list[Stretch] = []
    for tile in tiles:
        last = found[-1] if found else None
        end = last.offset_bytes + last.numel * last.dtype.itemsize if last else -1
        neighbours = last and last.dtype == tile.dtype and end == tile.offset_bytes and tile.index != border
        if last and neighbours and end < last.offset_bytes + most_bytes:
            longer = range(last.tiles.start, tile.index + 1)
            found[-1] = Stretch(longer, last.dtype, last.offset_bytes, last.numel + tile.numel)
        else:
            found.append(Stretch(range(tile.index, tile.index + 1), tile.dtype, tile.offset_bytes, tile.numel))
    return found


def when_whole(stretches: Sequence[Stretch], act: Callable[[int], None]) -> Callable[[int], None]:
    """Returns a function to be called with every tile that is ready, in any order. It calls `act` once per stretch,
    with the stretch's number, when all tiles of the stretch are ready.

    >>> import torch
    >>> two = [Stretch(range(2), torch.float32, 0, 128), Stretch(range(2, 3), torch.float32, 512, 64)]
    >>> tell = when_whole(two, print)
    >>> tell(1), tell(2), tell(0)
    1
    0
    (None, None, None)
    """
    number_of = [number for number, stretch in enumerate(stretches) for _ in stretch.tiles]
    missing = [len(stretch.tiles) for stretch in stretches]

    def tile_ready(tile: int) -> None:
        number = number_of[tile]
        missing[number] -= 1
        if not missing[number]:
            act(number)

    return tile_ready


class DeviceExchange:
    """The exchange of a member on an accelerator. `inner`: the exchange in host memory; each member has its own state.

    `where`: source -> the host memory of that partial sum; None: `inner` cannot tell, and adds up on the host.
    """

    shares_state = False
    backups: Backups | None = None

    def __init__(
        self,
        inner: Exchange,
        geometry: Geometry,
        device: torch.device,
        memory: dict[str, Memory] | None = None,
        where: Where | None = None,
    ) -> None:
        """`memory`: device memory that this process keeps across generations."""
        self.device = device
        self.rank = inner.rank
        self.size = inner.size
        self.tiles: Sequence[int] = range(len(geometry.tiles))
        self.stretches = stretches(geometry.tiles, geometry.gradient_tiles)
        self.stretch_of = [number for number, stretch in enumerate(self.stretches) for _ in stretch.tiles]
        """Tile -> the number of its stretch."""
        self._inner = inner
        self._geometry = geometry
        self._unpublished: list[int] = []
        self._memory = {} if memory is None else memory
        self._where = where
        self._out_stream = CopyStream(device)
        self._slots: dict[int, Slot] = {}
        self._staged: dict[int, torch.Tensor] = {}
        self._scratch: list[torch.Tensor] = []
        self._plan = StepPlan(-1, [], 0)
        self._result: Slot | None = None

    @property
    def waiting(self) -> bool:
        return self._inner.waiting

    def slot(self, index: int) -> Memory:
        return self._slot(index).memory

    def in_slot(self, index: int) -> list[torch.Tensor]:
        """The slot, stretch by stretch."""
        return self._slot(index).stretches

    def _slot(self, index: int) -> Slot:
        if index not in self._slots:
            self._slots[index] = self._shaped(DeviceMemory(self._geometry.slot_bytes, self.device))
        return self._slots[index]

    @cached_property
    def _sums(self) -> Slot:
        return self._shaped(DeviceMemory(self._geometry.slot_bytes, self.device))

    def _shaped(self, memory: Memory) -> Slot:
        return Slot(memory, _views(memory, self._geometry.tiles), _views(memory, self.stretches))

    def state(self, size_bytes: int, name: str = "state") -> Segment:
        return self._inner.state(size_bytes, name)

    def numbers(self, size_bytes: int) -> Memory:
        """Device memory for parameters and optimizer state."""
        if "numbers" not in self._memory:
            self._memory["numbers"] = DeviceMemory(size_bytes, self.device)
        return self._memory["numbers"]

    def published_sums(self, step: int) -> list[PublishedSum] | None:
        return self._inner.published_sums(step)

    def died_computing(self) -> list[DiedComputing]:
        return self._inner.died_computing()

    def working(self, shard: int) -> None:
        self._inner.working(shard)

    def begin(self, plan: StepPlan) -> None:
        self._plan = plan
        self._result = None
        self._unpublished = [len(stretch.tiles) for stretch in self.stretches]
        self._inner.begin(plan)

    def publish(self, tile: int) -> None:
        number = self.stretch_of[tile]
        self._unpublished[number] -= 1
        if self.size == 1 or self._unpublished[number]:
            return
        with self._out_stream.after(self._out_stream.mark()):
            self._copy_out(number)

    def _copy_out(self, number: int) -> None:
        shape = self.stretches[number]
        for source in self._plan.sources:
            if self._is_mine(source):
                host = self._inner.slot(source.slot)
                self._pin(host)
                to = host.tensor(shape.dtype, shape.offset_bytes, shape.numel)
                to.copy_(self._outgoing(source, number), non_blocking=True)

    def _outgoing(self, source: Source, number: int) -> torch.Tensor:
        """A partial sum of this member, as it is added."""
        return self.in_slot(source.slot)[number]

    def _is_mine(self, source: Source) -> bool:
        return source.rank == self.rank and source.back == 0

    def _pin(self, host: Memory) -> None:
        if self.device.type == "cuda" and isinstance(host, Segment):
            pin(host)

    def share(self, contribution: Contribution, meanwhile: Callable[[], bool] = lambda: False) -> AllContributions:
        self._publish_all()
        return self._inner.share(contribution, meanwhile)

    def finish_copies(self) -> None:
        """Wait until published partial sums are in host memory."""
        self._out_stream.finish()

    def _publish_all(self) -> None:
        self.finish_copies()
        for tile in self.tiles:
            self._inner.publish(tile)

    def reduced(self, tile: int) -> torch.Tensor:
        return self._sum.tiles[tile]

    def scaled(self, tile: int, factor: float) -> torch.Tensor:
        return self.reduced(tile).mul_(factor)

    def reduced_stretches(self) -> list[torch.Tensor]:
        """The sums of all tiles, stretch by stretch."""
        return self._sum.stretches

    @property
    def _sum(self) -> Slot:
        if self._result is None:
            self._result = self._add_up()
        return self._result

    def _add_up(self) -> Slot:
        program, sources = self._plan.program, self._plan.sources
        told = self._where is not None or self.size == 1
        if told and isinstance(program, int) and self._is_mine(sources[program]):
            return self._slot(sources[program].slot)  # no other member reads the slot itself
        if self._where is None and self.size > 1:
            for tile in self._added_on_host():
                self._sums.tiles[tile].copy_(self._inner.reduced(tile), non_blocking=True)
            return self._sums
        for number, stretch in enumerate(self.stretches):
            parts = [self._part(index, source, number, stretch) for index, source in enumerate(sources)]
            levels = [room[: stretch.numel * stretch.dtype.itemsize].view(stretch.dtype) for room in self._rooms()]
            tree_add(program, parts, self._sums.stretches[number], levels)
        return self._sums

    def _added_on_host(self) -> Sequence[int]:
        """The tiles whose sums `inner` adds on the host, to be copied to the device."""
        return self.tiles

    def _part(self, index: int, source: Source, number: int, stretch: Stretch) -> torch.Tensor:
        if self._is_mine(source):
            return self._slot(source.slot).stretches[number]
        assert self._where is not None
        host = self._where(source)
        self._pin(host)
        if index not in self._staged:
            self._staged[index] = self._room()
        room = self._staged[index][: stretch.numel * stretch.dtype.itemsize].view(stretch.dtype)
        return room.copy_(host.tensor(stretch.dtype, stretch.offset_bytes, stretch.numel), non_blocking=True)

    def _rooms(self) -> list[torch.Tensor]:
        while len(self._scratch) < depth(self._plan.program):
            self._scratch.append(self._room())
        return self._scratch

    def _room(self) -> torch.Tensor:
        largest = max(stretch.numel * stretch.dtype.itemsize for stretch in self.stretches)
        return torch.empty(largest, dtype=torch.uint8, device=self.device)

    def share_squares(self, mine: dict[int, float]) -> list[float]:
        return [mine[tile] for tile in sorted(mine)]

    def applied(self) -> None:
        foreign = self.size > 1 or any(source.back for source in self._plan.sources)
        if foreign and self.device.type == "cuda":
            # other members may overwrite the sources after this, and earlier generations' memory is released
            torch.cuda.current_stream(self.device).synchronize()
        self._inner.applied()

    def settle(self) -> None:
        self._inner.settle()

    def gather(self, payload: bytes) -> list[bytes]:
        return self._inner.gather(payload)

    def transfer(self, block: torch.Tensor, source: int, receivers: Sequence[int]) -> None:
        if block.device.type == "cpu":
            self._inner.transfer(block, source, receivers)
            return
        for first in range(0, block.numel(), TRANSFER_BYTES):
            part = block[first : first + TRANSFER_BYTES]
            between = part.cpu() if self.rank == source else torch.empty(part.numel(), dtype=torch.uint8)
            self._inner.transfer(between, source, receivers)
            if self.rank in receivers:
                part.copy_(between)

    def close(self) -> None:
        """First wait for copies, also after an abort: they use memory that may be freed next. A broken device has
        raised its error before."""
        with contextlib.suppress(RuntimeError):
            self.finish_copies()
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        self._inner.close()


@dataclass(frozen=True)
class Slot:
    """Device memory of one slot, with its views by tile and by stretch."""

    memory: Memory
    tiles: list[torch.Tensor]
    stretches: list[torch.Tensor]


def _views(memory: Memory, places: Sequence[Tile | Stretch]) -> list[torch.Tensor]:
    return [memory.tensor(one.dtype, one.offset_bytes, one.numel) for one in places]

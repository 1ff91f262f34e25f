"""The exchange between workers of one host: gradients are written straight into shared memory and added there.

Each member owns some tiles. It adds the partial sums of a tile, in the tree's order, out of place into memory of its
own; so an aborted step leaves every partial sum intact. A tile is reduced as soon as all members have published it,
also in the middle of this member's own backward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from distbelief.comm.exchange import ROW, Geometry, StepPlan, depth, tree_add
from distbelief.comm.segment import KeeperClient, Segment
from distbelief.comm.words import Abort, Words, row_bytes
from distbelief.shards import Range

_ARRIVED, _MEASURED, _SETTLED, _MAIL, _TILES = range(5)  # words of a member; one more per tile follows the last
_MAILBOX_BYTES = 1 << 18


class SharedExchange:
    """See `Exchange`. `name` is unique to the generation: the segments of two generations never meet."""

    shares_state = True

    def __init__(self, keeper: KeeperClient, name: str, rank: int, geometry: Geometry, abort: Abort) -> None:
        self.rank = rank
        self.size = len(geometry.slots)
        self.tiles: Sequence[int] = [tile.index for tile in geometry.tiles if tile.index % self.size == rank]
        self._keeper = keeper
        self._geometry = geometry
        self._slots = [
            [keeper.segment(f"{name}/slot/{r}.{i}", geometry.slot_bytes) for i in range(count)]
            for r, count in enumerate(geometry.slots)
        ]
        words = _TILES + len(geometry.tiles)
        table = _Table(geometry, self.size)
        control = keeper.segment(f"{name}/control", row_bytes(words) * self.size + table.size_bytes)
        self._words = Words(control.buffer, 0, self.size, words, rank, abort)
        self._rows, self._untouched, self._squares, self._mailboxes = table.map(control, row_bytes(words) * self.size)
        self._views = [
            [[slot.tensor(t.dtype, t.offset_bytes, t.numel) for t in geometry.tiles] for slot in slots]
            for slots in self._slots
        ]
        self._out = {i: torch.empty(geometry.tiles[i].numel, dtype=geometry.tiles[i].dtype) for i in self.tiles}
        self._scratch: dict[torch.dtype, list[torch.Tensor]] = {}
        self._ready: deque[int] = deque()
        """Tiles of mine that I have published, in that order, and not reduced yet."""
        self._reduced: set[int] = set()
        self._largest = max((tile.numel for tile in geometry.tiles), default=0)
        self._letters = 0
        self._plan = StepPlan(-1, [], 0)

    def slot(self, index: int) -> Segment:
        return self._slots[self.rank][index]

    def state(self, size_bytes: int) -> Segment:
        return self._keeper.segment("state", size_bytes)

    def begin(self, plan: StepPlan) -> None:
        self._plan = plan
        self._stamp = plan.step + 1
        self._ready.clear()
        self._reduced.clear()

    def publish(self, tile: int) -> None:
        self._words.set(_TILES + tile, self._stamp)
        if tile in self._out:
            self._ready.append(tile)
        while self._ready and self._everybody_published(self._ready[0]):
            self._reduce(self._ready.popleft())

    def _everybody_published(self, tile: int) -> bool:
        get, word, stamp = self._words.get, _TILES + tile, self._stamp
        return all(get(rank, word) == stamp for rank in range(self.size))

    def _reduce(self, tile: int) -> None:
        self._reduced.add(tile)
        parts = [self._views[source.rank][source.slot][tile] for source in self._plan.sources]
        out = self._out[tile]
        tree_add(self._plan.program, parts, out, self._scratch_for(out.dtype))

    def _scratch_for(self, dtype: torch.dtype) -> list[torch.Tensor]:
        scratch = self._scratch.setdefault(dtype, [])
        while len(scratch) < depth(self._plan.program):
            scratch.append(torch.empty(self._largest, dtype=dtype))
        return scratch

    def share(self, mine: Range, rows: np.ndarray, untouched: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self._rows[mine[0] : mine[1]] = rows
        self._untouched[self.rank] = untouched
        self._words.barrier(_ARRIVED, self._stamp)
        return self._rows, np.asarray(self._untouched.all(axis=0))

    def reduced(self, tile: int) -> torch.Tensor:
        if tile not in self._reduced:
            self._reduce(tile)
        return self._out[tile]

    def share_squares(self, mine: dict[int, float]) -> list[float]:
        for tile, value in mine.items():
            self._squares[tile] = value
        self._words.barrier(_MEASURED, self._stamp)
        return [float(value) for value in self._squares]

    def applied(self) -> None:
        self._words.announce(_SETTLED, self._stamp)

    def settle(self) -> None:
        self._words.await_all(_SETTLED, self._stamp)

    def gather(self, payload: bytes) -> list[bytes]:
        received = [bytearray() for _ in range(self.size)]
        mine, sent = self._mailboxes[self.rank], 0
        while True:
            chunk = payload[sent : sent + _MAILBOX_BYTES]
            sent += len(chunk)
            mine["length"], mine["more"] = len(chunk), sent < len(payload)
            mine["data"][: len(chunk)] = np.frombuffer(chunk, np.uint8)
            self._meet()
            for rank, box in enumerate(self._mailboxes):
                received[rank] += box["data"][: int(box["length"])].tobytes()
            more = any(bool(box["more"]) for box in self._mailboxes)
            self._meet()
            if not more:
                return [bytes(content) for content in received]

    def _meet(self) -> None:
        self._letters += 1
        self._words.barrier(_MAIL, self._letters)

    def close(self) -> None:
        """Nothing to hand back: the mapping ends with the process or with the last view of it."""


class _Table:
    """Where the small arrays of a generation lie behind its words."""

    def __init__(self, geometry: Geometry, members: int) -> None:
        self.fields: list[tuple[np.dtype[Any], tuple[int, ...]]] = [
            (np.dtype(np.float64), (geometry.shards, ROW)),
            (np.dtype(np.uint8), (members, geometry.marks)),
            (np.dtype(np.float64), (len(geometry.tiles),)),
            (np.dtype([("length", np.int64), ("more", np.int64), ("data", np.uint8, _MAILBOX_BYTES)]), (members,)),
        ]

    @property
    def size_bytes(self) -> int:
        return sum(self._bytes(dtype, shape) for dtype, shape in self.fields)

    @staticmethod
    def _bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
        return -(-int(np.prod(shape)) * dtype.itemsize // 64) * 64

    def map(self, segment: Segment, offset_bytes: int) -> list[np.ndarray]:
        arrays = []
        for dtype, shape in self.fields:
            arrays.append(np.ndarray(shape, dtype, buffer=segment.buffer, offset=offset_bytes))
            offset_bytes += self._bytes(dtype, shape)
        return arrays

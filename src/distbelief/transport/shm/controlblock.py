"""What one generation keeps in shared memory: its members' words, what they told each other, and their slots.

The generation itself writes it; the generation after it reads in it what was done before the change, also by members
that are dead. Nothing here decides or waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from distbelief.shards import Range
from distbelief.transport.exchange import Geometry
from distbelief.transport.shm.futexflags import Abort, Words, row_bytes
from distbelief.transport.shm.liveness import LIFE_BYTES, Life
from distbelief.transport.shm.segment import KeeperClient, Segment

BEGUN, UNITS, WORKING, ARRIVED, MEASURED, SETTLED, MAIL, TILES = range(8)  # a member's words; one more per tile follows
MAILBOX_BYTES = 1 << 18


@dataclass(frozen=True)
class Past:
    """An earlier generation whose unfinished step may be taken over."""

    name: str
    geometry: Geometry


class Ledger:
    """A generation's memory, mapped. Slots are mapped when they are first used."""

    def __init__(
        self, keeper: KeeperClient, past: Past, rank: int = 0, abort: Abort | None = None, *, exists: bool = False
    ) -> None:
        geometry = past.geometry
        self.geometry = geometry
        self.members = len(geometry.slots)
        self._keeper = keeper
        self._name = past.name
        words = TILES + len(geometry.tiles)
        lives_at = row_bytes(words) * self.members
        arrays, size_bytes = _places(geometry, lives_at + LIFE_BYTES * self.members)
        control = keeper.segment(f"{past.name}/control", -1 if exists else size_bytes)
        self.words = Words(control.buffer, 0, self.members, words, rank, abort or Abort())
        self.lives = [Life(control.buffer, lives_at + LIFE_BYTES * member) for member in range(self.members)]
        maps = [np.ndarray(shape, dtype, buffer=control.buffer, offset=at) for dtype, shape, at in arrays]
        self.rows, self.untouched, self.squares, self.nodes, self.integers, self.mailboxes = maps[:6]
        self.claims, self.backups, self.backup_rows, self.backup_touched = maps[6:]
        self._slots: dict[tuple[int, int], Segment] = {}
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}

    def slot(self, rank: int, index: int) -> Segment:
        if (rank, index) not in self._slots:
            self._slots[rank, index] = self._keeper.segment(self.slot_name(rank, index), self.geometry.slot_bytes)
        return self._slots[rank, index]

    def has_slot(self, rank: int, index: int) -> bool:
        """Whether the slot can be used without waiting for the process that keeps it."""
        if (rank, index) not in self._slots:
            found = self._keeper.segment_soon(self.slot_name(rank, index), self.geometry.slot_bytes)
            if found is None:
                return False
            self._slots[rank, index] = found
        return True

    def slot_name(self, rank: int, index: int) -> str:
        return f"{self._name}/slot/{rank}.{index}"

    def tiles(self, rank: int, index: int) -> list[torch.Tensor]:
        """A slot, tile by tile."""
        if (rank, index) not in self._views:
            slot = self.slot(rank, index)
            self._views[rank, index] = [slot.tensor(t.dtype, t.offset_bytes, t.numel) for t in self.geometry.tiles]
        return self._views[rank, index]

    def write_nodes(self, rank: int, nodes: Sequence[tuple[Range, int]]) -> None:
        mine = self.nodes[rank]
        mine[0] = (len(nodes), 0, 0)
        for number, ((first, end), slot) in enumerate(nodes, start=1):
            mine[number] = (first, end, slot)

    def read_nodes(self, rank: int) -> list[tuple[Range, int]]:
        theirs = self.nodes[rank]
        return [((int(first), int(end)), int(slot)) for first, end, slot in theirs[1 : 1 + int(theirs[0][0])]]

    def arrived(self, rank: int, stamp: int) -> bool:
        """Whether that member has published its whole part of the step, and told of it."""
        return self.words.get(rank, ARRIVED) == stamp


def _places(geometry: Geometry, at: int) -> tuple[list[tuple[np.dtype[Any], tuple[int, ...], int]], int]:
    """Where the small arrays lie behind the words, and where they end."""
    members = len(geometry.slots)
    fields: list[tuple[Any, tuple[int, ...]]] = [
        (np.float64, (geometry.shards, geometry.row)),
        (np.uint8, (members, geometry.marks)),
        (np.float64, (len(geometry.tiles),)),
        (np.int32, (members, 1 + geometry.shards, 3)),
        (np.uint8, (members, geometry.integer_bytes)),
        ([("length", np.int64), ("more", np.int64), ("data", np.uint8, MAILBOX_BYTES)], (members,)),
        (np.int64, (geometry.shards,)),
        (np.int64, (members, geometry.shards)),
        (np.float64, (geometry.shards, geometry.row)),
        (np.uint8, (geometry.shards, geometry.marks)),
    ]
    places = []
    for kind, shape in fields:
        dtype = np.dtype(kind)
        places.append((dtype, shape, at))
        at += -(-int(np.prod(shape)) * dtype.itemsize // 64) * 64
    return places, at

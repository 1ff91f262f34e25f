"""The control block: the shared memory of one generation, except its gradients.

    | futex flags, a row per member | liveness mutexes | small arrays: rows, untouched marks, squares, nodes, … |

Members record there their progress (`BEGUN`, `ARRIVED`, …), their contributions to a step, and their published partial
sums. The next generation reads these entries, also those of members that died. `ControlBlock` maps the block, and the
slots on demand; it decides nothing and does not wait. `SharedBackups` are the entries about backup copies of late
shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from distbelief.errors import NotEnoughMemory
from distbelief.shards import Range
from distbelief.transport.abort import Abort
from distbelief.transport.exchange import Backup, Geometry, tile_views
from distbelief.transport.shm.futexflags import LIVENESS_BYTES, FutexFlags, ThreadLiveness, flag_row_bytes
from distbelief.transport.shm.segment import Segment, SegmentClient

BEGUN, UNITS, WORKING, ARRIVED, MEASURED, SETTLED, MAIL, TILES = range(8)  # a member's flags; a flag per tile follows
MAILBOX_BYTES = 1 << 18
_SLOTS = 1 << 16


@dataclass(frozen=True)
class GenerationMemory:
    """Names the shared memory of one generation: the present one, or an earlier one whose unfinished step may be taken
    over."""

    name: str
    geometry: Geometry


class ControlBlock:
    """One generation's control block, mapped. Slots are mapped at first use. `exists`: an earlier generation made it,
    and its slots."""

    def __init__(
        self,
        segments: SegmentClient,
        generation: GenerationMemory,
        rank: int = 0,
        abort: Abort | None = None,
        *,
        exists: bool = False,
    ) -> None:
        geometry = generation.geometry
        self.geometry = geometry
        self.members = len(geometry.slots)
        self._segments = segments
        self._name = generation.name
        self._slot_bytes = -1 if exists else geometry.slot_bytes
        flags = TILES + len(geometry.tiles)
        liveness_at = flag_row_bytes(flags) * self.members
        places, size_bytes = _places(geometry, liveness_at + LIVENESS_BYTES * self.members)
        memory = segments.segment(f"{generation.name}/control", -1 if exists else size_bytes)
        self.flags = FutexFlags(memory.buffer, 0, self.members, flags, rank, abort or Abort())
        self.liveness = [
            ThreadLiveness(memory.buffer, liveness_at + LIVENESS_BYTES * member) for member in range(self.members)
        ]
        arrays = {
            name: np.ndarray(shape, dtype, buffer=memory.buffer, offset=at)
            for name, (dtype, shape, at) in places.items()
        }
        self.rows = arrays["rows"]
        self.untouched = arrays["untouched"]
        self.squares = arrays["squares"]
        self.nodes = arrays["nodes"]
        self.integers = arrays["integers"]
        self.mailboxes = arrays["mailboxes"]
        self.claims = arrays["claims"]
        self.backups = arrays["backups"]
        self.backup_rows = arrays["backup_rows"]
        self.backup_touched = arrays["backup_touched"]
        self._slots: dict[tuple[int, int], Segment] = {}
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}

    def slot(self, rank: int, index: int) -> Segment:
        if (rank, index) not in self._slots:
            self._slots[rank, index] = self._segments.segment(self.slot_name(rank, index), self._slot_bytes)
        return self._slots[rank, index]

    def has_slot(self, rank: int, index: int) -> bool:
        """Whether the slot can be used without waiting for the segment server."""
        if (rank, index) not in self._slots:
            found = self._segments.segment_soon(self.slot_name(rank, index), self.geometry.slot_bytes)
            if found is None:
                return False
            self._slots[rank, index] = found
        return True

    def slot_name(self, rank: int, index: int) -> str:
        return f"{self._slots_of(rank)}{index}"

    def _slots_of(self, rank: int) -> str:
        return f"{self._name}/slot/{rank}."

    def release_slots(self, rank: int, keep: Sequence[int]) -> None:
        """Make the segment server forget a member's slots, except `keep`."""
        self._segments.drop_all(self._slots_of(rank), [str(index) for index in keep])

    def tiles(self, rank: int, index: int) -> list[torch.Tensor]:
        """A slot, tile by tile."""
        if (rank, index) not in self._views:
            self._views[rank, index] = tile_views(self.slot(rank, index), self.geometry.tiles)
        return self._views[rank, index]

    def write_nodes(self, rank: int, nodes: Sequence[tuple[Range, int]]) -> None:
        """Record the partial sums that a member has published: (subtree, slot)."""
        mine = self.nodes[rank]
        mine[0] = (len(nodes), 0, 0)
        for number, ((first, end), slot) in enumerate(nodes, start=1):
            mine[number] = (first, end, slot)

    def read_nodes(self, rank: int) -> list[tuple[Range, int]]:
        theirs = self.nodes[rank]
        return [((int(first), int(end)), int(slot)) for first, end, slot in theirs[1 : 1 + int(theirs[0][0])]]

    def arrived(self, rank: int, stamp: int) -> bool:
        """Whether the member has published all its partial sums and its contribution to the step."""
        return self.flags.get(rank, ARRIVED) == stamp


class SharedBackups:
    """Backup copies of late shards, in one generation's control block. See `Backups`.

    Only a shard's owner publishes it; before it starts a shard it looks for a backup. Both copies have the same bits,
    so the members need not agree on one of them.
    """

    def __init__(self, block: ControlBlock, rank: int) -> None:
        self._block = block
        self._rank = rank

    def starting(self, units: int) -> None:
        self._block.flags.set(UNITS, units)

    def late(self, stamp: int) -> list[tuple[int, int]]:
        flags, ranks = self._block.flags, range(self._block.members)
        if any(flags.get(rank, BEGUN) != stamp for rank in ranks):
            return []  # a member that has not begun may still need memory
        return [
            (rank, flags.get(rank, UNITS)) for rank in ranks if rank != self._rank and flags.get(rank, ARRIVED) < stamp
        ]

    def has_room(self, slot: int) -> bool:
        try:
            return self._block.has_slot(self._rank, slot)
        except NotEnoughMemory:
            return False

    def claim(self, shard: int, stamp: int) -> bool:
        """Two members may claim a shard at the same moment; then both compute it, which only wastes time."""
        if int(self._block.claims[shard]) == stamp:
            return False
        self._block.claims[shard] = stamp
        return True

    def offer(self, shard: int, stamp: int, slot: int, row: np.ndarray, touched: np.ndarray) -> None:
        self._block.backup_rows[shard] = row
        self._block.backup_touched[shard] = touched
        self._block.backups[self._rank, shard] = stamp * _SLOTS + slot

    def find(self, shard: int, stamp: int) -> Backup | None:
        for rank in np.flatnonzero(self._block.backups[:, shard] // _SLOTS == stamp).tolist():
            slot = int(self._block.backups[rank, shard]) % _SLOTS
            if not self._block.has_slot(rank, slot):
                return None  # the shard's owner computes it
            tiles = self._block.tiles(rank, slot)
            return Backup(tiles, self._block.backup_rows[shard], self._block.backup_touched[shard])
        return None


def _places(geometry: Geometry, at: int) -> tuple[dict[str, tuple[np.dtype[Any], tuple[int, ...], int]], int]:
    """The small arrays, each with its type, shape and offset, from `at` on; and the end of the last one."""
    members = len(geometry.slots)
    mailbox = [("length", np.int64), ("more", np.int64), ("data", np.uint8, MAILBOX_BYTES)]
    arrays: dict[str, tuple[Any, tuple[int, ...]]] = {
        "rows": (np.float64, (geometry.shards, geometry.row)),
        "untouched": (np.uint8, (members, geometry.marks)),
        "squares": (np.float64, (len(geometry.tiles),)),
        "nodes": (np.int32, (members, 1 + geometry.shards, 3)),
        "integers": (np.uint8, (members, geometry.integer_bytes)),
        "mailboxes": (mailbox, (members,)),
        "claims": (np.int64, (geometry.shards,)),
        "backups": (np.int64, (members, geometry.shards)),
        "backup_rows": (np.float64, (geometry.shards, geometry.row)),
        "backup_touched": (np.uint8, (geometry.shards, geometry.marks)),
    }
    places = {}
    for name, (kind, shape) in arrays.items():
        dtype = np.dtype(kind)
        places[name] = (dtype, shape, at)
        at += -(-int(np.prod(shape)) * dtype.itemsize // 64) * 64
    return places, at

"""Backup copies of late shards: who is late, which of its shards others have computed for it, and where they lie.

Only the member that a shard is assigned to publishes it, as always; before it starts a shard it looks whether somebody
else has it already. Both copies have the same bits, so nothing must be agreed on: whoever is first, wins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from distbelief.errors import NotEnoughMemory
from distbelief.transport.shm.controlblock import ARRIVED, BEGUN, UNITS, Ledger

_SLOTS = 1 << 16


@dataclass(frozen=True)
class Backup:
    """One shard, computed by somebody else."""

    tiles: list[torch.Tensor]
    row: np.ndarray
    touched: np.ndarray


class Backups:
    """A member's view of one generation's ledger."""

    def __init__(self, ledger: Ledger, rank: int) -> None:
        self._ledger = ledger
        self._rank = rank

    def starting(self, units: int) -> None:
        """I am about to start another of my shards; `units` counts it."""
        self._ledger.words.set(UNITS, units)

    def late(self, stamp: int) -> list[tuple[int, int]]:
        """(rank, shards that it has begun) of the members that are still computing this step."""
        words = self._ledger.words
        return [
            (rank, words.get(rank, UNITS))
            for rank in range(self._ledger.members)
            if rank != self._rank and words.get(rank, ARRIVED) < stamp and words.get(rank, BEGUN) == stamp
        ]

    def has_room(self, slot: int) -> bool:
        """Whether that slot of mine can be had now."""
        try:
            return self._ledger.has_slot(self._rank, slot)
        except NotEnoughMemory:
            return False

    def claim(self, shard: int, stamp: int) -> bool:
        """Say that I compute it; False: somebody does already. Two may still do so at once, which only wastes time."""
        if int(self._ledger.claims[shard]) == stamp:
            return False
        self._ledger.claims[shard] = stamp
        return True

    def offer(self, shard: int, stamp: int, slot: int, row: np.ndarray, touched: np.ndarray) -> None:
        """It lies in this slot of mine, whole."""
        self._ledger.backup_rows[shard] = row
        self._ledger.backup_touched[shard] = touched
        self._ledger.backups[self._rank, shard] = stamp * _SLOTS + slot

    def find(self, shard: int, stamp: int) -> Backup | None:
        """A backup of this shard of the step, if anybody has finished one."""
        for rank in np.flatnonzero(self._ledger.backups[:, shard] // _SLOTS == stamp).tolist():
            slot = int(self._ledger.backups[rank, shard]) % _SLOTS
            if not self._ledger.has_slot(rank, slot):
                return None  # its owner can compute the shard itself
            tiles = self._ledger.tiles(rank, slot)
            return Backup(tiles, self._ledger.backup_rows[shard], self._ledger.backup_touched[shard])
        return None

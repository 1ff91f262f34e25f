"""A member that is done with its shards and waits for a late one computes some of the late one's shards for it.

Which shard is worth it is a pure choice, from how far the others are and how long a shard takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from distbelief.transport.abort import Aborted
from distbelief.transport.exchange import Backups

_WORTH = 1.2
"""A backup must promise to be there before the late member would start the shard, with some room for error."""

Compute = Callable[[int, int, int], tuple[np.ndarray, np.ndarray]]
"""(step, shard, slot) -> (row, touched) of the shard, computed into that slot of mine."""


@dataclass(frozen=True)
class Late:
    """A member that is still computing."""

    shards: Sequence[int]
    """All of its shards of this step, in the order in which it computes them."""
    begun: int


def choose(late: Sequence[Late], elapsed_s: float, mine_s: float) -> list[int]:
    """The shards that are worth a backup, the most urgent first.

    `elapsed_s` is how long the step has lasted, `mine_s` what a shard takes me. The last shard of a member is the one
    that it would come to last.

    >>> choose([Late([4, 5, 6, 7], begun=1)], elapsed_s=3.0, mine_s=1.0)
    [7, 6, 5]
    >>> choose([Late([4, 5, 6, 7], begun=3)], elapsed_s=3.0, mine_s=1.5)
    []
    """
    found: list[tuple[float, int]] = []
    for member in late:
        shard_s = elapsed_s / max(member.begun - 0.5, 0.5)  # the one that it has begun counts half
        for ahead, shard in enumerate(member.shards[member.begun :]):
            starts_in_s = (ahead + 0.5) * shard_s
            if starts_in_s > _WORTH * mine_s:
                found.append((starts_in_s, shard))
    return [shard for _, shard in sorted(found, reverse=True)]


class Helper:
    """Computes backups while this member waits in one step after the other."""

    def __init__(self, backups: Backups, first_slot: int, compute: Compute) -> None:
        self._backups = backups
        self._first_slot = first_slot
        self._compute = compute
        self._slots = 0
        self.seconds = 0.0
        """Spent on backups, over all steps."""
        self.count = 0

    def begin(self) -> None:
        self._slots = 0

    def help(self, step: int, work: Callable[[int], Sequence[int]], elapsed_s: float, mine_s: float) -> bool:
        """Compute one backup if there is one worth it. `work`: rank -> its shards of this step."""
        late = [Late(work(rank), begun) for rank, begun in self._backups.late(step + 1)]
        wanted, slot = choose(late, elapsed_s, mine_s), self._first_slot + self._slots
        if not wanted or not self._backups.has_room(slot):
            return False
        shard = next((s for s in wanted if self._backups.claim(s, step + 1)), -1)
        if shard < 0:
            return False
        started = time.perf_counter()
        self._slots += 1
        try:
            row, touched = self._compute(step, shard, slot)
        except Aborted:
            raise
        except Exception:
            # The late member may have come after all, and the others have begun to update what this one was reading.
            # If the shard itself is at fault, its owner will say so.
            return True
        finally:
            self.seconds += time.perf_counter() - started
        self._backups.offer(shard, step + 1, slot, row, touched)
        self.count += 1
        return True

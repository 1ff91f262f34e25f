"""What every replica keeps from one round to the next (kept.py): where no death loses it.

    | begun | stamps, two per replica | the bytes of each replica, twice |

A replica's state before round T lies in place T mod 2 with the stamp T + 1; whoever trains it in that round writes the
state after it to the other place. So a round can be given up and begun again. Members of one host have one such memory,
which outlives them. Others have one each, and before a round is committed they send what they have written to the next
member (unless that costs too much): then it takes the death of two neighbours at one moment to lose a replica.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch

from distbelief.shards import Range
from distbelief.transport.exchange import Exchange

_PAGE = 4096
_TOLD = struct.Struct("q")  # the round that a member has begun, plus 1


class InnerStates:
    """Views of that memory. `ranges`: the replicas of each member; `copies`: whether they are sent on."""

    def __init__(self, exchange: Exchange, ranges: Sequence[Range], size_bytes: int, copies: bool = True) -> None:
        self.copies = copies and not exchange.shares_state and exchange.size > 1
        self.exchange = exchange
        self._ranges = ranges
        self._replicas = ranges[-1][1]
        self.size_bytes = size_bytes
        head = -(-8 * (1 + 2 * self._replicas) // _PAGE) * _PAGE
        self._stretch = -(-size_bytes // 64) * 64
        segment = exchange.state(head + 2 * self._replicas * self._stretch, "inner")
        words = np.frombuffer(segment.buffer, np.int64, 1 + 2 * self._replicas)
        self._begun, self._stamps = words[:1], words[1:].reshape(self._replicas, 2)
        self._places = [
            [segment.tensor(torch.uint8, head + (2 * r + place) * self._stretch, size_bytes) for place in range(2)]
            for r in range(self._replicas)
        ]

    def read(self, replica: int, number: int) -> torch.Tensor:
        """The bytes of its state before that round."""
        assert self._has(replica, number), f"the state of replica {replica} before round {number} is not here"
        return self._places[replica][number % 2]

    def write(self, replica: int, number: int, state: torch.Tensor) -> None:
        self._stamps[replica, number % 2] = 0
        self._places[replica][number % 2].copy_(state)
        self._stamps[replica, number % 2] = number + 1

    def begin(self, number: int) -> None:
        """I begin that round."""
        self._begun[0] = number + 1

    def set(self, number: int, states: Sequence[torch.Tensor]) -> None:
        """The run goes on from here: these are the states of all replicas before that round."""
        self._stamps[:] = 0
        for replica, state in enumerate(states):
            self.write(replica, number, state)

    def _has(self, replica: int, number: int) -> bool:
        """Before the first round, memory that nobody has written to is the state of an optimizer that has not begun."""
        stamp = int(self._stamps[replica, number % 2])
        return stamp == number + 1 or (number == 0 and stamp == 0)

    # --- members that have a memory each -----------------------------------------------------------------------------

    def agree(self, number: int) -> tuple[bool, list[int]]:
        """A generation begins, before that round: every member gets what it needs from those who have it. Returns
        whether somebody had begun the round, and the replicas whose state nobody has; then nothing was moved."""
        mine = bytes(self._has(replica, number) for replica in range(self._replicas))
        everybody = self.exchange.gather(_TOLD.pack(int(self._begun[0])) + mine)
        begun = any(_TOLD.unpack_from(theirs)[0] == number + 1 for theirs in everybody)
        holders = [
            [rank for rank, theirs in enumerate(everybody) if theirs[_TOLD.size + replica]]
            for replica in range(self._replicas)
        ]
        lost = [replica for replica, ranks in enumerate(holders) if not ranks]
        if not lost:
            for replica, ranks in enumerate(holders):
                owner = self._owner(replica)
                wanting = [owner, self._next(owner)] if self.copies else [owner]
                self._send(replica, number, ranks[0], [rank for rank in wanting if rank not in ranks])
        return begun, lost

    def send_on(self, number: int) -> None:
        """My replicas' states before that round, to the next member. Every other one gives first, so that no chain of
        members waits for its head."""
        if not self.copies:
            return
        for turn in range(2):
            for replica in range(self._replicas):
                owner = self._owner(replica)
                if owner % 2 == turn:
                    self._send(replica, number, owner, [self._next(owner)])

    def _send(self, replica: int, number: int, source: int, receivers: Sequence[int]) -> None:
        if not receivers:
            return
        mine = self.exchange.rank in receivers
        if mine:
            self._stamps[replica, number % 2] = 0
        self.exchange.transfer(self._places[replica][number % 2], source, receivers)
        if mine:
            self._stamps[replica, number % 2] = number + 1

    def _owner(self, replica: int) -> int:
        return next(rank for rank, (first, end) in enumerate(self._ranges) if first <= replica < end)

    def _next(self, rank: int) -> int:
        return (rank + 1) % self.exchange.size

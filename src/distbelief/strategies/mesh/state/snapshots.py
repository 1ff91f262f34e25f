"""Snapshots in memory: every member keeps a copy of its own state and a copy of its neighbour's.

A part with one holder is lost when that member dies. All members then go back to the last snapshot, and the neighbour
supplies the dead member's state. Unless the user sets the interval, it follows from the cost of a snapshot.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distbelief.checkpoint.rules.boxes import Box, sizes, volume
from distbelief.strategies.mesh.state.memberstate import Forms, MemberState
from distbelief.transport.gloo.group import TorchGroup

PRICE = 0.01
"""The share of the time that snapshots may take if the user does not set the interval."""
FIRST_INTERVAL = 10  # steps, before the cost of a snapshot is known
LONGEST_INTERVAL = 1000
_CHUNK_BYTES = 64 << 20
_ALIGN = 64


@dataclass(frozen=True)
class Snapshot:
    """The boxes of one member's state, in one block of memory."""

    step: int
    boxes: Mapping[str, Box]
    memory: torch.Tensor
    pieces: Mapping[str, tuple[Box, torch.Tensor]]

    @classmethod
    def empty(cls, step: int, boxes: Mapping[str, Box], forms: Forms) -> Snapshot:
        places, at = {}, 0
        for name, box in boxes.items():
            places[name] = at
            size = volume(box) * forms[name][0].itemsize
            at += -(-size // _ALIGN) * _ALIGN
        memory = torch.empty(at, dtype=torch.uint8)
        pieces = {}
        for name, box in boxes.items():
            dtype = forms[name][0]
            part = memory[places[name] : places[name] + volume(box) * dtype.itemsize]
            pieces[name] = (box, part.view(dtype).view(sizes(box)))
        return cls(step, boxes, memory, pieces)


class Snapshots:
    """The snapshots that a worker keeps from one generation to the next."""

    def __init__(self, every: int | None) -> None:
        """`every`: steps between snapshots; None: chosen by their cost; 0: no snapshots."""
        self.kept: list[Snapshot] = []
        """This member's own snapshot and its neighbour's, of the same step."""
        self._every = every
        self._took_s = 0.0
        self._interval = 0
        self._measured = False
        self._told = 0
        """The interval in the last message for people."""
        self._next = -1
        self._since = (0, 0.0)

    def begin(self, state: MemberState, needed: bool) -> None:
        """Begin a generation. `needed`: some part has one holder only."""
        wanted = needed and self._every != 0
        self._next = state.applied if wanted else -1
        if not wanted:
            self.kept = []
        self._since = (state.applied, time.perf_counter())

    def is_due(self, applied: int) -> bool:
        return applied == self._next

    def take(self, group: TorchGroup, state: MemberState, held: Sequence[Mapping[str, Box]], forms: Forms) -> None:
        """Collective, between two steps. The old snapshots are kept until the new ones are complete."""
        first, since = self._since
        steps = state.applied - first
        step_s = (time.perf_counter() - since) / steps if steps else 0.0
        started = time.perf_counter()
        mine = Snapshot.empty(state.applied, held[group.rank], forms)
        for name, (_, values) in state.tensors().items():
            mine.pieces[name][1].copy_(values)
        before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        theirs = Snapshot.empty(state.applied, held[before], forms)
        with group.network():
            works = [dist.isend(part, after) for part in torch.split(mine.memory, _CHUNK_BYTES) if part.numel()]
            works += [dist.irecv(part, before) for part in torch.split(theirs.memory, _CHUNK_BYTES) if part.numel()]
            for work in works:
                if work is not None:
                    work.wait()
        took_s = time.perf_counter() - started
        self.kept = [*self.kept, mine, theirs]
        told = [
            one.split() for one in group.gather(f"{took_s} {step_s} {self._interval} {int(self._measured)}".encode())
        ]
        self.kept = [mine, theirs]  # the exchange shows that every member has its new snapshots
        self._took_s = max(float(one[0]) for one in told)
        # Rank 0 decides: newcomers know less, and all members must take the next snapshot at the same step.
        step_s, known, measured = float(told[0][1]), int(told[0][2]), bool(int(told[0][3]))
        goes_on = measured and step_s == 0  # a new generation, which uses what the last one measured
        self._interval = self._every or (known if goes_on else interval(self._took_s, step_s))
        self._measured = measured or step_s > 0
        self._next = state.applied + self._interval
        self._since = (state.applied, time.perf_counter())

    def news(self) -> list[str]:
        """A line for people when the interval is first known or has changed much."""
        settled = self._every is not None or self._measured
        if not settled or self._told / 2 < self._interval < self._told * 2:
            return []
        self._told = self._interval
        how = "as asked for" if self._every else f"so that they take at most {100 * PRICE:.0f} % of the time"
        size_bytes = sum(one.memory.numel() for one in self.kept)
        return [
            f"snapshots: every {self._interval} steps a neighbour gets a copy of each part ({how}); one takes "
            f"{1e3 * self._took_s:.0f} ms, and the copies {size_bytes / 1e6:.1f} MB of a worker's memory"
        ]


def interval(took_s: float, step_s: float) -> int:
    """The number of steps to the next snapshot.

    >>> interval(0.03, 0.1), interval(0.01, 0.0)
    (30, 10)
    """
    if not step_s:
        return FIRST_INTERVAL
    return min(max(math.ceil(took_s / (PRICE * step_s)), 1), LONGEST_INTERVAL)

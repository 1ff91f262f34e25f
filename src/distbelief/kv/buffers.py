"""A client's own memory for what it pushes: it stays as it is until the push counts, then it is used again.

Where servers can map it, messages only name it; elsewhere its bytes are sent from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from distbelief.errors import DistBeliefError
from distbelief.transport.shm.segment import Segment, SegmentClient

SMALLEST = 1 << 16
LENT_BYTES = 256 << 20
"""With more than this on its way, a push waits for those before it."""


@dataclass
class Buffer:
    name: str
    """Under which servers find it; empty: they cannot."""
    segment: Segment
    pushes: list[tuple[int, int]] = field(default_factory=list)
    """(slice, number) of the pushes that are made from it."""

    @property
    def size_bytes(self) -> int:
        return self.segment.size_bytes

    def tensor(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        return self.segment.tensor(dtype, 0, count)


class Buffers:
    def __init__(self, client: int, segments: SegmentClient | None) -> None:
        self._client = client
        self._segments = segments
        self._made = 0
        self._free: list[Buffer] = []
        self._lent: list[Buffer] = []
        self._mapped: dict[tuple[str, int], tuple[str, Segment]] = {}

    @property
    def lent_bytes(self) -> int:
        return sum(one.size_bytes for one in self._lent)

    @property
    def shares(self) -> bool:
        return self._segments is not None

    def lend(self, size_bytes: int) -> Buffer:
        """One of that size at least."""
        size = max(SMALLEST, 1 << (size_bytes - 1).bit_length())
        fitting = (one for one in self._free if one.size_bytes >= size)
        found = min(fitting, key=lambda one: one.size_bytes, default=None)
        if found is not None:
            self._free.remove(found)
        elif self._segments is not None:
            self._made += 1
            name = f"client {self._client}/{self._made}"
            found = Buffer(name, self._segments.segment(name, size))
        else:
            found = Buffer("", Segment.private(size))
        found.pushes.clear()
        self._lent.append(found)
        return found

    def take_back(self, waits_for: Callable[[int, int], bool]) -> None:
        """Those whose pushes all count."""
        still: list[Buffer] = []
        for one in self._lent:
            one.pushes = [push for push in one.pushes if waits_for(*push)]
            (still if one.pushes else self._free).append(one)
        self._lent = still

    def close(self) -> None:
        if self._segments is not None:
            self._segments.close()

    def values(self, key: str, slice_: int, name: str) -> Segment | None:
        """What a server has of a key; None: it has it no more. When another server has it, the memory of the old one is
        let go."""
        assert self._segments is not None
        held = self._mapped.get((key, slice_))
        if held is None or held[0] != name:
            try:
                held = self._mapped[key, slice_] = (name, self._segments.segment(name))
            except DistBeliefError:
                return None
        return held[1]

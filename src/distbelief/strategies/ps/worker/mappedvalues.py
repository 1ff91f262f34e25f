"""A worker's parameters in the servers' own memory, on one host: what a server has updated need not be copied.

Whole pages of a slice are mapped to their places among the worker's values; the few bytes at its ends, which share a
page with the next slice, are copied. That is right only where no server changes values with which somebody may still
compute: under `ps:sync` a step is applied when all sums of it are there, and then nobody needs the values before it.
A member whose part others have computed may see a mixture, and what it makes of that counts for nothing.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch

from distbelief.shards import Range
from distbelief.strategies.ps.protocol.messages import VALUES_AT, values_at
from distbelief.strategies.ps.rules.slicing import SliceShape
from distbelief.transport.shm.segment import Segment

SUPPORTED = mmap.PAGESIZE == VALUES_AT
"""Values lie as far into a page as in the layout."""


def whole_pages(shape: SliceShape) -> Range:
    """The bytes of the layout that are pages of this slice alone. Empty, where a slice is too small for one."""
    first = -(-shape.first_byte // VALUES_AT) * VALUES_AT
    return first, max(shape.end_byte // VALUES_AT * VALUES_AT, first)


class MappedValues:
    def __init__(self, values: Segment, server_memory: Callable[[str], Segment]) -> None:
        self._values = values
        self._server_memory = server_memory
        self._shown: dict[int, str] = {}
        """By slice: whose memory is mapped."""
        self._ends: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def take(self, shape: SliceShape, name: str) -> None:
        """Have the values of a slice that lie in the memory of that name."""
        if self._shown.get(shape.number) != name:
            self._map(shape, self._server_memory(name))
            self._shown[shape.number] = name
        for mine, theirs in self._ends[shape.number]:
            mine.copy_(theirs)

    def _map(self, shape: SliceShape, memory: Segment) -> None:
        ahead = values_at(shape.first_byte) - shape.first_byte
        first, end = whole_pages(shape)
        if first < end:
            self._values.lay(first, memory, ahead + first, end - first)
        ends = [(shape.first_byte, shape.end_byte)]
        if first < end:
            ends = [(shape.first_byte, first), (end, shape.end_byte)]
        self._ends[shape.number] = [
            (self._values.tensor(torch.uint8, a, b - a), memory.tensor(torch.uint8, ahead + a, b - a))
            for a, b in ends
            if a < b
        ]

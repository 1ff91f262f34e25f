"""A member under parameter servers that computes on an accelerator.

What servers read and show is in the host's memory. The device has the copy of the parameters that shards are computed
with, and partial sums, which are added up there. What is pushed is copied to the host first, once for all shards that
are in it; values come straight from the servers' memory where that can be mapped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from distbelief.strategies.ps.worker.exchange import ServedGroup
from distbelief.transport.device.exchange import STRETCH_BYTES
from distbelief.transport.device.memory import DeviceMemory, pin
from distbelief.transport.shm.segment import Memory, Segment


@dataclass(kw_only=True)
class ServedOnDevice(ServedGroup):
    """See `ServedGroup`. Copies have come to their end when a method returns."""

    device: torch.device
    kept: dict[str, Memory]
    """What this process keeps on the device from one generation to the next."""
    apart: ClassVar[bool] = True
    grain_bytes: ClassVar[int] = STRETCH_BYTES
    _rooms: dict[int, DeviceMemory] = field(default_factory=dict)
    _opened: dict[str, Segment] = field(default_factory=dict)

    def room(self, index: int) -> Memory:
        if index not in self._rooms:
            self._rooms[index] = DeviceMemory(self.slot_bytes, self.device)
        return self._rooms[index]

    def bring(self, index: int) -> None:
        slot = self._pinned(self.slot(index)[0])
        computed = self.room(index).tensor(torch.uint8, 0, self.slot_bytes)
        slot.tensor(torch.uint8, 0, self.slot_bytes).copy_(computed)

    def values(self, size_bytes: int) -> Memory:
        if "values" not in self.kept:
            self.kept["values"] = DeviceMemory(size_bytes, self.device)
        return self.kept["values"]

    def server_memory(self, name: str) -> Segment:
        if name not in self._opened:  # it is held: what nobody holds is not pinned any more
            self._opened[name] = self._pinned(super().server_memory(name))
        return self._opened[name]

    def _pinned(self, segment: Segment) -> Segment:
        if self.device.type == "cuda":
            pin(segment)
        return segment

"""The exchange of members on accelerators whose gradients are compressed: on the device, so that only encoded bytes go
to the host and over the network, and only those come back.

Residuals are on the device, too. What is not compressed, as buffers, and all of a step that goes uncompressed, travels
as in `DeviceExchange`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distbelief.compression.exchanges.base import CompressedExchange
from distbelief.transport.device.accelerator import Accelerator
from distbelief.transport.device.exchange import DeviceExchange, Slot
from distbelief.transport.exchange import Exchange, Geometry, Source


class CodedOnDevice(DeviceExchange):
    """See `Exchange`. `coder`: how gradients are compressed and travel; it was made for this accelerator."""

    def __init__(self, coder: CompressedExchange, geometry: Geometry, on: Accelerator) -> None:
        super().__init__(coder, geometry, on.device, on.kept)
        self.coder = coder
        self._slots = {index: self._shaped(memory) for index, memory in enumerate(coder.slots)}
        self._sums = self._shaped(coder.totals)

    def _is_coded(self, tile: int) -> bool:
        """In this step. The tiles of a stretch all are, or none."""
        return self.coder.packing and tile in self.coder.compression.tiles

    def _copy_out(self, number: int) -> None:
        tiles = self.stretches[number].tiles
        if self._is_coded(tiles.start):
            self.coder.encode(tiles)
        else:
            super()._copy_out(number)

    def _outgoing(self, source: Source, number: int) -> torch.Tensor:
        part = super()._outgoing(source, number)
        return part + self._owed(number) if self.coder.releases(source, self.stretches[number].tiles.start) else part

    def _owed(self, number: int) -> torch.Tensor:
        stretch = self.stretches[number]
        first = stretch.offset_bytes // 4
        return self.coder.residuals.before[first : first + stretch.numel]

    def _add_up(self) -> Slot:
        if self.size > 1:
            self.coder.reduced(0)  # all sums come with the first
            return super()._add_up()
        alone = super()._add_up()
        for number, stretch in enumerate(self.stretches):
            if any(self.coder.releases(source, stretch.tiles.start) for source in self._plan.sources):
                alone.stretches[number].add_(self._owed(number))
        return alone

    def _added_on_host(self) -> Sequence[int]:
        return [tile for tile in self.tiles if not self._is_coded(tile)]


def coder_of(exchange: Exchange) -> CompressedExchange | None:
    """What compresses in there; None: nothing does."""
    found = exchange.coder if isinstance(exchange, CodedOnDevice) else exchange
    return found if isinstance(found, CompressedExchange) else None

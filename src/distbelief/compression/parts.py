"""Encodes the float32 parameters of a flat layout one by one, side by side in one block of bytes.

Unlike tiles, parameters follow from the model alone. So a plain loop can compute the same encoding, and the encoding
does not depend on how memory is divided.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distbelief.compression import block
from distbelief.compression.codec import Codec
from distbelief.compression.methods import codec_of
from distbelief.compression.option import canonical
from distbelief.transport.exchange import CompressedParameter
from distbelief.transport.shm.segment import Memory


@dataclass(frozen=True)
class EncodedParameter:
    """Where one parameter lies in the layout, in the residual and in the encoded block."""

    place: CompressedParameter
    rest: slice
    """The parameter's elements in the residual."""
    code: slice
    """The parameter's bytes in the encoded block."""


class PartsCoding:
    """Encodes and decodes parameters. `method`: an option of `compression.option`.

    >>> coding = PartsCoding("topk=0.5", [CompressedParameter(0, 0, (2,)), CompressedParameter(1, 64, (1, 2))])
    >>> from distbelief.transport.shm.segment import Segment
    >>> slot, rest = Segment.private(4096), torch.zeros(coding.elements)
    >>> slot.tensor(torch.float32, 0, 2)[:] = torch.tensor([1.0, 2.0])
    >>> code = coding.room()
    >>> coding.write(slot, rest, np.array([1, 0]), code)
    >>> coding.vector(coding.parts[0], slot).tolist(), rest[coding.parts[0].rest].tolist()
    ([0.0, 2.0], [1.0, 0.0])
    """

    def __init__(self, method: str, places: Iterable[CompressedParameter]) -> None:
        self.method = canonical(method)
        self.codec: Codec = codec_of(method)
        self.parts: list[EncodedParameter] = []
        self.elements = self.size_bytes = 0
        for place in places:
            numel = place.part.stop - place.part.start
            if not numel:
                continue
            size_bytes = block.size_bytes(self.codec, numel)
            rest = slice(self.elements, self.elements + numel)
            self.parts.append(EncodedParameter(place, rest, slice(self.size_bytes, self.size_bytes + size_bytes)))
            self.elements += block.padded(numel)
            self.size_bytes += block.padded(size_bytes)

    def room(self) -> Tensor:
        return torch.zeros(self.size_bytes, dtype=torch.uint8)

    def vector(self, part: EncodedParameter, slot: Memory) -> Tensor:
        first = part.place.part.start
        return slot.tensor(torch.float32, 4 * first, part.place.part.stop - first)

    def write(self, slot: Memory, rest: Tensor, touched: np.ndarray, into: Tensor) -> None:
        """Encode the slot's values plus the residual. Afterwards the slot has the values that a receiver decodes, and
        `rest` has the new residual. Parameters that were not touched are sent as zeros and keep their residual: perhaps
        nobody uses their value."""
        for part in self.parts:
            vector, code = self.vector(part, slot), into[part.code]
            owed = rest[part.rest] if touched[part.place.mark] else torch.zeros_like(vector.zero_())
            block.write(self.codec, owed, vector, code)
            block.read(self.codec, code, vector)

    def read(self, part: EncodedParameter, code: Tensor, out: Tensor) -> None:
        block.read(self.codec, code[part.code], out)

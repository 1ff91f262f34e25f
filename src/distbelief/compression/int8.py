"""Block-wise int8: each block of the vector has one float32 scale, its largest magnitude / 127, and a byte per element.

An element is off by at most half its block's scale, and zeros are exact. A block that contains a NaN or an infinity
arrives as NaN in every element, never as wrong numbers. No scale is below 2^-126.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distbelief.compression.codec import CHUNK, Encoded, Frame, Header, checked, frame_for, output, received
from distbelief.compression.option import Option, checked_block

_MAGNITUDE = np.int32(0x7FFFFFFF)
_LEVELS = 127
_SMALLEST = _LEVELS * 2.0**-126  # below it the scale would not be a normal number, and its inverse no number at all


@dataclass(frozen=True)
class Int8:
    """
    >>> codec = Int8(block=8)
    >>> sent = codec.encode(torch.tensor([127.0, -2.2, 0.0, 0.7]))
    >>> sent.size_bytes, codec.decode(sent.header, sent.frames).tolist()
    (8, [127.0, -2.0, 0.0, 1.0])
    """

    block: int = 1024

    def __post_init__(self) -> None:
        checked_block(self.block)

    def __str__(self) -> str:
        return str(Option("int8", self.block))

    def frames(self, length: int) -> list[Frame]:
        return [(torch.float32, self._count(length)), (torch.int8, length)]

    def encode(self, vector: Tensor, reuse: Encoded | None = None) -> Encoded:
        return self._encode(checked(vector), None, reuse)

    def encode_keeping(self, rest: Tensor, vector: Tensor, reuse: Encoded | None = None) -> Encoded:
        return self._encode(checked(vector), checked(rest), reuse)

    def decode(self, header: Header, frames: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        count = self._count(max(header.length, 0))
        scales, levels = received(self, header, frames, (torch.float32, count), (torch.int8, header.length))
        out = output(header, out)
        for blocks, elements, shape in self._stretches(header.length):
            out[elements].copy_(levels[elements]).view(shape).mul_(scales[blocks].unsqueeze(1))
        return out

    def _encode(self, vector: Tensor, rest: Tensor | None, reuse: Encoded | None) -> Encoded:
        length = vector.numel()
        scales = frame_for(reuse, 0, torch.float32, self._count(length))
        levels = frame_for(reuse, 1, torch.int8, length)
        scratch = torch.empty(min(max(CHUNK, self.block), length))
        for blocks, elements, shape in self._stretches(length):
            values = (vector[elements] if rest is None else rest[elements].add_(vector[elements])).view(shape)
            room, scale = scratch[: values.numel()].view(shape), scales[blocks]
            _largest_magnitudes(values, room, scale)
            torch.mul(values, (_LEVELS / scale).unsqueeze(1), out=room)
            levels[elements].view(shape).copy_(room.round_())
            scale.div_(_LEVELS)
            if rest is not None:
                values.sub_(room.mul_(scale.unsqueeze(1)))
        # The largest float32 numbers arrive as infinities; their residual is then zero, too.
        if not bool((scales * _LEVELS).isfinite().all()):
            self._spoil_broken(scales, levels)
            if rest is not None:
                rest.nan_to_num_(0.0, 0.0, 0.0)
        return Encoded(Header(str(self), length), [scales, levels])

    def encode_rows(self, rests: Tensor, vectors: Tensor, frames: Sequence[Tensor]) -> list[Tensor | int]:
        rests.add_(vectors)
        for blocks, elements, width in self._pieces(vectors.shape[1]):
            values = _by_block(rests[:, elements], width)
            largest = (values.view(torch.int32) & int(_MAGNITUDE)).amax(-1).view(torch.float32).clamp_min_(_SMALLEST)
            rounded = values.mul((_LEVELS / largest).unsqueeze(-1)).round_()
            # By a tensor: CUDA multiplies by the inverse of a plain number instead, which rounds otherwise.
            scale = largest.div_(torch.full_like(largest[:1, :1], _LEVELS))
            broken = ~scale.isfinite()
            levels = _by_block(frames[1][:, elements], width)
            levels.copy_(rounded).masked_fill_(broken.unsqueeze(-1), 1)
            values.sub_(rounded.mul_(scale.unsqueeze(-1)))
            frames[0][:, blocks].copy_(scale.masked_fill_(broken, torch.nan))
        rests.nan_to_num_(0.0, 0.0, 0.0)
        return [self._count(vectors.shape[1]), vectors.shape[1]]

    def decode_rows(self, frames: Sequence[Tensor], counts: Tensor, out: Tensor) -> None:
        for blocks, elements, width in self._pieces(out.shape[1]):
            values = out[:, elements].copy_(frames[1][:, elements])
            _by_block(values, width).mul_(frames[0][:, blocks].unsqueeze(-1))

    def _pieces(self, length: int) -> list[tuple[slice, slice, int]]:
        """(blocks, elements, elements per block): all whole blocks, then the shorter last block."""
        whole = length // self.block
        pieces = [
            (slice(0, whole), slice(0, whole * self.block), self.block),
            (slice(whole, whole + 1), slice(whole * self.block, length), length - whole * self.block),
        ]
        return [piece for piece in pieces if piece[1].stop > piece[1].start]

    def _spoil_broken(self, scales: Tensor, levels: Tensor) -> None:
        """Replace scales that are not finite by NaN, so that the whole block arrives as NaN, and set the block's levels
        to a fixed value: the result of converting NaN to an integer depends on the processor."""
        for at in (~scales.isfinite()).nonzero().flatten().tolist():
            scales[at] = torch.nan
            levels[at * self.block : (at + 1) * self.block] = 1

    def _count(self, length: int) -> int:
        return -(-length // self.block)

    def _stretches(self, length: int) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
        """(blocks, elements, shape as rows of blocks): several whole blocks at a time, then the shorter last block."""
        whole = length // self.block
        at_a_time = max(1, CHUNK // self.block)
        for first in range(0, whole, at_a_time):
            last = min(first + at_a_time, whole)
            yield slice(first, last), slice(first * self.block, last * self.block), (last - first, self.block)
        if whole * self.block < length:
            yield slice(whole, whole + 1), slice(whole * self.block, length), (1, length - whole * self.block)


def _by_block(rows: Tensor, width: int) -> Tensor:
    return rows.view(rows.shape[0], rows.shape[1] // width, width)


def _largest_magnitudes(values: Tensor, room: Tensor, out: Tensor) -> None:
    """The largest magnitude of each row, at least `_SMALLEST`; overwrites `room`.

    The comparison uses the bits without the sign, as integers: in that order a NaN is above an infinity, and an
    infinity above all numbers. numpy does this ten times faster than torch finds the maximum of float32 rows.
    """
    bits = room.numpy().view(np.int32)
    np.bitwise_and(values.numpy().view(np.int32), _MAGNITUDE, out=bits)
    bits.max(axis=1, out=out.numpy().view(np.int32))
    out.clamp_min_(_SMALLEST)

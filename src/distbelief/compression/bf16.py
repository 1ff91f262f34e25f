"""bfloat16: the upper half of a float32, rounded to the nearest, ties to even. Half the bytes, 8 bits of precision.

NaN stays NaN and infinities stay infinite; a number that rounds beyond the largest bfloat16 becomes an infinity. The
processor decides which NaN pattern results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distbelief.compression.codec import (
    CHUNK,
    Encoded,
    Frame,
    Header,
    checked,
    chunks,
    frame_for,
    output,
    received,
)


@dataclass(frozen=True)
class Bf16:
    """
    >>> codec = Bf16()
    >>> sent = codec.encode(torch.tensor([1.00390625, 1.005, -3.0]))
    >>> sent.size_bytes, codec.decode(sent.header, sent.frames).tolist()
    (6, [1.0, 1.0078125, -3.0])
    """

    def __str__(self) -> str:
        return "bf16"

    def frames(self, length: int) -> list[Frame]:
        return [(torch.bfloat16, length)]

    def encode(self, vector: Tensor, reuse: Encoded | None = None) -> Encoded:
        vector = checked(vector)
        frame = frame_for(reuse, 0, torch.bfloat16, vector.numel()).copy_(vector)
        return Encoded(Header(str(self), vector.numel()), [frame])

    def decode(self, header: Header, frames: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        (frame,) = received(self, header, frames, (torch.bfloat16, header.length))
        return output(header, out).copy_(frame)

    def encode_keeping(self, rest: Tensor, vector: Tensor, reuse: Encoded | None = None) -> Encoded:
        vector, rest = checked(vector), checked(rest)
        frame = frame_for(reuse, 0, torch.bfloat16, vector.numel())
        # torch subtracts a bfloat16 from a float32 forty times slower than it widens one and subtracts then.
        wide = torch.empty(min(CHUNK, vector.numel()))
        for part in chunks(vector.numel()):
            values, sent = rest[part].add_(vector[part]), frame[part]
            sent.copy_(values)
            values.sub_(wide[: len(sent)].copy_(sent)).nan_to_num_(0.0, 0.0, 0.0)
        return Encoded(Header(str(self), vector.numel()), [frame])

    def encode_rows(self, rests: Tensor, vectors: Tensor, frames: Sequence[Tensor]) -> list[Tensor | int]:
        sent = frames[0].copy_(rests.add_(vectors))
        rests.sub_(sent.float()).nan_to_num_(0.0, 0.0, 0.0)
        return [vectors.shape[1]]

    def decode_rows(self, frames: Sequence[Tensor], counts: Tensor, out: Tensor) -> None:
        out.copy_(frames[0])

"""The interface of codecs: a codec turns a flat float32 vector into frames of raw bytes, and back.

The header is data (msgspec writes it); the frames are contiguous tensors that travel unchanged. A receiver may get the
same tensors or their bytes (uint8). This module also has the checks that all codecs share. A codec holds no state: the
caller keeps the residual of an encoding (`encode_keeping`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from distbelief.errors import DistBeliefError

CHUNK = 1 << 17
"""The number of elements processed at a time: 512 kB of float32 and a scratch buffer of the same size stay in a core's
cache.
"""


Frame = tuple[torch.dtype, int]
"""The data type of a frame, and its largest number of elements."""


class Header(msgspec.Struct, frozen=True):
    """The values that the receiver needs for decoding: the codec and the length of the vector."""

    codec: str
    length: int


@dataclass(frozen=True)
class Encoded:
    """An encoded vector. The frames belong to the caller of `encode` until the caller passes them as `reuse`."""

    header: Header
    frames: list[Tensor]

    @property
    def size_bytes(self) -> int:
        """Bytes of the frames, without the header (about twenty bytes)."""
        return sum(frame.numel() * frame.element_size() for frame in self.frames)


class Codec(Protocol):
    """Encodes flat float32 vectors. `str(codec)` is the option's text (`option.py`)."""

    def frames(self, length: int) -> list[Frame]:
        """The frames of a vector of this length, at their largest size."""

    def encode(self, vector: Tensor, reuse: Encoded | None = None) -> Encoded:
        """Encode the vector. `reuse`: an earlier result that nobody reads any more; the codec may overwrite its
        frames."""

    def decode(self, header: Header, frames: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """Decode the vector, as far as the encoding kept it, into `out` if given."""

    def encode_keeping(self, rest: Tensor, vector: Tensor, reuse: Encoded | None = None) -> Encoded:
        """Encode rest + vector, and leave the encoding's error in `rest`, in as few passes over memory as possible. The
        error of elements that are not finite is set to zero: a NaN must not be sent again in every later step."""

    def encode_rows(self, rests: Tensor, vectors: Tensor, frames: Sequence[Tensor]) -> list[Tensor | int]:
        """`encode_keeping` for many vectors of one length, one per row, on any device: with few large operations, and
        without waiting for the device. Each frame has one row per vector and its largest size. Returns, for each frame,
        the number of elements in use; it may differ by row."""

    def decode_rows(self, frames: Sequence[Tensor], counts: Tensor, out: Tensor) -> None:
        """Decode the vectors of `encode_rows`. `counts` (rows, frames): elements in use. Invalid numbers become NaN,
        because a device operation cannot raise an error."""


def checked(vector: Tensor) -> Tensor:
    """The vector detached from its autograd graph. Raises an error if the vector cannot be encoded."""
    if vector.dtype != torch.float32 or vector.device.type != "cpu":
        raise DistBeliefError(
            f"only float32 vectors in host memory are compressed, not {_words(vector)}",
            hint="copy the gradients to float32 on the CPU first, or send them uncompressed",
        )
    if vector.dim() != 1 or not vector.is_contiguous():
        raise DistBeliefError(
            f"only flat, contiguous vectors are compressed, not {_words(vector)}",
            hint="flatten it: vector.reshape(-1)",
        )
    return vector.detach()


def output(header: Header, out: Tensor | None) -> Tensor:
    """The tensor to decode into: `out` if it has the right size, else a new vector."""
    if out is None:
        return torch.empty(header.length)
    out = checked(out)
    if out.numel() != header.length:
        raise DistBeliefError(
            f"a vector of {header.length} elements cannot be decoded to one of {out.numel()}",
            hint="sender and receiver cut their parameters differently: start both with the same job and version",
        )
    return out


def received(
    codec: Codec, header: Header, frames: Sequence[Tensor], *expected: tuple[torch.dtype, int]
) -> list[Tensor]:
    """The frames as tensors of the expected types and lengths; a frame may arrive as a tensor of its type or as
    bytes."""
    if header.codec != str(codec):
        raise DistBeliefError(f"a vector that was encoded as {header.codec} cannot be decoded as {codec}")
    sizes = [frame.numel() * frame.element_size() for frame in frames]
    wanted = [count * dtype.itemsize for dtype, count in expected]
    if header.length < 0 or sizes != wanted:
        raise DistBeliefError(
            f"a {codec} message of {header.length} elements has frames of {sizes} bytes, expected {wanted}",
            hint="the message was truncated or corrupted in transit; run the same version on both sides",
        )
    return [
        frame.reshape(-1).view(dtype) if count else torch.empty(0, dtype=dtype)
        for frame, (dtype, count) in zip(frames, expected, strict=True)
    ]


def frame_for(reuse: Encoded | None, at: int, dtype: torch.dtype, count: int) -> Tensor:
    """The frame with this index of an earlier result if it has the right size, else a new frame."""
    if reuse is not None and at < len(reuse.frames):
        old = reuse.frames[at]
        if old.dtype == dtype and old.numel() == count:
            return old
    return torch.empty(count, dtype=dtype)


def chunks(length: int) -> Iterator[slice]:
    """
    >>> [(part.start, part.stop) for part in chunks(140_000)]
    [(0, 131072), (131072, 140000)]
    """
    return (slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK))


def _words(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)} on {tensor.device}"

"""What a codec is: a value that turns a flat float32 vector into frames of raw bytes, and back.

The header is data (msgspec writes it), the frames are contiguous tensors that go on the wire as they are. What arrives
may be the same tensors or their bytes (uint8). Here are also the checks that all codecs share. A codec holds no state:
its caller keeps what an encoding loses (`encode_keeping`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from distbelief.errors import DistBeliefError

CHUNK = 1 << 17
"""Elements that are worked on at a time: 512 kB of float32 and a scratch of the same size stay in a core's cache."""


Frame = tuple[torch.dtype, int]
"""The type of a frame, and how many elements it has at most."""


class Header(msgspec.Struct, frozen=True):
    """What the receiver must know to decode: who encoded it, and how long the vector was."""

    codec: str
    length: int


@dataclass(frozen=True)
class Encoded:
    """A vector as it goes on the wire. The frames belong to whoever asked for them, until they are given for reuse."""

    header: Header
    frames: list[Tensor]

    @property
    def size_bytes(self) -> int:
        """Bytes of the frames; the header is some twenty more."""
        return sum(frame.numel() * frame.element_size() for frame in self.frames)

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than the float32 vector has."""
        if not self.header.length:
            return 1.0
        return 4 * self.header.length / self.size_bytes if self.size_bytes else math.inf


class Codec(Protocol):
    """Encodes flat float32 vectors. Its `str` is an option (`option.py`)."""

    def frames(self, length: int) -> list[Frame]:
        """Those that a vector of this length becomes, at their largest."""

    def encode(self, vector: Tensor, reuse: Encoded | None = None) -> Encoded:
        """The vector as frames. `reuse`: an earlier result whose frames may be written over, as nobody needs them."""

    def decode(self, header: Header, frames: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """The vector again, or what is left of it, written to `out` if given."""

    def encode_keeping(self, rest: Tensor, vector: Tensor, reuse: Encoded | None = None) -> Encoded:
        """Encode rest + vector, and leave in `rest` what that lost, in as few passes over memory as can be. Where it is
        not finite nothing is left: a NaN that was sent once must not come back in every later step."""

    def encode_rows(self, rests: Tensor, vectors: Tensor, frames: Sequence[Tensor]) -> list[Tensor | int]:
        """The same for many vectors of one length at a time, one in each row, in the memory of any device: with few and
        large operations, and without waiting for the device. The frames have a row for each vector and their largest
        size; returned is how many elements of each frame count, which may differ by row."""

    def decode_rows(self, frames: Sequence[Tensor], counts: Tensor, out: Tensor) -> None:
        """The vectors again. `counts`: (rows, frames), elements that count. Numbers that cannot be make NaN: a device
        cannot stop for an error."""


def checked(vector: Tensor) -> Tensor:
    """The vector without its graph, or an error that says why it cannot be encoded."""
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
    """Where to decode to: `out` if it fits, else a new vector."""
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
    """The frames as tensors of these types and lengths, whether they came as such or as bytes."""
    if header.codec != str(codec):
        raise DistBeliefError(f"a vector that was encoded as {header.codec} cannot be decoded as {codec}")
    sizes = [frame.numel() * frame.element_size() for frame in frames]
    wanted = [count * dtype.itemsize for dtype, count in expected]
    if header.length < 0 or sizes != wanted:
        raise DistBeliefError(
            f"a {codec} message of {header.length} elements has frames of {sizes} bytes, expected {wanted}",
            hint="the message was cut or mixed up on its way; the same version must run on both sides",
        )
    return [
        frame.reshape(-1).view(dtype) if count else torch.empty(0, dtype=dtype)
        for frame, (dtype, count) in zip(frames, expected, strict=True)
    ]


def frame_for(reuse: Encoded | None, at: int, dtype: torch.dtype, count: int) -> Tensor:
    """The frame at that place of an earlier result if it has the right size, else a new one."""
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

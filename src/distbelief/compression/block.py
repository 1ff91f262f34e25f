"""An encoded vector as one block of bytes. The block's size depends on the codec and the vector's length alone, so the
receiver knows it in advance.

| elements in each frame, int32 | frame | frame … |       each of them from a multiple of 8 bytes on
"""

from __future__ import annotations

import torch
from torch import Tensor

from distbelief.compression.codec import Codec, Encoded, Header
from distbelief.errors import DistBeliefError

_ALIGNED = 8
_LINE = 64


def size_bytes(codec: Codec, length: int) -> int:
    """
    >>> from distbelief.compression.methods import Int8
    >>> size_bytes(Int8(block=8), 20)
    48
    """
    return _places(codec, length)[-1][1]


def padded(size: int) -> int:
    """The size, rounded up to whole cache lines: vectors and blocks that lie side by side each begin a line."""
    return -(-size // _LINE) * _LINE


def write(codec: Codec, rest: Tensor, vector: Tensor, block: Tensor) -> None:
    """Encode rest + vector into the block, and store the encoding error in `rest`."""
    room = _frames(codec, vector.numel(), block)
    sent = codec.encode_keeping(rest, vector, Encoded(Header(str(codec), vector.numel()), room))
    counts = _heads(block, len(room))
    for at, (frame, space) in enumerate(zip(sent.frames, room, strict=True)):
        counts[at] = frame.numel()
        if frame.data_ptr() != space.data_ptr():  # a codec that makes frames of its own
            space[: frame.numel()].copy_(frame)


def read(codec: Codec, block: Tensor, out: Tensor) -> None:
    """Decode the vector that `write` has put into the block."""
    room = _frames(codec, out.numel(), block)
    counts = _heads(block, len(room)).tolist()
    if any(not 0 <= count <= space.numel() for count, space in zip(counts, room, strict=True)):
        raise DistBeliefError(
            f"a {codec} message of {out.numel()} elements says that its frames have {counts}",
            hint="the message was corrupted in transit; run the same version on both sides",
        )
    frames = [space[:count] for count, space in zip(counts, room, strict=True)]
    codec.decode(Header(str(codec), out.numel()), frames, out)


def write_rows(codec: Codec, rests: Tensor, vectors: Tensor, blocks: Tensor) -> None:
    """`write` for many vectors of one length, one per row, on any device; the host does not wait for the device."""
    room = _frames(codec, vectors.shape[1], blocks)
    heads = _heads(blocks, len(room))
    for at, count in enumerate(codec.encode_rows(rests, vectors, room)):
        heads[:, at] = count


def read_rows(codec: Codec, blocks: Tensor, out: Tensor) -> None:
    """`read` for many blocks of one length, one per row, written by `write_rows` or `write`."""
    room = _frames(codec, out.shape[1], blocks)
    codec.decode_rows(room, _heads(blocks, len(room)), out)


def _heads(blocks: Tensor, frames: int) -> Tensor:
    return blocks[..., : 4 * frames].view(torch.int32)


def _frames(codec: Codec, length: int, block: Tensor) -> list[Tensor]:
    """The frames as views of one block, or of the blocks in all rows."""
    places = _places(codec, length)
    return [
        block[..., end : end + count * dtype.itemsize].view(dtype)
        for (_, end), (dtype, count) in zip(places, codec.frames(length), strict=False)
    ]


def _places(codec: Codec, length: int) -> list[tuple[int, int]]:
    """(first byte, end) of the head and of each frame."""
    frames = codec.frames(length)
    places = [(0, _aligned(4 * len(frames)))]
    for dtype, count in frames:
        places.append((places[-1][1], _aligned(places[-1][1] + count * dtype.itemsize)))
    return places


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED

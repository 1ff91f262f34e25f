"""The codecs bf16, int8 and top-k; constructs them, or PowerSGD, from a compression option (`option.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distbelief.compression.codec import (
    CHUNK,
    Codec,
    Encoded,
    Frame,
    Header,
    checked,
    chunks,
    frame_for,
    output,
    received,
)
from distbelief.compression.option import Option, checked_block, checked_fraction, parse
from distbelief.compression.powersgd import LowRank
from distbelief.errors import DistBeliefError, JobError

# --- bf16: the upper half of a float32 ----------------------------------------------------------------------------
# Rounded to the nearest, ties to even: half the bytes, 8 bits of precision. NaN stays NaN and infinities stay
# infinite; a number that rounds beyond the largest bfloat16 becomes an infinity. The processor decides which NaN
# pattern results.


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


# --- int8: a byte per element, and a scale per block --------------------------------------------------------------
# The scale of a block is its largest magnitude / 127, in float32. An element is off by at most half its block's
# scale, and zeros are exact. A block that contains a NaN or an infinity arrives as NaN in every element, never as
# wrong numbers. No scale is below 2^-126.

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


# --- top-k: the k largest magnitudes and their indices ------------------------------------------------------------
# The rest becomes the residual (`encode_keeping`) or is lost (`encode`). NaN and infinities rank above all numbers,
# so a NaN or an infinity is always sent. Equal magnitudes are taken from the front, so the same vector gives the same
# message on every machine. Zeros are never sent: a vector with fewer than k other elements gives a smaller message.

_TOPK_MAGNITUDE = np.int32(0x7FFFFFFF)
_SAMPLES = 1 << 15
_LONGEST = 2**31 - 1

Integers = NDArray[np.signedinteger[Any]]


@dataclass(frozen=True)
class TopK:
    """
    >>> codec = TopK(0.25)
    >>> sent = codec.encode(torch.tensor([0.5, -4.0, 0.0, 4.0, 1.0, 0.0, 0.0, 0.1]))
    >>> sent.size_bytes, codec.decode(sent.header, sent.frames).tolist()
    (16, [0.0, -4.0, 0.0, 4.0, 0.0, 0.0, 0.0, 0.0])
    """

    fraction: float

    def __post_init__(self) -> None:
        checked_fraction(self.fraction)

    def __str__(self) -> str:
        return str(Option("topk", self.fraction))

    def count(self, length: int) -> int:
        """The largest number of elements sent of a vector of this length; at least one if the vector is not empty."""
        return min(length, max(1, int(self.fraction * length + 0.5)))

    def frames(self, length: int) -> list[Frame]:
        return [(torch.int32, self.count(length)), (torch.float32, self.count(length))]

    def encode(self, vector: Tensor, reuse: Encoded | None = None) -> Encoded:
        """Encode the vector. `reuse` is ignored: messages differ in length and are small."""
        vector = checked(vector)
        _check_length(vector)
        places = _largest(vector.numpy().view(np.int32), self.count(vector.numel()))
        # Not from_numpy: of an empty array it makes a tensor that cannot be viewed as bytes.
        frames = [torch.empty(len(places), dtype=torch.int32), torch.empty(len(places))]
        frames[0].numpy()[:] = places
        np.take(vector.numpy(), places, out=frames[1].numpy(), mode="clip")
        return Encoded(Header(str(self), vector.numel()), frames)

    def decode(self, header: Header, frames: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        sent = frames[0].numel() * frames[0].element_size() // 4 if frames else 0
        places, values = received(self, header, frames, (torch.int32, sent), (torch.float32, sent))
        if sent and not 0 <= int(places.min()) <= int(places.max()) < header.length:
            raise DistBeliefError(f"a {self} message of {header.length} elements has indices outside of it")
        out = output(header, out).zero_()
        return out.index_copy_(0, places.long(), values)

    def encode_keeping(self, rest: Tensor, vector: Tensor, reuse: Encoded | None = None) -> Encoded:
        encoded = self.encode(checked(rest).add_(checked(vector)))
        places, values = encoded.frames
        rest.index_fill_(0, places.long(), 0.0)
        if not bool(values.isfinite().all()):
            rest.nan_to_num_(0.0, 0.0, 0.0)
        return encoded

    def encode_rows(self, rests: Tensor, vectors: Tensor, frames: Sequence[Tensor]) -> list[Tensor | int]:
        _check_length(vectors)
        if not vectors.numel():
            return [0, 0]
        values = rests.add_(vectors)
        chosen = _choose(values.view(torch.int32) & int(_TOPK_MAGNITUDE), self.count(vectors.shape[1]))
        places, found = _places(chosen, self.count(vectors.shape[1]))
        frames[0].copy_(places)
        frames[1].copy_(values.gather(1, places))
        rests.masked_fill_(chosen, 0.0).nan_to_num_(0.0, 0.0, 0.0)
        return [found, found]

    def decode_rows(self, frames: Sequence[Tensor], counts: Tensor, out: Tensor) -> None:
        out.zero_()
        if not out.numel():
            return
        given = _numbers(frames[0].shape[1], out) < counts[:, :1]
        # Entries beyond the count belong to an earlier message: they repeat the first element, or write a zero.
        places = frames[0].where(given, frames[0][:, :1].where(given[:, :1], 0)).long()
        values = frames[1].where(given, frames[1][:, :1].where(given[:, :1], 0.0))
        known = (places >= 0) & (places < out.shape[1])
        out.scatter_(1, places.where(known, 0), values.where(known, torch.nan))


def _check_length(vector: Tensor) -> None:
    if vector.numel() > _LONGEST:
        raise DistBeliefError(
            f"top-k takes vectors of up to {_LONGEST} elements, not {vector.numel()}", hint="send it in slices"
        )


def _choose(magnitudes: Tensor, count: int) -> Tensor:
    """Whether each element is among the `count` largest of its row: equal magnitudes from the front, never zeros.

    Devices differ in which of several equal elements `torch.topk` returns, but the smallest returned value is always
    the same.
    """
    limit = magnitudes.topk(count, dim=1, sorted=False).values.amin(1, keepdim=True).clamp_min_(1)
    above, equal = magnitudes > limit, magnitudes == limit
    return above | (equal & (_running(equal) <= count - above.sum(1, keepdim=True)))


def _places(chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """For each row: the first `count` chosen indices in order, filled up with zeros; and their number."""
    running = _running(chosen)
    found = running[:, -1:].contiguous()
    wanted = _numbers(count, chosen).add(1).expand(len(chosen), count)
    places = torch.searchsorted(running, wanted.contiguous())
    return places.where(wanted <= found, 0), found[:, 0]


def _running(marks: Tensor) -> Tensor:
    """The number of marked elements in the row up to each index. One cumulative sum over all rows: a device runs a
    single long sum with full parallelism, but many short ones with little."""
    line = marks.reshape(-1).cumsum(0, dtype=torch.int32).view_as(marks)
    return line - (line[:, -1:] - marks.sum(1, keepdim=True, dtype=torch.int32))


def _numbers(count: int, beside: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=beside.device)


def _largest(bits: Integers, count: int) -> Integers:
    """The indices, in order, of the `count` largest magnitudes of float32 numbers given as their bits.

    Without the sign bit, the integers have the order of the magnitudes, with NaN above all. A sample gives a limit
    above which there are probably enough elements; one pass finds these, and the exact limit is searched only among
    them. The sample affects time alone: if too few are found, all elements are searched.
    """
    found = _at_least(bits, _guess(bits, count))
    if len(found) < count:
        found = _at_least(bits, 1)
    if len(found) <= count:
        return found
    magnitudes = bits[found] & _TOPK_MAGNITUDE
    limit = np.partition(magnitudes, len(found) - count)[len(found) - count]
    chosen = magnitudes > limit
    chosen[np.flatnonzero(magnitudes == limit)[: count - int(chosen.sum())]] = True
    places: Integers = found[chosen]
    return places


def _guess(bits: Integers, count: int) -> int:
    """A magnitude, as bits, that probably somewhat more than `count` elements reach."""
    if len(bits) <= _SAMPLES:
        return 1
    stride = len(bits) // _SAMPLES
    sample = bits[::stride] & _TOPK_MAGNITUDE
    expected = count / stride
    enough = int(1.1 * expected + 4 * expected**0.5 + 8)
    if enough >= len(sample):
        return 1
    return max(1, int(np.partition(sample, len(sample) - enough)[len(sample) - enough]))


def _at_least(bits: Integers, limit: int) -> Integers:
    """The indices, in order, of all elements with at least this magnitude."""
    scratch = np.empty(min(CHUNK, len(bits)), np.int32)
    found = [np.empty(0, np.int64)]
    for part in chunks(len(bits)):
        magnitudes = np.bitwise_and(bits[part], _TOPK_MAGNITUDE, out=scratch[: part.stop - part.start])
        found.append(np.flatnonzero(magnitudes >= limit) + part.start)
    return np.concatenate(found)


def method_of(text: str) -> Codec | LowRank:
    """
    >>> str(method_of("int8")), str(method_of("topk=0.01")), str(method_of("powersgd=2"))
    ('int8', 'topk=0.01', 'powersgd=2')
    """
    option = parse(text)
    match option.name:
        case "bf16":
            return Bf16()
        case "int8":
            return Int8(int(option.number))
        case "topk":
            return TopK(option.number)
        case _:
            return LowRank(int(option.number))


def codec_of(text: str) -> Codec:
    """The codec that an option names, for transports that carry vectors only. Refuses PowerSGD, which needs matrices.

    >>> codec_of("powersgd=4")
    Traceback (most recent call last):
    distbelief.errors.JobError: powersgd=4 cannot compress what is pushed to servers
    """
    found = method_of(text)
    if isinstance(found, LowRank):
        raise JobError(
            f"{found} cannot compress what is pushed to servers",
            hint="it sums matrices over all members: use it with allreduce, or take bf16, int8 or topk=0.01 here",
        )
    return found

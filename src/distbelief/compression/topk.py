"""Top-k: sends the k elements of a vector with the largest magnitudes, and their indices. The rest becomes the residual
(`encode_keeping`) or is lost (`encode`).

NaN and infinities rank above all numbers, so a NaN or an infinity is always sent. Equal magnitudes are taken from the
front, so the same vector gives the same message on every machine. Zeros are never sent: a vector with fewer than k
other elements gives a smaller message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distbelief.compression.codec import CHUNK, Encoded, Frame, Header, checked, chunks, output, received
from distbelief.compression.option import Option, checked_fraction
from distbelief.errors import DistBeliefError

_MAGNITUDE = np.int32(0x7FFFFFFF)
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
            raise DistBeliefError(f"a {self} message of {header.length} elements names places outside of it")
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
        chosen = _choose(values.view(torch.int32) & int(_MAGNITUDE), self.count(vectors.shape[1]))
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
    magnitudes = bits[found] & _MAGNITUDE
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
    sample = bits[::stride] & _MAGNITUDE
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
        magnitudes = np.bitwise_and(bits[part], _MAGNITUDE, out=scratch[: part.stop - part.start])
        found.append(np.flatnonzero(magnitudes >= limit) + part.start)
    return np.concatenate(found)

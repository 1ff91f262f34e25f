"""A sum that is encoded in both directions, vector by vector.

Every vector has an owner. The owner receives the other members' encoded vectors, adds them to its own, and encodes the
sum; all members decode the sum, the owner too. The encoding member keeps the encoding's error as a residual. So the sum
of a vector depends on the vector and its owner alone, not on neighbouring vectors: another group with the same owner
and the same vector gets the same bits.

`SumCoding` is the arithmetic. `CodedSum` sums the vectors of a torch group in one call, with one message per owner.
`CodedTiles` (tiles.py) sends each tile as soon as it is computed, as an exchange does. `CodedParts` (partialsums.py) is
another algorithm: sums are not encoded, and the order of the additions does not depend on the members.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distbelief.compression import block
from distbelief.compression.codec import Codec


class SumCoding:
    """Encodes, decodes and adds the vectors of such a sum, and counts the seconds that it takes."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.codec_s = 0.0
        """Seconds of encoding and decoding since the caller last set this to 0."""

    def encode(self, rest: Tensor, vector: Tensor, into: Tensor, before: Tensor | None = None) -> None:
        """Encode the vector plus the residual `rest`, which becomes the new residual. `before`: the residual to begin
        with, if `rest` does not have it yet."""
        started = time.perf_counter()
        if before is not None:
            rest.copy_(before)
        block.write(self.codec, rest, vector, into)
        self.codec_s += time.perf_counter() - started

    def decode(self, content: Tensor, out: Tensor) -> Tensor:
        started = time.perf_counter()
        block.read(self.codec, content, out)
        self.codec_s += time.perf_counter() - started
        return out

    def add(self, total: Tensor, contents: Iterable[Tensor], scratch: Tensor) -> None:
        """Add the other members' encoded vectors to the owner's vector `total`, in the order of `contents`: by rank."""
        for content in contents:
            total.add_(self.decode(content, scratch))


class CodedSum:
    """Sums vectors over a group. `sizes`: elements of each vector; `owners`: the rank in the group of each vector's
    owner."""

    def __init__(self, codec: Codec, sizes: Sequence[int], owners: Sequence[int], group: dist.ProcessGroup) -> None:
        self.wire_s = 0.0
        """Seconds that the last sum took to broadcast the encoded sums."""
        self._coding = SumCoding(codec)
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._me = dist.get_rank(group)
        self._owners = owners
        self._places: list[slice] = []
        """The slice of each vector in the block of its owner."""
        ends = [0] * len(self._ranks)
        for size, owner in zip(sizes, owners, strict=True):
            first, length = ends[owner], block.size_bytes(codec, size)
            self._places.append(slice(first, first + length))
            ends[owner] += block.padded(length)
        self._blocks = [torch.zeros(end, dtype=torch.uint8) for end in ends]
        """One block per owner: first what this member sends to the owner, then the sums that the owner broadcasts."""
        mine = [rank for rank in range(len(ends)) if rank != self._me and ends[self._me]]
        self._inbox = {rank: torch.zeros(ends[self._me], dtype=torch.uint8) for rank in mine}
        self._scratch = torch.empty(max(sizes, default=0))

    @property
    def codec_s(self) -> float:
        """Seconds that the last sum took to encode and decode."""
        return self._coding.codec_s

    @property
    def traffic(self) -> int:
        """Bytes that all members send."""
        return 2 * (len(self._ranks) - 1) * sum(one.numel() for one in self._blocks)

    @property
    def timed_bytes(self) -> int:
        """Bytes that crossed this member's link in `wire_s`, in the busier direction."""
        mine = self._blocks[self._me].numel()
        return max((len(self._ranks) - 1) * mine, sum(one.numel() for one in self._blocks) - mine)

    def add(self, vectors: Sequence[Tensor], rests: Sequence[Tensor]) -> None:
        """Sum in place: `vectors` become the sums, and `rests` the new residuals."""
        self._coding.codec_s = 0.0
        works = [dist.irecv(room, self._ranks[rank], self._group) for rank, room in self._inbox.items()]
        self._encode(vectors, rests, mine=False)
        others = [(rank, one) for rank, one in enumerate(self._blocks) if rank != self._me and one.numel()]
        works += [dist.isend(one, self._ranks[rank], self._group) for rank, one in others]
        _wait(works)
        for vector, owner, place in zip(vectors, self._owners, self._places, strict=True):
            if owner == self._me:
                received = [self._inbox[rank][place] for rank in sorted(self._inbox)]
                self._coding.add(vector, received, self._scratch[: vector.numel()])
        self._encode(vectors, rests, mine=True)
        started = time.perf_counter()
        _wait(
            [
                dist.broadcast(one, self._ranks[rank], self._group, async_op=True)
                for rank, one in enumerate(self._blocks)
                if one.numel()
            ]
        )
        self.wire_s = time.perf_counter() - started
        for vector, owner, place in zip(vectors, self._owners, self._places, strict=True):
            self._coding.decode(self._blocks[owner][place], vector)

    def _encode(self, vectors: Sequence[Tensor], rests: Sequence[Tensor], mine: bool) -> None:
        for vector, rest, owner, place in zip(vectors, rests, self._owners, self._places, strict=True):
            if (owner == self._me) is mine:
                self._coding.encode(rest, vector, self._blocks[owner][place])

    def probe(self, vectors: Sequence[Tensor]) -> float:
        """Seconds that encoding and decoding would take for vectors that were sent uncompressed."""
        self._coding.codec_s = 0.0
        rests = [torch.zeros_like(vector) for vector in vectors]
        self._encode(vectors, rests, mine=True)
        self._encode(vectors, rests, mine=False)
        for vector, owner, place in zip(vectors, self._owners, self._places, strict=True):
            self._coding.decode(self._blocks[owner][place], self._scratch[: vector.numel()])
        return self.codec_s * (2 - 1 / len(self._ranks))


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()

"""Which server a row of a sparse table belongs to.

Rows fall into 1,024 fixed buckets by a hash of their number, and servers own buckets. Buckets rather than rendezvous
over the rows themselves: the map is a list of 1,024 numbers that can be sent, versioned and changed one bucket at a
time; loads differ by at most one bucket; and a new server takes its fair share of buckets and nothing else moves.
The hash spreads consecutive and strided numbers alike: real row numbers are often multiples of something.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from distbelief.errors import DistBeliefError

BUCKETS = 1024
_SHIFT = np.uint64(64 - 10)  # the top bits; a table's own map from rows to slots uses the low ones


def mixed(numbers: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 well-mixed bits of every number (splitmix64): a bijection, so different numbers never give the same bits.

    >>> mixed(np.array([0, 1])).tolist()
    [16294208416658607535, 10451216379200822465]
    """
    bits = numbers.astype(np.uint64)  # a copy: what follows is in place
    bits += np.uint64(0x9E3779B97F4A7C15)
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


def bucket_of(rows: torch.Tensor) -> torch.Tensor:
    """The bucket of every row: for whoever keeps a map from buckets to servers of its own.

    >>> bucket_of(torch.tensor([0, 1, 2, 1]))
    tensor([904, 580, 605, 580])
    """
    return torch.from_numpy(buckets_of(rows.numpy()))


def buckets_of(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same of arrays."""
    return (mixed(rows) >> _SHIFT).astype(np.int64)


@lru_cache(maxsize=64)
def bucket_owners(servers: int) -> tuple[int, ...]:
    """The server of every bucket. Server n takes one bucket at a time from whichever of 0 to n - 1 then has most.

    >>> owners = bucket_owners(3)
    >>> [owners.count(server) for server in range(3)]
    [341, 342, 341]
    >>> sum(a != b for a, b in zip(owners, bucket_owners(4)))
    256
    """
    if not 1 <= servers <= BUCKETS:
        raise DistBeliefError(
            f"a sparse table cannot be divided among {servers} servers",
            hint=f"a table has {BUCKETS} buckets of rows: use 1 to {BUCKETS} servers",
        )
    held = [list(range(BUCKETS))]
    for _ in range(1, servers):
        new: list[int] = []
        while len(new) < BUCKETS // (len(held) + 1):
            most = max(range(len(held)), key=lambda server: (len(held[server]), -server))
            new.append(held[most].pop())
        held.append(new)
    owners = {bucket: server for server, buckets in enumerate(held) for bucket in buckets}
    return tuple(owners[bucket] for bucket in range(BUCKETS))


@lru_cache(maxsize=64)
def _owner_array(servers: int) -> torch.Tensor:
    return torch.tensor(bucket_owners(servers))


def server_of(rows: torch.Tensor, servers: int) -> torch.Tensor:
    """The number of the server, of so many, that every row belongs to.

    >>> server_of(torch.tensor([0, 1, 2, 1]), 2)
    tensor([1, 1, 1, 1])
    >>> torch.bincount(server_of(torch.arange(100_000), 2)).tolist()
    [50286, 49714]
    """
    return _owner_array(servers)[bucket_of(rows)]


def parts_for(servers: int) -> int:
    """As many as the run begins with servers, so that each has one. Two at least, for a second server to come; not
    more, since every part takes part in every update, however few of its rows are its own.

    >>> parts_for(1), parts_for(3)
    (2, 3)
    """
    return min(max(servers, 2), BUCKETS)


def part_of(rows: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """The part of every row: a run of buckets each.

    >>> part_of(np.array([0, 1, 2, 1]), 8).tolist()
    [7, 4, 4, 4]
    """
    return buckets_of(rows) * parts // BUCKETS

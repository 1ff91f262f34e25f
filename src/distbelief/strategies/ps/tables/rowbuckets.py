"""The part of the tables that a row lies in: its number hashes to one of 1,024 buckets, and a part has a run of them.

The hash spreads consecutive and strided numbers alike: row numbers are often multiples of something.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from distbelief.strategies.tables.rowinit import mixed

BUCKETS = 1024
_SHIFT = np.uint64(64 - 10)  # the top bits; the hash table of RowSlots uses the low ones


def bucket_of(rows: torch.Tensor) -> torch.Tensor:
    """The bucket of every row.

    >>> bucket_of(torch.tensor([0, 1, 2, 1]))
    tensor([904, 580, 605, 580])
    """
    return torch.from_numpy(buckets_of(rows.numpy()))


def buckets_of(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """`bucket_of` for arrays."""
    return (mixed(rows) >> _SHIFT).astype(np.int64)


def parts_for(servers: int) -> int:
    """The number of parts: the number of servers that the run begins with, so that each has one, but at least two, for
    a second server that is added later. More parts would cost time: every part takes part in every update.

    >>> parts_for(1), parts_for(3)
    (2, 3)
    """
    return min(max(servers, 2), BUCKETS)


def part_of(rows: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """The part of every row.

    >>> part_of(np.array([0, 1, 2, 1]), 8).tolist()
    [7, 4, 4, 4]
    """
    return buckets_of(rows) * parts // BUCKETS

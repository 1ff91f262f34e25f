"""The assignment of shards: one contiguous range per rank. Arithmetic on shares; it knows no workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from distbelief.shards import Range


def proportional(shards: int, shares: Sequence[float]) -> list[Range]:
    """Cut [0, shards) into one range per share, sizes in proportion to the shares, none empty.

    A member whose proportional part is below one shard gets one; the others divide the rest by largest remainder
    (the lower rank first when remainders are equal). Sums are exact fractions, so every machine cuts alike.

    >>> proportional(8, [1, 1, 2])
    [(0, 2), (2, 4), (4, 8)]
    >>> proportional(4, [1000, 1, 1])
    [(0, 2), (2, 3), (3, 4)]
    """
    if not 1 <= len(shares) <= shards:
        raise ValueError(f"{len(shares)} members cannot each have one of {shards} shards")
    if any(not math.isfinite(share) or share <= 0 for share in shares):
        raise ValueError(f"every share must be a finite number above 0, not {list(shares)}")
    return _ranges(_sizes(shards, [Fraction(share) for share in shares]))


def equal(shards: int, members: int) -> list[Range]:
    """Ranges whose sizes differ by at most one; all equal when `members` divides `shards`.

    >>> equal(8, 3)
    [(0, 3), (3, 6), (6, 8)]
    """
    if not 1 <= members <= shards:
        raise ValueError(f"{members} members cannot each have one of {shards} shards")
    size, more = divmod(shards, members)  # as `proportional` would, without a fraction for each of many members
    return _ranges([size + (rank < more) for rank in range(members)])


def _sizes(shards: int, shares: Sequence[Fraction]) -> list[int]:
    quotas = dict(enumerate(shares))
    sizes = [1] * len(shares)
    while True:
        free = shards - (len(shares) - len(quotas))
        total = sum(quotas.values())
        # Giving a small member its one shard shrinks what the others divide, so another may fall below one in turn.
        # The largest share never does: what is left is at least one shard per remaining member.
        small = [rank for rank, share in quotas.items() if free * share < total]
        if not small:
            break
        for rank in small:
            del quotas[rank]
    exact = {rank: free * share / total for rank, share in quotas.items()}
    for rank, quota in exact.items():
        sizes[rank] = math.floor(quota)
    missing = shards - sum(sizes)
    for rank in sorted(exact, key=lambda r: (math.floor(exact[r]) - exact[r], r))[:missing]:
        sizes[rank] += 1
    return sizes


def _ranges(sizes: Sequence[int]) -> list[Range]:
    ranges: list[Range] = []
    first = 0
    for size in sizes:
        ranges.append((first, first + size))
        first += size
    return ranges

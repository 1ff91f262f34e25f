"""The order of samples in an epoch: a keyed permutation, computed on demand and never stored.

A Feistel network permutes the numbers below side², the smallest square of at least the data set's size; a result
outside of the data set goes through the network again until it is inside ("cycle walking"), which is again a
permutation. A square is at most 2√n too large, so few numbers walk; a power of two can be four times too large, and was
ten times slower (measured). Memory and time depend on the number of requested positions, not on the number of samples.

The order is a pure function of (samples, seed, epoch). Runs are reproducible only if it never changes; a test pins its
values. This module knows nothing of steps, shards or the content of samples.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

import numpy as np
import numpy.typing as npt

from distbelief.shards import mix

_ROUNDS = 10  # with 6, the 120 orders of 5 samples are measurably not equally likely; with 8 they are
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
_ORDER_STREAM = 3  # streams 1 and 2 of `mix` are the seeds of shards and of samples


def positions_to_samples(
    positions: npt.NDArray[np.int64], samples: int, seed: int, epoch: int, shuffle: bool
) -> npt.NDArray[np.int64]:
    """The sample at each of these positions of an epoch. Request a whole batch in one call: it costs little more than a
    single position.

    >>> positions_to_samples(np.arange(5), 5, seed=0, epoch=0, shuffle=True)
    array([0, 3, 1, 4, 2])
    >>> positions_to_samples(np.array([10**9 - 1]), 10**9, seed=0, epoch=7, shuffle=True)
    array([266268133])
    >>> positions_to_samples(np.arange(3), 5, seed=0, epoch=0, shuffle=False)
    array([0, 1, 2])
    """
    asked = np.array(positions, dtype=np.int64)
    if asked.size and (int(asked.min()) < 0 or int(asked.max()) >= samples):
        raise ValueError(f"positions must lie in 0..{samples - 1}, got {int(asked.min())}..{int(asked.max())}")
    if not shuffle or samples == 1:
        return asked
    side = isqrt(samples - 1) + 1
    keys = _round_keys(seed, epoch)
    found = _permute(asked.ravel().astype(np.uint64), side, keys)
    outside = np.flatnonzero(found >= samples)
    while outside.size:
        found[outside] = _permute(found[outside], side, keys)
        outside = outside[found[outside] >= samples]
    return found.astype(np.int64).reshape(asked.shape)


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    return tuple(np.uint64(mix(seed, _ORDER_STREAM, epoch, number)) for number in range(_ROUNDS + 1))


def _permute(numbers: npt.NDArray[np.uint64], side: int, keys: tuple[np.uint64, ...]) -> npt.NDArray[np.uint64]:
    """One pass through the network, a bijection of the numbers below side²: (l, r) -> (r, (l + f(r)) mod side) for each
    key. Products wrap around at 2^64."""
    width = np.uint64(side)
    *rounds, coin = keys
    if coin & np.uint64(1):
        # On an odd side the rounds together are always an even permutation, which small data sets show: half of the
        # orders of 5 samples were nearly twice as likely as the others. Exchanging 0 and 1
        # in every second epoch mends it.
        numbers = numbers ^ (numbers < 2)
    left, right = np.divmod(numbers, width)
    for key in rounds:
        mixed = (right ^ key) * _FIRST
        mixed ^= mixed >> _HALF
        mixed *= _SECOND
        mixed >>= _HALF  # the high bits of a product depend on all bits below them
        mixed *= width  # 32 random bits times side / 2^32: a number below side, evenly spread
        mixed >>= _HALF
        mixed += left
        mixed %= width
        left, right = right, mixed
    return left * width + right

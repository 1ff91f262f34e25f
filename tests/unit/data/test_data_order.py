"""The order of samples: a permutation, different every epoch, that looks random and never changes."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from distbelief.data.rules.order import positions_to_samples


def order(samples: int, seed: int = 0, epoch: int = 0, first: int = 0, end: int | None = None) -> Any:
    return positions_to_samples(np.arange(first, samples if end is None else end), samples, seed, epoch, True)


def deviation(counts: Any, cells: int) -> float:
    """Pearson's chi-square against equal counts, in standard deviations from what chance gives."""
    expected = sum(counts) / cells
    square = sum((count - expected) ** 2 for count in counts) / expected + (cells - len(counts)) * expected
    return float((square - (cells - 1)) / math.sqrt(2 * (cells - 1)))


@pytest.mark.parametrize("epoch", [0, 1, 12345])
def test_every_small_size_is_a_permutation(epoch: int) -> None:
    for samples in range(1, 300):
        assert sorted(order(samples, seed=7, epoch=epoch)) == list(range(samples))


@pytest.mark.parametrize("samples", [1_000_003, 65_536, 65_537, 1_048_576, 999_999])
def test_a_large_size_is_a_permutation(samples: int) -> None:
    assert np.array_equal(np.sort(order(samples)), np.arange(samples))


@pytest.mark.parametrize("samples", [10**9 + 7, 2**40 - 87, 2**62 + 1, 2**63 - 25])
def test_a_huge_size_gives_distinct_samples_for_some_positions_and_stores_nothing(samples: int) -> None:
    tracemalloc.start()
    first, last = order(samples, end=1000), order(samples, first=samples - 1000)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    both = np.concatenate([first, last])
    assert len(set(both.tolist())) == 2000
    assert both.min() >= 0
    assert both.max() < samples
    assert abs(float(np.mean(both / samples)) - 0.5) < 0.05
    assert peak_bytes < 1_000_000


def test_a_position_has_one_sample_however_it_is_asked_for() -> None:
    whole = order(1797, seed=3, epoch=5)
    pieces = [order(1797, 3, 5, first, min(first + 64, 1797)) for first in range(0, 1797, 64)]
    assert np.array_equal(whole, np.concatenate(pieces))
    backwards = positions_to_samples(np.arange(1796, -1, -1), 1797, 3, 5, True)
    assert np.array_equal(whole[::-1], backwards)
    square = positions_to_samples(np.arange(1600).reshape(40, 40), 1797, 3, 5, True)
    assert np.array_equal(square, whole[:1600].reshape(40, 40))


def test_epochs_and_seeds_differ() -> None:
    orders = [tuple(order(1000, seed, epoch)) for seed in range(5) for epoch in range(20)]
    assert len(set(orders)) == 100
    # Two independent orders of 1000 samples agree at one place on average.
    agreements = [int(np.sum(np.array(a) == np.array(b))) for a, b in pairwise(orders)]
    assert max(agreements) < 10


@pytest.mark.parametrize("samples", [2, 3, 4, 5])
def test_all_orders_of_a_few_samples_are_equally_likely_over_the_epochs(samples: int) -> None:
    orders = math.factorial(samples)
    seen = Counter(tuple(order(samples, seed=1, epoch=epoch)) for epoch in range(40 * orders))
    assert len(seen) == orders
    assert abs(deviation(seen.values(), orders)) < 4


@pytest.mark.parametrize("samples", [10, 37, 64])
def test_every_sample_is_equally_likely_at_every_position(samples: int) -> None:
    grid = np.zeros((samples, samples))
    for epoch in range(3000):
        grid[np.arange(samples), order(samples, seed=2, epoch=epoch)] += 1
    assert abs(deviation(grid.ravel(), samples * samples)) < 4


def test_neighbours_in_the_order_are_unrelated() -> None:
    samples, cells = 40_000, 20
    found = order(samples, seed=9) * cells // samples
    pairs = Counter(zip(found[:-1].tolist(), found[1:].tolist(), strict=True))
    assert abs(deviation(pairs.values(), cells * cells)) < 4
    steps = np.diff(order(samples, seed=9)) % samples
    assert abs(deviation(Counter((steps * 50 // samples).tolist()).values(), 50)) < 4


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    positions = np.array([4, 0, 2])
    plain = positions_to_samples(positions, 5, 0, 0, False)
    assert plain.tolist() == [4, 0, 2]
    plain[0] = 9
    assert positions[0] == 4, "the caller's array is not handed back"


@pytest.mark.parametrize("position", [-1, 10])
def test_a_position_outside_the_epoch_is_refused(position: int) -> None:
    with pytest.raises(ValueError, match=r"0\.\.9"):
        positions_to_samples(np.array([position]), 10, 0, 0, True)


def test_nothing_asked_nothing_given() -> None:
    assert positions_to_samples(np.array([], dtype=np.int64), 10, 0, 0, True).shape == (0,)


def test_the_order_never_changes() -> None:
    """These values are a promise: a run of today can be repeated by any later version."""
    assert order(10, seed=0, epoch=0).tolist() == [9, 2, 8, 6, 4, 1, 7, 0, 3, 5]
    assert order(1797, seed=42, epoch=3, end=8).tolist() == [1007, 1395, 1586, 1066, 1491, 1113, 85, 1447]
    assert order(60_000, seed=-1, epoch=1, end=6).tolist() == [34787, 28772, 43845, 36127, 50049, 26348]
    assert order(10**12, seed=2**63, epoch=99, first=10**12 - 3).tolist() == [515551084431, 964251322001, 744377005436]

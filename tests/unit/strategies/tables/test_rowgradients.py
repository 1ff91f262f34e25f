"""Gradients of rows are added up along a tree, each once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distbelief.strategies.tables.rowgradients import added_up


def test_gradients_of_one_row_are_added_along_a_tree_in_the_order_given() -> None:
    a, b, c, d, e = (np.float32(x) for x in (1e8, 1.0, -1e8, 3.0, 0.1))
    rows = np.array([9, 4, 9, 9, 9, 4, 9])
    gradients = np.array([a, 7, b, c, d, 8, e], np.float32)[:, None]
    numbers, total = added_up(rows, gradients)
    assert numbers.tolist() == [4, 9]
    assert total[:, 0].tolist() == [15.0, ((a + b) + (c + d)) + e]
    assert gradients[:, 0].tolist() == [a, 7, b, c, d, 8, e]  # what was given is left as it was


@given(st.lists(st.integers(0, 30), max_size=200))
@settings(max_examples=50, deadline=None)
def test_every_gradient_is_added_once(rows: list[int]) -> None:
    """Powers of two would need too many bits: whole numbers, whose sums are exact, and the count beside them."""
    gradients = np.stack([np.arange(len(rows)), np.ones(len(rows))], axis=1).astype(np.float32)
    numbers, total = added_up(np.array(rows, np.int64), gradients)
    assert numbers.tolist() == sorted(set(rows))
    for row, (places, count) in zip(numbers.tolist(), total.tolist(), strict=True):
        mine = [place for place, other in enumerate(rows) if other == row]
        assert (places, count) == (sum(mine), len(mine))

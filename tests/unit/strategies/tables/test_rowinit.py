"""Forms of tables, and the initial values of their rows."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from distbelief.errors import JobError
from distbelief.strategies.tables.rowinit import RowInit, TableForm, _normal, _signed


def test_initial_values_depend_on_the_seed_the_name_and_the_row_alone() -> None:
    rows = np.array([7, 0, 10**15, 7])
    form = TableForm("a", rows=10**16, width=5, seed=1)
    values = form.initial(rows)
    assert np.array_equal(values[0], values[3])
    assert np.array_equal(form.initial(rows[::-1]), values[::-1])
    assert np.array_equal(msgspec.structs.replace(form, width=4, rows=10**17).initial(rows), values[:, :4])
    for other in (msgspec.structs.replace(form, seed=2), msgspec.structs.replace(form, name="b")):
        assert not (other.initial(rows) == values).any()
    assert values[0, :3].tobytes().hex() == "9828ea3b86c730bb19531d3c"  # what was saved relies on it


@pytest.mark.parametrize("rows", [np.arange(60_000), np.arange(60_000) * 4096])
def test_initial_values_have_the_distribution_asked_for(rows: np.ndarray) -> None:
    normal = TableForm("n", rows=10**9, width=7, init=RowInit("normal", 0.5)).initial(rows) / 0.5
    uniform = TableForm("u", rows=10**9, width=7, init=RowInit("uniform", 0.5)).initial(rows)
    count = normal.size
    for moment, expected in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        spread = np.sqrt({1: 1.0, 2: 2.0, 3: 15.0, 4: 96.0}[moment] / count)
        assert abs(np.mean(normal.astype(np.float64) ** moment) - expected) < 5 * spread
    assert abs(uniform).max() < 0.5
    assert np.histogram(uniform, 16, (-0.5, 0.5))[0].std() < 3 * np.sqrt(count / 16)
    # Neighbours, in the row and in the column, know nothing of each other.
    for left, right in ((normal[1:], normal[:-1]), (normal[:, 1:], normal[:, :-1]), (normal[::2], normal[1::2])):
        assert abs(np.mean(left * right)) < 5 / np.sqrt(left.size)
    assert not TableForm("z", rows=9, width=2, init=RowInit("zeros")).initial(np.arange(9)).any()


def test_normal_numbers_are_those_of_the_inverse_error_function() -> None:
    uniform = np.concatenate([_signed(1, np.arange(50_000), 4).ravel(), [1 - 2**-24, 2**-24 - 1, 2**-24]])
    exact = torch.erfinv(torch.from_numpy(uniform).double()).numpy() * np.sqrt(2)
    np.testing.assert_allclose(_normal(uniform.astype(np.float32)), exact, rtol=3e-6)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: TableForm("a", rows=0, width=3), "'a' has 0 rows"),
        (lambda: TableForm("a", rows=3, width=-1), "of -1 numbers"),
        (lambda: RowInit("xavier"), "'xavier'"),
        (lambda: RowInit("normal", float("nan")), "nan"),
    ],
)
def test_a_table_that_cannot_be_is_refused(wrong, told: str) -> None:
    with pytest.raises(JobError, match=told):
        wrong()


def test_a_form_travels_as_data() -> None:
    form = TableForm("words", rows=5, width=2, init=RowInit("uniform", 0.1), seed=9)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(form), type=TableForm) == form

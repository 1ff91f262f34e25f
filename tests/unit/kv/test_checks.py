"""What a caller may give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distbelief.errors import DistBeliefError
from distbelief.kv import checks
from distbelief.kv.messages import Dense, Rows

TABLE = Rows(10, 2, "zeros", 0.0, 0, None)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e5m2])
def test_only_numbers_that_servers_can_add_are_held(dtype: torch.dtype) -> None:
    with pytest.raises(DistBeliefError, match="a store holds dense tensors of float32, float64, bfloat16, float16"):
        checks.form_of("w", torch.zeros(3, dtype=dtype))


def test_one_key_has_one_value_and_several_have_a_list() -> None:
    assert checks.pair_up("w", 5, "values") == [("w", 5)]
    assert checks.pair_up(["a", "b"], (1, 2), "values") == [("a", 1), ("b", 2)]
    for keys, values in ((["a", "b"], torch.zeros(2)), (["a"], [1, 2]), (["a", "a"], [1, 2]), (["a"], "b")):
        with pytest.raises(DistBeliefError):
            checks.pair_up(keys, values, "values")


@pytest.mark.parametrize("rows", [[1, 2], torch.tensor([1, 2], dtype=torch.int32), range(1, 3)])
def test_rows_are_named_by_whole_numbers(rows: Any) -> None:
    assert checks.row_numbers("t", TABLE, rows).tolist() == [1, 2]


def test_no_rows_are_rows() -> None:
    assert checks.row_numbers("t", TABLE, []).dtype == torch.int64


@pytest.mark.parametrize("rows", [[0.5], [[1, 2]], 3, [10], [-1]])
def test_rows_that_are_none(rows: Any) -> None:
    with pytest.raises(DistBeliefError):
        checks.row_numbers("t", TABLE, rows)


def test_a_sparse_gradient_is_rows_with_a_gradient_each() -> None:
    layer = torch.nn.Embedding(10, 2, sparse=True)
    layer(torch.tensor([7, 3, 7])).sum().backward()
    rows, gradients = checks.row_gradients("t", TABLE, layer.weight.grad, None)
    assert rows.tolist() == [7, 3, 7]
    assert gradients.tolist() == [[1.0, 1.0]] * 3


def test_a_result_goes_where_it_fits() -> None:
    form = Dense("float32", (2, 3))
    assert checks.output_tensor("w", form, None).shape == (2, 3)
    for wrong in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), [1.0]):
        with pytest.raises(DistBeliefError):
            checks.output_tensor("w", form, wrong)  # type: ignore[arg-type]

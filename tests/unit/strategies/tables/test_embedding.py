"""EmbeddingTable: the same rows as a parameter and from elsewhere; what it collects; what it refuses."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from distbelief import EmbeddingTable
from distbelief.errors import JobError
from distbelief.strategies.tables.embedding import densified, on_servers, settle, tables_of


def made(served: bool, **options: object) -> EmbeddingTable:
    torch.manual_seed(4)
    if not served:
        return EmbeddingTable(50, 3, **options)  # type: ignore[arg-type]
    with on_servers():
        return EmbeddingTable(50, 3, **options)  # type: ignore[arg-type]


def test_both_forms_give_the_same_output_and_the_same_gradients() -> None:
    whole, served = made(served=False, init=("normal", 0.5)), made(served=True, init=("normal", 0.5))
    assert (whole.is_served, served.is_served) == (False, True)
    assert list(served.parameters()) == []
    numbers = torch.tensor([[7, 3], [3, 49], [7, 7]])
    factors = torch.arange(18.0).reshape(3, 2, 3)
    for table in (whole, served):
        (table(numbers) * factors).sum().backward()
    assert torch.equal(whole(numbers), served(numbers))
    found = served.gradients()
    assert found.rows.tolist() == [3, 7, 49]
    assert whole.weight is not None
    assert whole.weight.grad is not None
    assert torch.equal(torch.from_numpy(found.gradients), whole.weight.grad[[3, 7, 49]])
    assert len(served.gradients().rows) == 0, "what was given is not given again"


def test_rows_that_are_looked_up_twice_are_added_up_and_those_without_a_gradient_left_out() -> None:
    table = made(served=True)
    unused = table(torch.tensor([11]))
    (table(torch.tensor([1, 2])).sum() + 2 * table(torch.tensor([2, 3])).sum()).backward()
    found = table.gradients()
    assert found.rows.tolist() == [1, 2, 3]
    assert found.gradients[:, 0].tolist() == [1, 3, 2]
    assert unused.shape == (1, 3)


def test_evaluation_collects_nothing_and_says_so_to_who_gives_the_rows() -> None:
    table = made(served=True)
    asked: list[tuple[list[int], bool]] = []

    def source(rows: NDArray[np.int64], learning: bool) -> NDArray[np.float32]:
        asked.append((rows.tolist(), learning))
        return np.zeros((len(rows), 3), np.float32)

    table.served_by(source)
    with torch.no_grad():
        table(torch.tensor([5, 4, 5]))
    assert len(table.gradients().rows) == 0
    table(torch.tensor([9], dtype=torch.int32))
    table.forget()
    assert asked == [([4, 5], False), ([9], True)]
    assert len(table.gradients().rows) == 0


def test_tables_of_one_model_begin_with_different_values_and_a_seed_gives_the_same_again() -> None:
    torch.manual_seed(1)
    one, other = EmbeddingTable(20, 4), EmbeddingTable(20, 4)
    torch.manual_seed(1)
    again = EmbeddingTable(20, 4)
    assert one.weight is not None
    assert again.weight is not None
    assert other.weight is not None
    assert torch.equal(one.weight, again.weight)
    assert not torch.equal(one.weight, other.weight)


def test_a_model_with_a_table_can_be_copied_and_pickled_as_any_other() -> None:
    for table in (made(served=False), made(served=True)):
        for again in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
            assert torch.equal(again(torch.tensor([3, 8])), table(torch.tensor([3, 8])))


@pytest.mark.parametrize("wrong", [torch.tensor([50]), torch.tensor([-1]), torch.tensor([0.5])])
def test_rows_that_there_are_not(wrong: torch.Tensor) -> None:
    with pytest.raises(JobError, match="EmbeddingTable"):
        made(served=True)(wrong)


def test_a_table_that_does_not_fit_in_memory_is_refused_with_its_size() -> None:
    with pytest.raises(JobError, match=r"10,000,000,000 × 64 numbers takes 2384.2 GiB") as refused:
        EmbeddingTable(10_000_000_000, 64)
    assert "--strategy ps" in refused.value.hint
    with on_servers():
        assert EmbeddingTable(10_000_000_000, 64)(torch.tensor([9_999_999_999])).shape == (1, 64)


def test_rows_on_servers_cannot_be_frozen() -> None:
    assert made(served=True).requires_grad_().is_served
    with pytest.raises(JobError, match="cannot be frozen"):
        made(served=True).requires_grad_(False)
    frozen = made(served=False).requires_grad_(False)
    assert [parameter.requires_grad for parameter in frozen.parameters()] == [False]


def test_what_a_strategy_makes_of_a_model() -> None:
    model = nn.Sequential(made(served=False), nn.Linear(3, 1))
    settle(model)
    assert tables_of(model) == []
    with on_servers():
        settle(model)  # one that was made before
    assert [name for name, _ in tables_of(model)] == ["0"]
    own = nn.Sequential(made(served=False, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0)))
    with pytest.raises(JobError, match="table '0' has an optimizer of its own"):
        settle(own)


def test_rows_become_a_parameter() -> None:
    model = nn.Sequential(made(served=False))
    before = dict(model.state_dict())["0.weight"].clone()
    given = {"0.rows": torch.tensor([2, 7]), "0.values": torch.ones(2, 3), "other": torch.zeros(1)}
    found = densified(model, given)
    assert found.keys() == {"0.weight", "other"}
    before[[2, 7]] = 1.0
    assert torch.equal(found["0.weight"], before)

"""Row optimizers against torch's own, on the same gradients; and the properties that replication rests on."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from distbelief.errors import JobError
from distbelief.strategies.ps.tables.rowoptimizers import RowOptimizer, State, _corrections, row_optimizer

WIDTH = 5


def new_state(optimizer: RowOptimizer, rows: int) -> State:
    return {f.name: np.full((rows, WIDTH) if f.wide else rows, optimizer.begin(f), f.dtype) for f in optimizer.fields}


def run(optimizer: RowOptimizer, values: NDArray[np.float32], gradients: list[NDArray[np.float32]]) -> State:
    """The state after these steps; values change in place."""
    state = new_state(optimizer, len(values))
    for gradient in gradients:
        optimizer.step(values, state, gradient.copy(), 1.0)
    return state


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (RowOptimizer("sgd", lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (RowOptimizer("adagrad", lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
        (
            RowOptimizer("adagrad", lr=0.1, eps=1e-3, initial=0.5),
            lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-3, initial_accumulator_value=0.5),
        ),
        (RowOptimizer("adam", lr=0.1), lambda p: torch.optim.SparseAdam(p, lr=0.1)),
        (
            RowOptimizer("adam", lr=0.1, betas=(0.8, 0.95), eps=1e-4),
            lambda p: torch.optim.SparseAdam(p, lr=0.1, betas=(0.8, 0.95), eps=1e-4),
        ),
        (RowOptimizer("adam", lr=0.1, betas=(0.0, 0.5)), lambda p: torch.optim.SparseAdam(p, 0.1, betas=(0.0, 0.5))),
        (RowOptimizer("adam", lr=0.1, eps=0.1, late_eps=True), lambda p: torch.optim.Adam(p, lr=0.1, eps=0.1)),
        (
            RowOptimizer("adam", lr=0.1, decay=0.3, late_eps=True),
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3),
        ),
    ],
)
def test_the_values_of_torch(ours, theirs) -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((40, WIDTH)).astype(np.float32)
    gradients = [rng.standard_normal((40, WIDTH)).astype(np.float32) for _ in range(30)]
    module = torch.nn.Embedding(40, WIDTH, sparse=not ours.late_eps)
    module.weight.data.copy_(torch.from_numpy(values))
    optimizer = theirs(list(module.parameters()))
    for gradient in gradients:
        module.zero_grad()
        (module(torch.arange(40)) * torch.from_numpy(gradient)).sum().backward()
        optimizer.step()
    run(ours, values, gradients)
    np.testing.assert_allclose(values, module.weight.detach().numpy(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), cut=st.integers(0, 9), width=st.integers(1, 40))
def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it(name: str, seed: int, cut: int, width: int) -> None:
    optimizer = RowOptimizer(name, lr=0.3)
    rng = np.random.default_rng(seed)
    gradients = [rng.standard_normal((9, width)).astype(np.float32) for _ in range(4)]

    def final(part: slice) -> NDArray[np.float32]:
        values = np.ones((9, width), np.float32)[part].copy()
        state: State = {
            f.name: np.zeros((len(values), width) if f.wide else len(values), f.dtype) for f in optimizer.fields
        }
        for gradient in gradients:
            optimizer.step(values, state, gradient[part].copy(), 1.0)
        return values

    whole = final(slice(None))
    assert np.concatenate([final(slice(cut)), final(slice(cut, None))]).tobytes() == whole.tobytes()


def test_adam_counts_the_steps_of_each_row() -> None:
    """A row that rested does what it would have done without the rest; SparseAdam gives it a larger first step."""
    optimizer = RowOptimizer("adam", lr=0.01)
    gradient = np.ones((2, WIDTH), np.float32)
    values = np.zeros((2, WIDTH), np.float32)
    state = new_state(optimizer, 2)
    for _ in range(1000):
        first, kept = values[:1].copy(), {k: v[:1].copy() for k, v in state.items()}
        optimizer.step(first, kept, gradient[:1].copy(), 1.0)
        values[:1] = first
        for key, entry in kept.items():
            state[key][:1] = entry
    optimizer.step(values, state, gradient.copy(), 1.0)
    assert state["step"].tolist() == [1001, 1]
    np.testing.assert_allclose(values[1], -0.01, rtol=1e-5)

    module = torch.nn.Embedding(2, WIDTH, sparse=True)
    torch.nn.init.zeros_(module.weight)
    theirs = torch.optim.SparseAdam(list(module.parameters()), lr=0.01)
    for rows in [[0]] * 1000 + [[0, 1]]:
        module.zero_grad()
        module(torch.tensor(rows)).sum().backward()
        theirs.step()
    np.testing.assert_allclose(values[0], module.weight[0].detach().numpy(), rtol=1e-4)
    assert 2.4 < -module.weight[1, 0].item() / 0.01 < 3.2


def test_corrections_of_the_bias_for_few_and_for_very_many_steps() -> None:
    steps = np.array([1, 2, 1000, 37_000, 10**9])
    exact = [-np.expm1(int(t) * np.log(0.999)) for t in steps]
    np.testing.assert_allclose(_corrections(0.999, steps), exact, rtol=1e-12)
    assert _corrections(0.0, steps).tolist() == [1.0] * 5
    # Whatever other rows have come to: the same bits.
    assert _corrections(0.999, steps)[:2].tobytes() == _corrections(0.999, steps[:2]).tobytes()


def test_a_factor_multiplies_the_learning_rate() -> None:
    for name in ("sgd", "adagrad", "adam"):
        values, other = np.ones((3, WIDTH), np.float32), np.ones((3, WIDTH), np.float32)
        gradient = np.full((3, WIDTH), 0.7, np.float32)
        half, whole = RowOptimizer(name, lr=0.5), RowOptimizer(name, lr=1.0)
        half.step(values, new_state(half, 3), gradient.copy(), 1.0)
        whole.step(other, new_state(whole, 3), gradient.copy(), 0.5)
        assert values.tobytes() == other.tobytes()
        assert (values < 1).all()


def test_no_rows_at_all() -> None:
    for name in ("sgd", "adagrad", "adam"):
        optimizer = RowOptimizer(name, lr=0.1)
        empty = np.empty((0, WIDTH), np.float32)
        optimizer.step(empty, new_state(optimizer, 0), empty.copy(), 1.0)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"name": "lion", "lr": 0.1}, "'lion'"),
        ({"name": "sgd", "lr": -0.1}, "lr -0.1"),
        ({"name": "sgd", "lr": float("nan")}, "lr nan"),
        ({"name": "adagrad", "lr": 0.1, "eps": -1.0}, "eps -1.0"),
        ({"name": "adagrad", "lr": 0.1, "initial": float("inf")}, "initial inf"),
        ({"name": "adam", "lr": 0.1, "betas": (0.9, 1.0)}, "betas"),
    ],
)
def test_what_cannot_be_is_refused_with_a_hint(wrong: dict, told: str) -> None:
    with pytest.raises(JobError, match=told) as caught:
        RowOptimizer(**wrong)
    assert caught.value.hint


def test_an_optimizer_travels_as_data() -> None:
    optimizer = RowOptimizer("adam", lr=0.1, betas=(0.8, 0.9))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(optimizer), type=RowOptimizer) == optimizer


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.Adagrad(p, lr_decay=0.1),
        lambda p: torch.optim.RMSprop(p),
    ],
)
def test_optimizers_that_do_not_work_row_by_row(optimizer: object) -> None:
    with pytest.raises(JobError, match="table 'users' cannot be trained by") as refused:
        row_optimizer("users", optimizer)
    assert "EmbeddingTable" in refused.value.hint


def test_optimizers_are_found_in_the_group_in_which_a_table_would_be() -> None:
    def by_shape(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        large = [p for p in parameters if p.ndim > 1]
        groups = [{"params": [p for p in parameters if p.ndim < 2]}, {"params": large, "lr": 0.5, "weight_decay": 0.2}]
        return torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9), eps=1e-6)

    found = row_optimizer("users", by_shape)
    assert (found.name, found.lr, found.eps, found.betas, found.decay) == ("adam", 0.5, 1e-6, (0.8, 0.9), 0.2)
    adagrad = row_optimizer("users", lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3))
    assert (adagrad.name, adagrad.initial) == ("adagrad", 0.3)

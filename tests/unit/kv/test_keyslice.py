"""One slice of a key-value store, by plain calls: changes in, values out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distbelief.errors import JobError
from distbelief.kv.catalogue import GRAIN
from distbelief.kv.keyoptimizer import OPTIMIZERS, optimizer_spec, row_optimizer
from distbelief.kv.keyslice import KeySlice
from distbelief.kv.messages import (
    AddToKey,
    AddToRows,
    Dense,
    KeyPulled,
    OptimizerSpec,
    PlaceKey,
    PullKey,
    PullKeyRows,
    Rows,
    SetOptimizer,
)
from distbelief.strategies.ps.server.stores import Change
from distbelief.transport.shm.segment import Segment

NUMBERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "adagrad": {"lr": 0.1, "initial_accumulator_value": 0.1},
    "adam": {"lr": 0.01, "amsgrad": True, "betas": (0.8, 0.99)},
}


class Space:
    """Memory in this process; what clients name is in `shared`."""

    def __init__(self) -> None:
        self.shared: dict[str, Segment] = {}
        self.made = 0
        self.released: list[str] = []

    def make(self, size_bytes: int) -> tuple[torch.Tensor, str]:
        self.made += 1
        return torch.empty(size_bytes, dtype=torch.uint8), f"value {self.made}"

    def release(self, name: str) -> None:
        self.released.append(name)

    def open(self, name: str) -> Segment:
        return self.shared[name]


def raw(value: torch.Tensor) -> Any:
    return value.contiguous().reshape(-1).view(torch.uint8).clone().numpy()


def place(store: KeySlice, value: torch.Tensor, key: str = "w", attempt: int = 0) -> None:
    form = Dense(str(value.dtype).removeprefix("torch."), tuple(value.shape))
    store.apply(Change(PlaceKey(key, attempt, form, 0, value.numel()), raw(value)))


def push(store: KeySlice, value: torch.Tensor, key: str = "w", **sync: int) -> None:
    store.apply(Change(AddToKey(key, **sync), raw(value)))


def optimize(store: KeySlice, name: str, **numbers: Any) -> None:
    store.apply(Change(SetOptimizer(optimizer_spec(name, numbers))))


def pull(store: KeySlice, key: str = "w", dtype: torch.dtype = torch.float32, round_: int = 0) -> torch.Tensor:
    letter = store.reply(PullKey(1, 1, 7, 0, key, round_), "", True, True)
    assert letter is not None
    return torch.frombuffer(letter.payload, dtype=dtype)


def table(optimizer: OptimizerSpec | None = None) -> Rows:
    return Rows(1000, 3, "zeros", 0.0, 0, optimizer)


def push_rows(store: KeySlice, rows: list[int], gradients: torch.Tensor, **sync: int) -> None:
    content = np.concatenate([raw(torch.tensor(rows, dtype=torch.int64)), raw(gradients)])
    store.apply(Change(AddToRows("t", len(rows), **sync), content))


def pull_rows(store: KeySlice, rows: list[int], round_: int = 0) -> torch.Tensor | None:
    numbers = torch.tensor(rows, dtype=torch.int64).numpy().tobytes()
    letter = store.reply(PullKeyRows(1, 1, 7, 0, "t", numbers, round_), "", True, True)
    return None if letter is None else torch.from_numpy(letter.payload)


def gradients(count: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, generator=generator) for _ in range(count)]


def copy_of(store: KeySlice) -> KeySlice:
    snapshot, content = store.state()
    other = KeySlice(Space())
    other.load((snapshot, content.clone()))
    return other


# --- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_without_an_optimizer_what_is_pushed_is_added(dtype: torch.dtype) -> None:
    store = KeySlice(Space())
    place(store, torch.full((2, 3), 1.5, dtype=dtype))
    push(store, torch.ones(2, 3, dtype=dtype))
    push(store, torch.ones(2, 3, dtype=dtype))
    assert pull(store, dtype=dtype).tolist() == [3.5] * 6


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_cut_over_slices_an_optimizer_has_the_bits_of_torch_in_one_process(name: str) -> None:
    numbers = NUMBERS.get(name, {"lr": 0.05})
    size = 5 * GRAIN + 13
    first = torch.linspace(-1, 1, size)
    whole = torch.nn.Parameter(first.clone())
    make: Any = OPTIMIZERS[name]
    expected = make([whole], **numbers)
    slices = [(KeySlice(Space()), 0, 2 * GRAIN), (KeySlice(Space()), 2 * GRAIN, size)]
    for store, begin, end in slices:
        optimize(store, name, **numbers)
        place(store, first[begin:end])
    for step, gradient in enumerate(gradients(6, size)):
        whole.grad = gradient.clone()
        expected.step()
        for number, (store, begin, end) in enumerate(slices):
            push(store, gradient[begin:end])
            if step == 3:  # another server goes on from a copy
                slices[number] = (copy_of(store), begin, end)
    found = torch.cat([pull(store) for store, _, _ in slices])
    assert torch.equal(found, whole.detach())
    assert not torch.equal(found, first)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_an_optimizer_leaves_what_was_pushed_as_it_is(name: str, dtype: torch.dtype) -> None:
    """A backup reads the same memory."""
    space = Space()
    store = KeySlice(space)
    place(store, torch.linspace(-1, 1, 100).to(dtype))
    optimize(store, name, lr=0.1, **({} if name == "rprop" else {"weight_decay": 0.1}))
    space.shared["buffer"] = Segment.private(1000)
    pushed = space.shared["buffer"].tensor(dtype, 0, 100)
    pushed.copy_(torch.linspace(1, 2, 100))
    before = pushed.clone()
    for _ in range(3):
        store.apply(Change(AddToKey("w", segment="buffer")))
    assert torch.equal(pushed, before)
    assert pull(store, dtype=dtype).isfinite().all()


def test_another_rate_keeps_the_state_and_another_optimizer_begins_it_anew() -> None:
    steps = gradients(4, 8)
    store = KeySlice(Space())
    place(store, torch.zeros(8))
    optimize(store, "sgd", lr=0.1, momentum=0.9)
    whole = torch.nn.Parameter(torch.zeros(8))
    expected = torch.optim.SGD([whole], lr=0.1, momentum=0.9)
    for gradient in steps[:2]:
        push(store, gradient)
        whole.grad = gradient.clone()
        expected.step()
    optimize(store, "sgd", lr=0.1, momentum=0.9)  # as every worker says it
    optimize(store, "sgd", lr=0.01, momentum=0.9)
    expected.param_groups[0]["lr"] = 0.01
    push(store, steps[2])
    whole.grad = steps[2].clone()
    expected.step()
    assert torch.equal(pull(store), whole.detach())
    optimize(store, "sgd", lr=0.01, momentum=0.5)
    push(store, steps[3])
    assert torch.equal(pull(store), whole.detach() - torch.tensor(0.01) * steps[3])


def test_the_rate_set_last_is_used_by_a_copy_too() -> None:
    store = KeySlice(Space())
    place(store, torch.zeros(4))
    optimize(store, "adam", lr=0.1)
    push(store, torch.ones(4))
    optimize(store, "adam", lr=0.001)
    other = copy_of(store)
    for one in (store, other):
        push(one, torch.ones(4))
    assert torch.equal(pull(store), pull(other))


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("lbfgs", {"lr": 0.1}),
        ("sgd", {"lr": -1}),
        ("sgd", {"rate": 1}),
        ("adam", {"fused": True}),
        ("sgd", {"lr": "1"}),
    ],
)
def test_an_optimizer_that_cannot_be_is_refused_with_words(name: str, numbers: dict[str, Any]) -> None:
    with pytest.raises(JobError) as caught:
        optimizer_spec(name, numbers)
    assert caught.value.hint


def test_a_value_of_an_older_attempt_comes_too_late() -> None:
    store = KeySlice(Space())
    place(store, torch.full((4,), 2.0), attempt=1)
    place(store, torch.full((4,), 1.0), attempt=0)
    place(store, torch.full((4,), 3.0), attempt=1)
    assert pull(store).tolist() == [2.0] * 4


def test_what_does_not_fit_changes_nothing() -> None:
    store = KeySlice(Space())
    place(store, torch.zeros(4))
    store.apply(Change(PlaceKey("t", 0, table())))
    push(store, torch.ones(5))
    push(store, torch.ones(4), key="unknown")
    push(store, torch.ones(4), key="t")
    push_rows(store, [1000], torch.ones(1, 3))
    store.apply(Change(AddToRows("w", 1), b"12345678"))
    store.apply(Change(AddToRows("t", 1), b"12345678"))
    assert pull(store).tolist() == [0.0] * 4
    assert pull_rows(store, [0]) is not None


def test_bytes_in_shared_memory_are_read_from_there_and_can_be_sent_on() -> None:
    space = Space()
    store, other = KeySlice(space), KeySlice(Space())
    place(store, torch.zeros(4))
    place(other, torch.zeros(4))
    space.shared["buffer"] = Segment.private(64)
    space.shared["buffer"].tensor(torch.float32, 16, 4).fill_(3.0)
    change = Change(AddToKey("w", segment="buffer", offset=16))
    store.apply(change)
    sent = store.with_bytes(change)
    space.shared["buffer"].tensor(torch.float32, 16, 4).fill_(5.0)  # the client goes on
    other.apply(sent)
    assert pull(store).tolist() == pull(other).tolist() == [3.0] * 4
    letter = store.reply(PullKey(1, 1, 7, 0, "w", inline=False), "", True, True)
    assert letter is not None
    assert letter.payload is None
    assert letter.message.segment == "value 1"


def test_memory_is_let_go_when_a_stretch_is_replaced_loaded_anew_or_dropped() -> None:
    space = Space()
    store = KeySlice(space)
    place(store, torch.zeros(4))
    optimize(store, "adam", lr=0.1)
    push(store, torch.ones(4))
    assert space.released == []
    place(store, torch.zeros(4), attempt=1)
    assert space.released == ["value 1"]
    store.load(store.state())
    assert space.released == ["value 1", "value 2"]
    assert pull(store).tolist() == [0.0] * 4
    del store
    assert space.released == ["value 1", "value 2", "value 3"]


def test_a_key_that_is_not_there() -> None:
    letter = KeySlice(Space()).reply(PullKey(1, 1, 7, 0, "w"), "", True, True)
    assert letter is not None
    assert letter.message == KeyPulled(1, 1, 0, there=False)


# --- rounds ----------------------------------------------------------------------------------------------------------


def test_a_synchronous_push_counts_when_all_workers_have_pushed_in_the_order_of_ranks() -> None:
    store = KeySlice(Space())
    values = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    place(store, torch.zeros(1))
    for rank in (2, 0):
        push(store, values[rank], round=0, rank=rank, workers=3)
    assert pull(store).tolist() == [0.0]
    assert store.reply(PullKey(1, 1, 7, 0, "w", round=1), "", True, True) is None
    push(store, torch.tensor([5.0]), round=0, rank=0, workers=3)  # a second time, by a replacement: the first counts
    store = copy_of(store)
    push(store, values[1], round=0, rank=1, workers=3)
    expected = (values[0] + values[1]) + values[2]
    assert pull(store, round_=1).tolist() == expected.tolist()
    assert expected.tolist() != [1.0]  # another order would have given other bits


def test_rounds_are_applied_in_their_order_and_without_an_optimizer_the_sum_takes_the_place() -> None:
    store = KeySlice(Space())
    place(store, torch.full((2,), 9.0))
    push(store, torch.full((2,), 10.0), round=1, rank=0, workers=2)
    push(store, torch.full((2,), 20.0), round=1, rank=1, workers=2)
    assert pull(store).tolist() == [9.0] * 2
    push(store, torch.full((2,), 1.0), round=0, rank=0, workers=2)
    push(store, torch.full((2,), 2.0), round=0, rank=1, workers=2)
    assert pull(store, round_=2).tolist() == [30.0] * 2


def test_what_a_round_gave_is_told_when_it_cannot_be_undone() -> None:
    store = KeySlice(Space())
    place(store, torch.zeros(2))
    push(store, torch.ones(2), round=0, rank=0, workers=1)
    assert store.reply(PullKey(1, 1, 7, 0, "w", round=1), "", True, caught_up=False) is None


# --- tables ----------------------------------------------------------------------------------------------------------


def test_rows_are_added_or_optimized() -> None:
    store = KeySlice(Space())
    store.apply(Change(PlaceKey("t", 0, table())))
    push_rows(store, [5, 900, 5], torch.ones(3, 3))
    store = copy_of(store)
    found = pull_rows(store, [900, 5, 6])
    assert found is not None
    assert found.tolist() == [[1.0] * 3, [2.0] * 3, [0.0] * 3]
    other = KeySlice(Space())
    other.apply(Change(PlaceKey("t", 0, table(OptimizerSpec("adagrad", {"lr": 0.5})))))
    push_rows(other, [5], torch.full((1, 3), 2.0))
    other = copy_of(other)
    push_rows(other, [5], torch.full((1, 3), 2.0))
    whole = torch.nn.Parameter(torch.zeros(3))
    expected = torch.optim.Adagrad([whole], lr=0.5)
    for _ in range(2):
        whole.grad = torch.full((3,), 2.0)
        expected.step()
    found = pull_rows(other, [5])
    assert found is not None
    torch.testing.assert_close(found[0], whole.detach())


def test_rows_of_all_workers_are_one_step() -> None:
    store = KeySlice(Space())
    store.apply(Change(PlaceKey("t", 0, table(OptimizerSpec("sgd", {"lr": 1.0})))))
    push_rows(store, [1, 2], torch.ones(2, 3), round=0, rank=1, workers=2)
    assert pull_rows(store, [1], round_=1) is None
    store = copy_of(store)
    push_rows(store, [], torch.zeros(0, 3), round=0, rank=0, workers=2)
    found = pull_rows(store, [1, 2, 3], round_=1)
    assert found is not None
    assert found[:, 0].tolist() == [-1.0, -1.0, 0.0]


def test_a_table_takes_only_optimizers_that_work_by_row() -> None:
    with pytest.raises(JobError):
        row_optimizer(optimizer_spec("sgd", {"lr": 0.1, "momentum": 0.9}))
    with pytest.raises(JobError):
        row_optimizer(optimizer_spec("rmsprop", {}))

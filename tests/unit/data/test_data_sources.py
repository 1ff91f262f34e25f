"""What a job may give as data, and what comes out as batches."""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from distbelief.data.sources import InMemory, MapStyle, as_source, split_batch
from distbelief.errors import JobError

WANTED = np.array([3, 0, 3])


class Squares(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        assert type(i) is int, "data sets expect plain numbers"
        return torch.tensor([float(i), float(i * i)]), i


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))

    def __len__(self) -> int:
        return 10


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * tensor[index] for tensor in self.tensors)


def test_one_tensor_gives_a_tensor() -> None:
    source = as_source(torch.arange(10).reshape(5, 2))
    assert isinstance(source, InMemory)
    assert len(source) == 5
    assert torch.equal(source.fetch(WANTED), torch.tensor([[6, 7], [0, 1], [6, 7]]))


@pytest.mark.parametrize("kind", [tuple, list])
def test_several_tensors_give_a_tuple(kind: Any) -> None:
    batch = as_source(kind([torch.arange(5), np.arange(5) * 0.5])).fetch(WANTED)
    assert isinstance(batch, tuple)
    assert batch[0].tolist() == [3, 0, 3]
    assert batch[1].tolist() == [1.5, 0.0, 1.5]
    assert batch[1].dtype == torch.float64


def test_a_mapping_gives_a_dict() -> None:
    batch = as_source({"x": torch.arange(5), "y": np.arange(5) * 2}).fetch(WANTED)
    assert {name: column.tolist() for name, column in batch.items()} == {"x": [3, 0, 3], "y": [6, 0, 6]}


def test_a_tensor_data_set_is_in_memory_unless_its_own_code_must_run() -> None:
    x = torch.arange(5)
    plain = as_source(TensorDataset(x, x))
    assert isinstance(plain, InMemory)
    assert [column.tolist() for column in plain.fetch(WANTED)] == [[3, 0, 3], [3, 0, 3]]
    assert isinstance(as_source(Doubled(x)), MapStyle)
    assert isinstance(as_source(TensorDataset(x), collate=torch.utils.data.default_collate), MapStyle)


@pytest.mark.parametrize("data", [torch.zeros(4), (torch.zeros(4), np.zeros(4)), {"x": torch.zeros(4)}])
def test_a_collate_function_for_tensors_in_memory_is_refused_and_a_usual_one_is_not_used(data: Any) -> None:
    with pytest.raises(JobError, match="the collate function would never be called: the data are tensors") as caught:
        as_source(data, collate=len)
    assert "TensorDataset" in caught.value.hint
    assert isinstance(as_source(data, usual=len), InMemory)


def test_the_usual_collate_function_is_for_samples_without_one_of_their_own() -> None:
    assert as_source(TensorDataset(torch.arange(5)), usual=len).fetch(WANTED) == 3
    assert as_source(Squares(), usual=len).fetch(WANTED) == 3
    assert as_source(Squares(), lambda parts: "own", usual=len).fetch(WANTED) == "own"


def test_arrays_are_not_copied_and_awkward_ones_are_accepted() -> None:
    array = np.arange(5.0)
    source = as_source(array)
    array[3] = 99
    assert source.fetch(WANTED).tolist() == [99, 0, 99]

    frozen = np.arange(5)
    frozen.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert as_source(frozen).fetch(WANTED).tolist() == [3, 0, 3]
    assert as_source(np.arange(5, dtype=">i4")).fetch(WANTED).tolist() == [3, 0, 3]
    assert as_source(np.arange(5)[::-1]).fetch(WANTED).tolist() == [1, 4, 1]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.bool, torch.bfloat16, torch.complex64])
def test_every_element_type_can_be_fetched(dtype: torch.dtype) -> None:
    column = torch.tensor([0, 1, 0, 1]).to(dtype)
    batch = as_source(column).fetch(WANTED)
    assert batch.dtype == dtype
    assert batch.to(torch.int64).tolist() == [1, 0, 1] if not dtype.is_complex else True


def test_gradients_do_not_reach_into_the_data() -> None:
    assert not as_source(torch.zeros(4, requires_grad=True)).fetch(WANTED).requires_grad


def test_a_data_set_is_collated() -> None:
    source = as_source(Squares())
    assert isinstance(source, MapStyle)
    x, y = source.fetch(WANTED)
    assert x.tolist() == [[3, 9], [0, 0], [3, 9]]
    assert y.tolist() == [3, 0, 3]
    assert as_source(Squares(), collate=len).fetch(WANTED) == 3
    assert as_source([(1, 2.0), (3, 4.0)]).fetch(np.array([1]))[1].tolist() == [4.0]


def test_a_source_is_taken_as_it_is() -> None:
    source = as_source(torch.zeros(3))
    assert as_source(source) is source


@pytest.mark.parametrize("empty", [torch.zeros(0, 4), (np.zeros(0), np.zeros(0)), {}, [], (), TensorDataset()])
def test_an_empty_data_set_is_refused(empty: Any) -> None:
    with pytest.raises(JobError, match="the data set is empty"):
        as_source(empty)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ((torch.zeros(4), torch.zeros(5)), "differ in length: 0 has 4, 1 has 5"),
        ({"x": torch.zeros(4), "y": torch.zeros(5)}, "x has 4, y has 5"),
        ((torch.zeros(4), [1, 2, 3, 4]), "element 1 of the data is a list"),
        ({"x": torch.zeros(4), "y": "text"}, "the data's 'y' is a str"),
        ({1: torch.zeros(4)}, "must be strings"),
        (torch.tensor(1.0), "a single number"),
        (np.array(["a", "b"]), "torch cannot hold"),
        (Stream(), "can only be iterated"),
        (iter([1, 2]), "can only be iterated"),
        ({1, 2}, "can only be iterated"),
        (DataLoader(Squares()), "DataLoader"),
        ("data/train", "is a str"),
        (pathlib.Path("data"), "not the samples themselves"),
        (17, "has no __len__ and no __getitem__"),
    ],
)
def test_what_cannot_be_data_is_refused_in_words(data: Any, says: str) -> None:
    with pytest.raises(JobError) as caught:
        as_source(data)
    assert says in caught.value.message


class Pair(NamedTuple):
    x: str
    y: str


@pytest.mark.parametrize(
    ("batch", "args", "kwargs", "target"),
    [
        ("x", ("x",), {}, "x"),
        (("x", "y"), ("x",), {}, "y"),
        (["a", "b", "y"], ("a", "b"), {}, "y"),
        (Pair("x", "y"), ("x",), {}, "y"),
        (("x",), ("x",), {}, "x"),
        ({"a": 1, "y": 2}, (), {"a": 1, "y": 2}, {"a": 1, "y": 2}),
    ],
)
def test_a_batch_is_split_into_what_the_model_and_the_loss_get(batch: Any, args: Any, kwargs: Any, target: Any) -> None:
    assert split_batch(batch) == (args, kwargs, target)


def test_a_batch_without_anything_is_refused() -> None:
    with pytest.raises(JobError, match="empty tuple"):
        split_batch(())

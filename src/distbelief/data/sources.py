"""The samples and random numbers of a job's code.

Samples come from tensors in memory, or from a data set whose code reads one sample at a time. A source has a length and
returns the batch of given sample numbers. It knows nothing of order, steps or shards. Tensors are indexed in the
training process; a data set is user code and runs in reader processes (`data.readers`).
Random numbers come from the generators that `seed_everything` seeds: readers seed them before each sample, members
before each shard.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from distbelief.errors import JobError

Samples = npt.NDArray[np.int64]
Collate = Callable[[list[Any]], Any]
Columns = torch.Tensor | tuple[torch.Tensor, ...] | dict[str, torch.Tensor]

_ACCEPTED = "tensors or arrays (one, a tuple, or a mapping by name), or a data set with __len__ and __getitem__"


# torch 2.13 does not implement index_select for these types on the CPU
_NO_INDEX_SELECT = {torch.uint16, torch.uint32, torch.uint64}


class Source(Protocol):
    """A number of samples that are read as batches."""

    def __len__(self) -> int: ...

    def fetch(self, samples: Samples) -> Any: ...


class InMemory:
    """Tensors whose first dimension counts samples.

    >>> source = as_source((torch.arange(10.0), np.arange(10)))
    >>> source.fetch(np.array([3, 1]))
    (tensor([3., 1.]), tensor([3, 1]))
    """

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self._length = _common_length(columns)

    def __len__(self) -> int:
        return self._length

    def fetch(self, samples: Samples) -> Any:
        wanted = torch.from_numpy(samples)
        if isinstance(self.columns, torch.Tensor):
            return _rows(self.columns, wanted)
        if isinstance(self.columns, dict):
            return {name: _rows(column, wanted) for name, column in self.columns.items()}
        return tuple(_rows(column, wanted) for column in self.columns)


class MapStyle:
    """A data set that is read one sample at a time, and the function that makes a batch of samples.

    >>> len(as_source([("a", 1), ("b", 2)]))
    2
    """

    def __init__(self, dataset: Any, collate: Collate | None = None) -> None:
        self.dataset = dataset
        self.collate: Collate = default_collate if collate is None else collate

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, samples: Samples) -> Any:
        """Read in this process, without seeds; `data.readers` reads in other processes, with seeds."""
        return self.collate([self.dataset[int(sample)] for sample in samples])


def as_source(data: Any, collate: Collate | None = None, *, usual: Collate | None = None) -> InMemory | MapStyle:
    """The source for a job's `data` or `validation`. `collate` needs a data set that is read one sample at a time.
    `usual`: the function for such data sets if `collate` is None; tensors in memory are indexed without it.

    >>> as_source({"x": torch.zeros(4, 2), "y": torch.zeros(3)})
    Traceback (most recent call last):
    distbelief.errors.JobError: the tensors of the data set differ in length: x has 4, y has 3
    """
    source = _recognise(data, collate or usual)
    if collate is not None and isinstance(source, InMemory):
        raise JobError(
            "the collate function would never be called: the data are tensors in memory",
            hint="leave the function out, or give a data set that is read sample by sample, for example "
            "torch.utils.data.TensorDataset(x, y)",
        )
    if len(source) == 0:
        raise JobError("the data set is empty")
    return source


def split_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Split into (args, kwargs, target): the model gets args and kwargs, the loss compares the model's output with
    target.

    >>> split_batch(("a", "b", "y"))
    (('a', 'b'), {}, 'y')
    >>> split_batch({"x": 1, "y": 2})
    ((), {'x': 1, 'y': 2}, {'x': 1, 'y': 2})
    >>> split_batch("x")   # nothing to compare with but itself: an autoencoder, a language model
    (('x',), {}, 'x')
    """
    if isinstance(batch, Mapping):
        return (), dict(batch), batch
    if not isinstance(batch, tuple | list):
        return (batch,), {}, batch
    if not batch:
        raise JobError("a batch is an empty tuple: the data set gives nothing to train on")
    if len(batch) == 1:  # TensorDataset(x) gives such batches; a model needs some input
        return (batch[0],), {}, batch[0]
    return tuple(batch[:-1]), {}, batch[-1]


def _recognise(data: Any, collate: Collate | None) -> InMemory | MapStyle:
    if isinstance(data, InMemory | MapStyle):
        return data
    if _is_array(data):
        return InMemory(_tensor(data, "the data"))
    if isinstance(data, Mapping):
        if not all(isinstance(name, str) for name in data):
            raise JobError(
                "the names in a mapping of tensors must be strings", hint="they become arguments of the model"
            )
        return InMemory({name: _tensor(column, f"the data's {name!r}") for name, column in data.items()})
    # A subclass may override __getitem__, and a collate function needs single samples: run both.
    if type(data) is TensorDataset and collate is None:
        return InMemory(tuple(data.tensors))
    if isinstance(data, tuple | list) and any(_is_array(column) for column in data):
        return InMemory(tuple(_tensor(column, f"element {i} of the data") for i, column in enumerate(data)))
    return MapStyle(_checked_dataset(data), collate)


def _checked_dataset(data: Any) -> Any:
    kind = type(data).__name__
    if isinstance(data, DataLoader):
        raise JobError("the data is a DataLoader", hint="give its Dataset; batches and order are the job's")
    if isinstance(data, str | bytes | PathLike):
        raise JobError(f"the data is a {kind}, not the samples themselves", hint=f"a job wants {_ACCEPTED}")
    if type(data).__module__.split(".")[0] == "pandas":  # in pandas, [i] is a column, not a row
        raise JobError(f"the data is a pandas {kind}", hint="give its columns as arrays, for example frame.to_numpy()")
    if isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__")):
        raise JobError(
            f"the data ({kind}) can only be iterated; any sample must be readable by its number",
            hint="give a data set with __len__ and __getitem__: order, shards and resuming need it",
        )
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(data, name)]
    if missing:
        raise JobError(f"the data ({kind}) has no {' and no '.join(missing)}", hint=f"a job wants {_ACCEPTED}")
    return data


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _tensor(value: Any, where: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
    elif isinstance(value, np.ndarray):
        tensor = _from_array(value, where)
    else:
        raise JobError(f"{where} is a {type(value).__name__}, not a tensor or array", hint=f"a job wants {_ACCEPTED}")
    if tensor.dim() == 0:
        raise JobError(f"{where} is a single number: its first dimension must count the samples")
    return tensor


def _from_array(array: npt.NDArray[Any], where: str) -> torch.Tensor:
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    try:
        with warnings.catch_warnings():  # a read-only memory map is fine: nothing writes into a source
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise JobError(f"{where} is an array that torch cannot hold: {error}") from error


def _common_length(columns: Columns) -> int:
    if isinstance(columns, torch.Tensor):
        return len(columns)
    named = columns.items() if isinstance(columns, dict) else enumerate(columns)
    lengths = {str(name): len(column) for name, column in named}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise JobError(f"the tensors of the data set differ in length: {listed}")
    return next(iter(lengths.values()), 0)


def _rows(column: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    wanted = wanted.to(column.device)
    return column[wanted] if column.dtype in _NO_INDEX_SELECT else column.index_select(0, wanted)


def seed_everything(seed: int) -> None:
    """Seed torch's, numpy's and Python's generators with one 63-bit number.

    torch's generators are seeded one by one: torch.manual_seed formats a stack trace for every kind of device that is
    not in use, which takes 0.7 ms (measured).
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    random.seed(seed)

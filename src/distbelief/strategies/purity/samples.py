"""Samples are functions of their number: the same at each reading, whatever was read before, and on every worker.

Finds the sample that differs, by reading the samples of the canary's shard through the real readers. A checksum of the
data, or of a part spread over it, is compared between workers.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from distbelief.data.reading import listed
from distbelief.data.sources import Columns, MapStyle, Samples
from distbelief.shards import Schedule, mix
from distbelief.strategies.base import Fetch
from distbelief.strategies.purity import Impurity
from distbelief.strategies.purity.hidden import checksum, content
from distbelief.strategies.purity.rules.findings import batch_differs, random_result_kept, sample_differs
from distbelief.strategies.purity.shards import CANARY

WHOLE_BYTES = 256 << 20
"""Of a longer column in memory, `BLOCKS` parts of `BLOCK_BYTES` are compared."""
BLOCKS = 64
BLOCK_BYTES = 1 << 20
COMPARED_SAMPLES = 32
"""The number of a data set's samples that are compared between workers; at least one shard."""
_SPREAD_STREAM = 7  # of `mix`


class BatchReadTwice:
    """A fetch that has read the canary's batch twice, and returns a copy of it each time; it reads other batches."""

    def __init__(self, fetch: Fetch) -> None:
        first = fetch(*CANARY)
        self._fetch = fetch
        self._held = fetch(*CANARY)
        self.is_same = content(first[0]) == content(self._held[0])

    def __call__(self, step: int, first: int, end: int) -> tuple[Any, int]:
        if (step, first, end) != CANARY:
            return self._fetch(step, first, end)
        batch, samples = self._held
        return copy.deepcopy(batch), samples  # the model's code may write into its input


def which_differs(source: MapStyle, samples: Samples, read_alone: Callable[[int], Any]) -> Impurity:
    """Two readings of the batch of these samples differed. `read_alone`: read one sample, anew."""
    for sample in samples.tolist():
        if content(read_alone(sample)) != content(read_alone(sample)):
            return sample_differs(*_innermost(source.dataset, sample))
    has_collate = source.collate is not torch.utils.data.default_collate
    return batch_differs(type(source.dataset).__name__, listed(samples), has_collate)


def which_is_kept(
    source: MapStyle, samples: Samples, read: Callable[[int, bool], Any], begin_anew: Callable[[], None]
) -> Impurity | None:
    """The reader has read these samples in epoch 0: whether it kept a random result, which then shows in epoch 1.

    `read(epoch, is_batch)`: read the samples, as a batch or as a list; `begin_anew()`: go on with a reader that has
    read nothing."""
    kept = content(read(1, True))
    begin_anew()
    if kept == content(read(1, True)):
        return None
    later = read(0, False)
    begin_anew()
    for sample, one, other in zip(samples.tolist(), later, read(0, False), strict=True):
        if content(one) != content(other):
            return random_result_kept("`{}.__getitem__({})`".format(*_innermost(source.dataset, sample)))
    return random_result_kept(f"`{type(source.dataset).__name__}`, or its collate function,")


def _innermost(dataset: Any, sample: int) -> tuple[str, int]:
    """The name of the data set's class, and the sample's number in it; of a Subset, those of the data set inside."""
    while isinstance(dataset, torch.utils.data.Subset):
        dataset, sample = dataset.dataset, int(dataset.indices[sample])
    return type(dataset).__name__, sample


# --- the same data on every worker -----------------------------------------------------------------------------------


def columns_checksum(columns: Columns, seed: int) -> str:
    """A checksum of tensors in memory, of a part of long ones. (4 GB/s, measured.)

    >>> columns_checksum(torch.zeros(3), 0) == columns_checksum(torch.zeros(3), 0) != columns_checksum(torch.ones(3), 0)
    True
    """
    if isinstance(columns, torch.Tensor):
        columns = (columns,)
    named = columns.items() if isinstance(columns, dict) else enumerate(columns)
    parts = [
        (
            name,
            str(column.dtype),
            tuple(column.shape),
            [checksum(column[low:high]) for low, high in _blocks(column, seed)],
        )
        for name, column in named
    ]
    return f"{zlib.crc32(repr(parts).encode()):08x}"


def batches_checksum(batches: Iterable[Any]) -> str:
    return f"{zlib.crc32(repr([content(batch) for batch in batches]).encode()):08x}"


def spread_shards(schedule: Schedule, seed: int) -> list[tuple[int, int]]:
    """(step, shard) of some shards of the first epoch, spread over it by the seed."""
    size = max(schedule.global_batch // schedule.shards, 1)
    steps = schedule.steps_per_epoch
    count = min(max(COMPARED_SAMPLES // size, 1), steps * schedule.shards)
    found = []
    for number in range(count):
        step = (number * steps + mix(seed, _SPREAD_STREAM, number) % steps) // count
        found.append((step, mix(seed, _SPREAD_STREAM, number, 1) % schedule.occupied(step)))
    return list(dict.fromkeys(found))


def _blocks(column: torch.Tensor, seed: int) -> Iterator[tuple[int, int]]:
    """(first row, end row) of the parts that count."""
    rows = len(column)
    if column.layout != torch.strided or column.nbytes <= WHOLE_BYTES:
        yield 0, rows
        return
    size = max(BLOCK_BYTES * rows // column.nbytes, 1)
    for number in range(BLOCKS):
        low, high = number * rows // BLOCKS, (number + 1) * rows // BLOCKS
        start = low + mix(seed, _SPREAD_STREAM, number) % max(high - low - size, 1)
        yield start, min(start + size, high)

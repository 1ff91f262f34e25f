"""What a data set's readers must do: a sample is the same at each reading, in each epoch's seeds, whatever was read
before it. Finds the sample that differs, by reading the samples of the canary's shard through the real readers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from distbelief.data.reading import listed
from distbelief.data.sources import MapStyle, Samples
from distbelief.strategies.base import Fetch
from distbelief.strategies.purity.hidden import content
from distbelief.strategies.purity.rules.findings import Impurity, batch_differs, random_result_kept, sample_differs
from distbelief.strategies.purity.shards import CANARY


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
    """The reader has read these samples in epoch 0: whether it kept a random result, which shows in epoch 1. (A cache of
    random results begins with each reader, so the epoch of a sample's numbers depends on who read it first.)

    `read(epoch, is_batch)`: read the samples, as a batch or as a list; `begin_anew()`: go on with a reader that has read
    nothing."""
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

"""Reads the samples of the canary's shard twice, through the real readers, and finds the sample that differs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from distbelief.data.reading import listed
from distbelief.data.sources import MapStyle, Samples
from distbelief.strategies.base import Fetch
from distbelief.strategies.purity.hidden import content
from distbelief.strategies.purity.rules.findings import Impurity, batch_differs, sample_differs
from distbelief.strategies.purity.shards import CANARY


class HeldBatch:
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


def _innermost(dataset: Any, sample: int) -> tuple[str, int]:
    """The name of the data set's class, and the sample's number in it; of a Subset, those of the data set inside."""
    while isinstance(dataset, torch.utils.data.Subset):
        dataset, sample = dataset.dataset, int(dataset.indices[sample])
    return type(dataset).__name__, sample

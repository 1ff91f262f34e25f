"""Reads the samples of the canary's shard twice, through the real readers, and finds the sample that differs."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from distbelief.data.reading import listed
from distbelief.data.sources import MapStyle, Samples
from distbelief.strategies.base import Fetch
from distbelief.strategies.purity.rules.findings import Impurity, batch_differs, sample_differs

CANARY = (0, 0, 1)
"""Step, first shard, end shard: what the canary computes."""


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


def content(value: Any, depth: int = 8) -> Any:
    """A value that is equal for two batches with the same bytes. What it does not know counts as equal.

    >>> content({"x": torch.zeros(2), "n": 3}) == content({"x": torch.zeros(2), "n": 3})
    True
    >>> content([torch.zeros(2)]) == content([-torch.zeros(2)])   # by bytes
    False
    """
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), checksum(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        bits = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return "array", str(value.dtype), value.shape, zlib.crc32(bits.data)
    if isinstance(value, int | float | complex | str | bytes | bytearray | np.generic) or value is None:
        return type(value).__name__, repr(value)
    if depth and isinstance(value, dict):
        return "dict", tuple((str(key), content(one, depth - 1)) for key, one in value.items())
    if depth and isinstance(value, Sequence):
        return type(value).__name__, tuple(content(one, depth - 1) for one in value)
    if depth and hasattr(value, "__dict__"):
        return type(value).__name__, content(vars(value), depth - 1)
    return type(value).__name__


def checksum(tensor: torch.Tensor) -> int:
    """A checksum of a tensor's bytes."""
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return 0
    plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    flat = plain.cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data)

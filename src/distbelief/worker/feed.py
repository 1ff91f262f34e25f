"""The batches of shards: selects their samples and reads them before they are needed.

In-memory data is sliced directly. A Dataset is user code, so reader processes run it some steps ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from distbelief.data.readers import Readers
from distbelief.data.rules.order import positions_to_samples
from distbelief.data.sources import InMemory, MapStyle
from distbelief.job import Job
from distbelief.shards import Range, Schedule
from distbelief.strategies.purity import Impurity
from distbelief.strategies.purity.samples import (
    batches_checksum,
    columns_checksum,
    spread_shards,
    which_differs,
    which_is_kept,
)

AHEAD = 2  # steps that are read ahead
_ALONE = -1  # instead of a step: a sample that is read by itself
TOGETHER = 4096  # positions permuted per call; a call has a fixed cost, that of some hundred positions


class Feed:
    """Batches of one data set. Construct it before any thread starts: it forks the readers."""

    def __init__(self, source: InMemory | MapStyle, schedule: Schedule, job: Job, *, shuffle: bool) -> None:
        self._source = source
        self._schedule = schedule
        self._seed = job.seed
        self._shuffle = shuffle
        self._until = 0
        self._readers = Readers(source, job.seed, job.readers) if isinstance(source, MapStyle) else None
        self._groups: Sequence[Sequence[Range]] = []
        self._stride = 1
        self._asked: set[tuple[int, int]] = set()
        self._spans: dict[tuple[int, Range], tuple[int, npt.NDArray[np.int64]]] = {}
        self._taken: dict[Range, tuple[int, int]] = {}
        """The first unit of a group -> (step, first shard) of the group's batch that was fetched last."""

    @property
    def readers(self) -> int:
        """The number of reader processes; 0: the data is in memory."""
        return self._readers.processes if self._readers else 0

    def expect(self, units: Sequence[Range], until: int) -> None:
        """Set the ranges of shards that every step before `until` requests; batches of other ranges are dropped."""
        self.expect_groups([units], until, 1)

    def expect_groups(self, groups: Sequence[Sequence[Range]], until: int, stride: int) -> None:
        """Like `expect`, for `groups` of ranges that take turns: each group is used for `stride` steps."""
        before = {unit for group in self._groups for unit in group}
        kept = {unit[0] for group in groups for unit in group if unit in before}
        self._groups = groups
        self._until = until
        self._stride = stride
        self._spans.clear()
        self._taken.clear()
        if self._readers:
            self._readers.forget(lambda key: key[1] in kept)
            self._asked = {key for key in self._asked if key[1] in kept}

    def samples(self, step: int, first: int, end: int) -> tuple[int, npt.NDArray[np.int64]]:
        """(epoch, sample numbers) of the shards [first, end) of a step."""
        epoch, low, _ = self._schedule.shard(step, first)
        _, _, high = self._schedule.shard(step, end - 1)
        group = next((g for g in self._groups if g and g[0][0] <= first and end <= g[-1][1]), None)
        if group is None:
            return epoch, self._permuted(epoch, np.arange(low, high, dtype=np.int64))
        key = step, group[0]
        if key not in self._spans:
            self._spans = self._spans_from(step, group)
        start, span = self._spans[key]
        return epoch, span[low - start : high - start]

    def _spans_from(
        self, step: int, group: Sequence[Range]
    ) -> dict[tuple[int, Range], tuple[int, npt.NDArray[np.int64]]]:
        """(first position, samples) of the group's units, for this step and some later steps, permuted in one call."""
        epoch, low, high = self._stretch(step, group)
        last = min(step + max(TOGETHER // max(high - low, 1), 1), self._end_of(step))
        found = {step: (low, high)}
        for later in range(step + 1, last):
            its_epoch, low, high = self._stretch(later, group)
            if its_epoch != epoch:
                break
            found[later] = low, high
        positions = np.concatenate([np.arange(low, high, dtype=np.int64) for low, high in found.values()])
        order, at = self._permuted(epoch, positions), 0
        spans = {}
        for later, (low, high) in found.items():
            spans[later, group[0]] = low, order[at : at + high - low]
            at += high - low
        return spans

    def _stretch(self, step: int, group: Sequence[Range]) -> tuple[int, int, int]:
        """(epoch, first, end): the positions of all units of a group."""
        epoch, low, _ = self._schedule.shard(step, group[0][0])
        _, _, high = self._schedule.shard(step, group[-1][1] - 1)
        return epoch, low, high

    def _end_of(self, step: int) -> int:
        """The end of the steps for which this step's group is used."""
        if len(self._groups) > 1:  # the next group begins with the next multiple of the stride
            return min(self._until, (step // self._stride + 1) * self._stride)
        return self._until

    def _permuted(self, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return positions_to_samples(positions, self._schedule.samples, self._seed, epoch, self._shuffle)

    def fetch(self, step: int, first: int, end: int) -> tuple[Any, int]:
        """The batch of these shards, and its number of samples."""
        _, low, _ = self._schedule.shard(step, first)
        _, _, high = self._schedule.shard(step, end - 1)
        if self._readers is None:
            return self._source.fetch(self.samples(step, first, end)[1]), high - low
        self._ask(step, first, end)
        # Prefetch only for the own shards: a request for another member's shard comes after all own shards were
        # fetched.
        group = next((group for group in self._groups if (first, end) in group), ())
        if group and (step, first) <= self._taken.get(group[0], (-1, -1)):
            group = ()  # fetched again: the later batches were requested the first time
        elif group:
            self._taken[group[0]] = step, first
        for later in range(step, min(step + 1 + AHEAD, self._end_of(step))):
            for unit in group:
                if later > step or unit[0] > first:  # earlier units of this step are taken already
                    self._ask(later, *unit)
        self._asked.discard((step, first))
        return self._readers.take((step, first)), high - low

    def checksum(self) -> str:
        """Equal on workers with the same data. Of much data a part is compared, spread by the seed."""
        if isinstance(self._source, InMemory):
            return columns_checksum(self._source.columns, self._seed)
        chosen = spread_shards(self._schedule, self._seed)
        return batches_checksum(self.fetch(step, shard, shard + 1)[0] for step, shard in chosen)

    def is_read(self) -> bool:
        """Whether reader processes run a data set's code."""
        return self._readers is not None

    def what_differs(self, step: int, first: int, end: int) -> Impurity:
        """Two readings of this batch differed: why."""
        assert self._readers is not None
        assert isinstance(self._source, MapStyle)
        readers = self._readers
        epoch, samples = self.samples(step, first, end)

        def read_alone(sample: int) -> Any:
            readers.request((_ALONE, sample), epoch, np.array([sample]), collated=False)
            return readers.take((_ALONE, sample))

        return which_differs(self._source, samples, read_alone)

    def what_is_kept(self, step: int, first: int, end: int) -> Impurity | None:
        """Whether the data set keeps random results of this batch, which a reader has read, for other epochs."""
        assert self._readers is not None
        assert isinstance(self._source, MapStyle)
        readers = self._readers
        _, samples = self.samples(step, first, end)

        def read(epoch: int, is_batch: bool) -> Any:
            readers.request((_ALONE, epoch), epoch, samples, collated=is_batch)
            return readers.take((_ALONE, epoch))

        return which_is_kept(self._source, samples, read, readers.begin_anew)

    def _ask(self, step: int, first: int, end: int) -> None:
        if (step, first) in self._asked:
            return
        epoch, samples = self.samples(step, first, end)
        if len(samples) and self._readers:
            self._asked.add((step, first))
            self._readers.request((step, first), epoch, samples)

    def close(self) -> None:
        if self._readers:
            self._readers.close()

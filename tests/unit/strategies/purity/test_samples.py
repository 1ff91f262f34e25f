"""The checksum of a job's data, by which workers agree that they have the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from distbelief.data.sources import as_source
from distbelief.shards import Schedule
from distbelief.strategies.purity import samples
from distbelief.strategies.purity.samples import batches_checksum, columns_checksum, spread_shards
from distbelief.worker.feed import Feed
from tests.support.purity import X, Y, job_of


def changed(at: int) -> torch.Tensor:
    labels = Y.clone()
    labels[at] ^= 1
    return labels


@pytest.mark.parametrize("at", [0, 17, 63])
def test_one_other_label_in_memory_is_seen(at: int) -> None:
    assert columns_checksum((X, Y), 5) == columns_checksum((X.clone(), Y.clone()), 5)
    assert columns_checksum((X, Y), 5) != columns_checksum((X, changed(at)), 5)
    assert columns_checksum({"x": X, "y": Y}, 5) != columns_checksum({"x": X, "y": changed(at)}, 5)
    assert columns_checksum(Y, 5) != columns_checksum(changed(at), 5)


def test_names_types_and_shapes_count() -> None:
    zeros = torch.zeros(4, 6)
    others = [zeros.view(4, 2, 3), zeros.int(), zeros[:3], {"x": zeros}, (zeros, zeros)]
    sums = {columns_checksum(one, 0) for one in [zeros, *others]}
    assert len(sums) == len(others) + 1


def test_bytes_count_whatever_the_layout_in_memory() -> None:
    assert columns_checksum(X.t().contiguous().t(), 0) == columns_checksum(X, 0)
    assert columns_checksum(X, 0) != columns_checksum(-X, 0)


def test_of_long_columns_a_part_is_read_that_is_spread_over_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(samples, "BLOCK_BYTES", 80)
    long = torch.arange(100_000)
    same = [columns_checksum(long, 3), columns_checksum(long.clone(), 3)]
    assert same[0] == same[1]
    noisy = long.clone()
    noisy[torch.randperm(len(long), generator=torch.Generator().manual_seed(1))[:3000]] += 1  # 3 %
    tail = torch.cat([long[:50_000], long[50_000:] + 1])
    assert len({columns_checksum(one, 3) for one in (long, noisy, tail)}) == 3
    read = [range(*one) for one in samples._blocks(long, 3)]
    assert len(read) == samples.BLOCKS
    assert {len(one) for one in read} == {10}
    assert all(number * 100_000 // 64 <= one.start < (number + 1) * 100_000 // 64 for number, one in enumerate(read))


@pytest.mark.parametrize(
    "schedule", [Schedule(64, 16, 4), Schedule(5000, 16, 4), Schedule(70, 64, 64), Schedule(9, 9, 1)]
)
def test_the_chosen_shards_have_samples_and_are_spread(schedule: Schedule) -> None:
    chosen = spread_shards(schedule, 3)
    assert chosen == spread_shards(schedule, 3)
    assert len(set(chosen)) == len(chosen)
    read = 0
    for step, shard in chosen:
        epoch, low, high = schedule.shard(step, shard)
        assert epoch == 0
        assert high > low
        read += high - low
    assert read <= max(samples.COMPARED_SAMPLES, schedule.global_batch // schedule.shards)
    if schedule.steps_per_epoch > 100:
        steps = sorted(step for step, _ in chosen)
        assert len(steps) == 8
        assert steps[-1] - steps[0] > schedule.steps_per_epoch // 2


class Files(Dataset):
    def __init__(self, shift: float, folder: Path) -> None:
        self.shift, self.folder = shift, folder

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return {"x": X[index] + self.shift + torch.randn(6), "file": str(self.folder / "one")}


def checksum_of(data: Any) -> str:
    job = job_of(torch.nn.Identity, data=data)
    feed = Feed(as_source(data), Schedule(64, 16, 4), job, shuffle=True)
    try:
        return feed.checksum()
    finally:
        feed.close()


def test_of_a_data_set_samples_are_compared_and_no_folders() -> None:
    """Hosts keep their files in different folders."""
    one = checksum_of(Files(0.0, Path("/a")))
    assert one == checksum_of(Files(0.0, Path("/b")))
    assert one != checksum_of(Files(1.0, Path("/a")))
    assert checksum_of((X, Y)) == columns_checksum((X, Y), 0)
    assert batches_checksum([X, Y]) != batches_checksum([Y, X])

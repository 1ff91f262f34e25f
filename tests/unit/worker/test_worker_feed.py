"""The feed: the same batches from memory and from readers, read ahead, and never those of somebody else's shards."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distbelief.data.rules.order import positions_to_samples
from distbelief.data.sources import as_source
from distbelief.job import Job
from distbelief.shards import Range, Schedule
from distbelief.worker.feed import AHEAD, Feed

SAMPLES, GLOBAL_BATCH, SHARDS = 23, 10, 4
X = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(SAMPLES)
SCHEDULE = Schedule(SAMPLES, GLOBAL_BATCH, SHARDS)


class Table:
    """The tensors as a data set that is read one sample at a time, and writes down what was asked of it."""

    def __init__(self, log: Path | None = None) -> None:
        self.log = log

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, sample: int) -> Any:
        torch.rand(3), np.random.rand()
        if self.log:
            with self.log.open("a") as file:
                file.write(f"{sample} {os.getpid()}\n")
        return X[sample], Y[sample]


@contextmanager
def feed(data: Any, *, shuffle: bool = True, seed: int = 5) -> Iterator[Feed]:
    job = Job(
        model=lambda: nn.Linear(3, 1),
        loss=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        data=data,
        global_batch=GLOBAL_BATCH,
        steps=1,
        shards=SHARDS,
        seed=seed,
    )
    it = Feed(as_source(data), SCHEDULE, job, shuffle=shuffle)
    try:
        yield it
    finally:
        it.close()


def expected(step: int, unit: Range, *, shuffle: bool = True, seed: int = 5) -> torch.Tensor:
    epoch, low, _ = SCHEDULE.shard(step, unit[0])
    _, _, high = SCHEDULE.shard(step, unit[1] - 1)
    positions = np.arange(low, high)
    return torch.from_numpy(positions_to_samples(positions, SAMPLES, seed, epoch, shuffle))


def check(found: tuple[Any, int], samples: torch.Tensor) -> None:
    (x, y), count = found
    assert count == len(samples)
    assert torch.equal(y, samples)
    assert torch.equal(x, X[samples])


def units_of(step: int, units: list[Range]) -> list[Range]:
    return [unit for unit in units if unit[0] < SCHEDULE.occupied(step)]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("units", [[(0, 1), (1, 2), (2, 3), (3, 4)], [(1, 2), (2, 3)], [(0, 4)], [(2, 4)]], ids=str)
def test_memory_and_readers_give_the_same_batches(units: list[Range], shuffle: bool) -> None:
    with feed((X, Y), shuffle=shuffle) as memory, feed(Table(), shuffle=shuffle) as readers:
        for it in (memory, readers):
            it.expect(units, until=7)
        for step in range(7):  # more than two epochs, each with a partial batch at its end
            for unit in units_of(step, units):
                samples = expected(step, unit, shuffle=shuffle)
                check(memory.fetch(step, *unit), samples)
                check(readers.fetch(step, *unit), samples)


def test_units_may_be_fetched_that_were_not_expected() -> None:
    with feed((X, Y)) as memory, feed(Table()) as readers:
        for it, step, unit in itertools.product((memory, readers), (4, 0, 3), ((0, 1), (3, 4), (1, 3))):
            check(it.fetch(step, *unit), expected(step, unit)) if unit[0] < SCHEDULE.occupied(step) else None
        memory.expect([(1, 2)], until=9)
        check(memory.fetch(0, 0, 4), expected(0, (0, 4)))


def test_an_epoch_has_every_sample_once_and_the_next_another_order() -> None:
    orders = []
    with feed((X, Y)) as it:
        it.expect([(0, 4)], until=6)
        for epoch in (0, 1):
            steps = range(epoch * SCHEDULE.steps_per_epoch, (epoch + 1) * SCHEDULE.steps_per_epoch)
            orders.append(torch.cat([it.fetch(step, 0, SCHEDULE.occupied(step))[0][1] for step in steps]).tolist())
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(SAMPLES))
    assert orders[0] != orders[1]


def test_the_next_steps_are_read_ahead_and_no_further_than_until(tmp_path: Path) -> None:
    log = tmp_path / "read"
    units = [(0, 1), (1, 2)]

    def read() -> list[int]:
        return [int(line.split()[0]) for line in log.read_text().splitlines()] if log.exists() else []

    def samples(steps: range) -> list[int]:
        return sorted(s for step in steps for unit in units for s in expected(step, unit, shuffle=False).tolist())

    with feed(Table(log), shuffle=False) as it:
        it.expect(units, until=2 * AHEAD)
        it.fetch(0, 0, 1)
        wait_for(lambda: (it._readers._collect(0), len(read()) == len(samples(range(1 + AHEAD))))[1])  # type: ignore[union-attr, func-returns-value]
        assert sorted(read()) == samples(range(1 + AHEAD))
        for step in range(2 * AHEAD):
            for unit in units:
                if (step, unit) != (0, (0, 1)):
                    check(it.fetch(step, *unit), expected(step, unit, shuffle=False))
        assert sorted(read()) == samples(range(2 * AHEAD)), "each sample once, none of a step that will not come"
        left = [key for key in itertools.product(range(9), range(SHARDS)) if it._readers._knows(key)]  # type: ignore[union-attr]
        assert left == [], "nothing is asked for or kept that nobody will take"


def test_a_batch_that_is_fetched_again_is_right_and_no_later_one_is_read_for_it() -> None:
    units = [(0, 1), (1, 2), (2, 3)]
    with feed(Table()) as it:
        it.expect(units, until=1)
        for unit in [*units, (0, 1), (3, 4), (1, 2)]:  # own ones, own ones again, and another member's
            check(it.fetch(0, *unit), expected(0, unit))
        left = [shard for shard in range(SHARDS) if it._readers._knows((0, shard))]  # type: ignore[union-attr]
        assert left == [], "nothing is asked for or kept that nobody will take"


def test_groups_are_read_one_after_the_other_through_the_steps_of_a_round(tmp_path: Path) -> None:
    log, stride, steps = tmp_path / "read", 4, 6
    groups: list[list[Range]] = [[(0, 1), (1, 2)], [(2, 3), (3, 4)]]
    with feed(Table(log)) as it:
        it.expect_groups(groups, until=steps, stride=stride)
        for first, group in itertools.product(range(0, steps, stride), groups):
            for step in range(first, min(first + stride, steps)):
                for unit in units_of(step, group):
                    check(it.fetch(step, *unit), expected(step, unit))
        left = [key for key in itertools.product(range(9), range(SHARDS)) if it._readers._knows(key)]  # type: ignore[union-attr]
        assert left == [], "nothing is asked for or kept that nobody will take"
    read = sorted(int(line.split()[0]) for line in log.read_text().splitlines())
    assert read == sorted(s for step in range(steps) for s in expected(step, (0, SHARDS)).tolist()), "each sample once"


def test_the_data_sets_code_runs_in_other_processes_and_leaves_our_random_numbers_alone(tmp_path: Path) -> None:
    log = tmp_path / "read"
    with feed(Table(log)) as it:
        it.expect([(0, 4)], until=3)
        torch.manual_seed(1)
        np.random.seed(1)
        without = (torch.rand(1).item(), np.random.rand())
        torch.manual_seed(1)
        np.random.seed(1)
        it.fetch(0, 0, 4)
        assert (torch.rand(1).item(), np.random.rand()) == without
    assert str(os.getpid()) not in {line.split()[1] for line in log.read_text().splitlines()}


def test_after_a_regroup_the_new_units_are_right_and_what_still_applies_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "read"
    with feed(Table(log), shuffle=False) as it:
        it.expect([(0, 1), (1, 2)], until=3)  # the first epoch: a sample that is read twice is one too many
        check(it.fetch(0, 0, 1), expected(0, (0, 1), shuffle=False))  # steps 1 and 2 of both are asked for
        check(it.fetch(0, 1, 2), expected(0, (1, 2), shuffle=False))
        it.expect([(1, 2), (2, 3)], until=3)
        for step in (1, 2):
            for unit in units_of(step, [(1, 2), (2, 3)]):
                check(it.fetch(step, *unit), expected(step, unit, shuffle=False))
    read = [int(line.split()[0]) for line in log.read_text().splitlines()]
    kept = [sample for step in (1, 2) for sample in expected(step, (1, 2), shuffle=False).tolist()]
    assert [read.count(sample) for sample in kept] == [1] * len(kept)


@pytest.mark.parametrize(("before", "after"), [((0, 2), (0, 4)), ((0, 4), (0, 2)), ((1, 3), (1, 4))])
def test_a_unit_that_grows_or_shrinks_is_read_anew(before: Range, after: Range) -> None:
    """A member that fuses its shards keeps its first shard and gets another last one: no old batch may be taken."""
    with feed(Table()) as it:
        it.expect([before], until=9)
        check(it.fetch(0, *before), expected(0, before))  # steps 1 and 2 are asked for
        it.expect([after], until=9)
        for step in (1, 2, 3):
            if after[0] < SCHEDULE.occupied(step):
                check(it.fetch(step, *after), expected(step, after))


def test_one_permutation_serves_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(positions: Any, *rest: Any) -> Any:
        asked.append(len(positions))
        return positions_to_samples(positions, *rest)

    with feed((X, Y)) as plain, feed((X, Y)) as ahead:
        ahead.expect([(1, 2), (2, 3)], until=7)
        wanted = [plain.samples(step, shard, shard + 1) for step in range(7) for shard in (1, 2)]
        monkeypatch.setattr("distbelief.worker.feed.positions_to_samples", counted)
        found = [ahead.samples(step, shard, shard + 1) for step in range(7) for shard in (1, 2)]
    assert [(epoch, list(some)) for epoch, some in found] == [(epoch, list(some)) for epoch, some in wanted]
    assert len(asked) == 3, "one for each epoch"

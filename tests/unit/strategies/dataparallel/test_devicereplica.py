"""The replica of accelerators, with the host's memory standing in for a device's: the same bits as the host's own
replica, since both do the same operations in the same order. On real devices: tests/gpu."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn, optim

from distbelief.data.sources import as_source
from distbelief.errors import NotEnoughMemory
from distbelief.job import Job
from distbelief.options import NEVER, RecheckPlan, recheck_plan
from distbelief.shards import Schedule
from distbelief.strategies.base import Seat
from distbelief.strategies.dataparallel.devicereplica import DeviceReplica
from distbelief.strategies.dataparallel.prepared import PreparedAllReduce
from distbelief.strategies.dataparallel.replica import DataParallelReplica
from distbelief.strategies.flatmodel import recheck as rechecks
from distbelief.transport.device.exchange import DeviceExchange, stretches
from distbelief.transport.exchange import Tile
from distbelief.transport.shm import memfd
from distbelief.transport.shm.segment import Segment
from distbelief.transport.singlemember import SingleMemberExchange
from distbelief.worker.feed import Feed
from tests.support.replicas.alone import job_of, linear_data

CPU = torch.device("cpu")
SHARDS = 4


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 70), nn.BatchNorm1d(70), nn.ReLU(), nn.Dropout(0.2), nn.Linear(70, 4))


def replica(job: Job, *, on_device: bool, exact: bool = True, recheck: RecheckPlan = NEVER) -> DataParallelReplica:
    source = as_source(job.data)
    schedule = Schedule(len(source), job.global_batch, job.resolved_shards)
    prepared = PreparedAllReduce(job, schedule, CPU, exact=exact)
    ranges = [(0, schedule.shards)]
    geometry = prepared.geometry(ranges)
    alone = SingleMemberExchange(geometry)
    exchange = DeviceExchange(alone, geometry, CPU) if on_device else alone
    feed = Feed(source, schedule, job, shuffle=job.shuffle)
    return prepared.build(Seat(0, ranges, 1000, recheck=recheck), exchange, feed.fetch)


def trained(job: Job, *, on_device: bool, steps: int = 4, recheck: RecheckPlan = NEVER) -> tuple[list[float], str]:
    one = replica(job, on_device=on_device, recheck=recheck)
    assert isinstance(one, DeviceReplica) == on_device
    losses = []
    for step in range(steps):
        one.compute(step)
        losses.append(one.commit(step).loss)
    assert one.steps_applied() == steps
    return losses, one.weights_sha256()


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("clip_norm", [None, 0.05, 1e9])
def test_it_gives_the_bits_of_the_hosts_replica(
    optimizer: Callable[[list[nn.Parameter]], optim.Optimizer], clip_norm: float | None
) -> None:
    job = job_of(
        model, linear_data(), optimizer=optimizer, global_batch=12, shards=SHARDS, clip_norm=clip_norm,
        schedule=lambda step: 1.0 / (step + 1),
    )  # fmt: skip
    assert trained(job, on_device=True) == trained(job, on_device=False)


@pytest.mark.parametrize("on_device", [True, False])
def test_a_flipped_bit_is_found_by_a_recheck_and_the_step_continues_with_the_right_gradients(on_device: bool) -> None:
    job = job_of(model, linear_data(), optimizer=OPTIMIZERS["AdamW"], global_batch=12, shards=SHARDS)
    one = replica(job, on_device=on_device, recheck=recheck_plan("all"))
    count = 0

    def flipped(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == 3:
            gradient = gradient.clone()
            gradient.view(torch.int32)[int(gradient[:, 0].abs().argmax()), 0] ^= 1 << 20
        return gradient

    next(one.model.parameters()).register_hook(flipped)  # type: ignore[no-untyped-call]
    for step in range(4):
        one.compute(step)
        one.commit(step)
    assert ["of shard 2 of step 0" in line for line in one.plan_lines()] == [True]
    assert one.weights_sha256() == trained(job, on_device=False)[1]


def test_without_memory_for_a_recheck_there_is_none_unless_the_user_wants_all(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(model, linear_data(), optimizer=OPTIMIZERS["AdamW"], global_batch=12, shards=SHARDS)
    monkeypatch.setattr(rechecks, "free_memory_bytes", lambda: 0)
    monkeypatch.setattr(memfd, "free_memory_bytes", lambda: 0)
    assert trained(job, on_device=False, recheck=RecheckPlan(1)) == trained(job, on_device=False)
    one = replica(job, on_device=False, recheck=RecheckPlan(1))
    for step in range(3):
        one.compute(step)
        one.commit(step)
    [notice] = one.plan_lines()
    assert notice.startswith("worker 0 on this host has no memory for rechecks"), "said once"
    with pytest.raises(NotEnoughMemory, match="not enough memory for rechecks"):
        trained(job, on_device=False, recheck=recheck_plan("all"))


def test_a_copy_is_that_of_its_step_although_training_goes_on() -> None:
    job = job_of(model, linear_data(), optimizer=OPTIMIZERS["AdamW"], global_batch=12, shards=SHARDS)
    one, still = (replica(job, on_device=True) for _ in range(2))
    for r in (one, still):
        r.compute(0)
        r.commit(0)
    (portion,) = one.portions()
    into, expected = Segment.private(portion.size_bytes), Segment.private(portion.size_bytes)
    copying = one.copy_portion(1, into)
    one.compute(1)
    one.commit(1)  # nobody has copied anything yet: it does so itself, before it writes
    still.copy_portion(1, expected).finish()
    copying.finish()
    assert bytes(into.buffer) == bytes(expected.buffer)


def test_stretches_end_where_the_type_or_the_patience_does() -> None:
    tiles = [Tile(index, torch.float32, index * 4096, 1024) for index in range(6)]
    tiles.append(Tile(6, torch.float64, 6 * 4096, 512))
    assert [s.tiles for s in stretches(tiles)] == [range(6), range(6, 7)]
    assert [s.tiles for s in stretches(tiles, border=2)] == [range(2), range(2, 6), range(6, 7)]
    assert [s.tiles for s in stretches(tiles, most_bytes=8192)] == [range(2), range(2, 4), range(4, 6), range(6, 7)]
    assert sum(s.numel for s in stretches(tiles, most_bytes=1)) == 6 * 1024 + 512

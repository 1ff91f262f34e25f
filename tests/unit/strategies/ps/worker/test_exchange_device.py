"""Workers under parameter servers that compute on an accelerator, with the host's memory standing in for a device's:
the same bits as those that compute where the servers read. On real devices: tests/gpu."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from distbelief import EmbeddingTable
from distbelief.job import Job
from distbelief.transport.device.accelerator import DeviceMemory
from distbelief.transport.shm.segment import SegmentClient
from tests.support.replicas.alone import job_of, kept, linear_data
from tests.support.replicas.served import ServedAlone

STEPS = 5


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 700), nn.BatchNorm1d(700), nn.ReLU(), nn.Dropout(0.2), nn.Linear(700, 4))


def job() -> Job:
    return job_of(
        model, linear_data(22), optimizer=lambda p: torch.optim.AdamW(p, lr=0.01), global_batch=8, shards=4,
        steps=STEPS, clip_norm=0.05, schedule=lambda step: 1.0 / (step + 1),
    )  # fmt: skip


def trained(one: Job, strategy: str, shared: bool, folder: Path, *, on_device: bool) -> tuple[list[float], str, bytes]:
    def run(segments: SegmentClient | None) -> tuple[list[float], str, bytes]:
        alone = ServedAlone(one, strategy, segments, on_device=on_device)
        assert isinstance(alone.replica._values, DeviceMemory) == on_device
        return *alone.train(folder), alone.saved()

    if not shared:
        return run(None)
    with kept() as segments:
        return run(segments)


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "a network"])
@pytest.mark.parametrize(
    "strategy",
    [
        "ps:sync",
        "ps:sync:backups=1",
        "ps:sync:int8:always",
        "ps:async",
        "ps:async:n_push=2:dc=0.04",
        "ps:async:noise=0.01",
        "ps:async:topk=0.1:always",
        "ps:ssp:staleness=2",
    ],
)
def test_it_gives_the_bits_of_a_worker_on_the_host(strategy: str, shared: bool, tmp_path: Path) -> None:
    """Losses, weights, and all that is saved."""
    there, here = (trained(job(), strategy, shared, tmp_path, on_device=where) for where in (True, False))
    assert there == here
    assert there[0][0] != there[0][-1]


def test_a_server_is_compared_with_workers_by_all_but_what_they_compute_on() -> None:
    alone = ServedAlone(job(), "ps:sync", None, on_device=True)
    assert alone.prepared.facts().items() - alone.stores.facts().items() == {("device", "cpu")}


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = EmbeddingTable(500, 8, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
        self.out = nn.Linear(8, 4)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.users(numbers).sum(1))
        return found


@pytest.mark.parametrize("strategy", ["ps:sync", "ps:async:n_push=2"])
def test_rows_of_tables_come_and_go(strategy: str, tmp_path: Path) -> None:
    dice = torch.Generator().manual_seed(2)
    data = torch.randint(0, 500, (22, 3), generator=dice), torch.randn(22, 4, generator=dice)
    with_table = job_of(Recommender, data, global_batch=8, shards=4, steps=STEPS, clip_norm=0.5)
    there, here = (trained(with_table, strategy, True, tmp_path, on_device=where) for where in (True, False))
    assert there == here
    assert there[0][0] != there[0][-1]

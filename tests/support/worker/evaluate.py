"""Evaluation as a member of a group, after a step of training. Runs in processes of the stage."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

from distbelief.checkpoint.weights import weights_sha256
from distbelief.data.sources import as_source
from distbelief.job import Job
from distbelief.shards import Schedule
from distbelief.strategies.base import Seat
from distbelief.strategies.dataparallel.prepared import PreparedAllReduce
from distbelief.transport.abort import Abort
from distbelief.transport.exchange import Exchange
from distbelief.transport.gloo.exchange import TorchExchange
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.shm.exchange import SharedExchange
from distbelief.transport.shm.segment import SegmentClient
from distbelief.worker.evaluate import Evaluator
from distbelief.worker.feed import Feed
from distbelief.worker.metrics import accuracy

SHARDS = 8


class Rows:
    """Tensors as a data set that reader processes read."""

    def __init__(self, *columns: torch.Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, sample: int) -> Any:
        return tuple(column[sample] for column in self.columns)


class Total(torchmetrics.SumMetric):  # type: ignore[misc]
    """A sum, not a ratio: it shows when something is counted twice."""

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        super().update(target)


def tables() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(740, 5, generator=generator), torch.randint(0, 3, (740,), generator=generator)
    return (x[:40], y[:40]), (x[40:], y[40:])


def make_job(readers: bool) -> Job:
    data, validation = tables()
    return Job(
        model=lambda: nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3)),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=data,
        global_batch=40,
        steps=1,
        shards=SHARDS,
        validation=Rows(*validation) if readers else validation,
        metrics={"accuracy": accuracy, "auroc": torchmetrics.AUROC(task="multiclass", num_classes=3), "total": Total()},
    )


def evaluate(segments: SegmentClient, rank: int, size: int, readers: bool, port: int, name: str) -> dict[str, Any]:
    job = make_job(readers)
    device = torch.device("cpu")
    evaluator = Evaluator(job, as_source(job.validation), device)
    schedule = Schedule(40, 40, SHARDS)
    feed = Feed(as_source(job.data), schedule, job, shuffle=False)
    prepared = PreparedAllReduce(job, schedule, device, exact=True)
    ranges = [(r * SHARDS // size, (r + 1) * SHARDS // size) for r in range(size)]
    group: Exchange
    if port:
        group = TorchExchange(Rendezvous("127.0.0.1", port, name, 60), rank, prepared.geometry(ranges), Abort())
    else:
        group = SharedExchange(segments, "generation 1", rank, prepared.geometry(ranges), Abort())
    replica = prepared.build(Seat(rank, ranges, 1000), group, feed.fetch)
    replica.compute(0)
    replica.commit(0)
    replica.synchronise()
    before = weights_sha256(replica.model)
    found = evaluator.evaluate(replica)
    assert evaluator.evaluate(replica) == found, "an evaluation belongs to the weights, not to the moment"
    assert replica.model.training
    assert weights_sha256(replica.model) == before
    evaluator.close()
    group.gather(b"")
    group.close()
    return {"metrics": found, "weights": {k: v.clone().numpy() for k, v in replica.model.state_dict().items()}}

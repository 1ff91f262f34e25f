"""Models whose shards would have to know of each other are refused by name, and no others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from distbelief.data.sources import as_source
from distbelief.errors import JobError
from distbelief.job import Job
from distbelief.shards import Schedule
from distbelief.strategies import parse
from distbelief.worker.feed import Feed

SAMPLES = 6  # of a shard
generator = torch.Generator().manual_seed(0)
X, Y = torch.randn(36, 8, generator=generator), torch.randn(36, 4, generator=generator)
X[:, 0] = X[:, 0].sort().values


def canary(model: Any, strategy: str = "allreduce", shards: int = 3) -> str:
    job = Job(
        model=model,
        loss=F.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        data=(X, Y),
        global_batch=shards * SAMPLES,
        shards=shards,
        steps=2,
    )
    source, how = as_source(job.data), parse(strategy)
    schedule = how.schedule_of(job, len(source))
    assert isinstance(schedule, Schedule)
    return how.prepare(job, schedule, torch.device("cpu")).canary(Feed(source, schedule, job, shuffle=False).fetch)


# --- state of samples ------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Carries its hidden state from batch to batch."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.cell, self.head = nn.GRUCell(8, 5), nn.Linear(5, 4)
        self.register_buffer("h", torch.zeros(5, SAMPLES) if way == "second axis" else torch.zeros(SAMPLES, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "second axis":
            h = self.cell(x, self.h.t())
            self.h = h.detach().t()
            return self.head(h)  # type: ignore[no-any-return]
        h = self.cell(x, self.h.clone())
        match self.way:
            case "attached":
                self.h = h
            case "detached":
                self.h = h.detach()
            case "in place":
                with torch.no_grad():
                    self.h.copy_(h)
            case "data":
                self.h.data.copy_(h.data)
        return self.head(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("way", "strategy"),
    [
        *((way, "allreduce") for way in ("attached", "detached", "in place", "data", "second axis")),
        *(("detached", strategy) for strategy in ("allreduce:inexact", "ps:sync", "ps:async", "local_sgd:2")),
    ],
)
def test_a_hidden_state_that_is_carried_from_batch_to_batch_is_named(way: str, strategy: str) -> None:
    with pytest.raises(JobError, match="the model's buffer 'h' carries a value for every sample") as caught:
        canary(lambda: Recurrent(way), strategy)
    assert "`shards=1`" in caught.value.hint


def test_with_one_shard_there_is_nothing_to_average() -> None:
    assert canary(lambda: Recurrent("detached"), shards=1)


def test_a_buffer_that_takes_the_batch_s_size_is_named() -> None:
    class Growing(Recurrent):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.h = torch.zeros(len(x), 5)
            return super().forward(x)

    def model() -> nn.Module:
        made = Growing("detached")
        made.h = torch.zeros(1, 5)
        return made

    with pytest.raises(JobError, match=r"'h' changed its shape while training, from \(1, 5\) to \(6, 5\)") as caught:
        canary(model)
    assert "averaged over the shards" in caught.value.hint
    assert "a table that grows (of a rotary embedding) has its full size from __init__ on" in caught.value.hint


class Contrast(nn.Module):
    """MoCo: each sample against a queue of earlier samples' keys. `axis`: that of the keys."""

    def __init__(self, axis: int, is_read: bool = True) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(8, 4), nn.Linear(32, 4)
        self.axis, self.is_read = axis, is_read
        keys = F.normalize(torch.randn(32, 4, generator=torch.Generator().manual_seed(2)))
        self.register_buffer("queue", keys if axis == 0 else keys.t().contiguous())
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = F.normalize(self.encoder(x))
        queue = self.queue if self.axis == 0 else self.queue.t()
        out = self.head(keys @ (queue.t().clone() if self.is_read else torch.ones(4, 32)))
        with torch.no_grad():
            queue[(torch.arange(len(x)) + self.at) % 32] = keys
            self.at += len(x)
        return out  # type: ignore[no-any-return]


@pytest.mark.parametrize("axis", [0, 1])
def test_a_queue_of_the_samples_keys_is_named(axis: int) -> None:
    with pytest.raises(JobError, match="the model's buffer 'queue' carries a value for every sample") as caught:
        canary(lambda: Contrast(axis))
    assert "`shards=1`" in caught.value.hint
    assert canary(lambda: Contrast(axis), shards=1)
    assert canary(lambda: Contrast(axis, is_read=False)), "a log"


class Keeping(nn.Module):
    """`kind`: what it keeps in a buffer that has as many rows as a shard has samples."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(8, SAMPLES)
        self.norm = nn.BatchNorm1d(SAMPLES) if kind == "statistics" else nn.Identity()
        self.head = nn.Linear(SAMPLES, 4)
        if kind == "spectral norm":
            self.layer = nn.utils.parametrizations.spectral_norm(self.layer)
        self.register_buffer("kept", torch.ones(SAMPLES, SAMPLES if kind == "covariance" else 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.layer(x))
        out = self.head(F.dropout(h, 0.1, self.training))
        match self.kind:
            case "log":
                self.kept = out.detach()
            case "covariance":
                self.kept = 0.9 * self.kept + 0.1 * (h.t() @ h).detach()
                return out * self.kept.mean()  # type: ignore[no-any-return]
            case "mean":
                self.kept = 0.9 * self.kept + 0.1 * out.mean(0).detach()
                return out - self.kept[:1]  # type: ignore[no-any-return]
            case "constant":
                return out * self.kept[0]  # type: ignore[no-any-return]
            case "sorted":
                if bool((x[:-1, 0] > x[1:, 0]).any()):
                    raise ValueError("samples must come sorted")
                self.kept = out.detach() + self.kept
        return out  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["statistics", "spectral norm", "log", "covariance", "mean", "constant", "sorted"])
def test_statistics_and_what_is_only_kept_are_no_state_of_samples(kind: str) -> None:
    assert canary(lambda: Keeping(kind))


def test_looking_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running statistics over as many features as a shard has samples are looked at more closely; the canary and the
    buffers are the same as without the look."""
    module = "distbelief.strategies.dataparallel.prepared.require_no_rows_of_samples"
    looked: list[Any] = []
    torch.manual_seed(5)
    model = Keeping("statistics")
    looking = copy.deepcopy(model)
    first = canary(looking)
    assert all(
        torch.equal(a, b) for a, b in zip(looking.state_dict().values(), model.state_dict().values(), strict=True)
    )
    monkeypatch.setattr(module, lambda *given: looked.append(given))
    assert canary(model) == first
    assert looked


# --- SyncBatchNorm ---------------------------------------------------------------------------------------------------


class SyncBatchNorm(nn.BatchNorm1d):
    """As other libraries have it."""


@pytest.mark.parametrize("strategy", ["allreduce", "ps:sync", "local_sgd:2", "pipeline:2"])
@pytest.mark.parametrize("norm", [nn.SyncBatchNorm, SyncBatchNorm])
def test_a_sync_batch_norm_is_refused_with_its_name(strategy: str, norm: type[nn.Module]) -> None:
    with pytest.raises(JobError, match="the module '1' is a SyncBatchNorm, and nothing would synchronise it") as caught:
        canary(lambda: nn.Sequential(nn.Linear(8, 8), norm(8), nn.Linear(8, 4)), strategy)
    assert "average" in caught.value.hint
    assert "BatchNorm1d" in caught.value.hint

"""A whole training of a small job with everything in it, as a member of any group; the same in plain PyTorch; and ways
to break each rule of exactness. Runs in processes of the stage."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from distbelief.checkpoint.weights import weights_sha256
from distbelief.data.rules.order import positions_to_samples
from distbelief.data.sources import as_source
from distbelief.job import Job
from distbelief.shards import Range, Schedule, shard_seed, split
from distbelief.strategies.base import Seat
from distbelief.strategies.dataparallel.prepared import PreparedAllReduce
from distbelief.strategies.flatmodel import compute, tileoptimizer
from distbelief.strategies.flatmodel.rules import stepwork as takeover
from distbelief.transport.abort import Abort
from distbelief.transport.exchange import Exchange
from distbelief.transport.gloo.exchange import TorchExchange
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.shm import exchange as shared
from distbelief.transport.shm.segment import SegmentClient
from distbelief.worker.feed import Feed

SAMPLES, GLOBAL_BATCH, STEPS, CLASSES = 56, 24, 7, 30
CLIP_NORM = 0.05


class Everything(nn.Module):
    """Sparse and tied weights, several types, batch statistics, dropout, a layer that some samples do not reach, one
    that none reaches, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.words = nn.Embedding(CLASSES, 8, sparse=True)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.body = nn.Linear(14, 256)
        self.norm = nn.BatchNorm1d(256)
        self.drop = nn.Dropout(0.3)
        self.sometimes = nn.Linear(256, 32)
        self.unused = nn.Linear(64, 64)
        self.last = nn.Linear(256, 8)
        self.head = nn.Linear(8, CLASSES, bias=False)
        self.head.weight = self.words.weight

    def forward(self, word: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h = torch.cat([self.words(word), self.frozen(x)], 1)
        h = self.drop(F.relu(self.norm(self.body(h))))
        out: torch.Tensor = self.head(self.last(h) * self.scale.float())
        if x[:, 0].max() > 1.0:
            out = out + self.sometimes(h).mean(1, keepdim=True)
        return out


def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Some targets are to be ignored, so the weight is not the number of samples."""
    total = F.cross_entropy(output, target, reduction="sum", ignore_index=-100)
    return total, (target != -100).sum()


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    matrices = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}], lr=1e-2)


def short_rows(p: torch.Tensor) -> torch.Tensor:
    return torch.renorm(p, 2, 0, 0.55)


def clipped(p: torch.Tensor) -> None:
    p.clamp_(-0.1, 0.1)


def make_job(shards: int) -> Job:
    generator = torch.Generator().manual_seed(1)
    word = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    x = torch.randn(SAMPLES, 6, generator=generator)
    target = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    target[torch.randperm(SAMPLES, generator=generator)[:15]] = -100
    return Job(
        model=Everything,
        loss=loss,
        optimizer=optimizer,
        data=(word, x, target),
        global_batch=GLOBAL_BATCH,
        steps=STEPS,
        shards=shards,
        seed=11,
        schedule=lambda step: 1.0 / (1 + step),
        clip_norm=CLIP_NORM,
        after_update={"body.*": clipped, "sometimes.weight": short_rows, "unused.*": torch.zero_, "head.*": short_rows},
    )


# --- with the trainer ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    rank: int
    ranges: tuple[Range, ...]
    transport: str = "shared"
    port: int = 0
    name: str = ""


@dataclass(frozen=True)
class Trained:
    sha256: str
    losses: list[float]
    fingerprints: list[str]
    unused_moved: bool


def train(segments: SegmentClient, place: Place, broken: str = "") -> Trained:
    """Train as one member. Where all members share one replica, everybody sees the same weights at the end."""
    if broken:
        BREAK[broken]()
    shards = place.ranges[-1][1]
    job = make_job(shards)
    schedule = Schedule(SAMPLES, GLOBAL_BATCH, shards)
    feed = Feed(as_source(job.data), schedule, job, shuffle=True)
    feed.expect([(v, v + 1) for v in range(*place.ranges[place.rank])], until=STEPS)
    prepared = PreparedAllReduce(job, schedule, torch.device("cpu"), exact=True)
    geometry = prepared.geometry(place.ranges)
    group: Exchange
    if place.transport == "shared":
        group = shared.SharedExchange(segments, "generation 1", place.rank, geometry, Abort())
    else:
        meeting = Rendezvous("127.0.0.1", place.port, place.name, timeout_s=60)
        group = TorchExchange(meeting, place.rank, geometry, Abort())
    start = [p.detach().clone() for p in prepared.model.unused.parameters()]  # type: ignore[union-attr, operator]
    member = prepared.build(Seat(place.rank, place.ranges, 1000), group, feed.fetch)
    results = []
    for step in range(STEPS):
        member.compute(step)
        results.append(member.commit(step))
    member.synchronise()
    end = list(member.model.unused.parameters())  # type: ignore[union-attr, operator]
    moved = not all(torch.equal(a, b) for a, b in zip(start, end, strict=True))
    sha256 = weights_sha256(member.model)
    group.gather(b"")
    group.close()
    return Trained(sha256, [r.loss for r in results], [r.fingerprint for r in results], moved)


# --- in plain PyTorch ------------------------------------------------------------------------------------------------


def plain(segments: SegmentClient, shards: int) -> Trained:
    """One process, one shard after the other, torch's own fused optimizer over whole parameters."""
    job = make_job(shards)
    torch.manual_seed(job.seed)
    model = Everything()
    parameters = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(optimizer(parameters).param_groups, fused=True)
    for group in adam.param_groups:
        group["fused"] = True
    rates = [group["lr"] for group in adam.param_groups]
    floats = [b for b in model.buffers() if b.is_floating_point()]
    schedule = Schedule(SAMPLES, GLOBAL_BATCH, shards)
    losses = []
    for step in range(STEPS):
        before = [b.clone() for b in model.buffers()]
        sums: list[Any] = []
        totals, weights = [], []
        for v in range(schedule.occupied(step)):
            epoch, low, high = schedule.shard(step, v)
            chosen = torch.from_numpy(positions_to_samples(np.arange(low, high), SAMPLES, job.seed, epoch, True))
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
            torch.manual_seed(shard_seed(job.seed, step, v))
            word, x, target = (column[chosen] for column in job.data)
            total, weight = loss(model(word, x), target)
            gradients = torch.autograd.grad(total, parameters, allow_unused=True)
            dense = [g.coalesce().to_dense() if g is not None and g.is_sparse else g for g in gradients]
            sums.append((dense, [b.clone() for b in floats]))
            totals.append(float(total.detach()))
            weights.append(float(weight))
        gradients, averages = _tree((0, shards), sums)
        scaled = [None if g is None else g * (1.0 / math.fsum(weights)) for g in gradients]
        norm = math.sqrt(
            math.fsum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in scaled if g is not None)
        )
        assert norm > CLIP_NORM
        factor = float(np.float32(CLIP_NORM / (norm + 1e-6)))
        for parameter, gradient in zip(parameters, scaled, strict=True):
            parameter.grad = None if gradient is None else gradient * factor
        for group, rate in zip(adam.param_groups, rates, strict=True):
            group["lr"] = rate / (1 + step)
        adam.step()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                if name in ("body.weight", "body.bias"):
                    parameter.data.clamp_(-0.1, 0.1)
                if name in ("sometimes.weight", "words.weight"):  # the latter is also the head's
                    parameter.data = torch.renorm(parameter.data, 2, 0, 0.55)
        for buffer, value in zip(floats, averages, strict=True):
            buffer.copy_(value / len(sums))
        losses.append(math.fsum(totals) / math.fsum(weights))
    return Trained(weights_sha256(model), losses, [], False)


def _tree(node: Range, sums: list[Any]) -> Any:
    if node[1] - node[0] == 1:
        return sums[node[0]]
    left, right = split(node)
    if right[0] >= len(sums):
        return _tree(left, sums)
    one, two = _tree(left, sums), _tree(right, sums)
    gradients = [b if a is None else a if b is None else a + b for a, b in zip(one[0], two[0], strict=True)]
    return gradients, [a + b for a, b in zip(one[1], two[1], strict=True)]


# --- each rule, broken -----------------------------------------------------------------------------------------------


def _left_to_right() -> None:
    takeover.program = lambda shards, occupied, sources: functools.reduce(  # type: ignore[assignment]
        lambda total, number: (total, number), range(len(sources))
    )


def _norms_by_member() -> None:
    """Each member adds up the squares of its own tiles, in the gradients' precision."""
    share = shared.SharedExchange.share_squares

    def rounded(self: shared.SharedExchange, mine: dict[int, float]) -> list[float]:
        total = float(sum((np.float32(square) for square in mine.values()), np.float32(0)))
        return share(self, {tile: total if tile == min(mine) else 0.0 for tile in mine})

    shared.SharedExchange.share_squares = rounded  # type: ignore[method-assign]


def _zeros_for_untouched() -> None:
    update = tileoptimizer.TileOptimizer.update
    tileoptimizer.TileOptimizer.update = lambda self, gradient, factor, untouched, divisor: update(  # type: ignore[method-assign]
        self, gradient, factor, None, divisor
    )


def _functions_on_pieces() -> None:
    """As if a tile could begin in the middle of a parameter: its pieces are not its rows."""

    def of_pieces(self: tileoptimizer.TileOptimizer, step: int, untouched: Any) -> None:
        for entry, value, one in self._functions:
            if untouched is None or not untouched[entry]:
                for piece in value.view(-1).split(100):
                    one.apply(piece.view(1, -1), step)

    tileoptimizer.TileOptimizer.after_update = of_pieces  # type: ignore[method-assign]


def _buffers_carried_on() -> None:
    """Integers are restored: they would be noticed at once, and the run would end."""
    restore = compute.ShardComputer.restore_buffers
    compute.ShardComputer.restore_buffers = lambda self, committed: restore(  # type: ignore[method-assign]
        self, self._live_tiles
    )


def _random_numbers_carried_on() -> None:
    once = compute.seed_everything

    def seed(number: int) -> None:
        if number == 11:  # the job's seed, for the initial weights
            once(number)

    compute.seed_everything = seed


BREAK: dict[str, Callable[[], None]] = {
    "order": _left_to_right,
    "norms": _norms_by_member,
    "untouched": _zeros_for_untouched,
    "functions": _functions_on_pieces,
    "buffers": _buffers_carried_on,
    "random": _random_numbers_carried_on,
}

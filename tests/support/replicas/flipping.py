"""A training of the job of member.py in which gradients have a flipped bit on some member, with rechecks.

The bit is flipped in a hook on a parameter, so in the gradient that autograd gives to the product. Runs in processes of
the stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distbelief.checkpoint.weights import weights_sha256
from distbelief.data.sources import as_source
from distbelief.errors import GradientsDiffer
from distbelief.options import NEVER, RecheckPlan
from distbelief.shards import Range, Schedule, shard_seed
from distbelief.strategies.base import Seat
from distbelief.strategies.dataparallel.prepared import PreparedAllReduce
from distbelief.transport.abort import Abort
from distbelief.transport.exchange import Exchange
from distbelief.transport.gloo.exchange import TorchExchange
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.shm.exchange import SharedExchange
from distbelief.transport.shm.segment import SegmentClient
from distbelief.transport.singlemember import SingleMemberExchange
from distbelief.worker.feed import Feed
from tests.support.replicas.member import GLOBAL_BATCH, SAMPLES, make_job

FLIPPED = "body.weight"


@dataclass(frozen=True)
class Flip:
    """On the member of this rank, gradients of this step and shard have a flipped bit; -1: of all steps, all shards."""

    rank: int
    step: int = -1
    shard: int = -1
    times: int = -1
    """How often; -1: always."""


@dataclass(frozen=True)
class Play:
    ranges: tuple[Range, ...]
    steps: int
    recheck: RecheckPlan = NEVER
    flips: tuple[Flip, ...] = ()
    hosts: tuple[str, ...] = ()
    port: int = 0
    """Of a store: then members meet in torch groups."""
    name: str = ""
    counts_calls: bool = False
    """The model counts its calls, and its output depends on the count."""


@dataclass(frozen=True)
class Ended:
    sha256: str
    applied: int
    error: str
    hint: str
    at: tuple[int, int]
    """The step and shard that the error names."""
    news: list[str]
    computed: int
    """The shards that this member has computed."""


class _Counting(nn.Module):
    """A layer that scales by the number of its calls: hidden state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.inner(x) * (1 + self.calls)
        return out


def train(segments: SegmentClient, rank: int, play: Play) -> Ended:
    shards = play.ranges[-1][1]
    job = make_job(shards)
    schedule = Schedule(SAMPLES, GLOBAL_BATCH, shards)
    feed = Feed(as_source(job.data), schedule, job, shuffle=True)
    feed.expect([(v, v + 1) for v in range(*play.ranges[rank])], until=play.steps)
    prepared = PreparedAllReduce(job, schedule, torch.device("cpu"), exact=True)
    if play.counts_calls:
        prepared.model.last = _Counting(prepared.model.last)  # type: ignore[arg-type]
    begun = _flip(prepared, [flip for flip in play.flips if flip.rank == rank], job.seed, play.steps, shards)
    geometry = prepared.geometry(play.ranges)
    group: Exchange
    if play.port:
        group = TorchExchange(Rendezvous("127.0.0.1", play.port, play.name, timeout_s=60), rank, geometry, Abort())
    elif len(play.ranges) == 1:
        group = SingleMemberExchange(geometry)
    else:
        group = SharedExchange(segments, "generation 1", rank, geometry, Abort())
    workers = range(10, 10 + len(play.ranges))
    seat = Seat(rank, play.ranges, play.steps, 1, (), workers, play.hosts, play.recheck)
    member = prepared.build(seat, group, feed.fetch)
    error, hint, at, news = "", "", (-1, -1), []
    try:
        for step in range(play.steps):
            member.compute(step)
            member.commit(step)
            news += member.plan_lines()
    except GradientsDiffer as found:
        error, hint, at = found.message, found.hint, (found.step, found.shard)
    group.gather(b"")
    member.synchronise()
    applied = member.steps_applied()
    sha256 = weights_sha256(member.model)
    group.gather(b"")
    group.close()
    return Ended(sha256, applied, error, hint, at, news, len(begun))


def _flip(prepared: PreparedAllReduce, flips: list[Flip], seed: int, steps: int, shards: int) -> list[Any]:
    """Plant the flips. Returns the list of the shards that have begun, which grows."""
    computer = prepared._computer
    of_seed = {shard_seed(seed, step, shard): (step, shard) for step in range(steps) for shard in range(shards)}
    begun: list[tuple[int, int]] = []
    left = [flip.times for flip in flips]
    begin = computer.begin

    def noted(batch: Any, samples: int, shards_seed: int, *others: Any) -> Any:
        begun.append(of_seed[shards_seed])
        return begin(batch, samples, shards_seed, *others)

    def flipped(gradient: torch.Tensor) -> torch.Tensor:
        step, shard = begun[-1]
        for number, flip in enumerate(flips):
            if flip.step in (-1, step) and flip.shard in (-1, shard) and left[number]:
                left[number] -= 1
                gradient = gradient.clone()
                largest = int(gradient.abs().argmax())
                gradient.view(torch.int32).view(-1)[largest] ^= 1 << 20  # a low bit may vanish in the sum
        return gradient

    computer.begin = noted  # type: ignore[method-assign]
    if flips:
        dict(prepared.model.named_parameters())[FLIPPED].register_hook(flipped)  # type: ignore[no-untyped-call]
    return begun

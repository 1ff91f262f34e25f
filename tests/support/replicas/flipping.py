"""A training of the job of member.py in which gradients have a flipped bit on some member, with rechecks.

The bit is flipped in a hook on a parameter, so in the gradient that autograd gives to the product. Runs in processes of
the stage.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from distbelief.checkpoint.weights import weights_sha256
from distbelief.data.sources import as_source
from distbelief.errors import ResultsDiffer
from distbelief.options import NEVER, RecheckPlan
from distbelief.shards import Range, Schedule, shard_seed
from distbelief.strategies.base import Seat
from distbelief.strategies.dataparallel.prepared import PreparedAllReduce
from distbelief.strategies.dataparallel.replica import DataParallelReplica
from distbelief.strategies.flatmodel.rules.stepwork import WEIGHT, ShardWork
from distbelief.transport.abort import Abort, Aborted
from distbelief.transport.exchange import AllContributions, Exchange
from distbelief.transport.gloo.exchange import TorchExchange
from distbelief.transport.gloo.group import train_or_be_succeeded
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.shm.exchange import SharedExchange
from distbelief.transport.shm.segment import SegmentClient
from distbelief.transport.singlemember import SingleMemberExchange
from distbelief.worker.feed import Feed
from tests.support.replicas.member import GLOBAL_BATCH, SAMPLES, make_job
from tests.support.stage import perform_and_end

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
class LaterFlip:
    """On the member of this rank, one bit flips once in this step, after the gradients of its shards are computed."""

    rank: int
    step: int
    where: str
    """partial (a sum of this member's shards) · published (the same, after it was compared) · sum · copy (of a sum that
    came over the network) · update · norm · rows (of losses and weights) · state (after the step) · optimizer (its
    state, after the step)"""


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
    later: LaterFlip | None = None
    clips: bool = True
    counts_calls: bool = False
    """The model counts its calls, and its output depends on the count."""
    nan_gradient: bool = False
    """One parameter's gradient is NaN, with every sound member."""


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
    abort = Abort()
    found: list[Ended] = []
    begun: list[Any] = []
    """The replica, its notices and the shards that it has begun."""
    # gloo sometimes misses the end of a group; then another thread answers for this member
    train_or_be_succeeded(
        lambda: found.append(_train(segments, rank, play, abort, begun)),
        abort,
        lambda: perform_and_end(lambda: _aborted(*begun)),
    )
    return found[0]


def _aborted(member: DataParallelReplica, news: list[str], shards: list[Any]) -> Ended:
    return Ended("", member.steps_applied(), "aborted", "", (-1, -1), news, len(shards))


def _train(segments: SegmentClient, rank: int, play: Play, abort: Abort, live: list[Any]) -> Ended:
    shards = play.ranges[-1][1]
    job = make_job(shards) if play.clips else replace(make_job(shards), clip_norm=None)
    schedule = Schedule(SAMPLES, GLOBAL_BATCH, shards)
    feed = Feed(as_source(job.data), schedule, job, shuffle=True)
    feed.expect([(v, v + 1) for v in range(*play.ranges[rank])], until=play.steps)
    prepared = PreparedAllReduce(job, schedule, torch.device("cpu"), exact=True)
    if play.counts_calls:
        prepared.model.last = _Counting(prepared.model.last)  # type: ignore[arg-type]
    if play.nan_gradient:
        prepared.model.body.weight.register_hook(lambda gradient: gradient * math.nan)  # type: ignore[union-attr, operator]
    begun = _flip(prepared, [flip for flip in play.flips if flip.rank == rank], job.seed, play.steps, shards)
    geometry = prepared.geometry(play.ranges)
    failed = segments.segment("failed", 4096).tensor(torch.int64, 0, 1)
    group: Exchange
    if play.port:
        group = TorchExchange(Rendezvous("127.0.0.1", play.port, play.name, timeout_s=60), rank, geometry, abort)
    elif len(play.ranges) == 1:
        group = SingleMemberExchange(geometry)
    else:
        group = SharedExchange(segments, "generation 1", rank, geometry, abort)
    workers = range(10, 10 + len(play.ranges))
    seat = Seat(rank, play.ranges, play.steps, 1, (), workers, play.hosts, play.recheck)
    member = prepared.build(seat, group, feed.fetch)
    assert isinstance(member, DataParallelReplica)
    later = play.later if play.later and play.later.rank == rank else None
    if play.later:
        _abort_when(failed, abort)
    error, hint, at, news = "", "", (-1, -1), list[str]()
    live += [member, news, begun]
    try:
        for step in range(play.steps):
            if later and later.step == step:
                _flip_later(member, group, later)
            member.compute(step)
            member.commit(step)
            news += member.plan_lines()
            if later and (later.where, later.step) == ("state", step):
                _flip_bit(member._state.values[0])
            if later and (later.where, later.step) == ("optimizer", step):
                _flip_bit(member._updates._optimizers[0]._held[0].views["exp_avg_sq"][1])
    except ResultsDiffer as found:
        error, hint, at = found.message, found.hint, (found.step, found.shard)
    except Aborted:
        error = "aborted"
    if play.later and error:  # only one member raises; the coordinator ends the others
        failed.fill_(1)
        return Ended("", member.steps_applied(), error, hint, at, news, len(begun))
    group.gather(b"")
    member.synchronise()
    applied = member.steps_applied()
    sha256 = weights_sha256(member.model)
    group.gather(b"")
    group.close()
    return Ended(sha256, applied, error, hint, at, news, len(begun))


def _abort_when(failed: torch.Tensor, abort: Abort) -> None:
    def look() -> None:
        while not int(failed[0]):
            time.sleep(0.005)
        abort.set("the run ends")

    threading.Thread(target=look, daemon=True).start()


def _flip_bit(values: torch.Tensor) -> None:
    values.view(torch.int32)[int(values.abs().argmax())] ^= 1 << 20


def _flip_later(member: DataParallelReplica, group: Exchange, flip: LaterFlip) -> None:
    """In this step, the first time that this member does it."""
    match flip.where:
        case "partial":
            adder, flipped = member._tile_adder, []

            def adding(unit: ShardWork, last: bool) -> Callable[[int], None]:
                ready = adder(unit, False)

                def tile_ready(tile: int) -> None:
                    ready(tile)
                    if unit.additions and not flipped:
                        flipped.append(tile)
                        _flip_bit(member._tile_views(unit.additions[-1][0])[tile])
                    if last:
                        group.publish(tile)

                return tile_ready

            member._tile_adder = adding  # type: ignore[method-assign]
        case "published":
            publish_all = member._publish_all

            def publishing() -> None:
                member._publish_all = publish_all  # type: ignore[method-assign]
                _flip_bit(member._tile_views(next(iter(member._work_of(flip.step).partials.results.values())))[1])
                publish_all()

            member._publish_all = publishing  # type: ignore[method-assign]
        case "sum" | "copy" if isinstance(group, TorchExchange):
            spread = group._spread

            def spreading() -> None:
                group._spread = spread  # type: ignore[method-assign]
                if flip.where == "sum":
                    _flip_bit(group._out[group._mine()[0]])
                spread()
                if flip.where == "copy":
                    _flip_bit(group._out[0])

            group._spread = spreading  # type: ignore[method-assign]
        case "rows":
            share_all = group.share

            def shared_all(*arguments: Any) -> AllContributions:
                found = share_all(*arguments)
                found.rows[0, WEIGHT] += 1
                group.share = share_all  # type: ignore[method-assign]
                return found

            group.share = shared_all  # type: ignore[method-assign]
        case "sum":
            reduce, calls = group._reduce, []  # type: ignore[attr-defined]

            def added(tile: int, out: torch.Tensor) -> torch.Tensor:
                found: torch.Tensor = reduce(tile, out)
                calls.append(tile)
                if len(calls) == 1:
                    _flip_bit(found)
                return found

            group._reduce = added  # type: ignore[attr-defined]
        case "update":
            apply = member._updates.apply

            def applied(step: int, gradients: dict[int, torch.Tensor], *others: Any) -> None:
                apply(step, gradients, *others)
                if step == flip.step and min(gradients) == member._tiles[0]:
                    _flip_bit(member._state.values[min(gradients)])

            member._updates.apply = applied  # type: ignore[method-assign]
        case "norm":
            share = group.share_squares

            def shared(mine: dict[int, float]) -> list[float]:
                return share({tile: square * 1.25 for tile, square in mine.items()})

            group.share_squares = shared  # type: ignore[method-assign]


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

"""Saves a state in one layout and goes on from it in another: members of the checkpoint matrix, as processes of the
stage. `allreduce` stands for one process, or for data parallelism alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file

from distbelief.checkpoint.manifest import Facts, PartRecord
from distbelief.checkpoint.saving import seal, write_part
from distbelief.data.sources import as_source
from distbelief.job import Job
from distbelief.shards import Schedule
from distbelief.strategies import parse
from distbelief.strategies.base import Replica, Saved, Seat
from distbelief.strategies.rules.degrees import Degrees, fit, ranges
from distbelief.transport.abort import Abort
from distbelief.transport.gloo.exchange import TorchExchange
from distbelief.transport.gloo.group import TorchGroup
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.shm.segment import Segment, SegmentClient
from distbelief.worker.feed import Feed
from distbelief.worker.origin import facts_at, opened_at, saved_at
from tests.support.mesh.member import adam, gpt

SAVED, END = 3, 6


def matrix_job() -> Job:
    """Tied weights, dropout, a schedule, and an optimizer that keeps much."""
    return replace(gpt(), steps=END, optimizer=adam, clip_norm=0.5)


@dataclass(frozen=True)
class Layout:
    strategy: str
    workers: int


@dataclass(frozen=True)
class Act:
    layout: Layout
    load: str = ""
    """The folder to begin from; empty: from the first step."""
    save: str = ""
    """The folder to save to after `SAVED` steps; empty: goes on to `END`."""
    scratch: str = ""
    """Where an act that neither loads nor saves leaves its weights."""


def perform(segments: SegmentClient, worker: int, port: int, acts: Sequence[Act]) -> list[dict[str, torch.Tensor]]:
    """What the weights are at the end of each act; from the member of rank 0, others return nothing."""
    found = []
    for number, act in enumerate(acts):
        if worker < act.layout.workers:
            try:
                found.append(_perform(worker, Rendezvous("127.0.0.1", port, f"act {number}", timeout_s=60), act))
            except Exception as error:
                raise RuntimeError(f"worker {worker} in {act}") from error
    return found


def _perform(rank: int, meeting: Rendezvous, act: Act) -> dict[str, torch.Tensor]:
    job = matrix_job()
    source = as_source(job.data)
    schedule = Schedule(len(source), job.global_batch, job.resolved_shards)
    strategy = parse(act.layout.strategy)
    wish = strategy.wish
    degrees = fit(wish, act.layout.workers, schedule.shards) if wish else Degrees(data=act.layout.workers)
    spans = ranges(degrees, schedule.shards)
    feed = Feed(source, schedule, job, shuffle=job.shuffle)
    feed.expect([(v, v + 1) for v in range(*spans[rank])], until=END)
    prepared = strategy.prepare(job, schedule, torch.device("cpu"))
    geometry = None if wish else prepared.geometry(spans)  # a divided model needs a group only
    group = (
        TorchGroup(meeting, rank, act.layout.workers, Abort())
        if geometry is None
        else TorchExchange(meeting, rank, geometry, Abort())
    )

    def begin_from(step: int = -1) -> Saved | None:
        if not act.load:
            return None
        return opened_at(act.load, SAVED) if wish else saved_at(act.load, SAVED)

    seat = Seat(rank, spans, END, 1, degrees.as_list() if wish else ())
    replica = prepared.build(seat, group, feed.fetch, begin_from)
    for step in range(replica.steps_applied(), SAVED if act.save else END):
        replica.compute(step)
        replica.commit(step)
    if act.save:
        _save(replica, rank, act.save)
    path = Path(act.save or act.load or act.scratch) / f"{act.layout.strategy}-{act.layout.workers}.safetensors"
    replica.save_weights(path)
    group.gather(b"")
    group.close()
    return load_file(path) if rank == 0 else {}


def _save(replica: Replica, rank: int, folder: str) -> None:
    portions = replica.portions()
    copy = Segment.private(portions[rank].size_bytes)
    copying = replica.copy_portion(SAVED, copy)
    copying.finish()
    part = write_part(folder, SAVED, rank + 1, len(portions), portions[rank].slices(copy, copying.outside))
    told = replica.exchange.gather(msgspec.json.encode(part))
    if rank == 0:
        records = [msgspec.json.decode(one, type=PartRecord) for one in told]
        seal(folder, SAVED, facts_at(Facts(), replica, SAVED), records)
    replica.exchange.gather(b"")

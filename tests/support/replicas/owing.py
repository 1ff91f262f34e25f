"""A training with compressed gradients that begins from a checkpoint or from the first step, and saves its part of one
on the way. Runs in processes of the stage, with the job of member.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distbelief.checkpoint.manifest import Facts, PartRecord
from distbelief.checkpoint.saving import write_part
from distbelief.checkpoint.weights import weights_sha256
from distbelief.data.sources import as_source
from distbelief.shards import Schedule
from distbelief.strategies.base import Seat
from distbelief.strategies.dataparallel.compressed import CompressedReplica
from distbelief.strategies.dataparallel.devicereplica import DeviceReplica
from distbelief.strategies.dataparallel.prepared import PreparedAllReduce, networked, networked_on
from distbelief.transport.abort import Abort
from distbelief.transport.device.accelerator import Accelerator
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.shm.segment import Segment, SegmentClient
from distbelief.worker.feed import Feed
from distbelief.worker.origin import facts_at, opened_at, saved_at
from tests.support.replicas.member import GLOBAL_BATCH, SAMPLES, STEPS, make_job

SHARDS = 8
SAVED = 3


@dataclass(frozen=True)
class Left:
    sha256: str
    owed_first: bytes
    """What it owed when it began."""
    owed_saved: bytes
    part: PartRecord | None
    facts: Facts


def train(
    segments: SegmentClient,
    port: int,
    name: str,
    rank: int,
    size: int,
    method: str,
    folder: str,
    load: bool,
    where: str,
) -> Left:
    ranges = [(r * SHARDS // size, (r + 1) * SHARDS // size) for r in range(size)]
    job, schedule = make_job(SHARDS), Schedule(SAMPLES, GLOBAL_BATCH, SHARDS)
    feed = Feed(as_source(job.data), schedule, job, shuffle=True)
    feed.expect([ranges[rank]], until=STEPS)
    prepared = PreparedAllReduce(job, schedule, torch.device("cpu"), exact=False, compression=method, always=True)
    meeting = Rendezvous("127.0.0.1", port, name, timeout_s=60)
    given = meeting, rank, prepared.geometry(ranges), Abort()
    group = networked_on(Accelerator(torch.device("cpu")), *given) if where == "device" else networked(*given)

    def begin_from(step: int = -1):
        if not load:
            return None
        return saved_at(folder, SAVED) if step < 0 else opened_at(folder, step)

    member = prepared.build(Seat(rank, ranges, STEPS), group, feed.fetch, begin_from)
    assert isinstance(member, CompressedReplica)
    assert isinstance(member, DeviceReplica) == (where == "device")
    first = _owed(member, member.steps_applied())
    saved, part, facts = b"", None, Facts()
    for step in range(member.steps_applied(), STEPS):
        member.compute(step)
        member.commit(step)
        if step + 1 == SAVED:
            saved = _owed(member, SAVED)
            portion = member.portions()[rank]
            copy = Segment.private(portion.size_bytes)
            copying = member.copy_portion(SAVED, copy)
            copying.finish()
            facts = facts_at(Facts(), member, SAVED)
            part = write_part(folder, SAVED, rank + 1, size, portion.slices(copy, copying.outside))
    member.synchronise()
    sha256 = weights_sha256(member.model)
    group.gather(b"")
    group.close()
    return Left(sha256, first, saved, part, facts)


def _owed(member: CompressedReplica, applied: int) -> bytes:
    found = member.coder.residuals.at(applied)
    return b"" if found is None else found[: member.coder.residuals.elements].numpy().tobytes()

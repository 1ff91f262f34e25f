"""A training that begins from a checkpoint or from the first step, and saves its part of one on the way, as a member of
any group. Runs in processes of the stage, with the job of member.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distbelief.checkpoint.manifest import Facts, PartRecord
from distbelief.checkpoint.saving import write_part
from distbelief.checkpoint.weights import weights_sha256
from distbelief.data.sources import as_source
from distbelief.shards import Schedule
from distbelief.strategies.base import Seat
from distbelief.strategies.dataparallel.prepared import PreparedAllReduce
from distbelief.transport.abort import Abort
from distbelief.transport.exchange import Exchange
from distbelief.transport.gloo.exchange import TorchExchange
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.shm.exchange import SharedExchange
from distbelief.transport.shm.segment import Segment, SegmentClient
from distbelief.worker.feed import Feed
from distbelief.worker.origin import facts_at, frozen_of, saved_at
from distbelief.worker.spec import Origin
from tests.support.replicas.member import GLOBAL_BATCH, SAMPLES, STEPS, Place, make_job


@dataclass(frozen=True)
class Saving:
    folder: str
    load: int = 0
    """Begin from this step's checkpoint."""
    save: int = 0
    """Take a snapshot after so many steps, and go on."""


@dataclass(frozen=True)
class Left:
    sha256: str
    fingerprints: list[str]
    """Of the steps that it took."""
    part: PartRecord | None
    facts: Facts


def train(segments: SegmentClient, place: Place, saving: Saving) -> Left:
    shards = place.ranges[-1][1]
    job = make_job(shards)
    schedule = Schedule(SAMPLES, GLOBAL_BATCH, shards)
    feed = Feed(as_source(job.data), schedule, job, shuffle=True)
    feed.expect([(v, v + 1) for v in range(*place.ranges[place.rank])], until=STEPS)
    prepared = PreparedAllReduce(job, schedule, torch.device("cpu"), exact=True)
    if saving.load:
        with torch.no_grad():
            for parameter in prepared.model.parameters():
                parameter.add_(1.0)  # nothing of the initial values may be left, also of the frozen ones
        prepared.set_frozen(frozen_of(Origin(saving.folder), prepared.frozen()))
    group = _group(segments, place, prepared)
    begin_from = (lambda: saved_at(saving.folder, saving.load)) if saving.load else lambda: None
    member = prepared.build(Seat(place.rank, place.ranges, STEPS), group, feed.fetch, begin_from)
    fingerprints, copy, part, facts = [], None, None, Facts()
    for step in range(member.steps_applied(), STEPS):
        member.compute(step)
        fingerprints.append(member.commit(step).fingerprint)
        if step + 1 == saving.save:
            portion = member.portions()[place.rank]
            copy = Segment.private(portion.size_bytes)
            copying = member.copy_portion(step + 1, copy)
            copying.finish()
            outside = copying.outside
            facts = facts_at(Facts(), member, step + 1)
    if copy:
        part = write_part(saving.folder, saving.save, place.rank + 1, len(place.ranges), portion.slices(copy, outside))
    member.synchronise()
    sha256 = weights_sha256(member.model)
    group.gather(b"")
    group.close()
    return Left(sha256, fingerprints, part, facts)


def _group(segments: SegmentClient, place: Place, prepared: PreparedAllReduce) -> Exchange:
    geometry = prepared.geometry(place.ranges)
    if place.transport == "shared":
        return SharedExchange(segments, "generation 1", place.rank, geometry, Abort())
    meeting = Rendezvous("127.0.0.1", place.port, place.name, timeout_s=60)
    return TorchExchange(meeting, place.rank, geometry, Abort())

"""A worker that is alone under one real parameter server, all in the test's own process: messages arrive at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from distbelief.control.credentials import NO_CREDENTIAL
from distbelief.control.messages import ServerMap
from distbelief.coordinator.rules.servers.placement import NONE
from distbelief.data.sources import as_source
from distbelief.job import Job
from distbelief.options import RunOptions
from distbelief.shards import Schedule
from distbelief.strategies import parse
from distbelief.strategies.base import Seat, ServerJob
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import Acknowledged, AtGate, LeasedUpdate, Push, Update
from distbelief.strategies.ps.server.node import ServerNode
from distbelief.strategies.ps.server.runslices import RunSlices
from distbelief.strategies.ps.strategy import ParameterServer
from distbelief.strategies.ps.worker.asynchronous import AsynchronousReplica
from distbelief.strategies.ps.worker.exchange import DeviceServerExchange, ServerExchange
from distbelief.strategies.ps.worker.prepared import PreparedParameterServer
from distbelief.strategies.ps.worker.synchronous import SynchronousReplica
from distbelief.transport.abort import Abort
from distbelief.transport.shm.exchange import SharedExchange
from distbelief.transport.shm.segment import Segment, SegmentClient
from distbelief.transport.singlemember import SingleMemberExchange
from distbelief.worker.feed import Feed
from distbelief.worker.serving import ServingHost
from distbelief.worker.spec import WorkerSpec

CPU = torch.device("cpu")
LIFE = 1


class DirectClient:
    """See `ServerClient`."""

    life, version, waiting = LIFE, 1, False

    def __init__(self, node: ServerNode, slices: int) -> None:
        self._node = node
        self._slices = slices
        self._sequences: dict[int, int] = {}
        self._tickets = 0
        self._unanswered: set[tuple[int, int]] = set()
        self._given: dict[tuple[int, int], Any] = {}
        self._replies: dict[int, Framed] = {}

    def restart(self) -> None:
        assert not self._unanswered

    def slices(self, abort: Abort) -> int:
        return self._slices

    def push(self, number: int, content: Any, payload: Any = None) -> int:
        sequence = self._sequences.get(number, -1) + 1
        if isinstance(content, Update):
            sequence = content.update
        else:
            self._sequences[number] = sequence
        self._unanswered.add((number, sequence))
        # As over a socket: what is sent is not changed by what the sender does to its memory afterwards.
        sent = bytearray(payload) if payload is not None else None
        self._tell(Framed(Push(0, sequence, number, content, LIFE), sent))
        return sequence

    def flush(self) -> None: ...

    def settle(self, abort: Abort) -> None:
        assert not self._unanswered, self._unanswered

    def change(self, number: int, content: Any, abort: Abort) -> Any:
        return self._given.pop((number, self.push(number, content)))

    def ask(
        self, questions: Iterable[Callable[[int], Any]], abort: Abort, each: Callable[[Framed], None], idle: Any = None
    ) -> None:
        for make in questions:
            self._tickets += 1
            self._tell(Framed(make(self._tickets)))
            each(self._replies.pop(self._tickets))

    def _tell(self, letter: Framed) -> None:
        for _, answer in self._node.receive(letter, b"worker").clients:
            message = answer.message
            if isinstance(message, Acknowledged):
                self._unanswered.remove((message.slice, message.sequence))
                self._given[message.slice, message.sequence] = message.given
            else:
                self._replies[message.ticket] = answer


class ServedAlone:
    """`segments`: of the memory that worker and server share; None: bytes travel."""

    def __init__(self, job: Job, strategy: str, segments: SegmentClient | None, *, on_device: bool) -> None:
        self.job = job
        how = parse(strategy)
        assert isinstance(how, ParameterServer)
        source = as_source(job.data)
        schedule = Schedule(len(source), job.global_batch, job.resolved_shards)
        assert job.steps
        self.steps = job.steps
        self.prepared = PreparedParameterServer(job, schedule, CPU, how)
        options = RunOptions(1, strategy, save_every="never")
        spec = WorkerSpec(0, "here", "", NO_CREDENTIAL, "", options, shares_memory=segments is not None)
        known = ServerJob(job, schedule, self.steps, PreparedParameterServer(job, schedule, CPU, how))
        self.stores = stores = RunSlices(ServingHost(spec, segments), known)
        stores.life = LIFE
        node, slices = ServerNode(0, stores.make), len(stores.sizes)
        node.learn(ServerMap(1, LIFE, [0] * slices, [NONE] * slices, [NONE] * slices, {0: ""}))
        ranges, abort = [(0, schedule.shards)], Abort()
        geometry = self.prepared.geometry(ranges)
        meet: Any = lambda: SingleMemberExchange(geometry)  # noqa: E731
        if segments is not None:
            meet = SharedExchange(segments, "generation 1", 0, geometry, abort)
        own: dict[str, Segment] = {}
        given: Any = 0, 1, meet, DirectClient(node, slices), abort, geometry.slot_bytes, segments, own
        exchange = DeviceServerExchange(*given, device=CPU, kept={}) if on_device else ServerExchange(*given)
        feed = Feed(source, schedule, job, shuffle=job.shuffle)
        self.replica = self.prepared.build(Seat(0, ranges, self.steps, 1, (), [0]), exchange, feed.fetch)

    def train(self, folder: Path) -> tuple[list[float], str]:
        """(losses, digest of all weights, those on servers too)"""
        replica = self.replica
        if isinstance(replica, AsynchronousReplica):
            while not isinstance(what := replica.next(), AtGate):
                assert isinstance(what, LeasedUpdate)
                replica.work(what)
            replica.arrived(what.step)
        else:
            assert isinstance(replica, SynchronousReplica)
            while (step := replica.steps_applied()) < self.steps:
                replica.compute(step)
                replica.commit(step)
        assert replica.steps_applied() == self.steps
        replica.save_weights(folder / "weights.safetensors")
        return [one.loss for one in replica.remembered(0)], replica.weights_sha256()

    def saved(self) -> bytes:
        """What a checkpoint holds."""
        (portion,) = self.replica.portions()
        into = Segment.private(portion.size_bytes)
        self.replica.copy_portion(self.steps, into).finish()
        return bytes(into.view(0, portion.size_bytes))

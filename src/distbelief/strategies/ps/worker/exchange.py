"""The members of a generation under parameter servers: they meet rarely, and each talks to the servers.

A member under parameter servers that computes on an accelerator.

What servers read and show is in the host's memory. The device has the copy of the parameters that shards are computed
with, and partial sums, which are added up there. What is pushed is copied to the host first, once for all shards that
are in it; values come straight from the servers' memory where that can be mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch

from distbelief.control.credentials import Credential
from distbelief.shards import Range
from distbelief.strategies.ps.protocol.client import ServerClient
from distbelief.strategies.ps.protocol.frames import MessageSet
from distbelief.transport.abort import Abort
from distbelief.transport.device.accelerator import DeviceMemory, pin
from distbelief.transport.device.exchange import STRETCH_BYTES
from distbelief.transport.exchange import Backups, DiedComputing, Geometry, StepPlan
from distbelief.transport.gloo.group import TorchGroup
from distbelief.transport.membership import Membership
from distbelief.transport.shm.exchange import SharedExchange
from distbelief.transport.shm.segment import Memory, Segment, SegmentClient


@dataclass
class ServerExchange:
    """See `Group`. On one host the members' slots are in memory that servers map too; else they are their own."""

    rank: int
    size: int
    meet: Callable[[], TorchGroup] | SharedExchange
    """How the members meet. In shared memory nobody waits for that; over the network all must come, so it is done only
    when they have something to tell each other."""
    client: ServerClient
    abort: Abort
    slot_bytes: int
    segments: SegmentClient | None
    """Of the host that the servers are on too; None: their memory cannot be mapped."""
    own: dict[str, Segment]
    """What this process keeps from one generation to the next."""
    shares_state: bool = False
    backups: Backups | None = None
    apart: ClassVar[bool] = False
    """Whether sums and values are somewhere else than in the host's memory."""
    grain_bytes: ClassVar[int] = 1
    """How much of a sum is worth an operation of its own. Here every tile is, while it is in the cache."""
    _slots: dict[int, Segment] = field(default_factory=dict)
    _meeting: bool = False

    @cached_property
    def members(self) -> SharedExchange | TorchGroup:
        if isinstance(self.meet, SharedExchange):
            return self.meet
        self._meeting = True
        try:
            return self.meet()
        finally:
            self._meeting = False

    @property
    def _met(self) -> SharedExchange | TorchGroup | None:
        found: SharedExchange | TorchGroup | None = self.__dict__.get("members")
        return found

    @property
    def waiting(self) -> bool:
        return self._meeting or self.client.waiting or (self._met is not None and self._met.waiting)

    def died_computing(self) -> list[DiedComputing]:
        return self.meet.died_computing() if isinstance(self.meet, SharedExchange) else []

    def gather(self, payload: bytes) -> list[bytes]:
        return self.members.gather(payload)

    def begin(self, step: int) -> None:
        self.abort.check()
        if isinstance(self.meet, SharedExchange):
            self.meet.begin(StepPlan(step, [], 0))

    def working(self, shard: int) -> None:
        if isinstance(self.meet, SharedExchange):
            self.meet.working(shard)

    def working_on(self, step: int, shard: int) -> None:
        if isinstance(self.meet, SharedExchange):
            self.meet.working_on(step, shard)

    def slot(self, index: int) -> tuple[Segment, str]:
        """Memory for partial sums, and the name under which servers find it; no name: only this process can see it."""
        if isinstance(self.meet, SharedExchange):
            return self.meet.slot(index), self.meet.slot_name(index)
        if index not in self._slots:
            self._slots[index] = Segment.private(self.slot_bytes)
        return self._slots[index], ""

    def room(self, index: int) -> Memory:
        """Where the partial sum of that slot is computed: here it is the slot itself."""
        return self.slot(index)[0]

    def bring(self, index: int) -> None:
        """Let the slot have what was computed in its room. Before anybody reads it."""

    def values(self, size_bytes: int) -> Memory:
        """Where this process has its copy of the parameters, from one generation to the next."""
        return self.memory("values", size_bytes)

    def memory(self, name: str, size_bytes: int) -> Segment:
        """Memory of this process that outlives generations."""
        if name not in self.own:
            self.own[name] = Segment.private(size_bytes)
        return self.own[name]

    @property
    def maps(self) -> bool:
        """Whether it can read the servers' memory."""
        return self.segments is not None

    def server_memory(self, name: str) -> Segment:
        """Where a server has the values of a slice."""
        assert self.segments is not None
        return self.segments.segment(name)

    def forget_past(self) -> None:
        if isinstance(self.meet, SharedExchange):
            self.meet.forget_past()

    def close(self) -> None:
        if isinstance(self.meet, SharedExchange):
            self.meet.close()
        elif self._met is not None:
            self._met.close()


@dataclass(kw_only=True)
class DeviceServerExchange(ServerExchange):
    """See `ServerExchange`. Copies have come to their end when a method returns."""

    device: torch.device
    kept: dict[str, Memory]
    """What this process keeps on the device from one generation to the next."""
    apart: ClassVar[bool] = True
    grain_bytes: ClassVar[int] = STRETCH_BYTES
    _rooms: dict[int, DeviceMemory] = field(default_factory=dict)
    _opened: dict[str, Segment] = field(default_factory=dict)

    def room(self, index: int) -> Memory:
        if index not in self._rooms:
            self._rooms[index] = DeviceMemory(self.slot_bytes, self.device)
        return self._rooms[index]

    def bring(self, index: int) -> None:
        slot = self._pinned(self.slot(index)[0])
        computed = self.room(index).tensor(torch.uint8, 0, self.slot_bytes)
        slot.tensor(torch.uint8, 0, self.slot_bytes).copy_(computed)

    def values(self, size_bytes: int) -> Memory:
        if "values" not in self.kept:
            self.kept["values"] = DeviceMemory(size_bytes, self.device)
        return self.kept["values"]

    def server_memory(self, name: str) -> Segment:
        if name not in self._opened:  # it is held: what nobody holds is not pinned any more
            self._opened[name] = self._pinned(super().server_memory(name))
        return self._opened[name]

    def _pinned(self, segment: Segment) -> Segment:
        if self.device.type == "cuda":
            pin(segment)
        return segment


class UsesServers:
    """What the strategies with parameter servers answer alike, as a worker's prepared model."""

    messages: ClassVar[MessageSet]
    geometry: Callable[[Sequence[Range]], Geometry]
    _device: torch.device
    _client: ServerClient | None = None

    def connect(self, credential: Credential) -> ServerClient:
        self._client = ServerClient(credential, self.messages)
        return self._client

    def exchange(self, membership: Membership) -> ServerExchange:
        assert self._client is not None
        segments = membership.segments if membership.transport == "shm" else None
        meet = membership.share(segments, self.geometry) if segments else membership.group
        slot_bytes = self.geometry(membership.ranges).slot_bytes
        member = membership.rank, membership.size, meet
        given = *member, self._client, membership.abort, slot_bytes, segments, membership.memory
        if self._device.type == "cpu":
            return ServerExchange(*given)
        return DeviceServerExchange(*given, device=self._device, kept=membership.device_memory)

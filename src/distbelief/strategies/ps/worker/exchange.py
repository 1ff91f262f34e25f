"""The exchange under parameter servers: members send data to the servers, and rarely to each other.

On an accelerator (`DeviceServerExchange`) shards are computed and summed on the device, which has a copy of the
parameters. A partial sum is copied to the host's memory once, when all its shards are in it, and pushed from there.
Values come straight from the servers' memory if that can be mapped.
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
    """The exchange under parameter servers. See `Group`. On one host the members' slots are in memory that servers can
    map; otherwise they are private."""

    rank: int
    size: int
    meet: Callable[[], TorchGroup] | SharedExchange
    """The connection to the other members. In shared memory no member waits for the others. Over the network all must
    connect, so they do so only when one of them calls `gather`."""
    client: ServerClient
    abort: Abort
    slot_bytes: int
    segments: SegmentClient | None
    """The segments of the host, if the servers are on it; None: the servers' memory cannot be mapped."""
    own: dict[str, Segment]
    """Memory that this process keeps across generations."""
    shares_state: bool = False
    backups: Backups | None = None
    apart: ClassVar[bool] = False
    """Whether sums and values are in a device's memory."""
    grain_bytes: ClassVar[int] = 1
    """The least bytes of a sum for an operation of its own. Here every tile gets one, while it is in the cache."""
    _slots: dict[int, Segment] = field(default_factory=dict)
    _connecting: bool = False

    @cached_property
    def members(self) -> SharedExchange | TorchGroup:
        if isinstance(self.meet, SharedExchange):
            return self.meet
        self._connecting = True
        try:
            return self.meet()
        finally:
            self._connecting = False

    @property
    def _met(self) -> SharedExchange | TorchGroup | None:
        found: SharedExchange | TorchGroup | None = self.__dict__.get("members")
        return found

    @property
    def waiting(self) -> bool:
        return self._connecting or self.client.waiting or (self._met is not None and self._met.waiting)

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
        """(memory for partial sums, the name under which servers map it; empty: only this process has it)"""
        if isinstance(self.meet, SharedExchange):
            return self.meet.slot(index), self.meet.slot_name(index)
        if index not in self._slots:
            self._slots[index] = Segment.private(self.slot_bytes)
        return self._slots[index], ""

    def room(self, index: int) -> Memory:
        """The memory in which the partial sum of this slot is computed: here the slot itself."""
        return self.slot(index)[0]

    def bring(self, index: int) -> None:
        """Copy a computed sum from its room into the slot, before the slot is read."""

    def values(self, size_bytes: int) -> Memory:
        """The memory of this process's copy of the parameters, kept from one generation to the next."""
        return self.memory("values", size_bytes)

    def memory(self, name: str, size_bytes: int) -> Segment:
        """Memory of this process that outlives generations."""
        if name not in self.own:
            self.own[name] = Segment.private(size_bytes)
        return self.own[name]

    @property
    def maps(self) -> bool:
        """Whether this process can map the servers' memory."""
        return self.segments is not None

    def server_memory(self, name: str) -> Segment:
        """The memory in which a server has the values of a slice."""
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
    """The exchange of a worker on an accelerator. Copies are complete when a method returns."""

    device: torch.device
    kept: dict[str, Memory]
    """Memory that this process keeps on the device from one generation to the next."""
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
        if name not in self._opened:  # keep it: memory without a reference is not pinned any more
            self._opened[name] = self._pinned(super().server_memory(name))
        return self._opened[name]

    def _pinned(self, segment: Segment) -> Segment:
        if self.device.type == "cuda":
            pin(segment)
        return segment


class UsesServers:
    """The common part of the prepared models of all strategies with parameter servers."""

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

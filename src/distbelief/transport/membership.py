"""The values with which a member opens a generation's exchange: the other members, the transport, and kept memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distbelief.control.credentials import Credential
from distbelief.errors import DistBeliefError
from distbelief.shards import Range
from distbelief.transport.abort import Abort
from distbelief.transport.exchange import DeathWatch, Geometry
from distbelief.transport.gloo.group import TorchGroup
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.shm.controlblock import GenerationMemory
from distbelief.transport.shm.exchange import SharedExchange
from distbelief.transport.shm.segment import Memory, Segment, SegmentClient


@dataclass(frozen=True)
class Earlier:
    """An earlier generation, which may have left an unfinished step in shared memory."""

    generation: int
    ranges: Sequence[Range]


@dataclass
class Membership:
    """The members of a generation, as one of them knows them before it opens its exchange."""

    generation: int
    rank: int
    ranges: Sequence[Range]
    """Each rank's shards."""
    transport: str
    """shm · gloo · nccl · slots (memory of one host, under accelerators)"""
    abort: Abort
    segments: SegmentClient | None
    """The source of shared memory; None on hosts other than the launcher's."""
    earlier: Sequence[Earlier] = ()
    store: tuple[str, int] | None = None
    """Host and port of the rendezvous store, if torch groups are used."""
    credential: Credential | None = None
    memory: dict[str, Segment] = field(default_factory=dict)
    """Segments that this process keeps across generations."""
    device_memory: dict[str, Memory] = field(default_factory=dict)
    """Device memory that it keeps."""
    watch: DeathWatch | None = None
    """The open exchange, if deaths of other members can be seen in it; else None."""

    @property
    def size(self) -> int:
        return len(self.ranges)

    @property
    def name(self) -> str:
        return _name(self.generation)

    def rendezvous(self) -> Rendezvous:
        if self.store is None:
            raise DistBeliefError("the members are on several hosts, but this worker got no rendezvous store")
        return Rendezvous(*self.store, self.name, credential=self.credential)

    def group(self) -> TorchGroup:
        """Open the group; waits until all members have come."""
        return TorchGroup(self.rendezvous(), self.rank, self.size, self.abort)

    def past(self, geometry: Callable[[Sequence[Range]], Geometry]) -> list[GenerationMemory]:
        """The earlier generations. `geometry`: the sizes of a generation with these ranges of shards."""
        return [GenerationMemory(_name(one.generation), geometry(one.ranges)) for one in self.earlier]

    def share(self, segments: SegmentClient, geometry: Callable[[Sequence[Range]], Geometry]) -> SharedExchange:
        """Open the exchange in the shared memory of one host."""
        past = self.past(geometry)
        exchange = SharedExchange(segments, self.name, self.rank, geometry(self.ranges), self.abort, past)
        self.watch = exchange
        return exchange


def _name(generation: int) -> str:
    return f"generation {generation}"

"""Chooses the exchange of members on several hosts: uncompressed or compressed, with gradients on the host or on a
device.
"""

from __future__ import annotations

from distbelief.compression.exchanges.base import CompressedExchange
from distbelief.compression.exchanges.lowrank import LowRankSums
from distbelief.compression.exchanges.ondevice import CodedOnDevice, CodedStretches
from distbelief.compression.exchanges.partialsums import CodedParts
from distbelief.compression.exchanges.tiles import CodedTiles
from distbelief.compression.methods import method_of
from distbelief.compression.powersgd import LowRank
from distbelief.transport.abort import Abort
from distbelief.transport.device.accelerator import Accelerator
from distbelief.transport.device.exchange import DeviceExchange
from distbelief.transport.exchange import Geometry
from distbelief.transport.gloo.exchange import TorchExchange
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.shm.segment import Segment


def networked(
    meeting: Rendezvous,
    rank: int,
    geometry: Geometry,
    abort: Abort,
    memory: dict[str, Segment] | None = None,
    on: Accelerator | None = None,
) -> TorchExchange:
    """`memory`: segments that this process keeps from one generation to the next. `on`: the device of the compressed
    gradients, None for the host; with a device, the exchange is used inside that of `networked_on`, which copies
    between device and host."""
    if geometry.compression is None:
        return TorchExchange(meeting, rank, geometry, abort, memory)
    if geometry.compression.apart:
        return CodedParts(meeting, rank, geometry, abort, memory)
    method = method_of(geometry.compression.method)
    if isinstance(method, LowRank):
        return LowRankSums(meeting, rank, geometry, abort, method, memory, on)
    if on is not None:
        return CodedStretches(meeting, rank, geometry, abort, method, memory, on)
    return CodedTiles(meeting, rank, geometry, abort, method, memory)


def networked_on(
    on: Accelerator,
    meeting: Rendezvous,
    rank: int,
    geometry: Geometry,
    abort: Abort,
    memory: dict[str, Segment] | None = None,
) -> DeviceExchange:
    """The exchange of a member that computes on an accelerator."""
    inner = networked(meeting, rank, geometry, abort, memory, on)
    if isinstance(inner, CompressedExchange):
        return CodedOnDevice(inner, geometry, on)
    return DeviceExchange(inner, geometry, on.device, on.kept)

"""Which exchange members on several hosts use: the plain one, or one that compresses; the same on accelerators."""

from __future__ import annotations

from distbelief.comm.codedondevice import CodedOnDevice
from distbelief.comm.codedparts import CodedParts
from distbelief.comm.codedstretches import CodedStretches
from distbelief.comm.codedtiles import CodedTiles
from distbelief.comm.compressed import CompressedExchange
from distbelief.comm.compression.option import long_form
from distbelief.comm.compression.powersgd import LowRank
from distbelief.comm.compression.spec import parse
from distbelief.comm.devicememory import Accelerator
from distbelief.comm.exchange import Geometry
from distbelief.comm.group import Rendezvous
from distbelief.comm.lowrank import LowRankSums
from distbelief.comm.ondevice import OnDevice
from distbelief.comm.segment import Segment
from distbelief.comm.torchgroup import TorchExchange
from distbelief.comm.words import Abort


def networked(
    meeting: Rendezvous,
    rank: int,
    geometry: Geometry,
    abort: Abort,
    memory: dict[str, Segment] | None = None,
    on: Accelerator | None = None,
) -> TorchExchange:
    """`memory`: what this process keeps from one generation to the next. `on`: where what is compressed lies, if not on
    the host; the exchange is then for `networked_on`, which says what is copied there and back."""
    if geometry.compression is None:
        return TorchExchange(meeting, rank, geometry, abort, memory)
    if geometry.compression.apart:
        return CodedParts(meeting, rank, geometry, abort, memory)
    method = parse(long_form(geometry.compression.method))
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
) -> OnDevice:
    """The same for a member that computes on an accelerator."""
    inner = networked(meeting, rank, geometry, abort, memory, on)
    if isinstance(inner, CompressedExchange):
        return CodedOnDevice(inner, geometry, on)
    return OnDevice(inner, geometry, on.device, on.kept)

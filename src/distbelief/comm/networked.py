"""Which exchange members on several hosts use: the plain one, or one that compresses."""

from __future__ import annotations

from distbelief.comm.codedparts import CodedParts
from distbelief.comm.codedtiles import CodedTiles
from distbelief.comm.compression.option import long_form
from distbelief.comm.compression.powersgd import LowRank
from distbelief.comm.compression.spec import parse
from distbelief.comm.exchange import Geometry
from distbelief.comm.group import Rendezvous
from distbelief.comm.lowrank import LowRankSums
from distbelief.comm.segment import Segment
from distbelief.comm.torchgroup import TorchExchange
from distbelief.comm.words import Abort


def networked(
    meeting: Rendezvous, rank: int, geometry: Geometry, abort: Abort, memory: dict[str, Segment] | None = None
) -> TorchExchange:
    """`memory`: what this process keeps from one generation to the next."""
    if geometry.compression is None:
        return TorchExchange(meeting, rank, geometry, abort, memory)
    if geometry.compression.apart:
        return CodedParts(meeting, rank, geometry, abort, memory)
    method = parse(long_form(geometry.compression.method))
    if isinstance(method, LowRank):
        return LowRankSums(meeting, rank, geometry, abort, method, memory)
    return CodedTiles(meeting, rank, geometry, abort, method, memory)

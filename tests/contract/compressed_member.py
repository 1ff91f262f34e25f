"""What a member does in the contract of compressed exchanges; runs in processes of the stage.

All sums that were ever applied, and what all members still owe, are together the sum of all gradients: nothing is lost
and nothing counts twice. That holds for every way of compressing, so it is what is checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import exchange_member as base
import numpy as np
import torch

from distbelief.comm.codedtiles import CodedTiles
from distbelief.comm.compressed import CompressedExchange
from distbelief.comm.compression.codec import Encoded
from distbelief.comm.compression.int8 import Int8
from distbelief.comm.compression.subject import Compression, Place
from distbelief.comm.exchange import Geometry, Gift, Source, StepPlan
from distbelief.comm.group import Rendezvous
from distbelief.comm.networked import networked
from distbelief.comm.segment import KeeperClient, Segment
from distbelief.comm.words import Abort, Aborted
from distbelief.shards import mix

MATRIX, VECTOR, BUFFER = 0, 1, 2  # tiles; the others have other types


def geometry(seat: base.Seat, method: str, always: bool = True) -> Geometry:
    """The first two tiles hold float32 parameters, a matrix and a vector. The third one holds a buffer."""
    plain = base.geometry(seat)
    places = (Place(0, 0, (25, 40)), Place(1, plain.tiles[VECTOR].offset_bytes // 4, (64,)))
    compression = Compression(method, frozenset({MATRIX, VECTOR}), places, seed=5, always=always)
    return replace(plain, slots=[1] * seat.size, compression=compression)


def join(seat: base.Seat, method: str, memory: dict[str, Segment], name: str = "", abort: Abort | None = None) -> Any:
    meeting = Rendezvous("127.0.0.1", seat.port, f"{seat.name} {name}", timeout_s=60)
    return networked(meeting, seat.rank, geometry(seat, method), abort or Abort(), memory)


def values(step: int, rank: int, tile: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(mix(step, rank, tile.index) >> 1)
    return torch.randn(tile.numel, generator=generator, dtype=torch.float64).to(tile.dtype)


def busy(seat: base.Seat, step: int) -> list[int]:
    """The members that have something to do in that step: in some steps, not the last one."""
    return list(range(max(1, seat.size - (step % 3 == 1))))


def plan(seat: base.Seat, step: int) -> StepPlan:
    program: Any = 0
    for number in range(1, len(busy(seat, step))):
        program = (program, number)
    return StepPlan(step, [Source(rank, 0) for rank in busy(seat, step)], program)


def publish(exchange: CompressedExchange, seat: base.Seat, step: int) -> None:
    exchange.begin(plan(seat, step))
    for tile in exchange._geometry.tiles:
        slot = exchange.slot(0).tensor(tile.dtype, tile.offset_bytes, tile.numel)
        slot.copy_(values(step, seat.rank, tile))
        exchange.publish(tile.index)


def finish(exchange: CompressedExchange, seat: base.Seat, step: int) -> list[torch.Tensor]:
    before = bytes(exchange.slot(0).view(0, exchange._geometry.slot_bytes))
    mine = seat.mine if seat.rank in busy(seat, step) else (0, 0)
    gift = Gift(np.zeros((seat.shards, 4)), [mine], [], np.zeros(base.PARAMETERS, bool), b"")
    exchange.share(gift)
    sums = [exchange.reduced(index) for index in exchange.tiles]
    assert bytes(exchange.slot(0).view(0, exchange._geometry.slot_bytes)) == before, "a partial sum was written to"
    for index, tile in enumerate(exchange._geometry.tiles):
        if index not in exchange.compression.tiles:
            true = sum((values(step, rank, tile).double() for rank in busy(seat, step)), torch.zeros(tile.numel))
            assert torch.allclose(sums[index].double(), true.double(), rtol=0.05, atol=0.05)
    kept = [one.clone() for one in sums]
    exchange.applied()
    exchange.settle()
    return kept


@dataclass(frozen=True)
class Found:
    digest: str
    """Of all sums."""
    missing: float
    """How far all sums and all residuals are from the sum of all gradients, at most."""
    owed: float
    """The largest of this member's residual."""
    traffic: tuple[int, int]
    packed: Sequence[bool]
    """Which steps were compressed."""
    news: Sequence[str]


def account(
    exchange: CompressedExchange, seat: base.Seat, steps: int, total: Sequence[torch.Tensor]
) -> tuple[float, float]:
    residual = exchange.residuals.at(steps)
    assert residual is not None
    everybody = exchange.gather(residual.numpy().tobytes())
    owed = sum(torch.frombuffer(bytearray(one), dtype=torch.float32).double() for one in everybody)
    missing = 0.0
    for index in sorted(exchange.compression.tiles):
        tile = exchange._geometry.tiles[index]
        parts = [values(step, rank, tile).double() for step in range(steps) for rank in busy(seat, step)]
        still = owed[tile.offset_bytes // 4 :][: tile.numel]
        missing = max(missing, float((torch.stack(parts).sum(0) - total[index] - still).abs().max()))
    return missing, float(residual[: exchange.residuals.elements].abs().max())


def run(
    exchange: CompressedExchange, seat: base.Seat, first: int, end: int, total: list[torch.Tensor], digest: Any
) -> list[bool]:
    packed = []
    for step in range(first, end):
        publish(exchange, seat, step)
        packed.append(exchange._packing)
        for into, found in zip(total, finish(exchange, seat, step), strict=True):
            into.add_(found)
            digest.update(found.view(torch.uint8).numpy().tobytes())
    return packed


def zeros(exchange: CompressedExchange) -> list[torch.Tensor]:
    return [torch.zeros(tile.numel, dtype=torch.float64) for tile in exchange._geometry.tiles]


def several_steps(keeper: KeeperClient, seat: base.Seat, method: str, steps: int, interrupt: str = "") -> Found:
    """`interrupt`: in the middle of step 3 all members are called away, and take it again in another generation."""
    memory: dict[str, Segment] = {}
    digest = hashlib.sha256()
    exchange = join(seat, method, memory)
    total = zeros(exchange)
    packed = run(exchange, seat, 0, 3, total, digest)
    if interrupt:
        publish(exchange, seat, 3)
        if interrupt == "collected":
            exchange.share(Gift(np.zeros((seat.shards, 4)), [], [], np.zeros(base.PARAMETERS, bool), b""))
            exchange.reduced(0)
        with contextlib.suppress(Aborted):
            exchange.gather(b"")
        exchange.close()
        exchange = join(seat, method, memory, "again")
    packed += run(exchange, seat, 3, steps, total, digest)
    found = Found(digest.hexdigest(), *account(exchange, seat, steps, total), exchange.traffic, packed, exchange.news)
    exchange.gather(b"")
    exchange.close()
    return found


def with_a_newcomer(keeper: KeeperClient, seat: base.Seat, method: str) -> str:
    """After three steps the last member is replaced by one that knows nothing; all must still apply the same."""
    memory: dict[str, Segment] = {}
    digest = hashlib.sha256()
    exchange = join(seat, method, memory)
    run(exchange, seat, 0, 3, zeros(exchange), digest)
    exchange.gather(b"")
    exchange.close()
    exchange = join(seat, method, {} if seat.rank == seat.size - 1 else memory, "again")
    run(exchange, seat, 3, 6, zeros(exchange), digest)
    exchange.gather(b"")
    exchange.close()
    return digest.hexdigest()


class Slow(Int8):
    """So slow that any link is faster."""

    def encode_keeping(self, rest: torch.Tensor, vector: torch.Tensor, reuse: Encoded | None = None) -> Encoded:
        time.sleep(0.05)
        return super().encode_keeping(rest, vector, reuse)


def too_slow(keeper: KeeperClient, seat: base.Seat, steps: int) -> Found:
    meeting = Rendezvous("127.0.0.1", seat.port, seat.name, timeout_s=60)
    exchange = CodedTiles(meeting, seat.rank, geometry(seat, "int8", always=False), Abort(), Slow(64), {})
    total, digest = zeros(exchange), hashlib.sha256()
    packed = run(exchange, seat, 0, steps, total, digest)
    found = Found(digest.hexdigest(), *account(exchange, seat, steps, total), exchange.traffic, packed, exchange.news)
    exchange.gather(b"")
    exchange.close()
    return found


def untouched(keeper: KeeperClient, seat: base.Seat, method: str) -> float:
    """The first step's sums are applied to the vector only: what was sent of the matrix counts as not sent. Returns how
    much of what was owed before is missing after it."""
    exchange = join(seat, method, {})
    run(exchange, seat, 0, 3, zeros(exchange), hashlib.sha256())
    owed = exchange.residuals.at(3).clone()
    run(exchange, seat, 3, 4, zeros(exchange), hashlib.sha256())
    marks = np.zeros(base.PARAMETERS, bool)
    marks[0] = True
    exchange.keep_untouched(marks)
    now = exchange.residuals.at(4)
    assert not torch.equal(now[256:], owed[256:]) or method == "powersgd=2", "the vector was touched"
    exchange.gather(b"")
    exchange.close()
    return float((now[:1000] - owed[:1000]).abs().max())

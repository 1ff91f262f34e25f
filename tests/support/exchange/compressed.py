"""What a member does in the contract of compressed exchanges; runs in processes of the stage.

All sums that were ever applied, and what all members still owe, are together the sum of all gradients: nothing is lost
and nothing counts twice. That holds for every way of compressing, so it is what is checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from distbelief.compression.codec import Encoded
from distbelief.compression.exchanges.base import CompressedExchange
from distbelief.compression.exchanges.ondevice import CodedOnDevice, CodedStretches
from distbelief.compression.exchanges.tiles import CodedTiles
from distbelief.compression.methods import Int8
from distbelief.shards import mix
from distbelief.strategies.dataparallel.compressed import coder_of
from distbelief.strategies.dataparallel.prepared import networked, networked_on
from distbelief.transport.abort import Abort, Aborted
from distbelief.transport.device.accelerator import Accelerator
from distbelief.transport.exchange import (
    CompressedParameter,
    Compression,
    Contribution,
    Exchange,
    Geometry,
    Source,
    StepPlan,
)
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.shm.segment import Segment, SegmentClient
from tests.support.exchange import member as base

COMPRESSED = {"mixed": 2, "even": 8}
"""The first so many tiles; the one after them holds a buffer. In "mixed" each has other tiles far from it."""


def geometry(seat: base.Seat, method: str, always: bool = True) -> Geometry:
    """The first tiles hold float32 parameters, a matrix and a vector."""
    plain, count = base.geometry(seat), COMPRESSED[seat.tiles]
    vector = plain.tiles[1].offset_bytes // 4
    places = (CompressedParameter(0, 0, (25, 40)), CompressedParameter(1, vector, (64,)))
    if seat.tiles == "even":
        places = (CompressedParameter(0, 0, (64, 64)), CompressedParameter(1, 4096, (7 * 1024 + 320 - 4096,)))
    compression = Compression(method, frozenset(range(count)), places, seed=5, always=always)
    return replace(plain, slots=[1] * seat.size, compression=compression, gradient_tiles=count)


@dataclass(frozen=True)
class Kept:
    """What a member has from one generation to the next; with an accelerator, or without."""

    on: Accelerator | None
    memory: dict[str, Segment] = field(default_factory=dict)


def keeping(where: str) -> Kept:
    return Kept(Accelerator(base.DEVICE) if where == "device" else None)


def join(seat: base.Seat, method: str, kept: Kept, name: str = "") -> Exchange:
    meeting = Rendezvous("127.0.0.1", seat.port, f"{seat.name} {name}", timeout_s=60)
    given = meeting, seat.rank, geometry(seat, method), Abort(), kept.memory
    return networked(*given) if kept.on is None else networked_on(kept.on, *given)


def coder(exchange: Exchange) -> CompressedExchange:
    found = coder_of(exchange)
    assert found is not None
    return found


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


def publish(exchange: Exchange, seat: base.Seat, step: int) -> None:
    exchange.begin(plan(seat, step))
    for tile in base.geometry(seat).tiles:
        slot = exchange.slot(0).tensor(tile.dtype, tile.offset_bytes, tile.numel)
        slot.copy_(values(step, seat.rank, tile))
        exchange.publish(tile.index)


def finish(exchange: Exchange, seat: base.Seat, step: int) -> list[torch.Tensor]:
    slot = exchange.slot(0).tensor(torch.uint8, 0, base.geometry(seat).slot_bytes)
    before = slot.clone()
    mine = seat.mine if seat.rank in busy(seat, step) else (0, 0)
    contribution = Contribution(np.zeros((seat.shards, 4)), [mine], [], np.zeros(base.PARAMETERS, bool), b"")
    exchange.share(contribution)
    sums = [exchange.reduced(index).cpu().clone() for index in exchange.tiles]
    alone = seat.size == 1 and isinstance(exchange, CodedOnDevice)  # then the partial sum is the sum
    assert alone or torch.equal(slot, before), "a partial sum was written to"
    for index, tile in enumerate(base.geometry(seat).tiles):
        if index not in coder(exchange).compression.tiles:
            true = sum((values(step, rank, tile).double() for rank in busy(seat, step)), torch.zeros(tile.numel))
            assert torch.allclose(sums[index].double(), true.double(), rtol=0.05, atol=0.05)
    exchange.applied()
    exchange.settle()
    return sums


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


def account(exchange: Exchange, seat: base.Seat, steps: int, total: Sequence[torch.Tensor]) -> tuple[float, float]:
    residual = coder(exchange).residuals.at(steps)
    assert residual is not None
    residual = residual.cpu()
    everybody = exchange.gather(residual.numpy().tobytes())
    owed = sum(torch.frombuffer(bytearray(one), dtype=torch.float32).double() for one in everybody)
    missing = 0.0
    for index in sorted(coder(exchange).compression.tiles):
        tile = base.geometry(seat).tiles[index]
        parts = [values(step, rank, tile).double() for step in range(steps) for rank in busy(seat, step)]
        still = owed[tile.offset_bytes // 4 :][: tile.numel]
        missing = max(missing, float((torch.stack(parts).sum(0) - total[index] - still).abs().max()))
    return missing, float(residual[: coder(exchange).residuals.elements].abs().max())


def run(
    exchange: Exchange, seat: base.Seat, first: int, end: int, total: list[torch.Tensor], digest: Any
) -> list[bool]:
    packed = []
    for step in range(first, end):
        publish(exchange, seat, step)
        packed.append(coder(exchange).packing)
        for into, found in zip(total, finish(exchange, seat, step), strict=True):
            into.add_(found)
            digest.update(found.view(torch.uint8).numpy().tobytes())
    return packed


def zeros(seat: base.Seat) -> list[torch.Tensor]:
    return [torch.zeros(tile.numel, dtype=torch.float64) for tile in base.geometry(seat).tiles]


def told(
    exchange: Exchange, seat: base.Seat, steps: int, total: list[torch.Tensor], packed: list[bool], digest: Any
) -> Found:
    how = coder(exchange)
    assert seat.size == 1 or how._probe() > 0.0  # and nothing is owed or paid by it
    found = Found(digest.hexdigest(), *account(exchange, seat, steps, total), how.traffic, packed, how.news)
    exchange.gather(b"")
    exchange.close()
    return found


def several_steps(
    segments: SegmentClient, seat: base.Seat, method: str, steps: int, interrupt: str = "", where: str = "host"
) -> Found:
    """`interrupt`: in the middle of step 3 all members are called away, and take it again in another generation."""
    kept, digest = keeping(where), hashlib.sha256()
    exchange = join(seat, method, kept)
    total = zeros(seat)
    packed = run(exchange, seat, 0, 3, total, digest)
    if interrupt:
        publish(exchange, seat, 3)
        if interrupt == "collected":
            exchange.share(Contribution(np.zeros((seat.shards, 4)), [], [], np.zeros(base.PARAMETERS, bool), b""))
            exchange.reduced(0)
        with contextlib.suppress(Aborted):
            exchange.gather(b"")
        exchange.close()
        exchange = join(seat, method, kept, "again")
    packed += run(exchange, seat, 3, steps, total, digest)
    return told(exchange, seat, steps, total, packed, digest)


def with_a_newcomer(segments: SegmentClient, seat: base.Seat, method: str, where: str = "host") -> str:
    """After three steps the last member is replaced by one that knows nothing; all must still apply the same."""
    kept, digest = keeping(where), hashlib.sha256()
    exchange = join(seat, method, kept)
    run(exchange, seat, 0, 3, zeros(seat), digest)
    exchange.gather(b"")
    exchange.close()
    exchange = join(seat, method, keeping(where) if seat.rank == seat.size - 1 else kept, "again")
    run(exchange, seat, 3, 6, zeros(seat), digest)
    exchange.gather(b"")
    exchange.close()
    return digest.hexdigest()


def left_alone(segments: SegmentClient, seat: base.Seat, method: str, where: str) -> tuple[float, str] | None:
    """After three steps all others leave. Returns how much of what the first member owed does not go out with its next
    sum, which is not compressed, and a digest of its sums."""
    kept, digest = keeping(where), hashlib.sha256()
    exchange = join(seat, method, kept)
    run(exchange, seat, 0, 3, zeros(seat), hashlib.sha256())
    exchange.gather(b"")
    exchange.close()
    if seat.rank > 0:
        return None
    owed = coder(exchange).residuals.at(3)
    assert owed is not None
    owed, alone = owed.cpu().clone(), replace(seat, size=1)
    exchange = join(alone, method, kept, "alone")
    total = zeros(alone)
    run(exchange, alone, 3, 4, total, digest)
    missing = 0.0
    for tile in base.geometry(alone).tiles[: COMPRESSED[seat.tiles]]:
        before = owed[tile.offset_bytes // 4 :][: tile.numel].double()
        missing = max(missing, float((values(3, 0, tile).double() + before - total[tile.index]).abs().max()))
    run(exchange, alone, 4, 5, total, digest)
    exchange.close()
    return missing, digest.hexdigest()


class Slow(Int8):
    """So slow that any link is faster."""

    def encode_keeping(self, rest: torch.Tensor, vector: torch.Tensor, reuse: Encoded | None = None) -> Encoded:
        time.sleep(0.05)
        return super().encode_keeping(rest, vector, reuse)

    def encode_rows(
        self, rests: torch.Tensor, vectors: torch.Tensor, frames: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | int]:
        if vectors.is_cuda:
            torch.cuda._sleep(100_000_000)
        else:
            time.sleep(0.05)
        return super().encode_rows(rests, vectors, frames)


def too_slow(segments: SegmentClient, seat: base.Seat, steps: int, where: str = "host") -> Found:
    kept, meeting = keeping(where), Rendezvous("127.0.0.1", seat.port, seat.name, timeout_s=60)
    shape = geometry(seat, "int8", always=False)
    given = meeting, seat.rank, shape, Abort(), Slow(64), kept.memory
    exchange: Exchange = (
        CodedTiles(*given) if kept.on is None else CodedOnDevice(CodedStretches(*given, kept.on), shape, kept.on)
    )
    total, digest = zeros(seat), hashlib.sha256()
    packed = run(exchange, seat, 0, steps, total, digest)
    return told(exchange, seat, steps, total, packed, digest)


def untouched(segments: SegmentClient, seat: base.Seat, method: str, where: str = "host") -> float:
    """The first step's sums are applied to the vector only: what was sent of the matrix counts as not sent. Returns how
    much of what was owed before is missing after it."""
    exchange = join(seat, method, keeping(where))
    residuals = coder(exchange).residuals
    run(exchange, seat, 0, 3, zeros(seat), hashlib.sha256())
    owed = residuals.at(3).clone()
    run(exchange, seat, 3, 4, zeros(seat), hashlib.sha256())
    marks = np.zeros(base.PARAMETERS, bool)
    marks[0] = True
    coder(exchange).keep_untouched(marks)
    now = residuals.at(4)
    assert not torch.equal(now[256:], owed[256:]) or method == "powersgd=2", "the vector was touched"
    exchange.gather(b"")
    exchange.close()
    return float((now[:1000] - owed[:1000]).abs().max())

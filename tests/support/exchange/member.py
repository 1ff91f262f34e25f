"""What a member does in the contract of exchanges. Runs in processes of the stage; the checks are here, because only a
member sees its exchange.

Shard v of step t gives every tile numbers that depend on (t, v, tile) alone. So every member can compute plainly, by
itself, what the sum must be.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from distbelief.shards import Range, cover, mix, program, split
from distbelief.strategies.dataparallel.prepared import networked
from distbelief.transport.abort import Abort, Aborted
from distbelief.transport.device.exchange import DeviceExchange
from distbelief.transport.device.nccl import NcclExchange
from distbelief.transport.exchange import (
    CompressedParameter,
    Compression,
    Contribution,
    Exchange,
    Geometry,
    Source,
    StepPlan,
    Tile,
)
from distbelief.transport.gloo import group
from distbelief.transport.gloo.exchange import TorchExchange
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.shm.exchange import SharedExchange, SharedSlots
from distbelief.transport.shm.segment import SegmentClient
from distbelief.transport.singlemember import SingleMemberExchange

PARAMETERS = 7
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Of those that compute on a device. Where there is none, the host's own memory stands in: the order of what is copied
and added is the same."""
SIZES = {"mixed": [(torch.float32, 1000), (torch.float32, 64), (torch.float32, 3), (torch.float64, 130),
                   (torch.bfloat16, 200), (torch.bfloat16, 64)],
         "few": [(torch.float32, 300), (torch.float64, 1)],
         "even": [*[(torch.float32, 1024)] * 7, (torch.float32, 320), (torch.float32, 64)]}  # fmt: skip


@dataclass(frozen=True)
class Seat:
    kind: str
    name: str
    port: int
    rank: int
    size: int
    shards: int
    tiles: str = "mixed"

    @property
    def ranges(self) -> list[Range]:
        return [(r * self.shards // self.size, (r + 1) * self.shards // self.size) for r in range(self.size)]

    @property
    def mine(self) -> Range:
        return self.mine_of(self.rank)

    def mine_of(self, rank: int) -> Range:
        return self.ranges[rank]


def geometry(seat: Seat) -> Geometry:
    tiles, offset_bytes = [], 0
    for dtype, numel in SIZES[seat.tiles]:
        tiles.append(Tile(len(tiles), dtype, offset_bytes, numel))
        offset_bytes = -(-(offset_bytes + tiles[-1].size_bytes) // 256) * 256
    slots = [max(1, len(cover(seat.shards, mine))) for mine in seat.ranges]
    return Geometry(tiles, offset_bytes, slots, seat.shards, PARAMETERS, len(integers(0, 0)))


def join(segments: SegmentClient, seat: Seat, abort: Abort | None = None) -> Exchange:
    if seat.kind == "shared":
        return SharedExchange(segments, seat.name, seat.rank, geometry(seat), abort or Abort())
    if seat.kind == "alone":
        return SingleMemberExchange(geometry(seat))
    if seat.kind == "slots":
        return SharedSlots(segments, seat.name, seat.rank, geometry(seat), abort or Abort())
    if seat.kind == "slots on device":
        slots = SharedSlots(segments, seat.name, seat.rank, geometry(seat), abort or Abort())
        return DeviceExchange(slots, geometry(seat), DEVICE, where=slots.where)
    meeting = Rendezvous("127.0.0.1", seat.port, seat.name, timeout_s=60)
    if seat.kind == "torch on device":
        return DeviceExchange(
            TorchExchange(meeting, seat.rank, geometry(seat), abort or Abort()), geometry(seat), DEVICE
        )
    if seat.kind == "device group":
        return NcclExchange(meeting, seat.rank, geometry(seat), abort or Abort(), DEVICE, exact=True, backend="gloo")
    if seat.kind == "torch":
        return TorchExchange(meeting, seat.rank, geometry(seat), abort or Abort())
    compression = Compression(seat.kind, frozenset({0}), (CompressedParameter(0, 0, (25, 40)),), seed=1)
    return networked(meeting, seat.rank, replace(geometry(seat), compression=compression), abort or Abort())


def shard_values(step: int, shard: int, tile: Tile) -> torch.Tensor:
    """Numbers of very different sizes, so that another order of addition shows."""
    generator = torch.Generator().manual_seed(mix(step, shard, tile.index) >> 1)
    values = torch.randn(tile.numel, generator=generator, dtype=torch.float64)
    return (values * 10.0 ** torch.randint(-4, 5, values.shape, generator=generator)).to(tile.dtype)


def plain_sum(step: int, node: Range, occupied: int, tile: Tile) -> torch.Tensor:
    if node[1] - node[0] == 1:
        return shard_values(step, node[0], tile)
    left, right = split(node)
    if right[0] >= occupied:
        return plain_sum(step, left, occupied, tile)
    return plain_sum(step, left, occupied, tile) + plain_sum(step, right, occupied, tile)


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and torch.equal(one.view(torch.uint8), two.view(torch.uint8))


def plan(seat: Seat, step: int, occupied: int) -> StepPlan:
    sources, numbers = [], {}
    for rank, mine in enumerate(seat.ranges):
        for slot, node in enumerate(n for n in cover(seat.shards, mine) if n[0] < occupied):
            numbers[node] = len(sources)
            sources.append(Source(rank, slot))
    return StepPlan(step, sources, program(seat.shards, occupied, numbers))


def write_partials(exchange: Exchange, seat: Seat, step: int, occupied: int) -> None:
    """Fill my slots tile by tile, in an order of my own, publishing each."""
    tiles = list(geometry(seat).tiles)
    random.Random(mix(step, seat.rank)).shuffle(tiles)
    nodes = [node for node in cover(seat.shards, seat.mine) if node[0] < occupied]
    for tile in tiles:
        for slot, node in enumerate(nodes):
            at = exchange.slot(slot).tensor(tile.dtype, tile.offset_bytes, tile.numel)
            at.copy_(plain_sum(step, node, occupied, tile))
        exchange.publish(tile.index)


def row(step: int, shard: int) -> list[float]:
    strange = [-0.0, float("inf"), float("nan"), 1e-310]
    return [step + shard / 7, strange[(step + shard) % 4], float(2**53 - shard), -1.0]


def integers(step: int, rank: int) -> bytes:
    return mix(step, rank).to_bytes(8, "little")


def check_share(exchange: Exchange, seat: Seat, step: int, occupied: int) -> None:
    """Rows that are not mine, and what a member without a partial sum says of integers, must not be heard of."""
    everything = np.array([row(step, shard) for shard in range(seat.shards)])
    mine = np.full_like(everything, 123.0)
    mine[slice(*seat.mine)] = everything[slice(*seat.mine)]
    untouched = np.array([[(mix(step, r, p) % 3) > 0 for p in range(PARAMETERS)] for r in range(seat.size)])
    nodes = [(node, slot) for slot, node in enumerate(cover(seat.shards, seat.mine)) if node[0] < occupied]
    shared = exchange.share(Contribution(mine, [seat.mine], nodes, untouched[seat.rank], integers(step, seat.rank)))
    assert shared.rows.tobytes() == everything.tobytes()
    assert shared.untouched.tolist() == untouched.all(axis=0).tolist()
    first = next(r for r, (low, high) in enumerate(seat.ranges) if low < high)
    assert shared.integers == integers(step, first), "those of the giver of the first partial sum"


def snapshot(exchange: Exchange, seat: Seat) -> list[bytes]:
    slots = [exchange.slot(index) for index in range(geometry(seat).slots[seat.rank])]
    return [slot.tensor(torch.uint8, 0, geometry(seat).slot_bytes).cpu().numpy().tobytes() for slot in slots]


def reduce_steps(segments: SegmentClient, seat: Seat) -> dict[int, str]:
    """Several steps in a row, the last ones with few samples. Returns a digest of the sum of each of my tiles."""
    exchange = join(segments, seat)
    assert (exchange.rank, exchange.size) == (seat.rank, seat.size)
    digests = {index: hashlib.sha256() for index in exchange.tiles}
    few = max(1, seat.shards - 1)
    for step, occupied in enumerate([seat.shards, seat.shards, few, 1, seat.shards, few, seat.shards, 1]):
        one_by_one = step > 3
        exchange.begin(replace(plan(seat, step, occupied), one_by_one=one_by_one))
        write_partials(exchange, seat, step, occupied)
        before = snapshot(exchange, seat)
        check_share(exchange, seat, step, occupied)
        for index in exchange.tiles:
            tile = geometry(seat).tiles[index]
            factor = 0.25 if step % 2 else 1.0
            found = exchange.scaled(index, factor) if step % 2 else exchange.reduced(index)
            expected = plain_sum(step, (0, seat.shards), occupied, tile) * factor
            assert same_bits(found.cpu(), expected), (step, tile, found.cpu() - expected)
            assert one_by_one or same_bits(exchange.reduced(index).cpu(), expected), "asking again changes nothing"
            digests[index].update(found.cpu().view(torch.uint8).numpy().tobytes())
            found.mul_(0.5)  # a commit scales its gradients, and some optimizers write into them
        squares = exchange.share_squares({index: step + index / 8 for index in exchange.tiles})
        assert squares == [step + tile.index / 8 for tile in geometry(seat).tiles]
        if (
            not isinstance(exchange, DeviceExchange) or len(plan(seat, step, occupied).sources) > 1
        ):  # else the only partial sum there is may be the sum
            assert snapshot(exchange, seat) == before, "a partial sum was written to"
        exchange.applied()
        exchange.settle()
    exchange.gather(b"")  # nobody leaves before all have finished: gloo would break the others' connections
    exchange.close()
    return {index: digest.hexdigest() for index, digest in digests.items()}


def gather(segments: SegmentClient, seat: Seat) -> int:
    exchange = join(segments, seat)
    sizes = [0, 1, 1 << 18, (1 << 18) + 1, 700_001]
    for turn in range(3):
        payloads = [bytes([rank + 1]) * sizes[(rank + turn) % len(sizes)] for rank in range(seat.size)]
        assert exchange.gather(payloads[seat.rank]) == payloads
    assert exchange.gather(b"") == [b""] * seat.size
    exchange.close()
    return len(sizes)


def keep_state(segments: SegmentClient, seat: Seat) -> tuple[bool, list[int]]:
    exchange = join(segments, seat)
    state = exchange.state(4096)
    numbers = state.tensor(torch.int64, 0, seat.size)
    numbers[seat.rank] = seat.rank + 1
    exchange.gather(b"")
    found = numbers.tolist()
    exchange.gather(b"")
    exchange.close()
    return exchange.shares_state, found


def tiles_of(segments: SegmentClient, seat: Seat) -> list[int]:
    exchange = join(segments, seat)
    exchange.gather(b"")
    exchange.close()
    return list(exchange.tiles)


def wait_in_vain(segments: SegmentClient, seat: Seat, phase: str) -> str:
    """The last member leaves before `phase`; the others wait for it there until their abort is set."""
    abort = Abort()
    exchange = join(segments, seat, abort)
    exchange.begin(plan(seat, 0, seat.shards))
    write_partials(exchange, seat, 0, seat.shards)
    before = snapshot(exchange, seat)
    phases: dict[str, Callable[[], Any]] = {
        "share": lambda: check_share(exchange, seat, 0, seat.shards),
        "share_squares": lambda: exchange.share_squares(dict.fromkeys(exchange.tiles, 1.0)),
        "settle": lambda: (exchange.applied(), exchange.settle()),
        "gather": lambda: exchange.gather(b"x" * 1000),
    }
    for name, act in phases.items():
        if name != phase:
            act()
            continue
        if seat.rank == seat.size - 1:
            return "left"
        threading.Timer(0.05, abort.set, ["member 2 was lost"]).start()
        try:
            act()
        except Aborted as error:
            assert snapshot(exchange, seat) == before
            return str(error)
    return "nobody was missed"


def wait_for_the_living(segments: SegmentClient, seat: Seat, phase: str) -> str:
    """The last member lives and does nothing; the first waits for it in `phase`, and another thread aborts that."""
    over, joined = segments.segment("over", 64).tensor(torch.int64, 0, 2).split(1)
    idle = seat.rank == seat.size - 1
    abort = Abort()
    if idle and phase == "meet":
        _until(lambda: bool(over))
        return "idle"
    if not idle:
        patience_s = 0.5 if phase == "meet" else 60.0
        threading.Thread(target=_abort_a_waiting_member, args=(abort, patience_s), daemon=True).start()
    try:
        exchange = join(segments, seat, abort)
        if idle:
            joined.fill_(1)
            _until(lambda: bool(over))
            return "idle"
        _until(lambda: bool(joined))  # this member joins first; its abort would end the other's attempt too
        _waiting.append(exchange)
        block = torch.zeros(1 << 20, dtype=torch.uint8)
        phases: dict[str, Callable[[], Any]] = {
            "share": lambda: check_share(exchange, seat, 0, seat.shards),
            "reduced": lambda: exchange.reduced(0),
            "gather": lambda: exchange.gather(b"x"),
            "receive": lambda: exchange.transfer(block, seat.size - 1, [seat.rank]),
        }
        exchange.begin(plan(seat, 0, seat.shards))
        write_partials(exchange, seat, 0, seat.shards)
        phases[phase]()
    except Aborted:
        over.fill_(1)
        return abort.reason
    return "nobody was missed"


_waiting: list[Exchange] = []


def _abort_a_waiting_member(abort: Abort, patience_s: float) -> None:
    """A little after it began to wait, so that it really does."""
    _until(lambda: bool(_waiting) and _waiting[0].waiting, patience_s)
    time.sleep(0.05)
    abort.set("member 1 does not come")


def _until(so: Callable[[], bool], patience_s: float = 60.0) -> None:
    end = time.monotonic() + patience_s
    while not so() and time.monotonic() < end:
        time.sleep(0.002)


def hand_over(segments: SegmentClient, seat: Seat) -> str:
    """The state of rank 1 goes to all others but the last, which has it already."""
    group._CHUNK_BYTES = 1000  # many pieces, the last one smaller
    exchange = join(segments, seat)
    truth = torch.randint(0, 256, (25_001,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    block = truth.clone() if seat.rank in (1, seat.size - 1) else torch.zeros_like(truth)
    exchange.transfer(block, 1, [rank for rank in range(seat.size - 1) if rank != 1])
    exchange.transfer(block[:10], 1, [])
    exchange.gather(b"")
    exchange.close()
    return "the same" if torch.equal(block, truth) else "not the same"


def lose_a_peer(segments: SegmentClient, seat: Seat) -> str:
    exchange = join(segments, seat)
    exchange.gather(b"")
    if seat.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        check_share(exchange, seat, 0, seat.shards)
    except Aborted as error:
        return str(error)
    return "nobody was missed"


def come_too_late(segments: SegmentClient, seat: Seat) -> str:
    """The abort was set before the member even began."""
    abort = Abort()
    abort.set("the run ends")
    try:
        exchange = join(segments, seat, abort)
        exchange.gather(b"")
    except Aborted as error:
        return str(error)
    return "it joined"


def meet_at_the_second_attempt(segments: SegmentClient, seat: Seat) -> int:
    """The first member waits for others who never come, and is called away; then all meet in the next group."""
    if seat.rank == 0:
        abort = Abort()
        threading.Timer(0.3, abort.set, ["the members change"]).start()
        with contextlib.suppress(Aborted):
            join(segments, replace(seat, name=f"before {seat.name}"), abort)
    return len(join(segments, seat).gather(b""))

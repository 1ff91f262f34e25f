"""A step that one generation begins and the next one finishes, at the level of exchanges: bytes, no model. Runs in
processes of the stage; the checks are here, because only a member sees its exchange.

The last member of the first generation ends at a chosen point, by os._exit or SIGKILL. The others see its process
number on a board, wait until the process is gone, abort, and meet again without it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from distbelief.errors import DistBeliefError
from distbelief.shards import cover, mix
from distbelief.strategies.flatmodel.rules.stepwork import plan_takeover
from distbelief.transport.abort import Abort, Aborted
from distbelief.transport.exchange import Contribution, PublishedSum, Source, StepPlan
from distbelief.transport.shm.controlblock import ARRIVED, GenerationMemory
from distbelief.transport.shm.exchange import SharedExchange
from distbelief.transport.shm.segment import SegmentClient
from tests.support.exchange.member import (
    PARAMETERS,
    Seat,
    geometry,
    integers,
    plain_sum,
    plan,
    row,
    same_bits,
    shard_values,
    write_partials,
)

POINTS = ["before the step", "begun", "computing", "some tiles", "all tiles", "arrived"]
STEP = 5


def untouched(who: int) -> np.ndarray:
    return np.array([(mix(STEP, who, entry) % 3) > 0 for entry in range(PARAMETERS)])


def contribution(seat: Seat, mine: list[tuple[int, int]], nodes: list, who: int) -> Contribution:
    rows = np.full((seat.shards, 4), 123.0)
    for first, end in mine:
        rows[first:end] = [row(STEP, shard) for shard in range(first, end)]
    return Contribution(rows, mine, nodes, untouched(who), integers(STEP, who))


def die_at(segments: SegmentClient, exchange: SharedExchange, seat: Seat, point: str, by_signal: bool) -> None:
    """The first part of the step, up to the point; then nothing more."""
    board = segments.segment("board", 64).tensor(torch.int64, 0, 1)

    def die() -> None:
        board[0] = os.getpid()
        if by_signal:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        os._exit(7)

    if point == "before the step":
        die()
    exchange.begin(plan(seat, STEP, seat.shards))
    if point == "begun":
        die()
    exchange.working(seat.mine[0])
    if point == "computing":
        exchange.slot(0).tensor(torch.uint8, 0, 100).fill_(77)
        die()
    exchange.working(-1)
    if point == "some tiles":
        publish = exchange.publish
        exchange.publish = lambda tile: (publish(tile), die())  # type: ignore[method-assign, return-value, assignment]
    write_partials(exchange, seat, STEP, seat.shards)
    if point == "all tiles":
        die()
    announce = exchange._flags.announce

    def last(word: int, value: int) -> None:
        announce(word, value)
        if word == ARRIVED:
            die()

    exchange._flags.announce = last  # type: ignore[method-assign]
    nodes = [(node, slot) for slot, node in enumerate(cover(seat.shards, seat.mine))]
    exchange.share(contribution(seat, [seat.mine], nodes, seat.rank))


def wait_for_the_end_of(segments: SegmentClient, abort: Abort) -> None:
    board = segments.segment("board", 64).tensor(torch.int64, 0, 1)

    def gone() -> bool:
        try:
            return Path(f"/proc/{int(board[0])}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True

    def look() -> None:
        while not int(board[0]) or not gone():
            time.sleep(0.001)
        abort.set("the last member is gone")

    threading.Thread(target=look, daemon=True).start()


def finish(
    segments: SegmentClient, seat: Seat, point: str, by_signal: bool = False
) -> tuple[list[PublishedSum] | None, int]:
    """What was held for the second generation, and how many shards it computed again."""
    abort = Abort()
    first = SharedExchange(segments, "generation 1", seat.rank, geometry(seat), abort)
    first.gather(b"")
    if seat.rank == seat.size - 1:
        die_at(segments, first, seat, point, by_signal)
    first.begin(plan(seat, STEP, seat.shards))  # before the news of a death: who has not begun the step leaves at once
    wait_for_the_end_of(segments, abort)
    try:
        write_partials(first, seat, STEP, seat.shards)
        nodes = [(node, slot) for slot, node in enumerate(cover(seat.shards, seat.mine))]
        first.share(contribution(seat, [seat.mine], nodes, seat.rank))
        first.applied()
        first.settle()
        raise AssertionError("somebody was to be missed")
    except Aborted:
        pass
    again = replace(seat, size=seat.size - 1)
    second = SharedExchange(
        segments,
        "generation 2",
        again.rank,
        geometry(again),
        Abort(),
        [GenerationMemory("generation 1", geometry(seat))],
    )
    second.gather(b"")
    held = second.published_sums(STEP)
    assert second.published_sums(STEP - 1) is None
    assert second.published_sums(STEP + 1) is None
    dead = seat.size - 1
    found = [(one.back, one.rank, one.step, one.shard) for one in second.died_computing()]
    assert found == ([(1, dead, STEP, seat.mine_of(dead)[0])] if point == "computing" else [])
    recomputed = _finish(segments, second, seat, again, held or [])
    assert second.published_sums(STEP) is None, "after the step nobody can need the past"
    second.gather(b"")
    third = SharedExchange(
        segments,
        "generation 3",
        again.rank,
        geometry(again),
        Abort(),
        [GenerationMemory("generation 1", geometry(seat))],
    )
    assert third.published_sums(STEP) is None, "and its memory was given back"
    third.gather(b"")
    return held, recomputed


def _only_what_is_held_is_left(segments: SegmentClient, seat: Seat, held: list[PublishedSum]) -> None:
    """Old slots of no use have no memory any more when new ones are made."""
    left = set()
    for rank, count in enumerate(geometry(seat).slots):
        for slot in range(count):
            with contextlib.suppress(DistBeliefError):
                segments.segment(f"generation 1/slot/{rank}.{slot}")
                left.add((rank, slot))
    assert left == {(one.source.rank, one.source.slot) for one in held}


def _finish(segments: SegmentClient, second: SharedExchange, seat: Seat, again: Seat, held: list[PublishedSum]) -> int:
    work = plan_takeover(again.shards, again.shards, held, again.size, again.rank)
    second.begin(StepPlan(STEP, work.sources, work.order))
    if again.rank == 0:  # whose requests the server answers in order
        _only_what_is_held_is_left(segments, seat, held)
    tiles = geometry(again).tiles
    for tile in tiles:
        for unit in work.partials.work:
            at = second.slot(unit.slot).tensor(tile.dtype, tile.offset_bytes, tile.numel)
            at.copy_(shard_values(STEP, unit.shard, tile))
            for into, other in unit.additions:
                parts = [second.slot(n).tensor(tile.dtype, tile.offset_bytes, tile.numel) for n in (into, other)]
                parts[0].add_(parts[1])
        second.publish(tile.index)
    newcomer = 100 + again.rank  # another name, so that what it tells differs from what it told before
    shared = second.share(contribution(again, list(work.mine), list(work.partials.results.items()), newcomer))
    assert shared.rows.tobytes() == np.array([row(STEP, shard) for shard in range(again.shards)]).tobytes()
    givers = {one.source.rank for one in held} | {100 + rank for rank in range(again.size)}
    assert shared.untouched.tolist() == np.array([untouched(who) for who in givers]).all(axis=0).tolist()
    source = work.sources[0]
    assert shared.integers == integers(STEP, source.rank if source.back else 100 + source.rank)
    for index in second.tiles:
        assert same_bits(second.reduced(index), plain_sum(STEP, (0, again.shards), again.shards, tiles[index]))
    assert isinstance(held, list)
    assert all(isinstance(one.source, Source) for one in held)
    second.applied()
    second.settle()
    return work.recomputed

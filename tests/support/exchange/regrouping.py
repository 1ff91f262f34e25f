"""A member of a run that regroups again and again: it opens and closes one exchange after the other, and counts what
its process holds. Runs in processes of the stage."""

from __future__ import annotations

import gc
import os

import torch.distributed as dist

from distbelief.transport.abort import Abort
from distbelief.transport.shm.controlblock import GenerationMemory
from distbelief.transport.shm.exchange import SharedExchange
from distbelief.transport.shm.segment import SegmentClient
from tests.support.exchange.member import Seat, check_share, geometry, join, plan, write_partials

SHARDS = 4


def _seat(kind: str, port: int, generation: int, rank: int) -> Seat:
    """The third member is in every second generation."""
    return Seat(kind, f"generation {generation}", port, rank, 2 + generation % 2, SHARDS, "few")


def regroup_often(
    segments: SegmentClient, kind: str, port: int, rank: int, generations: int, forgets: bool = True
) -> list[dict[str, int]]:
    """`forgets`: as in a run. Else the memory of earlier generations is kept, which the test has to notice."""
    gc.freeze()  # as a worker, once the job is loaded
    held = []
    for generation in range(1, generations + 1):
        seat = _seat(kind, port, generation, rank)
        if rank >= seat.size:
            continue
        if kind == "shared":
            before = _seat(kind, port, generation - 1, 0)
            past = [GenerationMemory(before.name, geometry(before))] if forgets else []
            exchange = SharedExchange(segments, seat.name, rank, geometry(seat), Abort(), past)
        else:
            exchange = join(segments, seat)
        exchange.begin(plan(seat, generation, SHARDS))
        write_partials(exchange, seat, generation, SHARDS)
        check_share(exchange, seat, generation, SHARDS)
        for tile in exchange.tiles:
            exchange.reduced(tile)
        exchange.applied()
        exchange.settle()
        exchange.gather(b"the step is applied")
        exchange.close()
        del exchange
        gc.collect()  # as the worker before each generation
        held.append(_held())
    return held


def _held() -> dict[str, int]:
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": len(open("/proc/self/maps").readlines()),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "descriptors of the segments' server": len(os.listdir(f"/proc/{os.getppid()}/fd")),
    }

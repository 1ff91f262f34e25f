"""Adding up one buffer over two processes: our shared memory, gloo's all_reduce, and copying the same bytes once.

    shared         what a training step does: each member ends with the sums of its own tiles (half of the buffer) in
                   memory of its own, where the optimizer takes them. Nobody needs the other half.
    shared, whole  and then each puts its sums into shared memory: the whole sum can be read by both, as after gloo
    gloo           torch.distributed.all_reduce in place: the whole sum, in each process
    memcpy         tensor.copy_ on one core while the other one rests

The same two processes run all of them, turn by turn. Run as a script this file is one of the two members.
"""

from __future__ import annotations

import argparse
import gc
import json
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from bench.running import TIMEOUT_S, DriverFailed, environment
from distbelief.strategies.flatmodel.layout import lay_out
from distbelief.transport.abort import Abort
from distbelief.transport.exchange import ROW, Contribution, Geometry, Source, StepPlan
from distbelief.transport.shm.exchange import SharedExchange
from distbelief.transport.shm.segment import SegmentClient
from distbelief.transport.shm.segmentserver import SegmentServer

MEMBERS = 2
METHODS = ("shared", "shared, whole", "gloo", "memcpy")
MEGABYTE = 1_000_000
ELEMENT_BYTES = 4
BLOCK_BYTES = 200 * MEGABYTE  # reduced between two looks at the clock, and at least twice

Seconds = dict[str, list[float]]
"""Method -> seconds per reduction, one figure per repetition."""


def measure(sizes_mb: list[int], repetitions: int) -> dict[int, Seconds]:
    """Start the two members, hand them segments, and return the slower one's times."""
    segments = SegmentServer()
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(MEMBERS)]
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank, (_, theirs) in enumerate(pairs):
            order = [str(rank), str(theirs.fileno()), folder, str(repetitions), ",".join(map(str, sizes_mb))]
            command = [sys.executable, __file__, *order]
            processes.append(subprocess.Popen(command, env=environment(), pass_fds=[theirs.fileno()]))
            theirs.close()
        try:
            _serve(segments, [mine for mine, _ in pairs])
            if any(process.wait(TIMEOUT_S) for process in processes):
                raise DriverFailed("a process of the reduce comparison failed; what it said is above")
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            segments.close()
        said = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(MEMBERS)]
    return {
        size: {
            method: [max(times) for times in zip(*(one[str(size)][method] for one in said), strict=True)]
            for method in METHODS
        }
        for size in sizes_mb
    }


def _serve(segments: SegmentServer, connections: list[socket.socket]) -> None:
    """Be the engine of two workers: hand out segments until both have gone, or one is silent for too long."""
    waiting = list(connections)
    while waiting:
        ready, _, _ = select.select(waiting, [], [], TIMEOUT_S)
        if not ready:
            raise DriverFailed(f"no word from the members of the reduce comparison for {TIMEOUT_S} s")
        for connection in ready:
            try:
                segments.answer(connection)
            except (EOFError, ConnectionError):
                waiting.remove(connection)
    for connection in connections:
        connection.close()


class _Member:
    """One of the two processes, for one size of buffer."""

    def __init__(self, segments: SegmentClient, rank: int, size_mb: int) -> None:
        self.elements = size_mb * MEGABYTE // ELEMENT_BYTES
        self.rank = rank
        model = torch.nn.Module()
        model.register_parameter("buffer", torch.nn.Parameter(torch.empty(self.elements)))
        layout = lay_out(model)  # the tiles that a model of this size would have
        geometry = Geometry(layout.tiles, layout.size_bytes, [1] * MEMBERS, shards=MEMBERS, marks=1)
        self._tiles = layout.tiles
        self._exchange = SharedExchange(segments, f"{size_mb} MB", rank, geometry, Abort())
        slot = self._exchange.slot(0).tensor(torch.float32, 0, self.elements)
        slot.copy_(content(rank, self.elements))
        shared = segments.segment(f"{size_mb} MB sum", layout.size_bytes)
        self._sums = [shared.tensor(t.dtype, t.offset_bytes, t.numel) for t in layout.tiles]
        self._whole = shared.tensor(torch.float32, 0, self.elements)
        self._gloo = torch.empty(self.elements)
        self._copy = torch.empty(self.elements)
        self._source = content(rank, self.elements)
        self._step = 0
        self.ready_for("")

    def ready_for(self, method: str) -> None:
        """Give gloo fresh numbers, because it adds in place."""
        if method in ("", "gloo"):
            self._gloo.copy_(self._source)

    def reduce(self, method: str) -> None:
        if method == "gloo":
            dist.all_reduce(self._gloo)
        elif method == "memcpy":
            if self.rank == 0:
                self._copy.copy_(self._source)
        else:
            self._shared(whole=method == "shared, whole")

    def _shared(self, *, whole: bool) -> None:
        exchange = self._exchange
        exchange.begin(StepPlan(self._step, [Source(rank, 0) for rank in range(MEMBERS)], (0, 1)))
        self._step += 1
        for tile in self._tiles:
            exchange.publish(tile.index)
        mine = (self.rank, self.rank + 1)
        exchange.share(Contribution(np.zeros((MEMBERS, ROW)), [mine], [(mine, 0)], np.zeros(1, bool), b""))
        for mine in exchange.tiles:
            reduced = exchange.reduced(mine)
            if whole:
                self._sums[mine].copy_(reduced)
        exchange.applied()
        exchange.settle()

    def check(self) -> None:
        """Everybody's sum is right, or nothing is measured."""
        wanted = content(0, self.elements) + content(1, self.elements)
        for method in ("shared, whole", "gloo"):
            self.ready_for(method)
            self.reduce(method)
            got = self._gloo if method == "gloo" else self._whole
            if not torch.equal(got, wanted):
                raise RuntimeError(f"{method}: the sum of {self.elements} elements is wrong")
            dist.barrier()


def content(rank: int, elements: int) -> torch.Tensor:
    """Small whole numbers, so that their sums are exact in any order."""
    return torch.arange(elements, dtype=torch.float32).remainder_(97).add_(rank)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("socket", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("repetitions", type=int)
    parser.add_argument("sizes_mb", type=lambda text: [int(part) for part in text.split(",")])
    args = parser.parse_args()
    torch.set_num_threads(1)
    segments = SegmentClient(socket.socket(fileno=args.socket))
    meeting_place = f"file://{args.folder.resolve()}/store"
    dist.init_process_group("gloo", init_method=meeting_place, rank=args.rank, world_size=MEMBERS)
    gc.freeze()  # as DistBelief's workers do; a collection of everything imported takes 0.1 s, for any of the methods
    found = {}
    for size_mb in args.sizes_mb:
        member = _Member(segments, args.rank, size_mb)
        member.check()
        rounds = min(64, max(2, BLOCK_BYTES // (size_mb * MEGABYTE)))  # gloo's numbers grow twofold each time
        found[size_mb] = _interleave(member, rounds, args.repetitions)
    (args.folder / f"rank{args.rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _interleave(member: _Member, rounds: int, repetitions: int) -> Seconds:
    """All methods turn by turn, another one first each time; the first turn of all warms up and does not count."""
    seconds: Seconds = {method: [] for method in METHODS}
    for repetition in range(repetitions + 1):
        shift = repetition % len(METHODS)
        for method in METHODS[shift:] + METHODS[:shift]:
            member.ready_for(method)
            took = _time(lambda method=method: member.reduce(method), rounds)  # type: ignore[misc]
            if repetition:
                seconds[method].append(took)
    return seconds


def _time(action: Callable[[], None], rounds: int) -> float:
    dist.barrier()
    started = time.perf_counter()
    for _ in range(rounds):
        action()
    return (time.perf_counter() - started) / rounds


if __name__ == "__main__":
    main()

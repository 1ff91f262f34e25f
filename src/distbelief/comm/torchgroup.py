"""The exchange over torch.distributed (gloo): for members on several hosts, or where shared memory cannot be used.

Exact all-reduce by tile: every member sends its partial sums of a tile to the tile's owner as soon as they are ready,
the owner adds them in the tree's order, and the sums are broadcast. The bytes are those of a ring; the order of
addition is fixed. Every member then applies the whole step to a replica of its own.

gloo cannot cancel what it waits for. So an abort shuts the group's sockets down: then every wait of ours ends with an
error, and so do those of the members at the other ends.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from distbelief.comm.backups import Backups
from distbelief.comm.exchange import Broken, Geometry, Gift, Held, Shared, StepPlan, depth, tree_add
from distbelief.comm.segment import Segment
from distbelief.comm.words import Abort, Aborted

_CHUNK_BYTES = 64 << 20
_MISSED_S = 5.0  # a wait whose sockets are closed ends within milliseconds, if it ends


@dataclass(frozen=True)
class Rendezvous:
    """Where the store is that introduces the members to each other, and the group's name (its generation)."""

    host: str
    port: int
    name: str
    timeout_s: float = 300.0


class TorchExchange:
    """See `Exchange`."""

    shares_state = False
    waiting = False
    backups: Backups | None = None

    def __init__(
        self,
        meeting: Rendezvous,
        rank: int,
        geometry: Geometry,
        abort: Abort,
        memory: dict[str, Segment] | None = None,
    ) -> None:
        """`memory`: what this process keeps from one generation to the next."""
        self.rank = rank
        self.size = len(geometry.slots)
        self.tiles: Sequence[int] = range(len(geometry.tiles))
        self._geometry = geometry
        self._abort = abort
        self._memory = {} if memory is None else memory
        self._slots = [Segment.private(geometry.slot_bytes) for _ in range(geometry.slots[rank])]
        self._views = [[slot.tensor(t.dtype, t.offset_bytes, t.numel) for t in geometry.tiles] for slot in self._slots]
        self._sums = Segment.private(geometry.slot_bytes)
        self._out = [self._sums.tensor(t.dtype, t.offset_bytes, t.numel) for t in geometry.tiles]
        self._owner = [tile.index * self.size // len(geometry.tiles) for tile in geometry.tiles]
        self._staged: dict[tuple[int, int], torch.Tensor] = {}
        self._receives: dict[int, list[dist.Work | None]] = {}
        self._sends: list[dist.Work | None] = []
        self._collected = False
        self._plan = StepPlan(-1, [], 0)
        timeout = datetime.timedelta(seconds=meeting.timeout_s)
        self._waits = 0
        self._before = _open_sockets()
        self._sockets: set[tuple[int, int]] | None = None
        abort.wake = self._hang_up
        with self._network():
            store = TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
            # torch numbers groups by this, and counts those too that an abort ended before the members had met: then
            # each member would wait under another name.
            dist.distributed_c10d._world.group_count = 0
            dist.init_process_group(
                "gloo",
                store=PrefixStore(meeting.name, store),
                rank=rank,
                world_size=self.size,
                timeout=timeout,
            )
        self._sockets = _open_sockets() - self._before

    def _hang_up(self) -> None:
        """From the control thread: end whatever the training thread waits for."""
        threading.Thread(target=self._insist, args=[self._waits], daemon=True).start()
        present = _open_sockets()
        for descriptor, identity in present - self._before if self._sockets is None else present & self._sockets:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if os.fstat(connection.fileno()).st_ino != identity:
                    continue  # closed meanwhile, and the number is that of a socket of the next group
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # gloo dies with its listener
                    connection.shutdown(socket.SHUT_RDWR)

    def _insist(self, wait: int) -> None:
        """gloo sometimes sleeps on although its sockets are closed. Then only the end of this process helps: the
        coordinator takes it for a death, and others have the state."""
        time.sleep(_MISSED_S)
        if self.waiting and self._waits == wait:
            print("gloo has missed that the group is over: this worker ends, to be replaced", flush=True)
            os._exit(1)

    @contextmanager
    def _network(self) -> Iterator[None]:
        """A broken connection is a member's loss, not a fault of the user's code: the coordinator says what follows."""
        self._waits += 1
        self._abort.check()
        self.waiting = True
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            what = str(error).partition(". This is typically")[0]
            raise Aborted(f"a connection between members broke: {what}") from error
        finally:
            self.waiting = False

    def slot(self, index: int) -> Segment:
        return self._slots[index]

    def state(self, size_bytes: int) -> Segment:
        if "state" not in self._memory:
            self._memory["state"] = Segment.private(size_bytes)
        return self._memory["state"]

    def held(self, step: int) -> list[Held] | None:
        return None  # partial sums are in the memory of their makers; they are computed again

    def broken(self) -> list[Broken]:
        return []

    def working(self, shard: int) -> None:
        """Nobody could look it up."""

    def begin(self, plan: StepPlan) -> None:
        self._plan = plan
        self._collected = False
        with self._network():
            for tile in self._mine():
                self._receives[tile] = [
                    dist.irecv(self._stage(number, tile), source.rank, tag=self._tag(number, tile))
                    for number, source in enumerate(plan.sources)
                    if source.rank != self.rank
                ]

    def _mine(self) -> list[int]:
        return [tile for tile in self.tiles if self._owner[tile] == self.rank]

    def _tag(self, source: int, tile: int) -> int:
        return source * len(self.tiles) + tile

    def _stage(self, source: int, tile: int) -> torch.Tensor:
        if (source, tile) not in self._staged:
            shape = self._geometry.tiles[tile]
            self._staged[source, tile] = torch.empty(shape.numel, dtype=shape.dtype)
        return self._staged[source, tile]

    def publish(self, tile: int) -> None:
        owner = self._owner[tile]
        if owner == self.rank:
            return
        with self._network():
            for number, source in enumerate(self._plan.sources):
                if source.rank == self.rank:
                    view = self._views[source.slot][tile]
                    self._sends.append(dist.isend(view, owner, tag=self._tag(number, tile)))

    def share(self, gift: Gift, meanwhile: Callable[[], bool] = lambda: False) -> Shared:
        everything = np.zeros_like(gift.rows)
        for first, end in gift.mine:
            everything[first:end] = gift.rows[first:end]
        touched = torch.from_numpy((gift.untouched == 0).astype(np.uint8))
        integers = torch.frombuffer(bytearray(gift.integers or b"\0"), dtype=torch.uint8)
        with self._network():
            # Every row has one giver. As whole numbers, because -0.0 + 0.0 would be another zero.
            dist.all_reduce(torch.from_numpy(everything.view(np.int64)))
            dist.all_reduce(touched, op=dist.ReduceOp.MAX)
            if gift.integers:
                dist.broadcast(integers, self._plan.sources[0].rank)
        return Shared(everything, touched.numpy() == 0, integers.numpy().tobytes() if gift.integers else b"")

    def reduced(self, tile: int) -> torch.Tensor:
        if not self._collected:
            self._collect()
        return self._out[tile]

    def _collect(self) -> None:
        self._collected = True
        plan, levels = self._plan, depth(self._plan.program)
        with self._network():
            for tile in self._mine():
                _wait(self._receives[tile])
                parts = [
                    self._views[source.slot][tile] if source.rank == self.rank else self._stage(number, tile)
                    for number, source in enumerate(plan.sources)
                ]
                out = self._out[tile]
                tree_add(plan.program, parts, out, [torch.empty_like(out) for _ in range(levels)])
            broadcasts = [
                dist.broadcast(self._sums.tensor(torch.uint8, first, end - first), owner, async_op=True)
                for owner, first, end in self._stretches()
            ]
            _wait(broadcasts)

    def _stretches(self) -> list[tuple[int, int, int]]:
        """(owner, first byte, end byte) of the neighbouring tiles that each rank owns."""
        tiles = self._geometry.tiles
        return [
            (owner, tiles[mine[0]].offset_bytes, tiles[mine[-1]].offset_bytes + tiles[mine[-1]].size_bytes)
            for owner in range(self.size)
            if (mine := [tile for tile in self.tiles if self._owner[tile] == owner])
        ]

    def share_squares(self, mine: dict[int, float]) -> list[float]:
        return [mine[tile] for tile in sorted(mine)]

    def applied(self) -> None:
        """Nobody waits for it: every member has a replica of its own."""

    def settle(self) -> None:
        with self._network():
            _wait(self._sends)
        self._sends.clear()

    def gather(self, payload: bytes) -> list[bytes]:
        with self._network():
            length = torch.tensor([len(payload)])
            lengths = [torch.zeros_like(length) for _ in range(self.size)]
            dist.all_gather(lengths, length)
            longest = max(int(n) for n in lengths)
            box = torch.zeros(max(longest, 1), dtype=torch.uint8)
            box[: len(payload)] = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[: len(payload)]
            boxes = [torch.zeros_like(box) for _ in range(self.size)]
            dist.all_gather(boxes, box)
        return [bytes(b.numpy()[: int(n)].tobytes()) for b, n in zip(boxes, lengths, strict=True)]

    def transfer(self, block: torch.Tensor, source: int, receivers: Sequence[int]) -> None:
        with self._network():
            for first in range(0, block.numel(), _CHUNK_BYTES):
                part = block[first : first + _CHUNK_BYTES]
                if self.rank == source:
                    _wait([dist.isend(part, receiver) for receiver in receivers])
                elif self.rank in receivers:
                    dist.recv(part, source)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _open_sockets() -> set[tuple[int, int]]:
    """(descriptor, identity) of every socket of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is gone by now
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()

"""The exchange of members that each have their own accelerator: sums go from device to device, over NCCL.

A stretch of the gradients is exchanged as soon as the backward pass has finished it, on a separate stream. In exact
mode every member receives its part of the stretch from all others (all-to-all), adds the parts in the tree's order, and
all members gather the sums: as many bytes as a ring, with a fixed order of addition. In inexact mode an all-reduce
adds. All other data of a step goes over gloo.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distbelief.transport.abort import Abort
from distbelief.transport.device.exchange import DeviceExchange, Slot, Stretch
from distbelief.transport.exchange import Geometry, Source, StepPlan, depth, tree_add
from distbelief.transport.gloo.exchange import TorchExchange
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.shm.segment import Memory, Segment

_LINE = 64  # elements; kernels cut at multiples of it anyway
_LOOK_EVERY_S = 5e-5


class NcclExchange(DeviceExchange):
    """The exchange over NCCL. `backend`: nccl, or gloo, which stages through the host and allows several members per
    device."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        geometry: Geometry,
        abort: Abort,
        device: torch.device,
        exact: bool,
        memory: dict[str, Segment] | None = None,
        device_memory: dict[str, Memory] | None = None,
        backend: str = "nccl",
    ) -> None:
        """`memory`, `device_memory`: memory that this process keeps across generations."""
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # we handle deaths; torch would end the process
        backends = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"
        inner = _Agreeing(rendezvous, rank, geometry, abort, memory, backends)
        super().__init__(inner, geometry, device, device_memory)
        self._network = inner
        self._abort = abort
        self._exact = exact
        self._missing: list[int] = []
        gradients = sum(1 for s in self.stretches if s.tiles.start < geometry.gradient_tiles)
        self._order = [*reversed(range(gradients)), *range(gradients, len(self.stretches))]
        """The order of the exchanges, equal on all members: from the last layer to the first, as in backward passes,
        then buffers."""
        self._next = 0
        self._travels: dict[int, _Travel] = {}
        self._rooms_of: dict[tuple[int, int], torch.Tensor] = {}
        self._own: list[Source] = []

    def begin(self, plan: StepPlan) -> None:
        super().begin(plan)
        self._own = [source for source in plan.sources if self._is_mine(source)]
        self._missing = [len(stretch.tiles) for stretch in self.stretches]
        self._next = 0
        self._travels.clear()

    def publish(self, tile: int) -> None:
        number = self.stretch_of[tile]
        self._missing[number] -= 1
        while self._next < len(self._order) and not self._missing[self._order[self._next]]:
            with self._network.network():
                self._travels[self._order[self._next]] = self._send(self._order[self._next])
            self._next += 1

    def _send(self, number: int) -> _Travel:
        stretch = self.stretches[number]
        own = [self._slot(source.slot).stretches[number] for source in self._own]
        if not self._exact:
            whole = own[0] if own else self._room_for(number, -1, stretch.numel, stretch.dtype).zero_()
            return _Travel(dist.all_reduce(whole, async_op=True), whole)
        cuts = _cuts(stretch, self.size)
        counts = [sum(1 for s in self._plan.sources if s.rank == rank) for rank in range(self.size)]
        mine = cuts[self.rank].stop - cuts[self.rank].start
        if len(own) == 1:
            given = own[0]
        else:  # ordered by receiver
            given = self._room_for(number, -1, len(own) * stretch.numel, stretch.dtype)
            parts = [one[cut] for cut in cuts for one in own]
            if parts:
                torch.cat(parts, out=given)
        taken = self._room_for(number, -2, sum(counts) * mine, stretch.dtype)
        sends = [len(own) * (cut.stop - cut.start) for cut in cuts]
        work = dist.all_to_all_single(taken, given, [count * mine for count in counts], sends, async_op=True)
        return _Travel(work, taken)

    def _room_for(self, number: int, purpose: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        room = self._rooms_of.get((number, purpose))
        if room is None or room.numel() < numel:
            room = self._rooms_of[number, purpose] = torch.empty(numel, dtype=dtype, device=self.device)
        return room[:numel]

    def _add_up(self) -> Slot:
        with self._network.network():
            sums = self._gathered() if self._exact else self._all_reduced()
        self._await()
        return sums

    def _all_reduced(self) -> Slot:
        for travel in self._travels.values():
            travel.wait()
        if self._own:
            return self._slot(self._own[0].slot)
        for number, travel in self._travels.items():
            self._sums.stretches[number].copy_(travel.numbers)
        return self._sums

    def _gathered(self) -> Slot:
        for number in sorted(self._travels, reverse=True):
            travel, stretch = self._travels[number], self.stretches[number]
            travel.wait()
            cuts = _cuts(stretch, self.size)
            mine = cuts[self.rank].stop - cuts[self.rank].start
            whole = self._room_for(number, -3, self.size * (cuts[0].stop - cuts[0].start), stretch.dtype)
            my_sum = self._room_for(number, -4, cuts[0].stop - cuts[0].start, stretch.dtype)
            levels = [self._room_for(number, level, mine, stretch.dtype) for level in range(depth(self._plan.program))]
            if mine:
                tree_add(self._plan.program, self._in_order(travel.numbers, mine), my_sum[:mine], levels)
            dist.all_gather_into_tensor(whole, my_sum)
            self._sums.stretches[number].copy_(whole[: stretch.numel])
        return self._sums

    def _in_order(self, taken: torch.Tensor, mine: int) -> list[torch.Tensor]:
        """The partial sums in the order of the plan's sources. They arrive ordered by rank."""
        by_rank = sorted(range(len(self._plan.sources)), key=lambda index: (self._plan.sources[index].rank, index))
        place = {index: at for at, index in enumerate(by_rank)}
        return [taken[place[index] * mine : (place[index] + 1) * mine] for index in range(len(by_rank))]

    def _await(self) -> None:
        """Wait for the sums. After an abort the memory holds no valid sums, because a dead member's share may be
        missing: raise instead."""
        if self.device.type != "cuda":
            return
        done = torch.cuda.current_stream(self.device).record_event()
        self._network.waiting = True
        try:
            while not done.query():
                self._abort.check()
                time.sleep(_LOOK_EVERY_S)
        finally:
            self._network.waiting = False
        self._abort.check()

    def applied(self) -> None:
        self._inner.applied()

    def _publish_all(self) -> None:
        """Nothing to do: partial sums are not published on the host."""


class _Agreeing(TorchExchange):
    """The gloo exchange for all data of a step except the sums."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        geometry: Geometry,
        abort: Abort,
        memory: dict[str, Segment] | None,
        backend: str,
    ) -> None:
        super().__init__(rendezvous, rank, geometry, abort, memory, backend)
        self._plain: Sequence[int] = ()


@dataclass(frozen=True)
class _Travel:
    """An exchange of a stretch in flight."""

    work: dist.Work | None
    numbers: torch.Tensor

    def wait(self) -> None:
        """Make the computing stream wait for the exchange."""
        if self.work is not None:
            self.work.wait()


def _cuts(stretch: Stretch, size: int) -> list[slice]:
    """Each member's share of a stretch: equal shares, except the last.

    >>> _cuts(Stretch(range(1), torch.float32, 0, 150), 2)
    [slice(0, 128, None), slice(128, 150, None)]
    """
    part = -(-stretch.numel // (size * _LINE)) * _LINE
    return [slice(min(r * part, stretch.numel), min((r + 1) * part, stretch.numel)) for r in range(size)]

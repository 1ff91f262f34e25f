"""PowerSGD in an exchange: all matrices are summed as products of two thin matrices, in two all-reduces.

PowerSGD is linear, so no member owns a sum: every member multiplies, the thin factors are summed over all members, and
all members compute the same result from the sums. The queries are the same on all members; a new member receives them.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from distbelief.compression.exchanges.base import CompressedExchange
from distbelief.compression.powersgd import LowRank, PowerSGD
from distbelief.transport.abort import Abort
from distbelief.transport.device.accelerator import Accelerator
from distbelief.transport.exchange import Geometry
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.shm.segment import Memory, Segment

_ALIGNED = 16  # elements; the alignment that PowerSGD needs for its matrices


class LowRankSums(CompressedExchange):
    """See `Exchange`."""

    _whole_when_shared = False

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        geometry: Geometry,
        abort: Abort,
        method: LowRank,
        memory: dict[str, Segment] | None = None,
        on: Accelerator | None = None,
    ) -> None:
        assert geometry.compression is not None
        self._method = method
        self._device = on.device if on else None
        self._places = geometry.compression.places
        self._power = self._new(geometry.compression.seed)
        self._factors: dict[int, tuple[slice, tuple[int, int]]] = {}
        """Parameter -> the slice of its query behind the layout, and the query's shape."""
        end = geometry.slot_bytes // 4
        for at, shape in self._power.compressed.items():
            self._factors[at] = slice(end, end + shape[0] * shape[1]), shape
            end = -(-(end + shape[0] * shape[1]) // _ALIGNED) * _ALIGNED
        super().__init__(rendezvous, rank, geometry, abort, memory, end - geometry.slot_bytes // 4, on)
        flat = [self.totals, *self.slots]
        self._gradients = [[_view(one, place.part, place.shape) for place in self._places] for one in flat]
        """Views of the gradients: first of the sums, then of each slot."""

    def _new(self, seed: int) -> PowerSGD:
        return self._method.over([place.shape for place in self._places], seed, self._device)

    def queries(self, vector: torch.Tensor) -> dict[int, torch.Tensor]:
        """Mark of a parameter -> its query, as views of a vector of `residuals`."""
        return {self._places[at].mark: vector[part].view(shape) for at, (part, shape) in self._factors.items()}

    def fresh(self) -> torch.Tensor:
        """A vector for `residuals` as at the start of a run."""
        vector = torch.zeros_like(self.residuals.before)
        for (part, _), start in zip(self._factors.values(), self._power.starts, strict=True):
            vector[part].copy_(start.reshape(-1))
        return vector

    def _meet(self, found: bool) -> None:
        there = self.gather(b"found" if found else b"")
        queries = self.residuals.before[self.residuals.elements :]
        if b"found" not in there:
            queries.copy_(self.fresh()[self.residuals.elements :])
        elif queries.numel():
            between = queries.cpu()
            with self.network():
                dist.broadcast(between, there.index(b"found"))
            queries.copy_(between)

    def _begin_packed(self) -> None:
        """PowerSGD sends nothing before all gradients of a step are complete."""

    def _publish_packed(self, tile: int) -> None:
        """Nothing to do, see `_begin_packed`."""

    def _collect_packed(self) -> None:
        started = self._now()
        self._wire_s = 0.0
        after = self.residuals.after.copy_(self.residuals.before)
        self._power.keep_in(
            [after[self._places[at].part] for at in self._factors],
            [after[part].view(shape) for part, shape in self._factors.values()],
        )
        sums = self._power.reduce(self._mine_of_step(), self._all_sum)
        for out, total in zip(self._gradients[0], sums, strict=True):
            out.copy_(total)
        if self._measures:
            self._codec_s = self._now() - started - self._wire_s
        self.residuals.mark_complete()

    def _mine_of_step(self) -> list[torch.Tensor]:
        slots = [self._gradients[1 + source.slot] for source in self._sources]
        if len(slots) == 1:
            return slots[0]
        zeros = [torch.zeros(place.shape, device=self._device) for place in self._places]
        return [sum((slot[at] for slot in slots), zero) for at, zero in enumerate(zeros)]

    def _all_sum(self, vector: torch.Tensor) -> torch.Tensor:
        started = time.perf_counter()
        with self.network():
            dist.all_reduce(vector)  # in a ring: each stretch is added in one place, so all have the same bits
        self._wire_s += time.perf_counter() - started
        return vector

    def _packed_bytes(self, senders: frozenset[int]) -> int:
        return 2 * (self.size - 1) * self._power.size_bytes

    def _timed_bytes(self) -> int:
        if self.packing:
            return 2 * (self.size - 1) * self._power.size_bytes // self.size
        out = sum((self.size - 1) * (end - first) for owner, first, end in self._stretches() if owner == self.rank)
        return max(out, sum(end - first for owner, first, end in self._stretches() if owner != self.rank))

    def _probe(self) -> float:
        power = self._new(self.compression.seed)
        started = self._now()
        power.reduce(self._gradients[0], lambda vector: vector)
        return self._now() - started

    def _now(self) -> float:
        """The time after the device has finished its queued work."""
        if self.accelerator:
            self.accelerator.finish()
        return time.perf_counter()


def _view(memory: Memory, part: slice, shape: tuple[int, ...]) -> torch.Tensor:
    return memory.tensor(torch.float32, 4 * part.start, part.stop - part.start).view(shape)

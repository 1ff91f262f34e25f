"""What the backward passes of different members have left is added up: over stages that share a parameter, and over
the members that have other data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from distbelief.checkpoint.boxes import Box
from distbelief.checkpoint.sources import MODEL
from distbelief.shards import Range, Schedule
from distbelief.strategies.mesh.run.groups import Groups
from distbelief.strategies.mesh.run.shardbuffers import ShardBuffers
from distbelief.strategies.mesh.state.optimizer import Local

Gradients = list[torch.Tensor | None]


class TiedSum:
    """A parameter that several stages use: each has a copy, and all must get the sum of their gradients."""

    def __init__(self, groups: Groups, boxes: Sequence[Mapping[str, Box]], held: Sequence[Local]) -> None:
        """`boxes`: what every rank holds."""
        self._groups = groups
        self._held = held
        self._sharers = {
            number: ranks
            for number, one in enumerate(held)
            if len(ranks := [rank for rank in groups.pipeline if f"{MODEL}{one.name}" in boxes[rank]]) > 1
        }

    def add(self, gradients: Gradients) -> None:
        """In place. All add in the same order, so that all have the same bits."""
        me, world = self._groups.world.rank, self._groups.world
        if not self._sharers:
            return
        works: list[dist.Work | None] = []
        arrived: dict[int, dict[int, torch.Tensor]] = {}
        with world.network():
            for number, ranks in self._sharers.items():
                value, tag = self._held[number].value, self._held[number].number
                own = gradients[number]
                mine = torch.zeros_like(value) if own is None else own.contiguous()
                flag = torch.tensor([float(own is not None)], dtype=mine.dtype)
                packed = torch.cat([mine.reshape(-1), flag])
                arrived[number] = {me: packed}
                for rank in ranks:
                    if rank != me:
                        works.append(dist.isend(packed, rank, tag=tag))
                        arrived[number][rank] = torch.empty_like(packed)
                        works.append(dist.irecv(arrived[number][rank], rank, tag=tag))
            for work in works:
                if work is not None:
                    work.wait()
        for number, ranks in self._sharers.items():
            parts = [arrived[number][rank] for rank in ranks if float(arrived[number][rank][-1])]
            total = parts[0].clone() if parts else None
            for part in parts[1:]:
                assert total is not None
                total += part
            gradients[number] = total[:-1].view(self._held[number].value.shape) if total is not None else None


class DataParallelSum:
    """Gradients in one flat buffer per type, with a flag per parameter that says whether anybody gave it one."""

    def __init__(self, groups: Groups, held: Sequence[Local], buffers: Sequence[ShardBuffers]) -> None:
        self._groups = groups
        self._held = held
        self._buffers = buffers
        self.news: list[str] = []
        """What people should know."""
        self._flat: list[tuple[list[int], torch.Tensor, list[torch.Tensor]]] = []
        if groups.degrees.data > 1:
            for dtype in dict.fromkeys(one.value.dtype for one in held):
                numbers = [number for number, one in enumerate(held) if one.value.dtype == dtype]
                sizes = [held[number].value.numel() for number in numbers]
                flat = torch.zeros(sum(sizes) + len(sizes), dtype=dtype)
                views = [
                    view.view(held[number].value.shape)
                    for number, view in zip(numbers, torch.split(flat[: sum(sizes)], sizes), strict=True)
                ]
                self._flat.append((numbers, flat, views))

    def add(self, gradients: Gradients, schedule: Schedule, ranges: Sequence[Range], step: int) -> Gradients:
        """The sums over all members that have other data; and the buffers', into them."""
        found = list(gradients)
        for numbers, flat, views in self._flat:
            there = [gradients[number] for number in numbers]
            flags = flat[flat.numel() - len(numbers) :]
            flags.copy_(torch.tensor([gradient is not None for gradient in there]))
            for view, gradient in zip(views, there, strict=True):
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(gradient)
            with self._groups.world.network():
                dist.all_reduce(flat, group=self._groups.data)
            for number, view, flag in zip(numbers, views, flags.tolist(), strict=True):
                found[number] = view if flag else None
        if self._groups.degrees.rows > 1:
            self._add_buffers(schedule.occupied(step), ranges)
        return found

    @property
    def traffic(self) -> tuple[int, int]:
        """Where gradients are compressed: bytes sent, and what they would have been."""
        return 0, 0

    def _add_buffers(self, occupied: int, ranges: Sequence[Range]) -> None:
        sums = [total for one in self._buffers for total in one.sums]
        if sums:
            changed = torch.tensor([flag for one in self._buffers for flag in one.changed], dtype=torch.float64)
            flat = torch.cat([total.reshape(-1).double() for total in sums] + [changed])
            with self._groups.world.network():
                dist.all_reduce(flat, group=self._groups.samples)
            flags = (flat[flat.numel() - len(sums) :] > 0).tolist()
            for total, part in zip(sums, torch.split(flat, [t.numel() for t in sums] + [len(sums)]), strict=False):
                total.copy_(part.view(total.shape))
            for one in self._buffers:
                one.changed, flags = flags[: len(one.changed)], flags[len(one.changed) :]
        integers = [after for one in self._buffers for after in one.after]
        if integers and any(first >= occupied for first, _ in ranges):  # some had no samples, and so no new values
            source = dist.get_global_rank(self._groups.samples, 0)
            with self._groups.world.network():
                for after in integers:
                    dist.broadcast(after, source, group=self._groups.samples)

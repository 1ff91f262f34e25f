"""Adds up the gradients of different members, after their backward passes.

`TiedSum` adds over the stages that share a parameter. `DataParallelSum` adds over the members that hold the same part
and have other data. `CompressedSum` does the same with compressed float32 gradients. Its `ErrorFeedback` keeps what the
compression lost (the residual) and adds it to the gradients of the next step. There is one residual per data index,
under the names that allreduce uses, each with the box of the parameter that its holder has. A residual is state, but a
run can go on without it: a member's death or a new division of the model loses it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distbelief.checkpoint.lazy import LazyTensors
from distbelief.checkpoint.rules.boxes import Box
from distbelief.checkpoint.sources import MODEL
from distbelief.compression.exchanges.groupsum import CodedSum
from distbelief.compression.methods import codec_of
from distbelief.compression.residuals import Residuals
from distbelief.compression.switch import Message, Switch
from distbelief.errors import DistBeliefError
from distbelief.shards import Range, Schedule, mix
from distbelief.strategies.base import BeginFrom
from distbelief.strategies.flatmodel.namedtensors import RESIDUAL
from distbelief.strategies.mesh.run.groups import MeshGroups
from distbelief.strategies.mesh.run.modelpart import HeldParameter
from distbelief.strategies.mesh.run.runner import ShardBuffers
from distbelief.strategies.mesh.state.memberstate import Forms
from distbelief.transport.shm.segment import Segment

# --- uncompressed ----------------------------------------------------------------------------------------------------

Gradients = list[torch.Tensor | None]


class TiedSum:
    """The sum of a parameter's gradients over the stages that share the parameter: each stage has a copy."""

    def __init__(self, groups: MeshGroups, boxes: Sequence[Mapping[str, Box]], held: Sequence[HeldParameter]) -> None:
        """`boxes`: the boxes that every rank holds."""
        self._groups = groups
        self._held = held
        self._sharers = {
            number: ranks
            for number, one in enumerate(held)
            if len(ranks := [rank for rank in groups.pipeline if f"{MODEL}{one.name}" in boxes[rank]]) > 1
        }

    def add(self, gradients: Gradients) -> None:
        """Add in place. All members add in the same order, so all have the same bits."""
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
    """The sum over the members with other data: one flat buffer per type, with a flag per parameter that tells whether
    any member has a gradient for it."""

    def __init__(self, groups: MeshGroups, held: Sequence[HeldParameter], buffers: Sequence[ShardBuffers]) -> None:
        self._groups = groups
        self._held = held
        self._buffers = buffers
        self.news: list[str] = []
        """Messages for people."""
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
        """Returns the sums over all members with other data. Adds up the sums of the buffers in place."""
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
        """Where gradients are compressed: (bytes sent, bytes without compression)."""
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
        if integers and any(first >= occupied for first, _ in ranges):  # members without samples have no new values
            source = dist.get_global_rank(self._groups.samples, 0)
            with self._groups.world.network():
                for after in integers:
                    dist.broadcast(after, source, group=self._groups.samples)


# --- error feedback --------------------------------------------------------------------------------------------------

_ALIGN = 64


class ResidualMemory:
    """The residuals that a worker keeps from one generation to the next."""

    def __init__(self) -> None:
        self._memory: dict[str, Segment] = {}
        self._boxes: list[tuple[str, Box]] = []

    def of(self, boxes: Sequence[tuple[str, Box]], elements: int) -> Residuals:
        """The residuals of a part with these boxes. Residuals of another part are dropped."""
        if boxes != self._boxes:
            self._memory = {}
            self._boxes = list(boxes)
        return Residuals(self._memory, elements)


class ErrorFeedback:
    """One member's residuals in one generation."""

    def __init__(self, groups: MeshGroups, held: Sequence[HeldParameter], kept: ResidualMemory) -> None:
        self._groups = groups
        self.held = [one for one in held if one.value.dtype == torch.float32 and one.value.numel()]
        self._starts, end = [], 0
        for one in self.held:
            self._starts.append(end)
            end += -(-one.value.numel() // _ALIGN) * _ALIGN
        self.residuals = kept.of([(one.name, one.box) for one in self.held], end)

    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Flat views of `vector`, one per parameter."""
        return [vector[first : first + one.value.numel()] for first, one in zip(self._starts, self.held, strict=True)]

    def load(self, applied: int, begin_from: BeginFrom) -> None:
        """If no member has a residual of the step that the generation begins from, load the residuals of a
        checkpoint."""
        mine = self.residuals.at(applied) is not None
        if any(self._groups.world.gather(b"mine" if mine else b"")) or not applied:
            return
        try:
            saved = begin_from(applied)
        except DistBeliefError:  # there is no checkpoint of exactly that step
            saved = None
        if saved is None or saved.step != applied:
            return
        row, rows = self._groups.place.data, self._groups.degrees.data
        found = {
            int(name.removeprefix(RESIDUAL).partition("/")[0]) for name in saved.tensors if name.startswith(RESIDUAL)
        }
        vector = torch.zeros_like(self.residuals.before)
        for giver in sorted(one for one in found if one % rows == row):
            for view, one in zip(self.views(vector), self.held, strict=True):
                if (name := f"{RESIDUAL}{giver}/{one.name}") in saved.tensors:
                    view.add_(_read(saved.tensors, name, one.box).reshape(-1))
        self.residuals.put(applied, vector)

    def tensors(self, applied: int) -> dict[str, torch.Tensor]:
        """The residuals under their names in a checkpoint."""
        vector = self.residuals.at(applied)
        if vector is None:
            vector = torch.zeros_like(self.residuals.before)
        row = self._groups.place.data
        return {
            f"{RESIDUAL}{row}/{one.name}": view.view(one.value.shape)
            for one, view in zip(self.held, self.views(vector), strict=True)
        }


def with_residuals(
    held: Sequence[Mapping[str, Box]], forms: Forms, rows: Iterable[int], trainable: Iterable[str]
) -> tuple[list[dict[str, Box]], Forms]:
    """Returns every member's boxes and the forms of all tensors, with the residuals added. `rows`: the members' data
    indices, by rank."""
    names = [name for name in trainable if forms[f"{MODEL}{name}"][0] == torch.float32]
    more: list[dict[str, Box]] = []
    known = dict(forms)
    for boxes, row in zip(held, rows, strict=True):
        mine = {f"{RESIDUAL}{row}/{name}": boxes[f"{MODEL}{name}"] for name in names if f"{MODEL}{name}" in boxes}
        known |= {f"{RESIDUAL}{row}/{name}": forms[f"{MODEL}{name}"] for name in names}
        more.append({**boxes, **mine})
    return more, known


def _read(tensors: Mapping[str, torch.Tensor], name: str, box: Box) -> torch.Tensor:
    if isinstance(tensors, LazyTensors):
        return tensors.read_box(name, box)
    return tensors[name][tuple(slice(start, end) for start, end in box)]


# --- compressed ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientCompression:
    """How a strategy compresses gradients."""

    codec: str
    """bf16, int8 or topk=F, as in the strategy's text."""
    always: bool
    """Whether compression stays on where the link is faster than the codec."""


class CompressedSum(DataParallelSum):
    """The sum over the members with other data, with compressed float32 gradients. The first member of each group
    measures whether compression pays, and tells the others with the flags of a step."""

    def __init__(
        self,
        groups: MeshGroups,
        held: Sequence[HeldParameter],
        buffers: Sequence[ShardBuffers],
        feedback: ErrorFeedback,
        compression: GradientCompression,
    ) -> None:
        mine = {one.number for one in feedback.held}
        super().__init__(groups, [one for one in held if one.number not in mine], buffers)
        self._is_mine = [one.number in mine for one in held]
        self._feedback = feedback
        self._always = compression.always
        self._size = groups.degrees.data
        self._switch = Switch(compression.codec)
        self._on = True
        self._wire_s = 0.0
        self._whole = torch.zeros(feedback.residuals.elements)
        self._vectors = feedback.views(self._whole)
        sizes = [vector.numel() for vector in self._vectors]
        self._plain_bytes = 2 * (self._size - 1) * 4 * sum(sizes)
        self._coded: CodedSum | None = None
        if self._size > 1:
            # Members of other groups that hold the same parameter must get the same bits.
            owners = [mix(one.number) % self._size for one in feedback.held]
            self._coded = CodedSum(codec_of(compression.codec), sizes, owners, groups.data)
            self.news.append(
                f"gradients are compressed ({compression.codec}) between the {self._size} members "
                "that hold the same part"
            )

    def add(self, gradients: Gradients, schedule: Schedule, ranges: Sequence[Range], step: int) -> Gradients:
        coded = [gradient for gradient, mine in zip(gradients, self._is_mine, strict=True) if mine]
        others = [gradient for gradient, mine in zip(gradients, self._is_mine, strict=True) if not mine]
        found = {True: iter(self._add_coded(coded, step)), False: iter(super().add(others, schedule, ranges, step))}
        return [next(found[mine]) for mine in self._is_mine]

    def _add_coded(self, gradients: Gradients, step: int) -> Gradients:
        residuals = self._feedback.residuals
        residuals.begin(step)
        residuals.keep(slice(None))
        there = self._agree(gradients)
        rests = self._feedback.views(residuals.after)
        kept = [(rest, rest.clone()) for rest, flag in zip(rests, there, strict=True) if not flag]
        for rest, _ in kept:  # the sum of a parameter without any gradient is not used
            rest.zero_()
        for vector, gradient in zip(self._vectors, gradients, strict=True):
            if gradient is None:
                vector.zero_()
            else:
                vector.copy_(gradient.reshape(-1))
        if self._coded is None or not self._on:
            for vector, rest in zip(self._vectors, rests, strict=True):
                vector.add_(rest)
                rest.zero_()
        with self._groups.world.network():
            if self._coded is not None:
                self._sum(self._coded, rests)
        for rest, before in kept:
            rest.copy_(before)
        residuals.mark_complete()
        shapes = [one.value.shape for one in self._feedback.held]
        return [
            vector.view(shape) if flag else None
            for vector, shape, flag in zip(self._vectors, shapes, there, strict=True)
        ]

    def _agree(self, gradients: Gradients) -> list[bool]:
        """For each parameter, whether any member of the group has a gradient for it. Also agrees whether this step is
        compressed."""
        if self._coded is None:
            return [gradient is not None for gradient in gradients]
        leads = self._groups.place.data == 0
        word = float(leads and (self._always or self._switch.on))
        told = torch.tensor([*(float(gradient is not None) for gradient in gradients), word])
        with self._groups.world.network():
            dist.all_reduce(told, group=self._groups.data)
        *flags, word = (told > 0).tolist()
        self._on = word
        return flags

    def _sum(self, coded: CodedSum, rests: Sequence[torch.Tensor]) -> None:
        if self._on:
            coded.add(self._vectors, rests)
            self._wire_s = coded.wire_s
        else:
            started = time.perf_counter()
            dist.all_reduce(self._whole, group=self._groups.data)
            self._wire_s = time.perf_counter() - started
        self._feedback.residuals.count(coded.traffic if self._on else self._plain_bytes, self._plain_bytes)
        self._measure(coded)

    def _measure(self, coded: CodedSum) -> None:
        if self._always or self._groups.place.data > 0:
            return
        codec_s = coded.codec_s if self._on else None
        if self._switch.probe_due:
            codec_s = coded.probe(self._vectors)
        was_on = self._switch.on
        share = self._plain_bytes // self._size
        timed = coded.timed_bytes if self._on else share
        self._switch = self._switch.after(Message(share, timed, self._wire_s, codec_s, coded.traffic // self._size))
        if self._switch.on != was_on:
            self.news.append(self._switch.why)

    @property
    def traffic(self) -> tuple[int, int]:
        return self._feedback.residuals.traffic

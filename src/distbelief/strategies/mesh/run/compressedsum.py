"""The sum over members with other data, compressed: float32 gradients travel encoded, and what that loses goes with the
next step. The first member of each group measures whether it pays, and tells the others with the flags of a step."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from distbelief.compression.exchanges.groupsum import CodedSum
from distbelief.compression.methods import codec_of
from distbelief.compression.switch import Message, Switch
from distbelief.shards import Range, Schedule, mix
from distbelief.strategies.mesh.run.gradients import DataParallelSum, Gradients
from distbelief.strategies.mesh.run.groups import Groups
from distbelief.strategies.mesh.run.shardbuffers import ShardBuffers
from distbelief.strategies.mesh.state.optimizer import Local
from distbelief.strategies.mesh.state.owing import Owing
from distbelief.strategies.mesh.strategy import Meshed


class CompressedSum(DataParallelSum):
    def __init__(
        self, groups: Groups, held: Sequence[Local], buffers: Sequence[ShardBuffers], owing: Owing, how: Meshed
    ) -> None:
        mine = {one.number for one in owing.held}
        super().__init__(groups, [one for one in held if one.number not in mine], buffers)
        self._is_mine = [one.number in mine for one in held]
        self._owing = owing
        self._always = how.always
        self._size = groups.degrees.data
        self._switch = Switch(how.compression)
        self._on = True
        self._wire_s = 0.0
        self._whole = torch.zeros(owing.residuals.elements)
        self._vectors = owing.views(self._whole)
        sizes = [vector.numel() for vector in self._vectors]
        self._plain_bytes = 2 * (self._size - 1) * 4 * sum(sizes)
        self._coded: CodedSum | None = None
        if self._size > 1:
            # Whoever else holds the same parameter, in another group, must come to the same bits.
            owners = [mix(one.number) % self._size for one in owing.held]
            self._coded = CodedSum(codec_of(how.compression), sizes, owners, groups.data)
            self.news.append(
                f"gradients are compressed ({how.compression}) between the {self._size} members that hold the same part"
            )

    def add(self, gradients: Gradients, schedule: Schedule, ranges: Sequence[Range], step: int) -> Gradients:
        coded = [gradient for gradient, mine in zip(gradients, self._is_mine, strict=True) if mine]
        others = [gradient for gradient, mine in zip(gradients, self._is_mine, strict=True) if not mine]
        found = {True: iter(self._add_coded(coded, step)), False: iter(super().add(others, schedule, ranges, step))}
        return [next(found[mine]) for mine in self._is_mine]

    def _add_coded(self, gradients: Gradients, step: int) -> Gradients:
        residuals = self._owing.residuals
        residuals.begin(step)
        residuals.keep(slice(None))
        there = self._agree(gradients)
        rests = self._owing.views(residuals.after)
        kept = [(rest, rest.clone()) for rest, flag in zip(rests, there, strict=True) if not flag]
        for rest, _ in kept:  # nobody uses what is sent of a parameter without a gradient
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
        residuals.written()
        shapes = [one.value.shape for one in self._owing.held]
        return [
            vector.view(shape) if flag else None
            for vector, shape, flag in zip(self._vectors, shapes, there, strict=True)
        ]

    def _agree(self, gradients: Gradients) -> list[bool]:
        """Which parameters anybody in the group has a gradient for; and whether this step is compressed."""
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
        self._owing.residuals.count(coded.traffic if self._on else self._plain_bytes, self._plain_bytes)
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
        return self._owing.residuals.traffic

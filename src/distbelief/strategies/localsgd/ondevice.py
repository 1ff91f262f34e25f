"""Replicas that are trained on an accelerator, between outer steps that are taken in the host's memory.

The committed state, and what replicas keep from one round to the next, stay on the host, where no death loses them. A
round brings them to the device once, takes all of its local steps there, the job's own optimizer too, and brings back
the difference and what the replica keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distbelief.compression.parts import PartsCoding
from distbelief.job import Job
from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.flatmodel.tileoptimizer import Recipe
from distbelief.strategies.localsgd.trainer import Beginning, LocalTrainer, views
from distbelief.transport.device.accelerator import DeviceMemory, pin
from distbelief.transport.device.exchange import STRETCH_BYTES
from distbelief.transport.shm.segment import Memory, Segment


class DeviceTrainer(LocalTrainer):
    """See `LocalTrainer`. Between rounds the model's parameters are a copy of the committed ones, taken when it is
    first wanted after a round."""

    _grain_bytes = STRETCH_BYTES

    def __init__(
        self, job: Job, model: torch.nn.Module, layout: Layout, device: torch.device, recipe: Recipe,
        coding: PartsCoding | None = None,
    ) -> None:  # fmt: skip
        super().__init__(job, model, layout, device, recipe, coding)
        self._optimizer_bytes = sum(self._sizes)
        self._optimizer_state = self._room(self._optimizer_bytes).tensor(torch.uint8, 0, self._optimizer_bytes)
        self._committed = self._room(layout.size_bytes)
        self._host: torch.Tensor | None = None
        """The committed values, where they are to be copied from; None: they have been."""
        self._pin(self._keeping)

    def bind_parameters(self, values: Memory, offset_bytes: int) -> None:
        if values is self._values:
            super().bind_parameters(values, offset_bytes)
            return
        self._pin(values)
        self._host = values.tensor(torch.uint8, offset_bytes, self.layout.size_bytes)
        super().bind_parameters(self._committed, 0)

    def committed_buffers(self, values: Memory, offset_bytes: int) -> list[torch.Tensor]:
        return super().committed_buffers(self._committed, 0)

    def restore_buffers(self, committed: Sequence[torch.Tensor]) -> None:
        self._freshen()
        super().restore_buffers(committed)

    def _freshen(self) -> None:
        if self._host is not None:
            self._committed.tensor(torch.uint8, 0, self.layout.size_bytes).copy_(self._host)
            self._host = None

    def write_difference(self, slot: Memory) -> None:
        """Made in the memory of gradients, which are not wanted any more."""
        self._pin(slot)
        made, size_bytes = self._slot(0), self.layout.size_bytes
        super().write_difference(made)
        slot.tensor(torch.uint8, 0, size_bytes).copy_(made.tensor(torch.uint8, 0, size_bytes))

    def _room(self, size_bytes: int) -> Memory:
        return DeviceMemory(size_bytes, self.device)

    def _bring_in(self, beginning: Beginning) -> list[torch.Tensor]:
        self._optimizer_state.copy_(self.kept[: self._optimizer_bytes])
        self._freshen()
        return views(self._committed, self._grain)

    def _bring_out(self) -> None:
        self.kept[: self._optimizer_bytes].copy_(self._optimizer_state)

    def _pin(self, memory: Memory) -> None:
        if self.device.type == "cuda" and isinstance(memory, Segment):
            pin(memory)

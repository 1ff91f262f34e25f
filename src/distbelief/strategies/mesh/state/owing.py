"""What a member of a mesh has not sent yet of its gradients: one residual per data index, under names as in allreduce,
each with the box that its holder has of the parameter. It is state, but none that a run cannot go on without: with a
member that dies it is lost, and with a part that is divided anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from distbelief.checkpoint.boxes import Box
from distbelief.checkpoint.lazy import LazyTensors
from distbelief.checkpoint.sources import MODEL
from distbelief.compression.residuals import Residuals
from distbelief.errors import DistBeliefError
from distbelief.strategies.base import BeginFrom
from distbelief.strategies.dataparallel.compressed import RESIDUAL
from distbelief.strategies.mesh.run.groups import Groups
from distbelief.strategies.mesh.state.optimizer import Local
from distbelief.strategies.mesh.state.snapshots import Forms
from distbelief.transport.shm.segment import Segment

_ALIGN = 64


class KeptResiduals:
    """What a worker keeps from one generation to the next."""

    def __init__(self) -> None:
        self._memory: dict[str, Segment] = {}
        self._boxes: list[tuple[str, Box]] = []

    def of(self, boxes: Sequence[tuple[str, Box]], elements: int) -> Residuals:
        """Those of a part that consists of these boxes. Of another one nothing can be used."""
        if boxes != self._boxes:
            self._memory = {}
            self._boxes = list(boxes)
        return Residuals(self._memory, elements)


class Owing:
    """A member's own, in one generation."""

    def __init__(self, groups: Groups, held: Sequence[Local], kept: KeptResiduals) -> None:
        self._groups = groups
        self.held = [one for one in held if one.value.dtype == torch.float32 and one.value.numel()]
        self._starts, end = [], 0
        for one in self.held:
            self._starts.append(end)
            end += -(-one.value.numel() // _ALIGN) * _ALIGN
        self.residuals = kept.of([(one.name, one.box) for one in self.held], end)

    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """By parameter, flat."""
        return [vector[first : first + one.value.numel()] for first, one in zip(self._starts, self.held, strict=True)]

    def take_up(self, applied: int, begin_from: BeginFrom) -> None:
        """Where nobody has a residual of the state that the generation begins from, it is a checkpoint's."""
        mine = self.residuals.at(applied) is not None
        if any(self._groups.world.gather(b"mine" if mine else b"")) or not applied:
            return
        try:
            saved = begin_from(applied)
        except DistBeliefError:  # none of exactly that step
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
        """Under their names in a checkpoint."""
        vector = self.residuals.at(applied)
        if vector is None:
            vector = torch.zeros_like(self.residuals.before)
        row = self._groups.place.data
        return {
            f"{RESIDUAL}{row}/{one.name}": view.view(one.value.shape)
            for one, view in zip(self.held, self.views(vector), strict=True)
        }


def with_owed(
    held: Sequence[Mapping[str, Box]], forms: Forms, rows: Iterable[int], trainable: Iterable[str]
) -> tuple[list[dict[str, Box]], Forms]:
    """Every member's boxes, and the forms of all tensors, with what they owe. `rows`: their data indices, by rank."""
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

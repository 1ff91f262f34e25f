"""What a worker owes the servers, under names: in checkpoints, and shared out again when a run goes on from one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from distbelief.compression.subject import Place
from distbelief.errors import DistBeliefError
from distbelief.strategies.base import BeginFrom
from distbelief.strategies.dataparallel.compressed import RESIDUAL, OwingPortion, compressing
from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.flatmodel.named import TilePortion
from distbelief.strategies.ps.strategy import ParameterServer


class Owed:
    """Of one strategy, whoever owes it."""

    def __init__(self, layout: Layout, method: str) -> None:
        self.places: list[tuple[str, Place]] = [
            (layout.entries[place.mark].name, place) for place in compressing(layout, method, 0, False).places
        ]

    def portions(self, tiles: Sequence[TilePortion]) -> list[OwingPortion]:
        """Every member's tiles, and behind them what it owes."""
        return [
            OwingPortion(one, {f"{RESIDUAL}{rank}/{name}": (place.part, place.shape) for name, place in self.places})
            for rank, one in enumerate(tiles)
        ]

    def add(self, saved: Mapping[str, torch.Tensor], rank: int, size: int, into: torch.Tensor) -> None:
        """What the member of that rank has to take over of what all had saved."""
        members = {int(name.removeprefix(RESIDUAL).partition("/")[0]) for name in saved if name.startswith(RESIDUAL)}
        for member in sorted(one for one in members if one % size == rank):
            for name, place in self.places:
                if (key := f"{RESIDUAL}{member}/{name}") in saved:
                    into[place.part].add_(saved[key].reshape(-1))

    def add_once(
        self, begin_from: BeginFrom, applied: int, began: int, seat: tuple[int, int], into: torch.Tensor
    ) -> None:
        """The same for a member that comes without a residual, where the parameters began at `began`, and are at
        `applied`: if they have gone on since, or were saved there by others, those who owe it are there. `seat`: rank,
        and of how many."""
        if applied == began:
            self.add(saved_tensors(begin_from, applied), *seat, into)


def stays(strategy: ParameterServer) -> str:
    """For people: nothing is compressed in shared memory."""
    return f"gradients stay in shared memory, so {strategy.compression} is off (it is on with tcp, or with always)"


def saved_tensors(begin_from: BeginFrom, step: int) -> Mapping[str, torch.Tensor]:
    """Of the checkpoint of exactly that step; empty, if there is none."""
    try:
        saved = begin_from(step) if step else None
    except DistBeliefError:  # the run has gone on since the last one
        saved = None
    return saved.tensors if saved is not None and saved.step == step else {}

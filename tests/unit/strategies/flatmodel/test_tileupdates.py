"""Gradients that the optimizer scales itself: the bits of a pass before the update, or it is not asked to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from distbelief.strategies.flatmodel.layout import lay_out, trainable
from distbelief.strategies.flatmodel.tileoptimizer import Recipe, TileMemory, TileUpdates, state_bytes

Optimizer = Callable[[list[nn.Parameter]], optim.Optimizer]

FUSED: dict[str, Optimizer] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
}


class Updated:
    """All tiles of a small model, updated by themselves."""

    def __init__(self, optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        model = nn.Linear(50, 40).to(dtype)
        recipe = Recipe(optimizer, [p for _, p in trainable(model)])
        self.layout = lay_out(model)
        self.memory = [
            TileMemory(tile.index, torch.randn(tile.numel).to(dtype), self.state(recipe, tile.index))
            for tile in self.layout.tiles
        ]
        self.updates = TileUpdates(1, recipe, self.layout, self.memory, apart=True)

    def state(self, recipe: Recipe, tile: int) -> torch.Tensor:
        return torch.zeros(state_bytes(recipe, self.layout, tile), dtype=torch.uint8)

    def step(self, number: int, before: float, within: float) -> None:
        make = torch.Generator().manual_seed(number)
        for one in self.memory:
            size = 10.0 ** torch.randint(-40, 5, one.values.shape, generator=make)  # also such as become subnormal
            gradient = torch.randn(one.values.shape, generator=make) * size
            sums = {one.tile: gradient.to(one.values.dtype) * before}
            self.updates.apply(number, sums, 1.0, np.zeros(2, np.uint8), within)

    def bits(self) -> list[Any]:
        return [(one.values.numpy().tobytes(), one.state.numpy().tobytes()) for one in self.memory]


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_of_two_give_the_bits_of_a_pass_before(name: str, dtype: torch.dtype) -> None:
    before, within = Updated(FUSED[name], dtype), Updated(FUSED[name], dtype)
    for step in range(6):
        scale = 2.0 ** (step * 3 - 12)
        assert within.updates.may_scale(scale)
        before.step(step, scale, 1.0)
        within.step(step, 1.0, scale)
        assert within.bits() == before.bits()


def test_other_factors_other_types_and_other_optimizers_do_not_scale() -> None:
    fused = Updated(FUSED["sgd"]).updates
    assert not fused.may_scale(1 / 3)
    assert not fused.may_scale(0.0)
    assert not Updated(FUSED["adamw"], torch.bfloat16).updates.may_scale(0.5)
    assert not Updated(lambda p: optim.RMSprop(p, lr=0.1)).updates.may_scale(0.5)
    assert not Updated(lambda p: optim.SGD(p, lr=0.1, foreach=True)).updates.may_scale(0.5)


def test_a_job_that_has_made_another_type_the_default() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        before, within = Updated(FUSED["sgd"]), Updated(FUSED["sgd"])
        before.step(0, 2.0**-9, 1.0)
        within.step(0, 1.0, 2.0**-9)
    finally:
        torch.set_default_dtype(torch.float32)
    assert within.bits() == before.bits()

"""Trying a model out leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distbelief.strategies.mesh.cut.dryrun import in_mode, restoring


class Remembering(nn.Module):
    """Keeps things in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(3)
        self.table: torch.Tensor | None = None
        self.by_size: dict[int, torch.Tensor] = {}
        self.seen = [1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = torch.ones(3)
        self.fresh = self.by_size[len(x)] = torch.ones(3)
        self.seen.append(len(x))
        self.inner.running_mean = torch.ones(3)
        self.extra = nn.Linear(1, 1)
        return self.inner(x)


def test_attributes_containers_buffers_and_modules_are_as_they_were() -> None:
    model = Remembering()
    mean, by_size, seen, names = model.inner.running_mean, model.by_size, model.seen, list(model.state_dict())
    with pytest.raises(ValueError, match="more than 1 value"), restoring(model):
        model(torch.randn(1, 3))  # fails when it has left its traces
    assert model.table is None
    assert not hasattr(model, "fresh")
    assert model.by_size is by_size
    assert by_size == {}
    assert model.seen is seen
    assert seen == [1]
    assert model.inner.running_mean is mean
    assert list(model.state_dict()) == names


def test_every_module_gets_its_own_mode_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].eval()
    with in_mode(model, training=False):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False]

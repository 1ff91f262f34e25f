"""Measuring units: no whole model in memory, nothing left behind, and costs that follow the work."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from distbelief.strategies.mesh.cut.cutting import make_blueprint, measure
from tests.support.mesh import models
from tests.support.mesh.models import on_meta, without_memory


class Peak(TorchDispatchMode):
    """The most bytes of real tensors' storages that there were at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, list | tuple) else [result]:
            if isinstance(one, torch.Tensor) and one.device.type != "meta":
                self._alive[one.untyped_storage()] = one.untyped_storage().nbytes()
        self.most = max(self.most, sum(self._alive.values()))
        return result


def wide(width: int = 256, layers: int = 6) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def test_every_unit_of_a_model_is_measured_and_the_model_stays_on_meta() -> None:
    model = without_memory(models.GPT())
    ids = torch.randint(0, 20, (4, 8))
    cut = make_blueprint(model, (ids.to("meta"),), {})
    model.eval()
    state = torch.get_rng_state()
    costs = measure(cut, (ids,), {}, "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert len(costs) == len(cut.units)
    assert all(cost.seconds > 0 for cost in costs)
    assert costs[1] == costs[2] == costs[3]  # equal blocks cost the same: one noisy run does not move a cut
    assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())
    assert model.head.weight is model.symbols.weight
    assert not any(module.training for module in model.modules())


def test_bytes_are_parameters_and_what_backward_needs() -> None:
    model = without_memory(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Sigmoid(), nn.Linear(64, 32, bias=False)))
    x = torch.randn(10, 64)
    costs = measure(make_blueprint(model, on_meta((x,)), {}), (x,), {}, "cpu")
    assert costs[0].bytes == 4 * 64 * 64 + x.nbytes
    assert costs[1].bytes == 4 * 10 * 64
    assert costs[2].bytes == 4 * 64 * 32 + 4 * 10 * 64


def test_the_whole_model_is_never_in_memory() -> None:
    model = without_memory(wide())
    x = torch.randn(2, 256)
    cut = make_blueprint(model, on_meta((x,)), {})
    whole = sum(parameter.nbytes for parameter in model.parameters())
    with Peak() as peak:
        measure(cut, (x,), {}, "cpu")
    assert 0 < peak.most < whole / 2


class Looking(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else -super().forward(x)


def test_modules_that_look_at_values_are_run_one_at_a_time() -> None:
    model = without_memory(nn.Sequential(*(Looking(256, 256) for _ in range(6))))
    x = torch.randn(2, 256)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    with Peak() as peak:
        cut = make_blueprint(model, on_meta((x,)), {}, split=["1", "2", "3", "4", "5"])
        costs = measure(cut, (x,), {}, "cpu")
    assert whole / 6 < peak.most < whole / 2
    assert len(costs) == 6
    assert all(parameter.is_meta for parameter in model.parameters())


def test_what_modules_keep_in_attributes_is_left_as_it_was() -> None:
    x = torch.randn(4, 8)
    model = without_memory(models.Routed())
    measure(make_blueprint(model, on_meta((x,)), {}, split=["blocks.1"]), (x,), {}, "cpu")
    assert all(block.table is None for block in model.blocks)
    other = without_memory(models.PlainAttributes())
    kept = other.offset
    for at_least in (2, 7):
        assert all(
            cost.seconds > 0
            for cost in measure(make_blueprint(other, on_meta((x,)), {}, at_least=at_least), (x,), {}, "cpu")
        )
    assert other.offset is kept
    assert all(block.shared is kept for block in other.blocks)


def test_more_work_takes_longer() -> None:
    model = without_memory(nn.Sequential(nn.Linear(64, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 8)))
    x = torch.randn(64, 64)
    costs = measure(make_blueprint(model, on_meta((x,)), {}), (x,), {}, "cpu")
    assert costs[1].seconds > costs[2].seconds


@pytest.mark.parametrize("make", [models.digits, models.Recurrent, models.Masked, models.UNet, models.Python])
def test_models_of_all_kinds_can_be_measured(make) -> None:  # type: ignore[no-untyped-def]
    kwargs = {}
    if make is models.Masked:
        args, kwargs = (), {"ids": torch.randint(0, 20, (4, 6)), "mask": torch.ones(4, 6)}
    elif make is models.digits:
        args = (torch.randn(4, 1, 8, 8),)
    elif make is models.Recurrent:
        args = (torch.randn(4, 5, 8),)
    else:
        args = (torch.randn(4, 4 if make is models.Python else 8),)
    cut = make_blueprint(without_memory(make()), on_meta(args), on_meta(kwargs))
    costs = measure(cut, args, kwargs, "cpu")
    assert len(costs) == len(cut.units)
    assert all(cost.bytes > 0 for cost, unit in zip(costs, cut.units, strict=True) if unit.parameters)

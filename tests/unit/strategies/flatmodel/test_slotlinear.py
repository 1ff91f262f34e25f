"""Layers that make their gradient in the slot: the bits of torch's own derivative, whatever a model does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from distbelief.strategies.flatmodel.capture import WORTHWHILE, GradientCapture, placeable
from distbelief.strategies.flatmodel.layout import lay_out, trainable
from tests.support.replicas.linear import (
    WIDE,
    Loss,
    Two,
    in_half_precision,
    mapped,
    ordinary,
    recomputed,
    summed,
    transposed,
    used_elsewhere,
    with_a_penalty,
)


def called_three_times(model: Any, x: torch.Tensor) -> Any:
    return model(model.first(F.relu(model.first(x)))).square().mean()


def asked_before(model: Any, x: torch.Tensor) -> Any:
    loss = ordinary(model, x)
    (slope,) = torch.autograd.grad(loss, [model.first.weight], retain_graph=True)
    return loss * float(slope.abs().sum())


def without_gradients_in_part(model: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        target = model(x)
    return (model(x) - 2 * target).square().mean()


def of_a_copy_too(model: Any, x: torch.Tensor) -> Any:
    return model(x).square().mean() + copy.deepcopy(model)(x).sum()


SLOT = "made in the slot"
MODELS: dict[str, Callable[[], nn.Module]] = {"bias": Two, "no bias": lambda: Two(bias=False)}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shape", [(5, WIDE), (1, WIDE), (3, 4, WIDE)], ids=str)
@pytest.mark.parametrize(
    ("loss", "placed"),
    [
        (ordinary, SLOT),
        (summed, SLOT),
        (recomputed, SLOT),
        (without_gradients_in_part, SLOT),
        (of_a_copy_too, SLOT),
        (transposed, ""),
        (called_three_times, ""),
        (used_elsewhere, ""),
        (with_a_penalty, ""),
        (asked_before, ""),
        (in_half_precision, ""),
        (mapped, ""),
    ],
)
def test_the_bits_are_those_of_torch(model: str, shape: tuple[int, ...], loss: Loss, placed: str) -> None:
    torch.manual_seed(5)
    plain = MODELS[model]()
    ours = copy.deepcopy(plain)
    x = torch.randn(shape)
    expected_loss = loss(plain, x)
    expected_loss.backward()

    parameters = [p for _, p in trainable(ours)]
    where: dict[int, int] = {}
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: where.update({id(p): p.grad.data_ptr()}))  # type: ignore[no-untyped-call]
    layers = placeable(ours, parameters)
    assert [layer.weight.numel() >= WORTHWHILE for layer in layers] == [True, True]
    capture = GradientCapture(parameters, lay_out(ours), layers)
    for _ in range(2):  # as if it were another shard
        where.clear()
        views = [torch.full_like(p, float("nan")) for p in parameters]
        capture.start(views, lambda tile: None)
        got = loss(ours, x)
        got.backward()
        capture.finish()
        assert torch.equal(got, expected_loss)
        for (name, wanted), view in zip(trainable(plain), views, strict=True):
            assert torch.equal(view, torch.zeros_like(view) if wanted.grad is None else wanted.grad), name
    if placed:
        slot_of = {id(p): view.data_ptr() for p, view in zip(parameters, views, strict=True)}
        assert all(where[id(layer.weight)] == slot_of[id(layer.weight)] for layer in layers), "a copy was made"
    assert {type(layer) for layer in layers} == {nn.Linear}, "nothing is left of it in the model"


def test_a_hook_on_the_weight_has_its_say() -> None:
    model = nn.Linear(WIDE, WIDE)
    model.weight.register_hook(lambda gradient: gradient * 3)  # type: ignore[no-untyped-call]
    x = torch.randn(4, WIDE)
    model(x).sum().backward()
    assert model.weight.grad is not None
    expected, model.weight.grad, model.bias.grad = model.weight.grad, None, None
    parameters = [p for _, p in trainable(model)]
    capture = GradientCapture(parameters, lay_out(model), placeable(model, parameters))
    views = [torch.full_like(p, float("nan")) for p in parameters]
    capture.start(views, lambda tile: None)
    model(x).sum().backward()
    capture.finish()
    assert torch.equal(views[0], expected)


def test_classes_of_others_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    frozen = nn.Linear(WIDE, WIDE).requires_grad_(False)
    model = nn.Sequential(Own(WIDE, WIDE), frozen, nn.Linear(8, 8))
    assert placeable(model, [p for _, p in trainable(model)]) == []

"""Capture: what autograd gives for each parameter arrives in the slot, bit for bit, and each tile is announced once."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distbelief.errors import JobError
from distbelief.strategies.flatmodel.capture import GradientCapture
from distbelief.strategies.flatmodel.layout import Layout, lay_out, trainable


class Recorder:
    """A model with capture hooks on it, and a slot that is full of garbage before each backward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [p for _, p in trainable(model)]
        self.layout: Layout = lay_out(model)
        self.capture = GradientCapture(self.parameters, self.layout)
        self.views: list[torch.Tensor] = []
        self.ready: list[int] = []

    def run(self, loss: Callable[[], torch.Tensor]) -> np.ndarray:
        self.views = [torch.full_like(p, float("nan")) for p in self.parameters]
        self.ready = []
        self.capture.start(self.views, self.ready.append)
        loss().backward()
        touched = self.capture.finish()
        assert sorted(self.ready) == list(range(self.layout.parameter_tiles)), "each tile once"
        assert all(p.grad is None for p in self.parameters)
        return touched


def plain_gradients(model: nn.Module, loss: Callable[[], torch.Tensor]) -> list[torch.Tensor | None]:
    return list(torch.autograd.grad(loss(), [p for _, p in trainable(model)], allow_unused=True))


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), two.contiguous().view(-1).view(torch.uint8))


def test_gradients_arrive_as_autograd_makes_them_in_every_pass() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 90), nn.ReLU(), nn.Linear(90, 80), nn.ReLU(), nn.Linear(80, 1))
    recorder = Recorder(model)
    for _ in range(3):
        x = torch.randn(4, 5)
        touched = recorder.run(lambda x=x: model(x).pow(2).mean())
        expected = plain_gradients(model, lambda x=x: model(x).pow(2).mean())
        assert touched.tolist() == [1] * 6
        assert all(same_bits(view, g) for view, g in zip(recorder.views, expected, strict=True) if g is not None)


def test_types_may_alternate() -> None:
    torch.manual_seed(0)
    model = nn.Module()
    for number, dtype in enumerate([torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float64]):
        model.register_parameter(f"p{number}", nn.Parameter(torch.randn(3 + number, dtype=dtype)))
    recorder = Recorder(model)
    loss = lambda: torch.stack([p.double().pow(3).sum() for p in model.parameters()]).sum()  # noqa: E731
    assert recorder.run(loss).tolist() == [1] * 5
    for view, gradient in zip(recorder.views, plain_gradients(model, loss), strict=True):
        assert gradient is not None
        assert same_bits(view, gradient)


def test_a_tile_is_announced_as_soon_as_its_gradients_are_there() -> None:
    """The last layer's tile comes first: its reduction may start while the first layer is still computed."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    recorder = Recorder(model)
    assert recorder.layout.parameter_tiles == 4
    touched_by_then: list[int] = []
    recorder.views = [torch.zeros_like(p) for p in recorder.parameters]
    recorder.capture.start(
        recorder.views, lambda tile: touched_by_then.append(sum(bool(v.any()) for v in recorder.views))
    )
    model(torch.randn(2, 64)).sum().backward()
    recorder.capture.finish()
    assert touched_by_then == [1, 2, 3, 4]


def test_a_parameter_without_a_gradient_counts_as_zeros_and_is_marked() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(70, 70)})
    recorder = Recorder(model)
    touched = recorder.run(lambda: model["used"](torch.ones(1, 3)).sum())
    assert touched.tolist() == [1, 1, 0, 0]
    assert not recorder.views[2].any()
    assert not recorder.views[3].any()
    touched[:] = 9  # what was handed out is the caller's
    assert recorder.run(lambda: model["unused"](torch.ones(1, 70)).sum()).tolist() == [0, 0, 1, 1]


def test_a_zero_gradient_is_not_the_same_as_none() -> None:
    model = nn.Linear(3, 1, bias=False)
    recorder = Recorder(model)
    assert recorder.run(lambda: (model(torch.ones(1, 3)) * 0).sum()).tolist() == [1]


def test_sparse_gradients_are_added_up_densely() -> None:
    torch.manual_seed(0)
    sparse, dense = nn.Embedding(50, 4, sparse=True), nn.Embedding(50, 4)
    dense.load_state_dict(sparse.state_dict())
    words = torch.tensor([3, 7, 3, 3, 49])
    recorder = Recorder(sparse)
    weights = torch.randn(5, 4)
    assert recorder.run(lambda: (sparse(words) * weights).sum()).tolist() == [1]
    [expected] = plain_gradients(dense, lambda: (dense(words) * weights).sum())
    assert expected is not None
    torch.testing.assert_close(recorder.views[0], expected)
    assert not recorder.views[0][[0, 1, 2, 4]].any()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.head = nn.Linear(6, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embedding(words))
        return out


def test_a_tied_weight_gets_the_sum_of_its_uses_once() -> None:
    torch.manual_seed(0)
    model = Tied()
    recorder = Recorder(model)
    words = torch.tensor([1, 2, 3])
    loss = lambda: model(words).pow(2).sum()  # noqa: E731
    assert recorder.run(loss).tolist() == [1]
    [expected] = plain_gradients(model, loss)
    assert expected is not None
    assert same_bits(recorder.views[0], expected)


class Reentrant(nn.Module):
    """One layer used in two blocks that are each run again in the backward pass: its gradient comes in two parts."""

    def __init__(self, others: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        self.first = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(others))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for other in self.first:
            x = other(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def test_a_gradient_in_parts_is_an_error_when_its_tile_is_already_out() -> None:
    model = Reentrant(others=0)
    recorder = Recorder(model)
    with pytest.raises(JobError, match=r"'layer\.weight' got its gradient in several parts") as caught:
        recorder.run(lambda: model(torch.ones(2, 4)).sum())
    assert "use_reentrant=False" in caught.value.hint


def test_a_gradient_in_parts_is_added_up_while_its_tile_waits() -> None:
    torch.manual_seed(0)
    model = Reentrant(others=1)  # its gradient comes last, and it shares the tile
    recorder = Recorder(model)
    touched = recorder.run(lambda: model(torch.ones(2, 4)).sum())
    assert touched.tolist() == [1, 1]
    plain = lambda: model.layer(model.layer(model.first[0](torch.ones(2, 4)))).sum()  # noqa: E731
    expected = plain_gradients(model, plain)
    for view, gradient in zip(recorder.views, expected, strict=True):
        torch.testing.assert_close(view, gradient)


def test_a_backward_pass_outside_a_shard_leaves_no_trace() -> None:
    model = nn.Linear(3, 1)
    recorder = Recorder(model)
    recorder.run(lambda: model(torch.ones(1, 3)).sum())
    before = [view.clone() for view in recorder.views]
    model(torch.full((1, 3), 5.0)).sum().backward()
    assert all(p.grad is None for p in recorder.parameters)
    assert all(torch.equal(a, b) for a, b in zip(before, recorder.views, strict=True))


@pytest.mark.parametrize("is_aborted", [False, True])
def test_nothing_is_held_of_who_wanted_the_gradients(is_aborted: bool) -> None:
    """On a device it is memory, and the next generation wants as much."""

    class Wanting:
        def tile_ready(self, tile: int) -> None:
            if is_aborted:
                raise KeyboardInterrupt

    model = nn.Linear(3, 2)
    capture = GradientCapture([p for _, p in trainable(model)], lay_out(model))
    wanting, views = Wanting(), [torch.empty_like(p) for p in model.parameters()]
    held = [weakref.ref(wanting), *map(weakref.ref, views)]
    capture.start(views, wanting.tile_ready)
    with pytest.raises(KeyboardInterrupt) if is_aborted else contextlib.nullcontext():
        model(torch.ones(4, 3)).sum().backward()
        capture.finish()
    capture.let_go()
    del wanting, views
    gc.collect()
    assert [one() for one in held] == [None] * 3

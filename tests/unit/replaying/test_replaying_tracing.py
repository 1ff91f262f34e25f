"""Which layer is to blame: in the forward pass, in the backward pass, and in models that are not a plain chain."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from distbelief.replaying.findings import Count
from distbelief.replaying.tracing import Trace

NAN = float("nan")


class Spoils(nn.Module):
    """Makes NaN of the last row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:-1], x[-1:] * NAN])


class Root(nn.Module):
    """Finite forwards; backwards the slope at 0 is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sqrt(self.scale)


class Block(nn.Module):
    """`inner` sees what `outer` sees; between them are operations of the block's own."""

    def __init__(self, inner: nn.Module, before: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        self.inner = inner
        self.beside = nn.Linear(3, 3)
        self.before = before

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        h = self.before(x) * scale
        return {"sum": self.inner(h) + self.beside(h), "plain": h}


class Net(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = nn.ReLU(inplace=True)
        self.block = block
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.again(self.first(x))
        h = self.again(self.block(h, scale=0.5)["sum"])
        return self.head(h)


def traced(net: nn.Module, loss: Callable[[torch.Tensor], torch.Tensor] = torch.sum) -> Trace:
    torch.manual_seed(0)
    with Trace(net, shard=5, indices=[30, 10, 20]) as trace:
        total = loss(net(torch.randn(3, 3) + 1))
        trace.watch_backward(total)
        total.backward()  # type: ignore[no-untyped-call]
    return trace


def origins(trace: Trace) -> list[str]:
    return [one.layer for one in trace.outputs if one.origin]


def test_a_sound_model_has_no_findings() -> None:
    trace = traced(Net(Block(nn.Linear(3, 3))))
    assert (trace.outputs, trace.gradient, trace.inside) == ([], None, "")


def test_the_layer_that_makes_nan_is_the_origin_and_those_behind_it_are_not() -> None:
    trace = traced(Net(Block(Spoils())))
    assert [(one.layer, one.origin) for one in trace.outputs] == [
        ("block.inner", True),
        ("block", False),
        ("again", False),
        ("head", False),
        ("(model)", False),
    ]
    first = trace.outputs[0]
    assert (first.where, first.shard, first.count, first.samples) == ("output", 5, Count(nan=3), (20,))


def test_an_operation_of_the_outer_module_is_its_own() -> None:
    trace = traced(Net(Block(nn.Linear(3, 3), before=lambda x: x * NAN)))
    assert origins(trace) == ["block"]
    assert [one.layer for one in trace.outputs[:2]] == ["block.inner", "block.beside"]


def test_infinities_that_are_hidden_again_are_seen_but_harm_nobody() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)

    trace = traced(nn.Sequential(nn.Linear(3, 3), Masked(), nn.Softmax(1)))
    assert [(one.layer, one.count) for one in trace.outputs] == [("1", Count(infinite=3))]
    assert trace.gradient is None


@pytest.mark.parametrize("place", ["inner", "beside"])
def test_the_operation_whose_backward_pass_gives_what_is_not_finite(place: str) -> None:
    """Both modules of the block get the same tensor, so its gradient alone would not tell which of them it was."""
    block = Block(nn.Linear(3, 3))
    setattr(block, place, nn.Sequential(nn.Linear(3, 3), Root()))
    trace = traced(Net(block))
    assert trace.outputs == []
    assert trace.gradient is not None
    assert (trace.gradient.layer, trace.gradient.name) == (f"block.{place}.1", "SqrtBackward0")
    assert (trace.gradient.where, trace.gradient.shard, trace.gradient.origin) == ("gradient", 5, True)


def test_a_backward_pass_that_goes_wrong_in_an_operation_of_the_outer_module() -> None:
    trace = traced(Net(Block(nn.Linear(3, 3), before=lambda x: torch.sqrt(x - x))))
    assert trace.gradient is not None
    assert (trace.gradient.layer, trace.gradient.name) == ("block", "SqrtBackward0")


def test_a_backward_pass_that_goes_wrong_in_the_loss() -> None:
    trace = traced(Net(Block(nn.Linear(3, 3))), loss=lambda output: torch.sqrt((output - output).sum()))
    assert trace.gradient is not None
    assert trace.gradient.layer == "(loss)"


def test_where_an_exception_was_raised() -> None:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    net = Net(Block(Raises()))
    with pytest.raises(ValueError, match="no"), Trace(net, 0, [0]) as trace:
        net(torch.ones(1, 3))
    assert trace.inside == "block.inner"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_nothing_is_changed() -> None:
    net = Net(Block(nn.Linear(3, 3)))
    gradients = []
    for watched in (False, True):
        net.zero_grad()
        if watched:
            traced(net)
        else:
            torch.manual_seed(0)
            net(torch.randn(3, 3) + 1).sum().backward()
        gradients.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert len(gradients[0]) == 8
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

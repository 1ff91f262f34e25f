"""One shard, looked at: what it gives, what is found in it, and the debugger."""

from __future__ import annotations

import bdb
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distbelief.job import Job
from distbelief.replaying.findings import Count
from distbelief.replaying.inspection import ShardWork, pass_through

NET = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
X, Y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0])


def job(loss: Callable[[Any, Any], Any] = nn.functional.cross_entropy, **options: Any) -> Job:
    optimizer = torch.optim.SGD
    return Job(model=NET, loss=loss, optimizer=optimizer, data=(X, Y), global_batch=4, steps=1, **options)


def work(x: torch.Tensor = X) -> ShardWork:
    return ShardWork(step=6, shard=1, seed=17, indices=[40, 41, 42, 43], batch=(x, Y))


def test_it_gives_what_the_shard_gives_in_training() -> None:
    passed = pass_through(job(), NET, work(), debug=False)
    NET.zero_grad()
    torch.manual_seed(17)
    loss = nn.functional.cross_entropy(NET(X), Y) * 4
    loss.backward()
    assert (passed.loss_sum, passed.weight, passed.findings, passed.error) == (loss.item(), 4.0, [], None)
    gradients = [p.grad for p in NET.parameters()]
    assert all(
        a is not None and b is not None and torch.equal(a, b) for a, b in zip(passed.gradients, gradients, strict=True)
    )
    assert pass_through(job(), NET, work(), debug=False).loss_sum == passed.loss_sum, "as often as one likes"


def test_a_loss_with_weights_and_autocast() -> None:
    def weighted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
        assert output.dtype == torch.bfloat16
        return output.float().sum(), 2.5

    passed = pass_through(job(weighted, precision="bf16"), NET, work(), debug=False)
    assert passed.weight == 2.5
    assert [g is not None and g.dtype for g in passed.gradients] == [torch.float32] * 4


def test_samples_that_are_not_finite() -> None:
    x = X.clone()
    x[2, 1] = torch.inf
    found = pass_through(job(), NET, work(x), debug=False).findings
    first = found[0]
    assert (first.where, first.name, first.count, first.samples) == ("batch", "[0]", Count(infinite=1), (42,))
    assert [one.origin for one in found] == [True] + [False] * (len(found) - 1)
    assert found[-1].where == "loss"


@pytest.mark.parametrize("loss", [lambda o, t: o.sum() / 0, lambda o, t: (o.sum(), torch.tensor(torch.nan))])
def test_a_loss_function_that_is_to_blame(loss: Callable[[Any, Any], Any]) -> None:
    (found,) = pass_through(job(loss), NET, work(), debug=False).findings
    assert (found.where, found.layer, found.origin) == ("loss", "(loss)", True)


def test_an_exception() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise KeyError("x")

    passed = pass_through(job(loss), NET, work(), debug=False)
    assert (passed.loss_sum, repr(passed.error), passed.error_layer) == (None, "KeyError('x')", "")
    passed = pass_through(job(), NET, work(X[:, :2]), debug=False)
    assert (type(passed.error), passed.error_layer) == (RuntimeError, "0")


def test_the_debugger_stops_before_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = ["p (step, shard, indices)", "p model is not None, batch[0].shape, target.tolist()", "s", "p self", "c"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(commands) + "\n"))
    passed = pass_through(job(), NET, work(), debug=True)
    assert passed.loss_sum == pass_through(job(), NET, work(), debug=False).loss_sum
    said = capsys.readouterr().out
    assert "-> output = model(*args, **kwargs)" in said
    assert "(6, 1, [40, 41, 42, 43])" in said
    assert "(True, torch.Size([4, 3]), [0, 1, 1, 0])" in said
    assert "Sequential(" in said, "one step, and we are in the model's own forward"


def test_the_debugger_is_left_when_there_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(bdb.BdbQuit):
        pass_through(job(), NET, work(), debug=True)
    assert not any(module._forward_hooks for module in NET.modules())

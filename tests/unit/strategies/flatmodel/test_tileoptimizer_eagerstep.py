"""A step without torch's compiler does what torch's own step does, and the compiler stays away."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import optim

from distbelief.strategies.flatmodel.tileoptimizer import eager_step

KINDS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.AdamW, {"lr": 0.1, "fused": True}),
    (optim.Adagrad, {"lr": 0.1, "foreach": True}),
    (optim.RMSprop, {"lr": 0.1, "centered": True}),
    (optim.NAdam, {"lr": 0.1}),
    (optim.Adadelta, {"lr": 0.1, "weight_decay": 0.01}),
]


def stepped(kind: type[optim.Optimizer], options: dict[str, Any], eagerly: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(100, generator=generator))
    optimizer = kind([weight], **options)  # type: ignore[call-arg]
    step = eager_step(optimizer) if eagerly else optimizer.step
    for _ in range(5):
        weight.grad = torch.randn(100, generator=generator)
        step()
    return weight.detach()


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=[kind.__name__ for kind, _ in KINDS])
def test_the_same_bits(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    assert torch.equal(stepped(kind, options, eagerly=True), stepped(kind, options, eagerly=False))


def test_hooks_are_called() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = optim.SGD([weight], lr=0.1)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    eager_step(optimizer)()
    assert called == [1]


def test_an_optimizer_of_the_users_own() -> None:
    class Mine(optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.5})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter -= group["lr"] * parameter.grad

    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    eager_step(Mine([weight]))()
    assert weight.item() == 0.5


def test_the_compiler_is_not_imported() -> None:
    """In a process of its own: other tests may have imported it here."""
    program = """
import sys, torch
from distbelief.strategies.flatmodel.tileoptimizer import eager_step, avoid_compiler_import
avoid_compiler_import()
weight = torch.nn.Parameter(torch.ones(8))
weight.grad = torch.ones(8)
optimizer = torch.optim.AdamW([weight], lr=0.1)
eager_step(optimizer)()
optimizer.load_state_dict(optimizer.state_dict())
optimizer.zero_grad()
import distbelief.worker.process
assert weight[0] < 1
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["False"]

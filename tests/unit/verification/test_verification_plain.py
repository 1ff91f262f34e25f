"""The plain loop against the real all-reduce replica in one process, over whatever a job may have; and by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from distbelief.errors import DistBeliefError, JobError
from distbelief.job import Job
from distbelief.verification.plain import ShardSum, add_up, make_model, make_optimizer, train_plainly
from tests.support.replicas.alone import Alone, kept

STEPS = 6
generator = torch.Generator().manual_seed(2)
X = torch.randn(50, 6, generator=generator)
Y = torch.randint(0, 3, (50,), generator=generator)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Dropout(0.2), nn.Linear(70, 3))


class Late(nn.Module):
    """A parameter that has no gradient before the third step, and one that never has."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(6, 3)
        self.later = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out = self.always(x)
        return out * self.later if int(self.calls) > 2 else out


class Replacing(nn.Module):
    """Its running mean is a new tensor in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("constant", torch.tensor([0.1, 0.7, 1e-20]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * out.mean(0).detach()
        return out - self.mean + self.constant


class Lars(optim.Optimizer):
    """Not element-wise: a parameter's rate depends on its norm."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = group["lr"] * parameter.norm() / (parameter.grad.norm() + 1e-9)
                    parameter -= rate * 0.01 * parameter.grad


def channels_last() -> nn.Module:
    grid = nn.Unflatten(1, (1, 2, 3))
    model = nn.Sequential(grid, nn.Conv2d(1, 8, 2), nn.Conv2d(8, 5, 1), nn.Flatten(), nn.Linear(10, 3))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def wide() -> nn.Module:
    """With a product that is worth it, also in a shard of three samples."""
    return nn.Sequential(nn.Linear(6, 512), nn.Linear(512, 1024), nn.Linear(1024, 3))


def ignoring(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Only the class 2 counts."""
    counts = target == 2
    return F.cross_entropy(output, target, reduction="none")[counts].sum(), counts.sum()


def nothing(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
    return output.sum() * 0.0, 0.0


def sgd(**options: Any) -> Callable[[list[nn.Parameter]], optim.Optimizer]:
    return lambda parameters: optim.SGD(parameters, lr=0.1, **options)


def shortened(p: torch.Tensor) -> None:
    p.mul_((0.3 / p.norm()).clamp(max=1.0))


JOBS: dict[str, dict[str, Any]] = {
    "fused, clipped, scheduled": {"clip_norm": 0.05, "schedule": lambda step: 1 / (step + 1)},
    "momentum that begins late": {"model": Late, "optimizer": sgd(momentum=0.9)},
    "adagrad": {"optimizer": lambda p: optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3)},
    "foreach": {"optimizer": sgd(momentum=0.9, nesterov=True, foreach=True)},
    "not fused": {"optimizer": lambda p: optim.RMSprop(p, lr=1e-2)},
    "one of the job's own": {"optimizer": Lars, "clip_norm": 0.1},
    "buffers that are replaced": {"model": Replacing},
    "batch norm": {"model": lambda: nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))},
    "channels last": {"model": channels_last},
    "bf16": {"precision": "bf16"},
    "onednn": {"matmul": "onednn", "model": wide},
    "sum and weight": {"loss": ignoring},
    "a batch of weight 0": {"loss": nothing, "model": Replacing},
    "no shuffling": {"shuffle": False, "shards": 1},
    "a model that is one": {"model": nn.Linear(6, 3)},
    "a mapping": {
        "data": {"input": X},
        "model": lambda: nn.Linear(6, 6),
        "loss": lambda output, batch: F.mse_loss(output, batch["input"]),
    },
    "clipped weights": {"after_update": {"*.weight": lambda p: p.clamp_(-0.1, 0.1), "3.*": lambda p: p.mul(0.9)}},
    "weights of a largest norm": {"model": Late, "optimizer": sgd(momentum=0.9), "after_update": {"*": shortened}},
    "one tensor": {"data": X, "model": lambda: nn.Linear(6, 6), "loss": F.mse_loss},
}


def job_of(**options: Any) -> Job:
    given: dict[str, Any] = {
        "model": mlp,
        "loss": F.cross_entropy,
        "optimizer": lambda p: optim.AdamW(p, lr=1e-2),
        "data": (X, Y),
        "global_batch": 21,  # 50 samples: the last batch has 8, in 3 of the 7 shards
        "shards": 7,
        "steps": STEPS,
        "seed": 9,
    }
    return Job(**{**given, **options})


def plainly(job: Job, most_steps: int = 0) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make_model(job)
    losses = list(train_plainly(job, model, most_steps))
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", JOBS)
def test_the_bits_of_the_replica(name: str) -> None:
    def job() -> Job:
        made = job_of(**JOBS[name])
        torch.manual_seed(0)  # for a model that is made here, twice
        return job_of(**{**JOBS[name], "model": nn.Linear(6, 3)}) if isinstance(made.model, nn.Module) else made

    plain_losses, plain_weights = plainly(job())
    with kept() as segments:
        alone = Alone(job(), segments)
        losses = [alone.step(step) for step in range(STEPS)]
        assert losses == plain_losses
        for key, tensor in alone.model.state_dict().items():
            assert torch.equal(tensor, plain_weights[key]), key


def test_the_first_steps_only() -> None:
    losses, weights = plainly(job_of())
    first, stopped = plainly(job_of(), most_steps=2)
    assert first == losses[:2]
    assert not torch.equal(stopped["0.weight"], weights["0.weight"])
    assert len(plainly(job_of(), most_steps=100)[0]) == STEPS
    assert len(plainly(job_of(steps=None, epochs=1.5), most_steps=100)[0]) == 5  # of 3 steps an epoch


def part(value: float) -> ShardSum:
    return ShardSum([torch.tensor([value])], [torch.tensor([value])], [False], [], [value], [1.0])


def test_the_sum_is_taken_along_the_tree() -> None:
    """2^24 swallows a single 1, but not a 2: from left to right the sum would be 0."""
    values = [2.0**24, 1.0, 1.0, 1.0, 1.0, -(2.0**24)]
    total = add_up(lambda shard: part(values[shard]), (0, 6))
    assert total.gradients[0] is not None
    assert total.gradients[0].item() == total.floats[0].item() == 3.0  # (2^24 + 2) + (1 - 2^24)
    assert total.losses == values
    assert total.weights == [1.0] * 6


def test_the_fused_implementation_unless_the_job_wants_another() -> None:
    parameters = [nn.Parameter(torch.zeros(3))]
    assert make_optimizer(job_of(), parameters).param_groups[0]["fused"] is True
    for options in ({"fused": False}, {"foreach": True}):
        assert not make_optimizer(job_of(optimizer=sgd(**options)), parameters).param_groups[0]["fused"]


def test_a_loss_that_is_not_finite() -> None:
    with pytest.raises(DistBeliefError, match="the loss is nan at step 0"):
        plainly(job_of(loss=lambda output, target: output.sum() * float("nan")))


def test_integers_that_depend_on_the_samples() -> None:
    class Counting(Late):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += int(x[0, 0] > 0)
            return self.always(x)  # type: ignore[no-any-return]

    with pytest.raises(JobError, match="integer buffer"):
        plainly(job_of(model=Counting))

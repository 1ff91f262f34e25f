"""A small model with all that exactness has to mind: BatchNorm, dropout, clipping, a schedule, AdamW, a short last
batch."""

import torch
from torch import nn
from torch.nn import functional as F

from distbelief import Job

SAMPLES, BATCH, SHARDS = 100, 24, 6


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 1, 12, 12, generator=generator)
    return x, x.mean((1, 2, 3)).mul(40).long().clamp(-4, 4) + 4


def model(width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1),
        nn.Linear(width * 100, 64), nn.ReLU(), nn.Linear(64, 9),
    )  # fmt: skip


def steady() -> nn.Module:
    """Training changes nothing of it but its parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.Tanh(), nn.Linear(64, 9))


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def rate(step: int) -> float:
    return min(1.0, (step + 1) / 5)


class Cumulative(nn.Module):
    """An operation of which there is no deterministic kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(144, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(self.inner(x.flatten(1))[:, None], scale_factor=2.0, mode="linear")[:, 0, ::2]


def job(steps: int = 20, kind: str = "usual", compiled: bool = False, pause_s: float = 0.0, clip: bool = True) -> Job:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if pause_s:
            import time

            time.sleep(pause_s)
        return F.cross_entropy(output, target)

    return Job(
        name="small",
        model={"indeterminate": Cumulative, "steady": steady}.get(kind, model),
        loss=loss,
        optimizer=optimizer,
        data=data(),
        validation=data(),
        evaluate_every=10,
        global_batch=BATCH,
        shards=SHARDS,
        steps=steps,
        schedule=rate,
        clip_norm=0.5 if clip else None,
        seed=3,
        compile=compiled,
    )

import torch
from torch import nn

from distbelief import Job, accuracy


def points(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(samples, 2, generator=torch.Generator().manual_seed(seed))
    return x, (x.norm(dim=1) > 1.2).long()


def job(lr: float = 1e-2, width: int = 64, epochs: int = 5) -> Job:
    return Job(
        model=lambda: nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        data=points(4000, seed=1),
        validation=points(1000, seed=2),
        metrics={"accuracy": accuracy},
        global_batch=100,  # samples per step, over all workers together
        epochs=epochs,
    )

"""What is trained in the comparison: models with generated data. Also a job file, so that DistBelief trains
them exactly as a user's job; the peers' loop (peer.py) takes model, data, loss and optimizer from here too.

It knows nothing of drivers, timing or goals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from distbelief import Job, JobError

SEED = 7
WORKERS = 2

Data = tuple[torch.Tensor, torch.Tensor]
Parameters = Sequence[nn.Parameter]


@dataclass(frozen=True)
class Workload:
    title: str
    batch_per_worker: int
    model: Callable[[], nn.Module]
    data: Callable[[], Data]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    """(parameters, **options): options choose the implementation, such as fused=True."""

    @property
    def global_batch(self) -> int:
        return self.batch_per_worker * WORKERS


def job(workload: str = "mlp", steps: int = 100, shards: int = WORKERS, batch: int = 0) -> Job:
    """`distbelief train bench/workloads.py --set workload=gpt --set steps=20 --set shards=2`
    `batch`: samples of a step, if not the workload's."""
    if workload not in WORKLOADS:
        raise JobError(f"there is no workload '{workload}'", hint=f"one of {', '.join(WORKLOADS)}")
    chosen = WORKLOADS[workload]
    return Job(
        name=workload,
        model=chosen.model,
        loss=chosen.loss,
        optimizer=lambda parameters: chosen.optimizer(parameters),
        data=chosen.data(),
        global_batch=batch or chosen.global_batch,
        steps=steps,
        shards=shards,
        seed=SEED,
    )


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


def _mlp_data() -> Data:
    """Vectors, and the class that a fixed linear map gives them: something that can be learnt."""
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(8192, 784, generator=generator)
    return x, (x @ torch.randn(784, 10, generator=generator)).argmax(1)


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def _cnn_data() -> Data:
    """Images: the picture of their class under noise, made of blots that pooling does not wipe out. A fifth of the
    labels are drawn by lot, so that the loss does not go to 0, where nothing could be compared."""
    generator = torch.Generator().manual_seed(SEED)
    pictures = torch.randn(10, 1, 7, 7, generator=generator).repeat_interleave(4, 2).repeat_interleave(4, 3)
    shown = torch.randint(0, 10, (4096,), generator=generator)
    x = pictures[shown] + torch.randn(4096, 1, 28, 28, generator=generator)
    by_lot = torch.rand(4096, generator=generator) < 0.2
    return x, torch.where(by_lot, torch.randint(0, 10, (4096,), generator=generator), shown)


_LAYERS, _WIDTH, _HEADS, _LENGTH, _SYMBOLS = 6, 256, 8, 128, 256


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(_WIDTH)
        self.queries_keys_values = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.mixed = nn.Linear(_WIDTH, _WIDTH)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.queries_keys_values(self.before_attention(x)).view(batch, length, 3, _HEADS, _WIDTH // _HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(seen.transpose(1, 2).reshape(batch, length, _WIDTH))
        return x + self.feed_forward(x)  # type: ignore[no-any-return]


class _GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(_SYMBOLS, _WIDTH)
        self.places = nn.Embedding(_LENGTH, _WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(_LAYERS)))
        self.out = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _SYMBOLS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks(self.symbols(x) + self.places.weight))  # type: ignore[no-any-return]


def _gpt_data() -> Data:
    """Sequences in which nine of ten symbols follow from the one before."""
    generator = torch.Generator().manual_seed(SEED)
    follows = torch.randperm(_SYMBOLS, generator=generator)
    text = torch.randint(0, _SYMBOLS, (1024, _LENGTH + 1), generator=generator)
    surprises = torch.rand(text.shape, generator=generator) < 0.1
    for place in range(1, _LENGTH + 1):
        text[:, place] = torch.where(surprises[:, place], text[:, place], follows[text[:, place - 1]])
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _symbol_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _momentum(rate: float) -> Callable[..., torch.optim.Optimizer]:
    def make(parameters: Parameters, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=rate, momentum=0.9, **options)

    return make


def _adamw(parameters: Parameters, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, **options)


WORKLOADS = {
    "mlp": Workload("MLP 784-1024-1024-10, ReLU, SGD momentum", 128, _mlp, _mlp_data, F.cross_entropy, _momentum(0.02)),
    "cnn": Workload(
        "CNN 28×28: conv 32, conv 64, fc 128, SGD momentum", 64, _cnn, _cnn_data, F.cross_entropy, _momentum(0.01)
    ),
    "wide": Workload(  # many parameters and few samples: what servers and networks have to do is most of a step
        "MLP 784-2048-2048-10, 16 samples per worker, SGD momentum",
        16,
        _wide,
        _mlp_data,
        F.cross_entropy,
        _momentum(0.005),
    ),
    "wide8": Workload(
        "MLP 784-2048-2048-10, 8 samples per worker, SGD momentum",
        8,
        _wide,
        _mlp_data,
        F.cross_entropy,
        _momentum(0.005),
    ),
    "gpt": Workload("GPT 6 layers, 256 wide, 8 heads, 128 symbols, AdamW", 8, _GPT, _gpt_data, _symbol_loss, _adamw),
}

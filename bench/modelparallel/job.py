"""A small language model that every way of dividing a model can divide. Also a job file, so that DistBelief trains it
exactly as a user's job; the peers' loops (modelparallel/peer.py) take model, data, loss and optimizer from here too.

    PYTHONPATH=. distbelief train bench/modelparallel/job.py --workers 2 --strategy pipeline:2 --set stages=2

A pipeline is cut at the modules that `boundaries` names, on both sides, and not by measured costs: these would give
another cut from run to run. It knows nothing of drivers, timing or goals.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from bench.workloads import SEED, WORKLOADS
from distbelief import Job

LAYERS, WIDTH, HEADS, LENGTH, SYMBOLS = 4, 128, 4, 128, 256
BATCH, SHARDS = 16, 8
CLIP_NORM = 1.0
TITLE = f"GPT {LAYERS} layers, {WIDTH} wide, {HEADS} heads, {LENGTH} symbols, AdamW, gradients clipped"

Data = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_width = width // HEADS
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        layers = self.query, self.key, self.value
        q, k, v = (layer(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in layers)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    def __init__(self, layers: int = LAYERS, width: int = WIDTH) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, SYMBOLS, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.symbols(x) + self.places.weight
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def boundaries(stages: int, layers: int = LAYERS) -> list[int]:
    """The blocks with which the second and later stages begin: as many blocks in each as can be.

    >>> boundaries(2), boundaries(4)
    ([2], [1, 2, 3])
    """
    return [layers * stage // stages for stage in range(1, stages)]


def data() -> Data:
    return WORKLOADS["gpt"].data()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def job(steps: int = 20, stages: int = 1, shards: int = SHARDS) -> Job:
    return Job(
        name="gpt",
        model=GPT,
        loss=loss,
        optimizer=optimizer,
        clip_norm=CLIP_NORM,
        data=data(),
        global_batch=BATCH,
        steps=steps,
        shards=shards,
        seed=SEED,
        split=[f"blocks.{block}" for block in boundaries(stages)],
    )

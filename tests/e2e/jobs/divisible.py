"""A small language model that can be divided in every way: blocks to cut between, heads and columns to share, a tied
embedding, dropout. While there is a file `brake` in the folder in which the run was started, it is slow, and no member
gets beyond step `hold_step`."""

import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from distbelief import Job

SYMBOLS, LENGTH, WIDTH, HEAD = 50, 8, 32, 8


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, blocks: int, dropout: float) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(blocks)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS, bias=False)
        self.head.weight = self.symbols.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.symbols(x))))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def job(
    steps: int = 40,
    blocks: int = 4,
    dropout: float = 0.1,
    batch: int = 18,
    brake_s: float = 0.0,
    hold_step: int = -1,
) -> Job:
    text = torch.randint(0, SYMBOLS, (100, LENGTH + 1), generator=torch.Generator().manual_seed(0))

    def braking(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if brake_s and Path("brake").exists():
            time.sleep(brake_s)
        return loss(output, target)

    def rate(step: int) -> float:
        while 0 <= hold_step <= step and Path("brake").exists():
            time.sleep(0.01)
        return 1.0 / (1 + step / 20)

    return Job(
        name="divisible",
        model=lambda: Model(blocks, dropout),
        loss=braking,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        schedule=rate,
        clip_norm=1.0,
        data=(text[:, :-1], text[:, 1:]),
        validation=(text[:30, :-1], text[:30, 1:]),
        global_batch=batch,
        shards=8,
        steps=steps,
        evaluate_every=max(steps // 2, 1),
    )

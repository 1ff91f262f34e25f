"""GPT of about 124 million parameters (12 layers, 768 wide, 12 heads, 1,024 symbols, bf16), for one accelerator. A job
file, and model, data, loss and optimizer for the peers' loops, which take them from here.

It knows nothing of drivers, timing or goals.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

SEED = 7
SYMBOLS, LENGTH, LAYERS, WIDTH, HEADS = 50304, 1024, 12, 768, 12
BATCH, SHARDS = 64, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.before_widening = nn.LayerNorm(WIDTH)
        self.widened = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrowed = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.queries_keys_values(self.before_attention(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.narrowed(F.gelu(self.widened(self.before_widening(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.last = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, SYMBOLS, bias=False)
        self.out.weight = self.symbols.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                deep = name.endswith(("mixed.weight", "narrowed.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if deep else 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.symbols(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.out(self.last(x))  # type: ignore[no-any-return]


def data(sequences: int = 2048) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of a few hundred symbols, of which nine in ten follow from the one before: something to learn."""
    generator = torch.Generator().manual_seed(SEED)
    follows = torch.randperm(512, generator=generator)
    text = torch.randint(0, 512, (sequences, LENGTH + 1), generator=generator)
    surprises = torch.rand(text.shape, generator=generator) < 0.1
    for place in range(1, LENGTH + 1):
        text[:, place] = torch.where(surprises[:, place], text[:, place], follows[text[:, place - 1]])
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def flops_per_symbol(parameters: int, layers: int = LAYERS) -> float:
    """Forward and backward: 6 per parameter in a matrix product (the places are in none), and attention's own."""
    return 6 * (parameters - LENGTH * WIDTH) + 12 * layers * WIDTH * LENGTH


def job(steps: int = 30, batch: int = BATCH, shards: int = SHARDS, compiled: bool = True, layers: int = LAYERS) -> Any:
    from distbelief import Job  # not where a peer imports this

    return Job(
        name="gpt124",
        model=lambda: GPT(layers),
        loss=loss,
        optimizer=optimizer,
        data=data(),
        global_batch=batch,
        steps=steps,
        shards=shards,
        seed=SEED,
        shuffle=False,  # the peers take the samples in this order too
        precision="bf16",
        compile=compiled,
    )

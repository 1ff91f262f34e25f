"""Transformers: GPT, which foretells the next symbol, and BERT, which foretells hidden ones. From their configs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from bench.workloads.workload import SEED, Data

GPT_SYMBOLS, GPT_LENGTH = 256, 128
BERT_SYMBOLS, BERT_LENGTH = 30522, 64
HIDDEN = 103
"""The number of BERT's [MASK]."""
NOT_ASKED = -100
"""cross_entropy leaves such targets out."""


class Block(nn.Module):
    """GPT normalizes before attention and feed-forward, BERT after."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.causal:
            x = x + self.attention(self.norm1(x))
            return x + self.feed_forward(self.norm2(x))  # type: ignore[no-any-return]
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.feed_forward(x))  # type: ignore[no-any-return]

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.queries_keys_values(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.mixed(seen.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class GPT(nn.Module):
    def __init__(self, layers: int = 6, width: int = 256, heads: int = 8) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(GPT_SYMBOLS, width), nn.Embedding(GPT_LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(layers)))
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, GPT_SYMBOLS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks(self.symbols(x) + self.places.weight))  # type: ignore[no-any-return]


class BERT(nn.Module):
    """BERT-base is 12 layers of 768 with 12 heads: 109 million parameters. No dropout (no two systems draw the same),
    one kind of segment, and the head for hidden symbols only, which shares the table of symbols."""

    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(BERT_SYMBOLS, width), nn.Embedding(BERT_LENGTH, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.out = nn.Linear(width, BERT_SYMBOLS)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.out.weight = self.symbols.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.symbols(x) + self.places.weight)
        return self.out(self.head(self.blocks(x)))  # type: ignore[no-any-return]


def sequences() -> Data:
    """Sequences in which nine of ten symbols follow from the one before."""
    text = _text(1024, GPT_LENGTH + 1, GPT_SYMBOLS, GPT_SYMBOLS)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def hidden_symbols() -> Data:
    """Such sequences of a few hundred words of a large vocabulary; every seventh symbol is hidden and asked for."""
    text = _text(512, BERT_LENGTH, 256, BERT_SYMBOLS)
    asked = torch.zeros(text.shape, dtype=torch.bool)
    asked[:, 3::7] = True
    return text.masked_fill(asked, HIDDEN), text.masked_fill(~asked, NOT_ASKED)


def _text(count: int, length: int, used: int, symbols: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    follows = torch.randperm(used, generator=generator)
    text = torch.randint(0, used, (count, length), generator=generator)
    surprises = torch.rand(text.shape, generator=generator) < 0.1
    for place in range(1, length):
        text[:, place] = torch.where(surprises[:, place], text[:, place], follows[text[:, place - 1]])
    return text * (symbols // used)


def symbol_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=NOT_ASKED)

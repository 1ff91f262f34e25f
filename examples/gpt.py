"""A small language model that learns to write like a folder of text files, byte by byte.

    distbelief train examples/gpt.py --workers 2                        # Python's own standard library
    distbelief train examples/gpt.py --set folder=~/notes --set pattern=*.txt --set steps=1000

Text needs no tokenizer here: every byte is one of 256 symbols. The measure is bits per byte: 8 is guessing, and a
general compressor such as gzip needs about 2 on program text.
"""

import math
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from distbelief import Job, JobError


def read_text(folder: Path, pattern: str, limit_bytes: int) -> torch.Tensor:
    """The files of a folder one after the other, in the order of their names, as bytes."""
    text = bytearray()
    for path in sorted(folder.glob(pattern)):
        if path.is_file() and len(text) < limit_bytes:
            text += path.read_bytes()
    if not text:
        raise JobError(
            f"there is no text in {folder} ({pattern})",
            hint="--set folder=PATH, and --set pattern='*.txt' for its files",
        )
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


def windows(text: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, y): pieces of the text, and the same pieces one byte later. Views of one tensor: they take no memory."""
    pieces = (len(text) - 1) // context
    if pieces < 1:
        raise JobError(f"{len(text)} bytes of text are too few for a context of {context}")
    end = pieces * context
    return text[:end].view(pieces, context), text[1 : end + 1].view(pieces, context)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width, self.dropout = width // heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        layers = self.query, self.key, self.value  # under tensor:K each gives a member only its own heads' columns
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in layers)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.attention(self.norm1(x)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.symbols.weight  # one matrix: a symbol's vector is the same at both ends

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.symbols(x.long()) + self.places.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten().long())


def bits_per_byte(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A metric returns (sum, weight); the mean over all workers and batches is sum of sums / sum of weights."""
    return loss(output.float(), target) * target.numel() / math.log(2), target.numel()


def job(
    folder: str = sysconfig.get_paths()["stdlib"],
    pattern: str = "*.py",
    megabytes: float = 2.0,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    context: int = 128,
    dropout: float = 0.05,
    lr: float = 3e-3,
    steps: int = 300,
    batch: int = 16,
    seed: int = 0,
    matmul: str = "torch",
) -> Job:
    text = read_text(Path(folder).expanduser(), pattern, int(megabytes * 1_000_000))
    held_out = min(len(text) // 10, 50_000)  # the job never trains on the end of the text
    warm_up = max(1, steps // 20)

    def schedule(step: int) -> float:
        return min((step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * step / steps))  # falls to a tenth

    return Job(
        name="gpt",
        model=lambda: GPT(layers, width, heads, context, dropout),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1),
        schedule=schedule,
        clip_norm=1.0,
        data=windows(text[:-held_out], context),
        validation=windows(text[-held_out:], context),
        metrics={"bits_per_byte": bits_per_byte},
        global_batch=batch,
        steps=steps,
        evaluate_every=math.ceil(steps / 5),
        seed=seed,
        matmul=matmul,  # onednn is much faster on some processors: see `distbelief doctor`
    )

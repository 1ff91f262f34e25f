"""Small networks on generated vectors and images: a step's time goes into parameters (MLP) or pixels (CNN)."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import nn

from bench.workloads.workload import SEED, Data

FASHION = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the files."""
WHOLE = 59904
"""Of its 60,000 samples: so many fill batches of 128, 256 and 512 without a rest, which each system treats its way."""


def mlp(width: int = 1024) -> nn.Module:
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def vectors() -> Data:
    """Vectors, and the class that a fixed linear map gives them: something that can be learnt."""
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(8192, 784, generator=generator)
    return x, (x @ torch.randn(784, 10, generator=generator)).argmax(1)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def images(channels: int = 1, size: int = 28, classes: int = 10, count: int = 4096) -> Data:
    """Images: the picture of their class under noise, made of blots that pooling does not wipe out. A fifth of the
    labels are drawn by lot, so that the loss does not go to 0, where nothing could be compared."""
    generator = torch.Generator().manual_seed(SEED)
    pictures = torch.randn(classes, channels, size // 4, size // 4, generator=generator)
    pictures = pictures.repeat_interleave(4, 2).repeat_interleave(4, 3)
    shown = torch.randint(0, classes, (count,), generator=generator)
    x = pictures[shown] + torch.randn(count, channels, size, size, generator=generator)
    by_lot = torch.rand(count, generator=generator) < 0.2
    return x, torch.where(by_lot, torch.randint(0, classes, (count,), generator=generator), shown)


def clothes() -> Data:
    x, y = _fashion("train")
    return x[:WHOLE], y[:WHOLE]


def test_clothes() -> Data:
    return _fashion("t10k")


def _fashion(part: str) -> Data:
    """Fashion-MNIST from Debian's IDX files: a header of 16 (images) or 8 (classes) bytes, then one byte each."""
    x = np.frombuffer(gzip.decompress((FASHION / f"{part}-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16)
    y = np.frombuffer(gzip.decompress((FASHION / f"{part}-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    return torch.from_numpy(x.reshape(-1, 1, 28, 28) / np.float32(255)), torch.from_numpy(y.astype(np.int64))

"""Fashion-MNIST as Debian's package has it, with a handful of images."""

from __future__ import annotations

import gzip
import pathlib
import struct

import numpy as np


def write_clothes(folder: pathlib.Path) -> pathlib.Path:
    generator = np.random.default_rng(0)
    for part, count in (("train", 40), ("t10k", 10)):
        images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        packed = gzip.compress(bytes([0, 0, 8, 3]) + struct.pack(">3I", *images.shape) + images.tobytes())
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(packed)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(
            bytes([0, 0, 8, 1]) + struct.pack(">I", count) + labels.tobytes()
        )
    return folder

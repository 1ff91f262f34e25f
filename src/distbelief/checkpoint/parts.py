"""A part, written: a safetensors file of stretches and boxes of tensors, as a stream of blocks.

Checksums are SHA-256, which current CPUs have instructions for: with those OpenSSL's is quicker than BLAKE2b.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from distbelief.checkpoint import boxes
from distbelief.checkpoint.boxes import Box
from distbelief.checkpoint.headers import METADATA, Placed, encode_header
from distbelief.checkpoint.manifest import DTYPES, PartEntry
from distbelief.errors import DistBeliefError

BLOCK_BYTES = 4 << 20  # is still in the cache when it was hashed and is to be written


@dataclass(frozen=True)
class Slice:
    """Elements `first`, `first + 1`, … of a tensor, in row-major order, or those of a box; `values` holds them in any
    shape."""

    tensor: str
    values: torch.Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""
    first: int = 0
    box: Box | None = None

    @classmethod
    def whole(cls, tensor: str, values: torch.Tensor) -> Slice:
        return cls(tensor, values, tuple(values.shape))

    @classmethod
    def of_box(cls, tensor: str, values: torch.Tensor, shape: Sequence[int], box: Box) -> Slice:
        """What a member holds of a tensor of that shape. An empty box may be given; it is not written.

        >>> Slice.of_box("w", torch.ones(2, 3), (4, 3), ((2, 4), (0, 3))).first
        6
        """
        if tuple(values.shape) != boxes.sizes(box):
            raise ValueError(f"tensor '{tensor}' has {tuple(values.shape)} values for the box {boxes.shown(box)}")
        entry = PartEntry.of_box(tensor, dtype_name(values.dtype), shape, box)
        return cls(tensor, values, entry.shape, entry.first, entry.box)


def arranged(slices: Iterable[Slice]) -> list[tuple[PartEntry, torch.Tensor]]:
    """Describe the slices, wide types first: then every tensor in the file starts at a multiple of its element size."""
    found = [(entry, piece.values) for piece in slices if not (entry := _entry(piece)).empty]
    keys = [entry.key for entry, _ in found]
    if len(set(keys)) < len(keys) or METADATA in keys:
        wrong = next(key for key in keys if key == METADATA or keys.count(key) > 1)
        raise ValueError(f"a part cannot hold two entries of one name, nor one called {METADATA}: {wrong}")
    return sorted(found, key=lambda pair: -DTYPES[pair[0].dtype][1])


def _entry(piece: Slice) -> PartEntry:
    dtype = dtype_name(piece.values.dtype)
    if dtype not in DTYPES or piece.values.layout != torch.strided:
        raise DistBeliefError(
            f"tensor '{piece.tensor}' cannot be saved: its type is {dtype} ({piece.values.layout})",
            hint="keep state in dense tensors of real numbers, whole numbers or booleans",
        )
    count, whole = piece.values.numel(), prod(piece.shape)
    if piece.box is not None:
        entry = PartEntry.of_box(piece.tensor, dtype, piece.shape, piece.box)
        if entry.count != count:
            raise ValueError(f"tensor '{piece.tensor}' has {count} values for the box {boxes.shown(piece.box)}")
        return entry
    if piece.first < 0 or piece.first + count > whole or (count == 0 and whole):
        raise ValueError(f"tensor '{piece.tensor}' has {whole} elements; a slice holds {count} from {piece.first} on")
    return PartEntry(piece.tensor, dtype, tuple(piece.shape), piece.first, count)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def blocks(pieces: Sequence[tuple[PartEntry, torch.Tensor]]) -> Iterator[bytes | memoryview]:
    """The bytes of the file. Where a tensor is contiguous on the CPU they are its own, not a copy."""
    yield encode_header(
        Placed(entry.key, DTYPES[entry.dtype][0], entry.stored_shape, entry.size_bytes) for entry, _ in pieces
    )
    for _, values in pieces:
        data = memory_of(values.detach().cpu().contiguous())
        for start in range(0, len(data), BLOCK_BYTES):
            yield data[start : start + BLOCK_BYTES]


def memory_of(contiguous: torch.Tensor) -> memoryview:
    """The bytes under a contiguous CPU tensor, to read from or write into."""
    if not contiguous.numel():  # one without elements may have any stride, which `view` does not like
        return memoryview(bytearray())
    return contiguous.reshape(-1).view(torch.uint8).numpy().data

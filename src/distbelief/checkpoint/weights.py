"""Saves weights (parameters and buffers by name) to a file, and hashes them.

Both functions take tensors one at a time, in name order, so a model that is distributed over many machines never has to
fit in the memory of one.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import torch

from distbelief.atomicfile import drafted, lacks_room, writing
from distbelief.checkpoint.lazy import Outline, outlines_of
from distbelief.checkpoint.manifest import DTYPES
from distbelief.checkpoint.parts import BLOCK_BYTES, Placed, begins, dtype_name, encode_header, memory_of
from distbelief.errors import DistBeliefError

KINDS = {name: kind for name, (kind, _) in DTYPES.items()} | {
    "complex64": "C64",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
"""The type's name in torch -> its name in safetensors; a weights file may hold a few more types than a checkpoint."""


_RETRY_S = 0.5
_NO_ROOM_HINT = (
    "free some space; if it was the end of a run, `distbelief resume RUN` then takes the run up from its newest "
    "checkpoint and writes the file"
)


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, in name order; a tied tensor under each of its names."""
    found = dict(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))  # type: ignore[arg-type]
    return {name: found[name].detach() for name in sorted(found)}


def persistent_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that `load_state_dict` expects: all except buffers that are not persistent."""
    kept = model.state_dict().keys()
    return {name: tensor for name, tensor in named_tensors(model).items() if name in kept}


@dataclass(frozen=True)
class Streamed:
    """A tensor that arrives once, in blocks of bytes, and is never in memory as a whole."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Iterable[bytes | memoryview]


class WeightsDigest:
    """SHA-256 over the names, types, shapes and bytes of tensors, added in name order."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._last: str | None = None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.add_blocks(name, (tensor.dtype, tuple(tensor.shape)), _blocks(tensor))

    def add_blocks(self, name: str, outline: Outline, blocks: Iterable[bytes | memoryview]) -> None:
        for _ in self.through(name, outline, blocks):
            pass

    def through(
        self, name: str, outline: Outline, blocks: Iterable[bytes | memoryview]
    ) -> Iterator[bytes | memoryview]:
        """Add a tensor's blocks to the digest while passing them on to another consumer."""
        if self._last is not None and name <= self._last:
            raise ValueError(f"tensors come in name order: {name!r} came after {self._last!r}")
        self._last = name
        dtype, shape = outline
        self._sha256.update(f"{name}\0{dtype}\0{tuple(shape)}\0".encode())
        for block in blocks:
            self._sha256.update(block)
            yield block

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


def weights_sha256(model: torch.nn.Module) -> str:
    """The digest of all parameters and buffers of a model.

    >>> a, b = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    >>> _ = b.load_state_dict(a.state_dict())
    >>> weights_sha256(a) == weights_sha256(b)
    True
    """
    return weights_sha256_of(named_tensors(model).items())


def weights_sha256_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The digest of tensors that arrive one at a time, in name order, each under all of its names."""
    digest = WeightsDigest()
    for name, tensor in tensors:
        digest.add(name, tensor)
        del tensor  # before the next tensor is made
    return digest.hexdigest()


def save_weights(
    model: torch.nn.Module,
    path: Path,
    besides: Mapping[str, torch.Tensor | Streamed] = MappingProxyType({}),
    room_wait_s: float = 0.0,
) -> str:
    """Write the tensors that `load_state_dict` expects to a safetensors file, completely or not at all. Returns
    `weights_sha256`.

    `besides`: tensors that belong to the weights but not to the model. `room_wait_s`: see `write_weights`.
    """
    every: dict[str, torch.Tensor | Streamed] = {**named_tensors(model), **besides}
    outlines = {name: (one.dtype, tuple(one.shape)) for name, one in {**persistent_tensors(model), **besides}.items()}
    return write_weights(path, outlines, ((name, every[name]) for name in sorted(every)), room_wait_s)


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file, completely or not at all, and read it back before renaming it."""
    write_weights(path, outlines_of(tensors), ((name, tensors[name]) for name in sorted(tensors)))


def write_weights(
    path: Path,
    outlines: Mapping[str, Outline],
    tensors: Iterable[tuple[str, torch.Tensor | Streamed]],
    room_wait_s: float = 0.0,
) -> str:
    """Write a safetensors file from tensors that arrive one at a time, in name order, completely or not at all.

    `outlines` lists the tensors of the file; other tensors only enter the digest. Returns the digest of all tensors.
    Every written byte is read back before the file gets its name. Room for the whole file is taken before the first
    tensor is asked for, and waited for `room_wait_s`: tensors of many members are gathered once only.

    >>> import tempfile
    >>> model = torch.nn.Linear(2, 1)
    >>> outlines = {"bias": (torch.float32, (1,)), "weight": (torch.float32, (1, 2))}
    >>> gathered = (pair for pair in [("bias", model.bias), ("weight", model.weight)])
    >>> write_weights(Path(tempfile.mkdtemp()) / "w.safetensors", outlines, gathered) == weights_sha256(model)
    True
    """
    outlines = {name: (dtype, tuple(shape)) for name, (dtype, shape) in outlines.items()}
    placed = _placed(outlines)
    header = encode_header(placed)
    where = begins(placed, len(header))
    every, written = WeightsDigest(), WeightsDigest()
    left = set(outlines)
    with drafted(path) as draft:
        with writing(path):
            file = draft.open("r+b")
        with file:
            _take_room(path, file, len(header) + sum(tensor.size_bytes for tensor in placed), room_wait_s)
            _write(path, file, 0, [header])
            for name, value in tensors:  # outside of `writing`: an error of the tensors is no error of the file
                outline = value.dtype, tuple(value.shape)
                blocks = value.blocks if isinstance(value, Streamed) else _blocks(value)
                if name in outlines:
                    left.discard(name)
                    _require_form(name, outline, outlines[name])
                    blocks = _written(path, file, where[name], written.through(name, outline, blocks))
                every.add_blocks(name, outline, blocks)
                del value, blocks  # before the next tensor is made
        if left:
            raise ValueError(f"these tensors are missing: {', '.join(sorted(left))}")
        with writing(path):
            found = _read_back(draft, header, placed, where, outlines)
        if found != written.hexdigest():
            raise DistBeliefError(f"{path} has other bytes when it is read back", hint="check the disk")
    return every.hexdigest()


def _take_room(path: Path, file: BinaryIO, size_bytes: int, room_wait_s: float) -> None:
    until, waits = time.monotonic() + room_wait_s, False
    while size_bytes:
        try:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
            return
        except OSError as error:
            if not lacks_room(error):
                return  # a file system that cannot reserve: writing tells whether there is room
            os.ftruncate(file.fileno(), 0)  # what was reserved in part is others' meanwhile
            if time.monotonic() >= until:
                raise DistBeliefError(f"cannot write {path}: {error.strerror}", hint=_NO_ROOM_HINT) from error
            if not waits:
                print(f"cannot write {path}: {error.strerror}; it waits {room_wait_s:.0f} s for room", flush=True)
            waits = True
            time.sleep(_RETRY_S)


def _placed(outlines: Mapping[str, Outline]) -> list[Placed]:
    """Order the tensors with wide types first: then every tensor in the file starts at a multiple of its element
    size."""
    for name, (dtype, _) in outlines.items():
        if dtype_name(dtype) not in KINDS:
            raise DistBeliefError(f"tensor '{name}' cannot be saved: its type is {dtype_name(dtype)}")
    return [
        Placed(name, KINDS[dtype_name(dtype)], shape, torch.Size(shape).numel() * dtype.itemsize)
        for name, (dtype, shape) in sorted(outlines.items(), key=lambda item: (-item[1][0].itemsize, item[0]))
    ]


def _require_form(name: str, found: Outline, outline: Outline) -> None:
    if found != outline:
        raise ValueError(f"tensor '{name}' is {found[0]} {found[1]}, not {outline[0]} {outline[1]}")


def _blocks(tensor: torch.Tensor) -> Iterator[memoryview]:
    data = memory_of(tensor.detach().cpu().contiguous())
    for start in range(0, len(data), BLOCK_BYTES):
        yield data[start : start + BLOCK_BYTES]


def _write(path: Path, file: BinaryIO, at: int, blocks: Iterable[bytes | memoryview]) -> None:
    for _ in _written(path, file, at, blocks):
        pass


def _written(path: Path, file: BinaryIO, at: int, blocks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Pass on every block after writing it to the file."""
    for block in blocks:
        with writing(path):
            file.seek(at)
            file.write(block)
            file.flush()
        at += len(block)
        yield block


def _read_back(
    draft: Path, header: bytes, placed: Iterable[Placed], where: Mapping[str, int], outlines: Mapping[str, Outline]
) -> str:
    """The digest of the file's content; an empty string if the file's beginning or end is wrong."""
    sizes = {tensor.key: tensor.size_bytes for tensor in placed}
    if draft.stat().st_size != len(header) + sum(sizes.values()):
        return ""
    digest = WeightsDigest()
    with draft.open("rb") as file:

        def blocks(name: str) -> Iterator[bytes]:
            file.seek(where[name])
            for start in range(0, sizes[name], BLOCK_BYTES):
                yield file.read(min(BLOCK_BYTES, sizes[name] - start))

        if file.read(len(header)) != header:
            return ""
        for name in sorted(outlines):
            digest.add_blocks(name, outlines[name], blocks(name))
    return digest.hexdigest()

"""A part: a safetensors file of stretches of tensors, written and read as a stream.

safetensors' own functions want every tensor whole and in memory at once. The format is small enough to write here:
eight bytes with the length of a header, the header as JSON, then the tensors' bytes without gaps. Checksums are
SHA-256, which current CPUs have instructions for: with those OpenSSL's is quicker than BLAKE2b.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import torch

from distbelief.checkpoint.faults import CheckpointDamaged
from distbelief.checkpoint.manifest import DTYPES, PartEntry, PartFile
from distbelief.checkpoint.storage import Folder, explained
from distbelief.errors import DistBeliefError

BLOCK_BYTES = 4 << 20  # is still in the cache when it was hashed and is to be written

_ALIGN = 8
_METADATA = "__metadata__"
_DAMAGED_HINT = "restore the file from a copy, or delete this checkpoint; resuming takes the newest one that is sound"


@dataclass(frozen=True)
class Slice:
    """Elements `first`, `first + 1`, … of a tensor, in row-major order; `values` holds them in any shape."""

    tensor: str
    values: torch.Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""
    first: int = 0

    @classmethod
    def whole(cls, tensor: str, values: torch.Tensor) -> Slice:
        return cls(tensor, values, tuple(values.shape))


class _Place(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def arranged(slices: Iterable[Slice]) -> list[tuple[PartEntry, torch.Tensor]]:
    """Describe the slices, wide types first: then every tensor in the file starts at a multiple of its element size."""
    found = [(_entry(piece), piece.values) for piece in slices]
    keys = [entry.key for entry, _ in found]
    if len(set(keys)) < len(keys) or _METADATA in keys:
        wrong = next(key for key in keys if key == _METADATA or keys.count(key) > 1)
        raise ValueError(f"a part cannot hold two entries of one name, nor one called {_METADATA}: {wrong}")
    return sorted(found, key=lambda pair: -DTYPES[pair[0].dtype][1])


def _entry(piece: Slice) -> PartEntry:
    dtype = dtype_name(piece.values.dtype)
    if dtype not in DTYPES or piece.values.layout != torch.strided:
        raise DistBeliefError(
            f"tensor '{piece.tensor}' cannot be saved: its type is {dtype} ({piece.values.layout})",
            hint="keep state in dense tensors of real numbers, whole numbers or booleans",
        )
    count, whole = piece.values.numel(), prod(piece.shape)
    if piece.first < 0 or piece.first + count > whole or (count == 0 and whole):
        raise ValueError(f"tensor '{piece.tensor}' has {whole} elements; a slice holds {count} from {piece.first} on")
    return PartEntry(piece.tensor, dtype, tuple(piece.shape), piece.first, count)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def blocks(pieces: Sequence[tuple[PartEntry, torch.Tensor]]) -> Iterator[bytes | memoryview]:
    """The bytes of the file. Where a tensor is contiguous on the CPU they are its own, not a copy."""
    yield _header([entry for entry, _ in pieces])
    for _, values in pieces:
        data = memory_of(values.detach().cpu().contiguous())
        for start in range(0, len(data), BLOCK_BYTES):
            yield data[start : start + BLOCK_BYTES]


def memory_of(contiguous: torch.Tensor) -> memoryview:
    """The bytes under a contiguous CPU tensor, to read from or write into."""
    return contiguous.reshape(-1).view(torch.uint8).numpy().data


def _header(entries: Sequence[PartEntry]) -> bytes:
    table: dict[str, Any] = {_METADATA: {"format": "pt"}}
    begin = 0
    for entry in entries:
        place = _Place(DTYPES[entry.dtype][0], entry.stored_shape, (begin, begin + entry.size_bytes))
        table[entry.key] = place
        begin = place.data_offsets[1]
    text = msgspec.json.encode(table)
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


def check_part(
    folder: Folder,
    part: PartFile,
    size_bytes: int | None,
    entries: Iterable[PartEntry],
    sinks: Mapping[str, memoryview],
) -> None:
    """Read a part once from end to end, in front of its checksum, filling the sinks by key on the way.

    `size_bytes` is what the folder's listing says, None where the file is not in it. Raises CheckpointDamaged when
    anything differs from the manifest; what the sinks hold then means nothing.
    """
    url = folder.url_of(part.file)
    if size_bytes is None:
        raise damaged(url, "is missing")
    if size_bytes != part.size_bytes:
        torn = "torn" if size_bytes < part.size_bytes else "too long"
        raise damaged(url, f"is {torn}: it has {size_bytes} of {part.size_bytes} bytes")
    with explained(folder, "read", url):
        try:
            file = folder.files.open(folder.path_of(part.file), "rb")
        except FileNotFoundError as error:
            raise damaged(url, "is missing") from error
        with file:
            stream = _Stream(file, url, part.size_bytes)
            length = int.from_bytes(stream.take(min(8, part.size_bytes)), "little")
            header = stream.take(min(length, stream.left))
            places, fault = _places(header, entries, stream.left)
            for key, size in places:
                stream.fill(sinks.get(key), size)
            stream.fill(None, stream.left)
    if stream.sha256.hexdigest() != part.sha256:
        raise damaged(url, "is damaged: its checksum differs")
    if fault:
        raise damaged(url, f"does not match the manifest: {fault}")


def damaged(url: str, what: str) -> CheckpointDamaged:
    return CheckpointDamaged(f"{url} {what}", hint=_DAMAGED_HINT)


class _Stream:
    """A file read in order, hashed on the way; it must have exactly so many bytes."""

    def __init__(self, file: Any, url: str, size_bytes: int) -> None:
        self.sha256 = hashlib.sha256()
        self.left = size_bytes
        self._size_bytes = size_bytes
        self._file = file
        self._url = url
        self._scratch = memoryview(bytearray(min(BLOCK_BYTES, size_bytes)))

    def take(self, size: int) -> bytes:
        data = bytearray(size)
        self.fill(memoryview(data), size)
        return bytes(data)

    def fill(self, sink: memoryview | None, size: int) -> None:
        """Read so many bytes into the sink, or past them."""
        done = 0
        while done < size:
            step = min(BLOCK_BYTES, size - done)
            block = self._scratch[:step] if sink is None else sink[done : done + step]
            try:
                got = self._file.readinto(block)
            except OSError as error:
                if error.errno != errno.EIO:  # a bad sector is damage of this file, an older checkpoint may be fine
                    raise
                raise damaged(self._url, "cannot be read: the disk reports a fault") from error
            if not got:
                there = self._size_bytes - self.left
                raise damaged(self._url, f"is torn: it has {there} of {self._size_bytes} bytes")
            self.sha256.update(block[:got])
            done += got
            self.left -= got


def _places(header: bytes, entries: Iterable[PartEntry], data_bytes: int) -> tuple[list[tuple[str, int]], str]:
    """The tensors of a file in the order of their bytes, with their sizes; or none, and what is wrong.

    Nothing is raised here: when the header is damaged, the checksum is the better thing to say.
    """
    try:
        table = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        table.pop(_METADATA, None)
        found = {key: msgspec.json.decode(raw, type=_Place) for key, raw in table.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return [], f"its header cannot be read ({error})"
    expected = {entry.key: entry for entry in entries}
    if missing := sorted(expected.keys() - found.keys()):
        return [], f"'{missing[0]}' is not in it"
    if more := sorted(found.keys() - expected.keys()):
        return [], f"'{more[0]}' is in it"
    reached, order = 0, []
    for key, place in sorted(found.items(), key=lambda item: item[1].data_offsets):
        entry = expected[key]
        if (place.dtype, place.shape) != (DTYPES[entry.dtype][0], entry.stored_shape):
            return [], f"'{key}' has another type or shape there"
        if place.data_offsets != (reached, reached + entry.size_bytes):
            return [], f"'{key}' lies at other bytes"
        reached += entry.size_bytes
        order.append((key, entry.size_bytes))
    if reached != data_bytes:
        return [], f"it has {data_bytes} bytes of data where {reached} belong"
    return order, ""

"""The parts of a checkpoint: safetensors files, written and read as streams of blocks.

A part holds the stretches and boxes of tensors that one member saves. Writing needs at most one block of memory; so
does reading, besides the caller's own tensors. Checksums are SHA-256: current processors have instructions for it, so
OpenSSL's SHA-256 is quicker than BLAKE2b.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import msgspec
import torch

from distbelief.checkpoint.faults import CheckpointDamaged
from distbelief.checkpoint.manifest import DTYPES, PartEntry, PartFile
from distbelief.checkpoint.rules import boxes
from distbelief.checkpoint.rules.boxes import Box
from distbelief.checkpoint.storage import Folder, explained
from distbelief.errors import DistBeliefError

# --- the header of a safetensors file -----------------------------------------------------------------------------

METADATA = "__metadata__"
LENGTH_BYTES = 8
_ALIGN = 8


@dataclass(frozen=True)
class Placed:
    """A tensor in a file; tensors are listed in the order of their bytes."""

    key: str
    kind: str
    """The type's name in safetensors."""
    shape: tuple[int, ...]
    size_bytes: int


class _Place(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def encode_header(tensors: Iterable[Placed]) -> bytes:
    """The beginning of the file: the header's length, then the header."""
    table: dict[str, Any] = {METADATA: {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        table[tensor.key] = _Place(tensor.kind, tensor.shape, (begin, begin + tensor.size_bytes))
        begin += tensor.size_bytes
    text = msgspec.json.encode(table)
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def begins(tensors: Iterable[Placed], first: int) -> dict[str, int]:
    """The offset of each tensor's bytes in the file; the first tensor's bytes are at `first`."""
    found = {}
    for tensor in tensors:
        found[tensor.key] = first
        first += tensor.size_bytes
    return found


def decode_header(text: bytes, data_bytes: int) -> tuple[list[Placed], str]:
    """The tensors in the order of their bytes, which take `data_bytes` in total; or no tensors and the fault.

    Raises nothing: if a checksum exists, a wrong checksum is the better error for a damaged header.
    """
    try:
        table = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        table.pop(METADATA, None)
        found = {key: msgspec.json.decode(raw, type=_Place) for key, raw in table.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return [], f"its header cannot be read ({error})"
    reached, order = 0, []
    for key, place in sorted(found.items(), key=lambda item: item[1].data_offsets):
        begin, end = place.data_offsets
        if begin != reached or end < begin:
            return [], f"'{key}' lies at other bytes"
        reached = end
        order.append(Placed(key, place.dtype, place.shape, end - begin))
    if reached != data_bytes:
        return [], f"it has {data_bytes} bytes of data where {reached} belong"
    return order, ""


BLOCK_BYTES = 4 << 20  # a block is still in the cache between hashing and writing


@dataclass(frozen=True)
class Slice:
    """Elements `first`, `first + 1`, … of a tensor in row-major order, or the elements of a box; `values` has them in
    any shape."""

    tensor: str
    values: torch.Tensor
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    first: int = 0
    box: Box | None = None

    @classmethod
    def whole(cls, tensor: str, values: torch.Tensor) -> Slice:
        return cls(tensor, values, tuple(values.shape))

    @classmethod
    def of_box(cls, tensor: str, values: torch.Tensor, shape: Sequence[int], box: Box) -> Slice:
        """A member's box of a tensor with this shape. An empty box is allowed; it is not written.

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
    """The bytes of the file. A tensor that is contiguous on the CPU is not copied."""
    yield encode_header(
        Placed(entry.key, DTYPES[entry.dtype][0], entry.stored_shape, entry.size_bytes) for entry, _ in pieces
    )
    for _, values in pieces:
        data = memory_of(values.detach().cpu().contiguous())
        for start in range(0, len(data), BLOCK_BYTES):
            yield data[start : start + BLOCK_BYTES]


def memory_of(contiguous: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, for reading or writing in place."""
    if not contiguous.numel():  # `view` refuses some strides of tensors without elements
        return memoryview(bytearray())
    return contiguous.reshape(-1).view(torch.uint8).numpy().data


# --- reading ------------------------------------------------------------------------------------------------------

_DAMAGED_HINT = "restore the file from a copy, or delete this checkpoint; resuming takes the newest one that is sound"
_HEADER_GUESS_BYTES = 1 << 16  # most headers are shorter, so one request suffices


class Sink(Protocol):
    """Takes the bytes of one tensor in a file; `start` and `end` count from that tensor's first byte."""

    def room(self, start: int, end: int) -> memoryview | None:
        """The memory to read these bytes into. None: the reader passes the bytes to `put`."""

    def put(self, start: int, block: memoryview) -> None: ...


def damaged(url: str, what: str) -> CheckpointDamaged:
    return CheckpointDamaged(f"{url} {what}", hint=_DAMAGED_HINT)


def check_part(
    folder: Folder,
    part: PartFile,
    size_bytes: int | None,
    entries: Iterable[PartEntry],
    sinks: Mapping[str, Sequence[Sink]],
) -> dict[str, int]:
    """Read a part once from end to end, verify its checksum, and fill the sinks by key on the way.

    `size_bytes` is the size in the folder's listing, None if the file is not listed. Returns the offset in the file of
    each key's bytes. Raises CheckpointDamaged if anything differs from the manifest; the sinks' content is then
    undefined.
    """
    url = folder.url_of(part.file)
    _check_size(url, part, size_bytes)
    with _opened(folder, part.file) as file:
        stream = _Stream(file, url, part.size_bytes)
        length = int.from_bytes(stream.take(min(LENGTH_BYTES, part.size_bytes)), "little")
        header = stream.take(min(length, stream.left))
        order, fault = decode_header(header, stream.left)
        fault = fault or _mismatch(order, entries)
        for tensor in [] if fault else order:
            stream.fill(sinks.get(tensor.key, ()), tensor.size_bytes)
        stream.fill((), stream.left)
    if stream.sha256.hexdigest() != part.sha256:
        raise damaged(url, "is damaged: its checksum differs")
    if fault:
        raise damaged(url, f"does not match the manifest: {fault}")
    return begins(order, LENGTH_BYTES + length)


def find_in_part(
    folder: Folder, part: PartFile, size_bytes: int | None, entries: Iterable[PartEntry]
) -> dict[str, int]:
    """The offset in the file of each key's bytes, from the header alone; the checksum is not verified."""
    url = folder.url_of(part.file)
    _check_size(url, part, size_bytes)
    header = read_header(folder, part.file, part.size_bytes)
    order, fault = decode_header(header, part.size_bytes - LENGTH_BYTES - len(header))
    if fault := fault or _mismatch(order, entries):
        raise damaged(url, f"does not match the manifest: {fault}")
    return begins(order, LENGTH_BYTES + len(header))


def read_header(folder: Folder, name: str, size_bytes: int) -> bytes:
    """The header's text; shorter if the file ends inside it."""
    begin = read_bytes(folder, name, 0, min(_HEADER_GUESS_BYTES, size_bytes))
    end = min(LENGTH_BYTES + int.from_bytes(begin[:LENGTH_BYTES], "little"), size_bytes)
    if end > len(begin):
        begin += read_bytes(folder, name, len(begin), end)
    return begin[LENGTH_BYTES:end]


def pour(folder: Folder, name: str, begin: int, spans: Iterable[tuple[int, int]], sink: Sink) -> None:
    """Pass spans (start, end) of one tensor's bytes to a sink; the tensor's bytes begin at byte `begin` of the file."""
    for start, end in spans:
        for at in range(start, end, BLOCK_BYTES):
            upto = min(at + BLOCK_BYTES, end)
            data = read_bytes(folder, name, begin + at, begin + upto)
            if (room := sink.room(at, upto)) is not None:
                room[:] = data
            else:
                sink.put(at, memoryview(bytearray(data)))


def read_bytes(folder: Folder, name: str, start: int, end: int) -> bytes:
    """Bytes `start` to `end` of the file; a store is asked for these bytes only."""
    url = folder.url_of(name)
    with explained(folder, "read", url), _faults_named(url):
        found = bytes(folder.files.cat_file(folder.path_of(name), start=start, end=end)) if start < end else b""
    if len(found) < end - start:
        raise damaged(url, f"is torn: it ends before byte {end}")
    return found


def _check_size(url: str, part: PartFile, size_bytes: int | None) -> None:
    if size_bytes is None:
        raise damaged(url, "is missing")
    if size_bytes != part.size_bytes:
        torn = "torn" if size_bytes < part.size_bytes else "too long"
        raise damaged(url, f"is {torn}: it has {size_bytes} of {part.size_bytes} bytes")


@contextmanager
def _opened(folder: Folder, name: str) -> Iterator[Any]:
    with explained(folder, "read", folder.url_of(name)):
        with _faults_named(folder.url_of(name)):
            file = folder.files.open(folder.path_of(name), "rb")
        with file:
            yield file


@contextmanager
def _faults_named(url: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise damaged(url, "is missing") from error
    except OSError as error:
        if error.errno != errno.EIO:  # a bad sector damages this file only; an older checkpoint may be sound
            raise
        raise damaged(url, "cannot be read: the disk reports a fault") from error


class _Stream:
    """A file that is read in order and hashed on the way; its size must match exactly."""

    def __init__(self, file: Any, url: str, size_bytes: int) -> None:
        self.sha256 = hashlib.sha256()
        self.left = size_bytes
        self._size_bytes = size_bytes
        self._file = file
        self._url = url
        self._scratch = memoryview(bytearray(min(BLOCK_BYTES, size_bytes)))

    def take(self, size: int) -> bytes:
        data = bytearray(size)
        self._read(memoryview(data))
        return bytes(data)

    def fill(self, sinks: Sequence[Sink], size: int) -> None:
        """Read `size` bytes into the sinks; without sinks, hash and drop them."""
        for start in range(0, size, BLOCK_BYTES):
            end = min(start + BLOCK_BYTES, size)
            room = sinks[0].room(start, end) if len(sinks) == 1 else None
            block = self._scratch[: end - start] if room is None else room
            self._read(block)
            for sink in sinks if room is None else ():
                sink.put(start, block)

    def _read(self, block: memoryview) -> None:
        done = 0
        while done < len(block):
            with _faults_named(self._url):
                got = self._file.readinto(block[done:])
            if not got:
                there = self._size_bytes - self.left
                raise damaged(self._url, f"is torn: it has {there} of {self._size_bytes} bytes")
            self.sha256.update(block[done : done + got])
            done += got
            self.left -= got


def _mismatch(order: Iterable[Placed], entries: Iterable[PartEntry]) -> str:
    """The first difference between a part's header and the manifest, or an empty string."""
    expected = {entry.key: entry for entry in entries}
    found = {tensor.key: tensor for tensor in order}
    if missing := sorted(expected.keys() - found.keys()):
        return f"'{missing[0]}' is not in it"
    if more := sorted(found.keys() - expected.keys()):
        return f"'{more[0]}' is in it"
    for key, entry in expected.items():
        tensor = found[key]
        if (tensor.kind, tensor.shape) != (DTYPES[entry.dtype][0], entry.stored_shape):
            return f"'{key}' has another type or shape there"
        if tensor.size_bytes != entry.size_bytes:
            return f"'{key}' lies at other bytes"
    return ""

"""Sends one Python value between forked processes; tensors and arrays arrive without a copy.

The value is pickled, but the bytes of tensors and numpy arrays inside it (at any depth, in any class) follow
separately. A small parcel is one message on a Unix socket; a larger one is written into a memfd, and only the file
descriptor is sent. So a message has at most a few kilobytes, the sender never waits for the receiver, and the receiver
maps the sender's memory. Only for processes of one run: pickle trusts its input.
"""

from __future__ import annotations

import array
import io
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 64  # the alignment of torch's own allocator
_INLINE_BYTES = 16 * 1024
_INLINE, _MAPPED = 0, 1
_PREFIX = struct.Struct("<BQ")  # kind of message; size of the body
_PICKLE_BYTES = struct.Struct("<Q")

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _Place:
    """Replaces a tensor or an array in the pickle. `offset` counts from the end of the pickle."""

    dtype: Any
    shape: tuple[int, ...]
    offset: int


def post(to: socket.socket, value: Any) -> None:
    """Send a value. Errors of the value itself (pickling, memory) are raised before anything is sent.

    >>> a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    >>> post(a, {"x": torch.ones(2), "name": "one"})
    >>> receive(b)
    {'x': tensor([1., 1.]), 'name': 'one'}
    """
    pickled, leaves = _pickle(value)
    data_start = _aligned(_PICKLE_BYTES.size + len(pickled))
    pieces = [(0, _raw(_PICKLE_BYTES.pack(len(pickled)) + pickled))]
    pieces += [(data_start + offset, leaf) for offset, leaf in leaves]
    last_offset, last = pieces[-1]
    size = max(data_start, last_offset + last.size)
    if size <= _INLINE_BYTES:
        body = bytearray(size)
        for offset, piece in pieces:
            body[offset : offset + piece.size] = piece.data
        to.sendmsg([_PREFIX.pack(_INLINE, size), body])
        return
    memory = os.memfd_create("distbelief-batch", os.MFD_CLOEXEC)
    try:
        os.ftruncate(memory, size)
        for offset, piece in pieces:
            _write_all(memory, piece.data, offset)
        socket.send_fds(to, [_PREFIX.pack(_MAPPED, size)], [memory])
    finally:
        os.close(memory)


def receive(source: socket.socket) -> Any:
    """Receive the next value. Raises EOFError when the sender is gone, and BlockingIOError when a non-blocking socket
    has no message."""
    message, descriptors = _receive_message(source)
    if not message:
        raise EOFError("the other side has closed the connection")
    kind, size = _PREFIX.unpack_from(message)
    if kind == _INLINE:
        body = torch.empty(size, dtype=torch.uint8)  # torch's memory is aligned; the tensors stay in it
        body.numpy()[:] = np.frombuffer(message, np.uint8, size, _PREFIX.size)
        storage = body.untyped_storage()
    elif not descriptors:
        raise OSError("a batch arrived without its memory: this process has too many open files (ulimit -n)")
    else:
        try:
            storage = _mapped(descriptors[0], size)
        finally:
            os.close(descriptors[0])
    return _unpickle(storage)


def _receive_message(source: socket.socket) -> tuple[bytes, Sequence[int]]:
    descriptor = array.array("i", [0])
    message, control, _, _ = source.recvmsg(
        _PREFIX.size + _INLINE_BYTES, socket.CMSG_SPACE(descriptor.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(data) >= descriptor.itemsize:
            descriptor = array.array("i", data[: descriptor.itemsize])
            return message, descriptor
    return message, []


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.leaves: list[tuple[int, Bytes]] = []
        self._end = 0
        # A tensor that occurs twice is sent once. The reference keeps its id from being reused.
        self._places: dict[int, tuple[Any, _Place]] = {}

    def persistent_id(self, item: Any) -> _Place | None:
        if id(item) in self._places:
            return self._places[id(item)][1]
        contents = _contents(item)
        if contents is None:
            return None
        place = _Place(item.dtype, tuple(item.shape), self._end)
        self.leaves.append((place.offset, contents))
        self._end = _aligned(self._end + contents.size)
        self._places[id(item)] = item, place
        return place


def _pickle(value: Any) -> tuple[bytes, list[tuple[int, Bytes]]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.leaves


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storage: torch.UntypedStorage, data_start: int) -> None:
        super().__init__(file)
        self._storage = storage
        self._data_start = data_start

    def persistent_load(self, place: Any) -> Any:
        start = self._data_start + place.offset
        if isinstance(place.dtype, torch.dtype):
            return _over(self._storage, place.dtype, start, place.shape)
        size = prod(place.shape) * place.dtype.itemsize
        return _over(self._storage, torch.uint8, start, (size,)).numpy().view(place.dtype).reshape(place.shape)


def _unpickle(storage: torch.UntypedStorage) -> Any:
    contents = _over(storage, torch.uint8, 0, (storage.nbytes(),)).numpy()
    (size,) = _PICKLE_BYTES.unpack_from(contents.data)
    first = _PICKLE_BYTES.size
    return _Unpickler(io.BytesIO(contents[first : first + size].data), storage, _aligned(first + size)).load()


def _mapped(descriptor: int, size: int) -> torch.UntypedStorage:
    """Map the memory with torch, which, unlike Python's mmap, keeps no descriptor open: a metric may hold thousands of
    batches."""
    storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", True, size)
    assert isinstance(storage, torch.UntypedStorage)
    return storage


def _over(storage: torch.UntypedStorage, dtype: torch.dtype, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A separate tensor over shared storage, not a view: views share a version counter, and autograd would complain
    about one part of a batch when another part is modified."""
    fresh: Any = torch.empty(0, dtype=dtype)  # torch's annotations of set_ require strides
    tensor: torch.Tensor = fresh.set_(storage, start // dtype.itemsize, shape)
    return tensor


def _contents(item: Any) -> Bytes | None:
    """The bytes of a plain tensor or array; None for all other objects, which are pickled."""
    if isinstance(item, torch.Tensor) and item.is_nested:
        raise TypeError("nested tensors are not supported: pad the samples to one length, or give a list of tensors")
    if type(item) is torch.Tensor and item.layout == torch.strided and not item.is_quantized:
        plain = item.detach().resolve_conj().resolve_neg().cpu().contiguous()
        bytes_of_it: Bytes = plain.reshape(-1).view(torch.uint8).numpy()
        return bytes_of_it
    if type(item) is np.ndarray and not item.dtype.hasobject and item.dtype.itemsize > 0:
        return np.ascontiguousarray(item).reshape(-1).view(np.uint8)
    return None


def _raw(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written

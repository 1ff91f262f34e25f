"""A segment: memory that several processes map, seen as tensors; and the client of the segment server."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import socket
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from distbelief.errors import DistBeliefError, NotEnoughMemory
from distbelief.transport.shm.memfd import receive_message, send_message

_MAP_FIXED = 0x10
_SOON_MS = 50
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class Memory(Protocol):
    """A block of bytes, on the host or on a device, seen as tensors."""

    size_bytes: int

    def tensor(self, dtype: torch.dtype, offset_bytes: int, numel: int) -> torch.Tensor: ...


class Segment:
    """Memory that several processes can map. `tensor` gives views of it."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self._map = mmap.mmap(fd, max(size_bytes, 1)) if fd >= 0 else mmap.mmap(-1, max(size_bytes, 1))

    def __del__(self) -> None:
        if self.fd >= 0:  # the mapping has its own descriptor and lives as long as its last view
            os.close(self.fd)

    @classmethod
    def private(cls, size_bytes: int) -> Segment:
        """Private anonymous memory."""
        return cls(-1, size_bytes)

    def tensor(self, dtype: torch.dtype, offset_bytes: int, numel: int) -> torch.Tensor:
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset_bytes)

    def lay(self, offset_bytes: int, other: Segment, at_bytes: int, size_bytes: int) -> None:
        """Map pages of another segment at this offset, without a copy: both then show the same memory. Views of this
        segment stay valid. All numbers are multiples of the page size."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map, offset_bytes))
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE | _MAP_FIXED
        if _libc.mmap(address, size_bytes, protection, flags, other.fd, at_bytes) != address:
            raise DistBeliefError(f"memory cannot be mapped: {os.strerror(ctypes.get_errno())}")

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        return memoryview(self._map)[offset_bytes : offset_bytes + size_bytes]

    @property
    def buffer(self) -> mmap.mmap:
        return self._map


class SegmentClient:
    """A worker's client of the segment server (segmentserver.py): opens segments by name."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lasting: dict[str, Segment] = {}
        self._asked: deque[str] = deque()
        """Requested names without an answer. Answers come in the order of requests."""
        self._answers: dict[str, Segment | DistBeliefError] = {}

    def segment(self, name: str, size_bytes: int = -1) -> Segment:
        """Open the segment with this name. The server makes it with this size if it does not exist; without a size that
        is an error."""
        self._ask(name, size_bytes)
        while name in self._asked:
            self._hear()
        return self._given(name)

    def segment_soon(self, name: str, size_bytes: int) -> Segment | None:
        """Like `segment`, but returns None if the server does not answer at once (its process may be stopped). Ask
        again later."""
        is_new = self._ask(name, size_bytes)
        while name in self._asked:
            answered = select.poll()  # not select.select, which refuses descriptors above 1023
            answered.register(self._sock, select.POLLIN)
            if not answered.poll(_SOON_MS if is_new else 0):
                return None
            self._hear()
        return self._given(name)

    def _ask(self, name: str, size_bytes: int) -> bool:
        if name in self._asked or name in self._answers:
            return False
        send_message(self._sock, {"name": name, "size_bytes": size_bytes})
        self._asked.append(name)
        return True

    def _hear(self) -> None:
        answer, fds = receive_message(self._sock)
        if "error" in answer:
            kind = NotEnoughMemory if answer["memory"] else DistBeliefError
            self._answers[self._asked.popleft()] = kind(answer["error"], hint=answer["hint"])
        else:
            self._answers[self._asked.popleft()] = Segment(fds[0], answer["size_bytes"])

    def _given(self, name: str) -> Segment:
        answer = self._answers.pop(name)
        if isinstance(answer, DistBeliefError):
            raise answer
        return answer

    def lasting(self, name: str, size_bytes: int) -> Segment:
        """A segment that outlives generations: mapped once, so that a regroup causes no page faults."""
        if name not in self._lasting:
            self._lasting[name] = self.segment(name, size_bytes)
        return self._lasting[name]

    def drop(self, name: str) -> None:
        """Make the server forget a segment. Processes that map it keep it until they unmap it."""
        send_message(self._sock, {"drop": name})

    def close(self) -> None:
        self._sock.close()

    def drop_all(self, beginning: str, keep: Sequence[str]) -> None:
        """Make the server forget the segments whose names begin with `beginning`, except where one of `keep`
        follows."""
        send_message(self._sock, {"drop_all": beginning, "keep": list(keep)})

    def drop_before(self, group: str) -> None:
        """Make the server forget the segments of groups with lower numbers: no process opens them again."""
        self._answers.clear()
        send_message(self._sock, {"drop_before": group})

"""The server of a host's shared segments. It runs in the engine's process, which outlives every worker. Torch-free.

A worker opens a segment by name over its own socket: the first request makes the segment, later requests get the same
memory. The server holds the descriptors, so segments survive the death of workers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection

from distbelief.errors import DistBeliefError, NotEnoughMemory
from distbelief.transport.shm.memfd import allocate, receive_message, send_message


class SegmentServer:
    """The table of descriptors, and the answers to requests."""

    def __init__(self) -> None:
        self._segments: dict[str, tuple[int, int]] = {}

    def put(self, name: str, content: bytes) -> None:
        """Make a segment with this content, for example a pickled job."""
        fd = allocate(len(content), name)
        written = 0
        while written < len(content):  # the kernel writes at most 2 GiB at a time
            written += os.pwrite(fd, memoryview(content)[written:], written)
        self._segments[name] = (fd, len(content))

    def answer(self, sock: socket.socket) -> str:
        """Answer one request. Returns the requested segment's name, if any. Raises EOFError when the worker has closed
        its socket."""
        request, _ = receive_message(sock)
        if "drop_before" in request:
            self.drop_before(str(request["drop_before"]))
            return ""
        if "drop_all" in request:
            self.drop_all(str(request["drop_all"]), request["keep"])
            return ""
        if "drop" in request:
            fd, _ = self._segments.pop(str(request["drop"]), (-1, 0))
            if fd >= 0:
                os.close(fd)
            return ""
        try:
            fd, size_bytes = self._find(str(request["name"]), int(request["size_bytes"]))
        except DistBeliefError as error:
            memory = isinstance(error, NotEnoughMemory)
            send_message(sock, {"error": error.message, "hint": error.hint, "memory": memory})
        else:
            send_message(sock, {"size_bytes": size_bytes}, [fd])
        return str(request["name"])

    def _find(self, name: str, size_bytes: int) -> tuple[int, int]:
        if name not in self._segments:
            if size_bytes < 0:
                raise DistBeliefError(f"there is no shared segment '{name}'")
            self._segments[name] = (allocate(size_bytes, name), size_bytes)
        fd, existing = self._segments[name]
        if size_bytes not in (-1, existing):
            raise DistBeliefError(
                f"the shared segment '{name}' has {existing} bytes, not {size_bytes}: the members disagree on the model"
            )
        return fd, existing

    def drop_before(self, group: str) -> None:
        """Forget the segments "GROUP NUMBER/…" with lower numbers: those of old generations. Members that map them keep
        them until they unmap them."""
        kind, _, number = group.rpartition(" ")
        for name in list(self._segments):
            its_kind, _, its_number = name.partition("/")[0].rpartition(" ")
            if its_kind == kind and its_number.isdigit() and number.isdigit() and int(its_number) < int(number):
                os.close(self._segments.pop(name)[0])

    def drop_all(self, beginning: str, keep: Collection[str] = ()) -> None:
        """Forget the segments whose names begin with `beginning`, except where one of `keep` follows: no process opens
        them again."""
        for name in [one for one in self._segments if one.startswith(beginning) and one[len(beginning) :] not in keep]:
            os.close(self._segments.pop(name)[0])

    def close(self) -> None:
        for fd, _ in self._segments.values():
            os.close(fd)
        self._segments.clear()

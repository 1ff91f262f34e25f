"""Memory without names: memfds, allocated with all pages or not at all, and passed over Unix sockets.

A memfd has no path, so no file is left behind and no other process can open it; a process that receives the descriptor
can map it. All pages are allocated at once: a shortage of memory is an error then, not a SIGBUS later. Does not import
torch, so that the engine can keep segments without it.
"""

from __future__ import annotations

import array
import errno
import json
import os
import socket
from typing import Any

import psutil

from distbelief.controlgroups import own_memory_room
from distbelief.errors import NotEnoughMemory

_HEADER_LIMIT = 1 << 16
_MAX_FDS = 4


def allocate(size_bytes: int, label: str) -> int:
    """Make a memfd of this size with all pages. Raises an error with a clear message if memory does not suffice."""
    free_bytes = require_memory(label, size_bytes)
    fd = os.memfd_create(label, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, max(size_bytes, 1))
        os.posix_fallocate(fd, 0, max(size_bytes, 1))
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
            raise _not_enough(label, size_bytes, free_bytes) from error
        raise
    return fd


def require_memory(label: str, size_bytes: int) -> int:
    """Returns the free bytes; raises an error if they are fewer than `size_bytes`."""
    free_bytes = free_memory_bytes()
    if size_bytes > free_bytes:
        raise _not_enough(label, size_bytes, free_bytes)
    return free_bytes


def _not_enough(label: str, size_bytes: int, free_bytes: int) -> NotEnoughMemory:
    return NotEnoughMemory(
        f"not enough memory for {label}: {size_bytes / 2**30:.2f} GiB are needed, "
        f"{max(free_bytes, 0) / 2**30:.2f} GiB are free",
        hint="use fewer workers, a smaller model or an optimizer with less state, or a machine with more memory",
    )


def free_memory_bytes() -> int:
    """The bytes that can be allocated: the machine's free memory, or what is left of a container's limit if that is
    less.

    One sixteenth of the machine's memory stays free, because a machine without any free memory kills processes instead
    of refusing.
    """
    memory = psutil.virtual_memory()
    free = int(memory.available) - int(memory.total) // 16
    room = own_memory_room()
    return free if room is None else min(free, room.free)


def send_message(sock: socket.socket, header: dict[str, Any], fds: list[int] | None = None) -> None:
    """Send a JSON header, and descriptors if given, over a SOCK_SEQPACKET socket (which keeps message boundaries)."""
    data = json.dumps(header).encode()
    if len(data) > _HEADER_LIMIT:
        raise ValueError(f"a header of {len(data)} bytes is over the limit of {_HEADER_LIMIT}")
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], ancillary)


def receive_message(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive a message of `send_message`. Raises EOFError when the sender is gone, ValueError for an invalid
    header."""
    fds = array.array("i")
    data, ancillary, _, _ = sock.recvmsg(
        _HEADER_LIMIT, socket.CMSG_SPACE(_MAX_FDS * fds.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if not data:
        raise EOFError("the other side closed the connection")
    try:
        header = json.loads(data)
        if not isinstance(header, dict):
            raise ValueError("a header is an object")
    except (ValueError, RecursionError) as error:
        for fd in fds:
            os.close(fd)
        raise ValueError("what came over a socket is no header") from error
    return header, list(fds)

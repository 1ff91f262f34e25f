"""A loopback relay between each worker and the coordinator that can be cut: bytes stop, but no connection is closed.

Both ends see the same as with a broken network. One thread moves the bytes of all connections; it does not interpret
them. The coordinator may return at another address: `moved` sets the target of new connections.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

CHUNK_BYTES = 1 << 16


@dataclass(eq=False)
class _End:
    """One socket of a connection; `waiting` has bytes from the other end that this socket could not take yet."""

    line: _Line
    sock: socket.socket
    other: _End | None = None
    waiting: bytes = b""


@dataclass(eq=False)
class _Line:
    """All connections of one worker."""

    worker: int
    listener: socket.socket
    ends: list[_End] = field(default_factory=list)
    cut: bool = False


class Relay:
    """A context manager; the engine calls `dial` for each worker's address."""

    def __init__(self) -> None:
        # the engine and the injector call from other threads; the relay's thread holds it while it moves bytes
        self._lock = threading.Lock()
        self._lines: dict[int, _Line] = {}
        self._upstream = ""
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._over = False
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._interrupt()
        self._thread.join()
        for line in self._lines.values():
            line.listener.close()
            for end in line.ends:
                end.sock.close()
        self._selector.close()
        os.close(self._wake)

    def dial(self, worker: int, address: str) -> str:
        """The address to which a worker shall connect instead of the coordinator's own."""
        with self._lock:
            self._upstream = address
            if worker not in self._lines:
                listener = socket.create_server(("127.0.0.1", 0))
                listener.setblocking(False)
                self._lines[worker] = _Line(worker, listener)
                self._update(self._lines[worker])
            host, port = self._lines[worker].listener.getsockname()
        self._interrupt()
        return f"tcp://{host}:{port}"

    def moved(self, address: str) -> None:
        with self._lock:
            self._upstream = address

    def cut(self, worker: int) -> bool:
        """Stop all bytes in both directions. False: the worker has no connection through this relay."""
        return self._set(worker, True)

    def mend(self, worker: int) -> bool:
        return self._set(worker, False)

    def _set(self, worker: int, cut: bool) -> bool:
        with self._lock:
            line = self._lines.get(worker)
            if line is None:
                return False
            line.cut = cut
            self._update(line)
        self._interrupt()
        return True

    def _interrupt(self) -> None:
        """Wake the thread up: the set of sockets that it waits on has changed."""
        os.eventfd_write(self._wake, 1)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over:
            ready = self._selector.select()
            with self._lock:
                for key, events in ready:
                    self._serve(key.data, events)

    def _serve(self, item: Any, events: int) -> None:
        if item is None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        elif isinstance(item, _Line):
            if not item.cut:
                self._accept(item)
        elif item in item.line.ends and not item.line.cut:  # otherwise it was closed or cut after it was found ready
            try:
                self._flow(item, events)
            except OSError:
                self._close(item)

    def _accept(self, line: _Line) -> None:
        try:
            near, _ = line.listener.accept()
        except OSError:  # the worker has given up already
            return
        parts = urlsplit(self._upstream)
        try:
            far = socket.create_connection((parts.hostname, parts.port), timeout=1.0)
        # nothing listens there: the worker sees its connection close, as without a relay, and tries again
        except OSError:
            near.close()
            return
        pair = [_End(line, near), _End(line, far)]
        for end, other in (pair, reversed(pair)):
            end.other = other
            end.sock.setblocking(False)
            end.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.ends += pair
        self._update(line)

    def _flow(self, end: _End, events: int) -> None:
        assert end.other is not None
        if events & selectors.EVENT_WRITE and end.waiting:
            end.waiting = end.waiting[end.sock.send(end.waiting) :]
        if events & selectors.EVENT_READ and not end.other.waiting:
            data = end.sock.recv(CHUNK_BYTES)
            if not data:
                self._close(end)
                return
            end.other.waiting = data
            with contextlib.suppress(BlockingIOError):
                end.other.waiting = data[end.other.sock.send(data) :]
        self._update(end.line)

    def _close(self, end: _End) -> None:
        for one in (end, end.other):
            assert one is not None
            self._watch(one.sock, 0, one)
            one.sock.close()
            end.line.ends.remove(one)

    def _update(self, line: _Line) -> None:
        """Register the sockets that can make progress: none of a cut worker; no input for an end whose buffer is
        full."""
        self._watch(line.listener, 0 if line.cut else selectors.EVENT_READ, line)
        for end in line.ends:
            assert end.other is not None
            wanted = selectors.EVENT_WRITE if end.waiting else 0
            wanted |= 0 if end.other.waiting else selectors.EVENT_READ
            self._watch(end.sock, 0 if line.cut else wanted, end)

    def _watch(self, sock: socket.socket, events: int, item: object) -> None:
        watched = sock in self._selector.get_map()
        if events and watched:
            self._selector.modify(sock, events, item)
        elif events:
            self._selector.register(sock, events, item)
        elif watched:
            self._selector.unregister(sock)

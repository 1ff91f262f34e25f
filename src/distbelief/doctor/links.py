"""Measures the link between two hosts: the time of a round trip, and the bytes per second.

It uses plain TCP, like gloo's tensors. A connecting host first sends a token, which it has from the leader.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import statistics
import struct
import threading
import time

from distbelief.control.addresses import bracketed, split
from distbelief.control.unreachable import attempt
from distbelief.doctor.rules.report import Link

TOKEN_BYTES = 32
ROUND_TRIPS = 20
ENOUGH_S = 0.2
"""A transfer of this duration, with many round trips, has reached its final speed."""
MOST_BYTES = 64 << 20
_FIRST_BYTES = 64 << 10
_LIMIT_S = 15.0
_TOKEN_S = 2.0
_ASK = struct.Struct(">cQ")  # (p)ing, (t)ake or (g)ive this number of bytes
_CHUNK = bytes(256 << 10)


class MeasuringServer:
    """Lets other hosts with the token measure the link to this host, one at a time. A context manager."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self.address = f"{bracketed(address)}:{self._listener.getsockname()[1]}"
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> MeasuringServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # closed
                return
            with peer, contextlib.suppress(OSError):
                peer.settimeout(_TOKEN_S)
                if hmac.compare_digest(_exactly(peer, TOKEN_BYTES), self.token):
                    peer.settimeout(_LIMIT_S)
                    _answer(peer)


def _answer(peer: socket.socket) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.sendall(b"k")
    while True:
        what, size = _ASK.unpack(_exactly(peer, _ASK.size))
        if size > MOST_BYTES:
            return
        if what == b"t":
            _take(peer, size)
        if what == b"g":
            _give(peer, size)
        else:
            peer.sendall(b"k")


def measure(here: str, there: str, address: str, token: bytes) -> list[Link]:
    """Measure the link to a host and back. An unreachable host gives one link with the error."""
    host, port = split(address)
    tried = attempt(host, int(port))
    if tried.what != "open":
        return [Link(here, there, error=str(tried))]
    try:
        with socket.create_connection((host, int(port)), timeout=_LIMIT_S) as line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.sendall(token)
            _exactly(line, 1)
            latency_s = statistics.median(_asked_s(line, b"p", 0) for _ in range(ROUND_TRIPS))
            to, back = (_bytes_per_s(line, what, latency_s) for what in (b"t", b"g"))
    except OSError as error:
        return [Link(here, there, error=f"{address}: {error.strerror or error}")]
    return [Link(here, there, latency_s, to), Link(there, here, latency_s, back)]


def _bytes_per_s(line: socket.socket, what: bytes, latency_s: float) -> float:
    """Transfer growing amounts, until the slow start of a connection does not count any more."""
    size, enough_s = _FIRST_BYTES, max(ENOUGH_S, 10 * latency_s)
    while True:
        took_s = max(_asked_s(line, what, size) - latency_s, 1e-6)
        if took_s >= enough_s or 4 * size > MOST_BYTES:
            return size / took_s
        size *= 4


def _asked_s(line: socket.socket, what: bytes, size: int) -> float:
    before = time.perf_counter()
    line.sendall(_ASK.pack(what, size))
    if what == b"t":
        _give(line, size)
    if what == b"g":
        _take(line, size)
    else:
        _exactly(line, 1)
    return time.perf_counter() - before


def _give(to: socket.socket, size: int) -> None:
    while size:
        part = memoryview(_CHUNK)[:size]
        to.sendall(part)
        size -= len(part)


def _take(source: socket.socket, size: int) -> None:
    room = memoryview(bytearray(len(_CHUNK)))
    while size:
        got = source.recv_into(room[:size])
        if not got:
            raise ConnectionError("it hung up")
        size -= got


def _exactly(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = source.recv(size - len(data))
        if not more:
            raise ConnectionError("it hung up")
        data += more
    return data

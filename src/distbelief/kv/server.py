"""A server process of a key-value service. The warm process (launch/zygote.py) forks it and calls `run`."""

from __future__ import annotations

import signal
import socket as sockets
from typing import Any

import msgspec
import torch
import zmq
from msgspec import Struct

from distbelief.control.credentials import Credential
from distbelief.control.messages import EXIT_REPORTED
from distbelief.kv.catalogue import Catalogue
from distbelief.kv.keyslice import KeySlice
from distbelief.kv.messages import CATALOGUE, MESSAGES
from distbelief.strategies.ps.server.sockets import ServerSockets
from distbelief.strategies.ps.server.stores import SliceStore
from distbelief.transport.shm.segment import Segment, SegmentClient

SHARED_FROM = 1 << 16
"""Values of at least this size lie in memory that clients can map: each takes a descriptor and a mapping."""
MAPPED_BYTES = 1 << 30
"""At most this much of the clients' buffers stays mapped (or one buffer), so that buffers of dead clients are freed."""


class ServerSpec(Struct, frozen=True):
    worker: int
    """The number of the server."""
    host: str
    address: str
    credential: Credential
    slices: int
    room: int
    """Bytes for the values of all servers together."""
    shares: bool


class _Space:
    def __init__(self, server: int, segments: SegmentClient | None) -> None:
        self._server = server
        self._segments = segments
        self._made = 0
        self._mapped: dict[str, Segment] = {}

    def make(self, size_bytes: int) -> tuple[torch.Tensor, str]:
        if self._segments is None or size_bytes < SHARED_FROM:
            return torch.empty(size_bytes, dtype=torch.uint8), ""
        self._made += 1
        name = f"server {self._server}/{self._made}"
        return self._segments.segment(name, size_bytes).tensor(torch.uint8, 0, size_bytes), name

    def release(self, name: str) -> None:
        assert self._segments is not None
        self._segments.drop(name)

    def open(self, name: str) -> Segment:
        assert self._segments is not None, "a client names shared memory where there is none"
        found = self._mapped.pop(name, None) or self._segments.segment(name)
        self._mapped[name] = found  # keep the order of use: the last used is unmapped last
        while len(self._mapped) > 1 and sum(one.size_bytes for one in self._mapped.values()) > MAPPED_BYTES:
            del self._mapped[next(iter(self._mapped))]
        return found


class _Slices:
    messages = MESSAGES

    def __init__(self, spec: ServerSpec, segments: SegmentClient) -> None:
        self.life = self.sealed = 0
        self.sizes = [0] * (spec.slices + 1)
        self._catalogue = (spec.slices, spec.room)
        self._space = _Space(spec.worker, segments if spec.shares else None)

    def make(self, number: int, first: bool) -> tuple[SliceStore, str]:
        return Catalogue(*self._catalogue) if number == CATALOGUE else KeySlice(self._space), ""

    def began(self) -> None:
        pass

    def facts(self) -> dict[str, str]:
        return {}


def run(spec: dict[str, Any], segments: sockets.socket) -> int:
    """Run a server until it ends. Returns its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches every process; the supervisor decides
    torch.set_num_threads(1)  # one per server: then bits do not depend on the machine
    known = msgspec.convert(spec, ServerSpec)
    with zmq.Context() as context:
        server = ServerSockets(known, context)
        try:
            server.serve(_Slices(known, SegmentClient(segments)))
        except BaseException as error:
            server.fail(error)
            return EXIT_REPORTED
        finally:
            server.close()
    return 0

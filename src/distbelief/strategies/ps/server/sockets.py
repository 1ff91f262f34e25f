"""The sockets of a parameter server: one thread with one poll loop.

Clients and other servers connect to one socket. The server itself connects to the coordinator (or, outside of runs, to
the supervisor that makes the maps), and to each other server. node.py decides what a message does, and `Slices` says
which slices there are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import zmq

from distbelief.control.addresses import own_address, tcp
from distbelief.control.connectionlimit import ConnectionLimit
from distbelief.control.credentials import Credential
from distbelief.control.fitting import MOST_DETAILS, MOST_MESSAGE, cut, text_of
from distbelief.control.messages import (
    EXIT_REPORTED,
    EndRun,
    Event,
    Introduce,
    Serve,
    ServerBeat,
    ServerFailed,
    ServerMap,
    ServerReady,
    SliceCopied,
    decode_command,
    encode,
)
from distbelief.control.signatures import MALFORMED, UNSIGNED, WRONG_SENDER, Refusals, Refused
from distbelief.control.sockets import dial, dial_server, protect_server
from distbelief.errors import DistBeliefError
from distbelief.strategies.base import ServerHost
from distbelief.strategies.ps.protocol.frames import Framed, MessageSet, may_say, pack
from distbelief.strategies.ps.server.node import Outgoing, ServerNode
from distbelief.strategies.ps.server.stores import SliceStore
from distbelief.transport.shm.memfd import free_memory_bytes

BEAT_S = 0.2
REMIND_S = 0.5
WAITING_MESSAGES = 1000
"""The limit per sender. Further messages wait in the sender's memory."""
LEAST_MESSAGE_BYTES = 1 << 30


class ServerIdentity(Protocol):
    """Which server this is, and the address of the coordinator or supervisor."""

    @property
    def worker(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def credential(self) -> Credential: ...


class Slices(Protocol):
    """The slices that a server can be given."""

    messages: MessageSet
    """The messages that clients exchange with these slices."""
    life: int
    sealed: int
    """The newest checkpoint of the run, by the map."""
    sizes: list[int]
    """The size of each slice in bytes, for balancing."""

    def make(self, number: int, first: bool) -> tuple[SliceStore, str]:
        """See `node.Make`."""

    def began(self) -> None:
        """All slices of a new map are made."""

    def facts(self) -> dict[str, str]:
        """The facts that the coordinator compares with the workers', such as versions and threads."""


def most_frame_bytes(free_bytes: int, slice_bytes: Sequence[int]) -> int:
    """The longest frame that a server takes. The sender of a longer one is disconnected unheard, so the limit leaves
    room for all that another server or a worker sends of a slice.

    >>> most_frame_bytes(3 << 30, [5 << 30, 1 << 20]) >> 30, most_frame_bytes(64 << 30, [1 << 20]) >> 30
    (10, 16)
    """
    return max(LEAST_MESSAGE_BYTES, free_bytes // 4, 2 * max(slice_bytes, default=0))


class ServerSockets:
    def __init__(self, spec: ServerIdentity, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._spec = spec
        self._server_key = spec.credential.servers_key
        self._signer = spec.credential.signer()
        self._to_peers = spec.credential.signer_to_servers()
        self._verifier = spec.credential.verifier()
        self._refusals = Refusals()
        self._context = context
        self._coordinator = context.socket(zmq.DEALER)
        self._coordinator.setsockopt(zmq.LINGER, 2000)
        dial(self._coordinator, spec.address, spec.credential.coordinator_key)
        self._inbox = context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.LINGER):
            self._inbox.setsockopt(option, 0)
        self._inbox.setsockopt(zmq.RCVHWM, WAITING_MESSAGES)
        self._limit: ConnectionLimit | None = None
        self._peers: dict[int, zmq.Socket[bytes]] = {}
        self._map: ServerMap | None = None
        self._epoch = 0
        self._ended = False
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))

    def _listen(self, slices: Slices) -> tuple[str, ConnectionLimit]:
        """Bind the inbox. Returns its address."""
        self._inbox.setsockopt(zmq.MAXMSGSIZE, most_frame_bytes(free_memory_bytes(), slices.sizes))
        listen = tcp(own_address(self._spec.address))
        protect_server(self._inbox, listen, self._spec.credential.server_keys())
        if "[" in listen:
            self._inbox.setsockopt(zmq.IPV6, 1)
        self._inbox.bind(listen)
        self._limit = ConnectionLimit(self._inbox, self._refusals)
        address = self._inbox.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(address, bytes)
        return address.rstrip(b"\0").decode(), self._limit

    def serve(self, slices: Slices) -> None:
        node = ServerNode(self._spec.worker, slices.make)
        address, limit = self._listen(slices)
        ready = ServerReady(self._spec.worker, self._spec.host, os.getpid(), address, slices.sizes, slices.facts())
        self._tell(ready)
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(limit.events, zmq.POLLIN)
        poller.register(self._coordinator, zmq.POLLIN)
        next_beat = next_reminder = time.monotonic()
        while not self._ended:
            there = dict(poller.poll(int(BEAT_S * 1000 / 2)))
            if self._coordinator in there:
                for command in self._commands():
                    if isinstance(command, Introduce):
                        self._tell(ready)
                    elif isinstance(command, Serve):
                        slices.life, slices.sealed = command.map.life, command.map.sealed
                        self._map = command.map
                        self._hang_up()
                        self._send(node.learn(command.map))
                        slices.began()
            if self._inbox in there:
                self._receive(node, slices.messages, limit)
            if limit.events in there:
                limit.enforce()
            now = time.monotonic()
            if now >= next_reminder:
                next_reminder = now + REMIND_S
                self._send(node.remind())
            if news := self._refusals.news(now):
                print(news, flush=True)
            if now >= next_beat:
                next_beat = now + BEAT_S
                self._tell(ServerBeat(self._spec.worker, self._epoch, node.version))

    def _commands(self) -> list[Any]:
        found: list[Any] = []
        while True:
            try:
                frames = self._coordinator.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return found
            with contextlib.suppress(msgspec.MsgspecError):
                command = decode_command(frames[-1])
                if command.epoch < self._epoch:
                    continue  # an older coordinator that does not know it was replaced
                self._epoch = command.epoch
                self._ended |= isinstance(command, EndRun)
                found.append(command)

    def _receive(self, node: ServerNode, messages: MessageSet, limit: ConnectionLimit) -> None:
        """Take all waiting messages, then send all answers: in as few ZeroMQ messages as possible."""
        out = Outgoing()
        for _ in range(1000):
            try:
                identity, *frames = self._inbox.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            try:
                several = self._checked(frames, messages)
            except Refused as refused:
                self._refusals.add(refused.reason)
                continue
            limit.authenticated(identity)
            for framed in several:
                out.add(node.receive(framed, identity.bytes))
        self._send(out)

    def _checked(self, frames: list[zmq.Frame], messages: MessageSet) -> list[Framed]:
        if len(frames) < 2:
            raise Refused(UNSIGNED)
        sender = self._verifier.verify(frames[0].bytes, frames[1].buffer)
        try:
            several = messages.unpack_for_server(frames[1:])
        except (msgspec.MsgspecError, DistBeliefError):
            raise Refused(MALFORMED) from None
        if not all(may_say(sender, framed.message) for framed in several):
            raise Refused(WRONG_SENDER)
        return several

    def _send(self, out: Outgoing) -> None:
        for identity, several in _by_addressee(out.clients).items():
            with contextlib.suppress(zmq.ZMQError):  # the client is gone
                self._inbox.send_multipart([identity, *pack(several)], zmq.NOBLOCK, copy=False)
        for server, several in _by_addressee(out.servers).items():
            socket = self._peer(server)
            if socket is not None:
                socket.send_multipart(pack(several, self._to_peers), zmq.NOBLOCK, copy=False)
        for number, recruit, version in out.copied:
            self._tell(SliceCopied(self._spec.worker, number, recruit, version))

    def _peer(self, server: int) -> zmq.Socket[bytes] | None:
        address = self._map.addresses.get(server) if self._map else None
        if address is None:
            return None
        if server not in self._peers:
            socket = self._context.socket(zmq.DEALER)
            for option in (zmq.SNDHWM, zmq.LINGER):
                socket.setsockopt(option, 0)
            dial_server(socket, address, self._server_key)
            self._peers[server] = socket
        return self._peers[server]

    def _hang_up(self) -> None:
        """Disconnect from servers that the map does not name any more."""
        assert self._map is not None
        for server in [one for one in self._peers if one not in self._map.addresses]:
            self._peers.pop(server).close(linger=0)

    def _tell(self, event: Event) -> None:
        message = encode(event)
        with contextlib.suppress(zmq.Again):
            self._coordinator.send_multipart([self._signer.sign(message), message], zmq.NOBLOCK)

    def fail(self, error: BaseException) -> None:
        traceback.print_exc()
        log = f"logs/server-{self._spec.worker}.log"
        message, hint = f"{type(error).__name__}: {text_of(error)}", "see its log in the logs folder of the run"
        details = "".join(traceback.format_exception(error))
        if isinstance(error, DistBeliefError):
            message, hint, details = error.message, error.hint, error.details
        message, details = cut(message, MOST_MESSAGE, log), cut(details, MOST_DETAILS, log)
        self._tell(ServerFailed(self._spec.worker, self._spec.host, message, hint, details))

    def close(self) -> None:
        if self._limit:
            self._limit.close()
        self._inbox.close(linger=0)
        for socket in self._peers.values():
            socket.close(linger=0)
        self._coordinator.close()
        sys.stdout.flush()


def run_server(host: ServerHost, make: Callable[[ServerHost], Slices]) -> int:
    """The process of a parameter server. `make` loads the job and returns the slices. Returns the exit status."""
    with zmq.Context() as context:
        server = ServerSockets(host, context)
        try:
            server.serve(make(host))
        except BaseException as error:
            server.fail(error)
            return EXIT_REPORTED
        finally:
            server.close()
    return 0


def _by_addressee(several: list[tuple[Any, Framed]]) -> dict[Any, list[Framed]]:
    found: dict[Any, list[Framed]] = {}
    for addressee, framed in several:
        found.setdefault(addressee, []).append(framed)
    return found

"""A worker's client of the parameter servers: it repeats pushes and questions until they are answered.

Messages go to the slice's primary by the newest map. When a newer map names another primary, the client sends all
unanswered messages again, to the new primary; servers apply a change once, however often they receive it
(rules/replication.py). Only the training thread uses a client, except for `learn`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
import zmq

from distbelief.control.credentials import Credential
from distbelief.control.messages import ServerMap
from distbelief.control.sockets import dial_server
from distbelief.errors import DistBeliefError
from distbelief.strategies.ps.protocol.frames import Framed, MessageSet, pack
from distbelief.strategies.ps.protocol.messages import (
    RUN,
    Acknowledged,
    Content,
    NotPrimary,
    Push,
    PushResult,
    Question,
    Update,
)
from distbelief.transport.abort import Aborted

AGAIN_S = 10.0
"""After this time without an answer a message is sent again: it, or the answer, may be lost with a connection."""
LOOK_S = 0.05
"""The interval at which a wait checks whether to give up."""


Idle = Callable[[], float]
"""A callback that runs during waits. It returns the seconds until its next call, and may push and ask."""


class Stop(Protocol):
    def check(self) -> None:
        """Raise `Aborted` if the wait is to be given up."""


@dataclass(frozen=True)
class _Sent:
    framed: Framed
    slice: int
    server: int
    at: float
    each: Callable[[Framed], None] = lambda framed: None
    """Called with the reply, if this is a question."""


class ServerClient:
    def __init__(self, credential: Credential, messages: MessageSet) -> None:
        self._messages = messages
        self._client = credential.number
        self._server_key = credential.servers_key
        self._signer = credential.signer_to_servers()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sockets: dict[int, tuple[str, zmq.Socket[bytes]]] = {}
        self._poller = zmq.Poller()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller.register(self._wake, zmq.POLLIN)
        self._newest: ServerMap | None = None
        self._map: ServerMap | None = None
        self._sequences: dict[int, int] = {}
        """Slice -> the sequence number of the last push. Each slice gets them without gaps."""
        self._tickets = 0
        self._changes: dict[tuple[int, int, int], _Sent] = {}
        """(slice, source, sequence) -> a push without acknowledgement."""
        self._given: dict[tuple[int, int], PushResult | None] = {}
        """(slice, sequence) -> the result that came with the acknowledgement, if `change` waits for it."""
        self._awaited: tuple[int, int] = (-1, -1)
        self._questions: dict[int, _Sent] = {}
        """Ticket -> a question without reply."""
        self._outbox: dict[int, list[Framed]] = {}
        self._looked_at = 0.0
        self.waiting = False

    # --- for any thread ----------------------------------------------------------------------------------------------

    def learn(self, known: ServerMap) -> None:
        if self._newest is None or known.version > self._newest.version:
            self._newest = known
            os.eventfd_write(self._wake, 1)

    @property
    def version(self) -> int:
        return self._newest.version if self._newest else 0

    @property
    def life(self) -> int:
        """The life of the slices: it goes up when all parameters begin anew from a checkpoint."""
        return self._map.life if self._map else 0

    # --- for the training thread -------------------------------------------------------------------------------------

    def restart(self) -> None:
        """A generation begins: forget the messages of the last one that are not answered."""
        self._changes.clear()
        self._questions.clear()
        self._outbox.clear()
        if self._newest is not None:
            self._use(self._newest)

    def slices(self, abort: Stop) -> int:
        """The number of slices. Waits for the first map."""
        self._wait(lambda: self._map is not None, abort)
        assert self._map is not None
        return len(self._map.primaries)

    def push(self, number: int, content: Content, payload: Any = None) -> int:
        """Change a slice. The push is sent by `flush`. `payload` must not change before it is acknowledged. Returns the
        sequence number of the push, for `waits_for`."""
        if isinstance(content, Update):
            source, sequence = RUN, content.update
        else:
            source, sequence = -1, self._sequences.get(number, -1) + 1
            self._sequences[number] = sequence
        message = Push(self._client, sequence, number, content, self.life)
        self._changes[number, source, sequence] = self._queued(Framed(message, payload), number)
        return sequence

    def sent(self, number: int) -> int:
        """The number of pushes to a slice in this client's name."""
        return self._sequences.get(number, -1) + 1

    def waits_for(self, number: int, sequence: int) -> bool:
        """Whether this push of the client is not acknowledged yet."""
        return (number, -1, sequence) in self._changes

    def flush(self) -> None:
        for server, several in self._outbox.items():
            self._send(server, several)
        self._outbox.clear()

    def settle(self, abort: Stop) -> None:
        """Return when all pushes are acknowledged."""
        self._wait(lambda: not self._changes, abort)

    def change(self, number: int, content: Content, abort: Stop) -> PushResult | None:
        """Change a slice, and wait for the result."""
        self.push(number, content)
        self._awaited = (number, self._sequences[number])
        self._wait(lambda: self._awaited in self._given, abort)
        return self._given.pop(self._awaited)

    def ask(
        self, questions: Iterable[Callable[[int], Question]], abort: Stop, each: Callable[[Framed], None],
        idle: Idle | None = None,
    ) -> None:  # fmt: skip
        """Ask, and call `each` with every reply as it comes. `questions` make a question from its ticket."""
        waiting = set()

        def answered(framed: Framed) -> None:
            waiting.discard(framed.message.ticket)
            each(framed)

        for make in questions:
            self._tickets += 1
            waiting.add(self._tickets)
            question = make(self._tickets)
            self._questions[self._tickets] = replace(self._queued(Framed(question), question.slice), each=answered)
        self.flush()
        try:
            self._wait(lambda: not waiting, abort, idle)
        finally:
            for ticket in waiting:  # given up: late replies are dropped
                self._questions.pop(ticket, None)

    def nap(self, seconds: float) -> None:
        """Sleep: there is nothing to do."""
        self.waiting = True
        try:
            time.sleep(seconds)
        finally:
            self.waiting = False

    def close(self) -> None:
        for _, socket in self._sockets.values():
            socket.close(linger=0)
        self._sockets.clear()
        if self._context:
            self._context.destroy(linger=0)
        os.close(self._wake)

    # --- plumbing ----------------------------------------------------------------------------------------------------

    def _queued(self, framed: Framed, number: int) -> _Sent:
        server = self._map.primaries[number] if self._map else -1
        if server >= 0:
            self._outbox.setdefault(server, []).append(framed)
        return _Sent(framed, number, server, time.monotonic())

    def _wait(self, done: Callable[[], bool], abort: Stop, idle: Idle | None = None) -> None:
        self._adopt()
        self.flush()
        idle_at = time.monotonic() if idle else float("inf")
        try:
            while not done():
                abort.check()
                if idle and time.monotonic() >= idle_at:
                    self.waiting = False
                    idle_at = idle() + time.monotonic()
                    continue
                self.waiting = True
                ready = self._poller.poll(int(1000 * max(min(LOOK_S, idle_at - time.monotonic()), 0.0)) + 1)
                for source, _ in ready:
                    if source == self._wake:
                        with contextlib.suppress(BlockingIOError):
                            os.eventfd_read(self._wake)
                    else:
                        self._receive(source)
                self._adopt()
                now = time.monotonic()
                if now - self._looked_at > LOOK_S:
                    self._looked_at = now
                    self._send_again(now - AGAIN_S)
        finally:
            self.waiting = False

    def _receive(self, socket: Any) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                several = self._messages.unpack_for_client(frames)
            except (msgspec.MsgspecError, DistBeliefError):
                continue  # not a message of this protocol
            for framed in several:
                match framed.message:
                    case Acknowledged(slice=number, sequence=sequence, source=source, given=given):
                        self._changes.pop((number, source, sequence), None)
                        if source < 0 and (number, sequence) == self._awaited:
                            self._given[self._awaited] = given
                    case NotPrimary(slice=number):
                        self._refused(number)
                    case _:
                        if sent := self._questions.pop(framed.message.ticket, None):
                            sent.each(framed)

    def _refused(self, number: int) -> None:
        """A server refused: it, or this client, has an old map and will get a newer one. Repeat the slice's messages
        after a moment."""
        long_ago = time.monotonic() - AGAIN_S + LOOK_S
        everything: list[dict[Any, _Sent]] = [self._changes, self._questions]
        for waiting in everything:
            waiting.update({key: replace(one, at=long_ago) for key, one in waiting.items() if one.slice == number})

    def _adopt(self) -> None:
        """Adopt the newest map, and repeat unanswered messages to slices with a new primary."""
        known = self._newest
        if known is None or known is self._map:
            return
        begins_anew = self._map is not None and known.life != self._map.life
        self._use(known)
        if begins_anew:
            self._changes.clear()
            self._questions.clear()
            self._outbox.clear()
            raise Aborted("the parameters begin anew from a checkpoint")
        self._send_again(float("inf"), moved_only=True)

    def _use(self, known: ServerMap) -> None:
        self._map = known
        for server in [one for one in self._sockets if one not in known.addresses]:
            _, socket = self._sockets.pop(server)
            self._poller.unregister(socket)
            socket.close(linger=0)

    def _send_again(self, before: float, moved_only: bool = False) -> None:
        assert self._map is not None or not (self._changes or self._questions)
        now = time.monotonic()
        several: dict[int, list[Framed]] = {}
        everything: list[dict[Any, _Sent]] = [self._changes, self._questions]
        for waiting in everything:
            for key, sent in waiting.items():
                assert self._map is not None
                server = self._map.primaries[sent.slice]
                if server < 0 or (moved_only and server == sent.server) or sent.at > before:
                    continue
                waiting[key] = replace(sent, server=server, at=now)
                several.setdefault(server, []).append(sent.framed)
        for server, some in several.items():
            self._send(server, some)

    def _send(self, server: int, several: Sequence[Framed]) -> None:
        socket = self._socket(server)
        if socket is not None:
            with contextlib.suppress(zmq.Again):  # it will be sent again
                socket.send_multipart(pack(several, self._signer), zmq.NOBLOCK, copy=False)

    def _socket(self, server: int) -> zmq.Socket[bytes] | None:
        address = self._map.addresses.get(server) if self._map else None
        if address is None:
            return None
        if server not in self._sockets:
            if self._context is None:
                self._context = zmq.Context()  # a context must not be made before the fork of the worker
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            dial_server(socket, address, self._server_key)
            self._poller.register(socket, zmq.POLLIN)
            self._sockets[server] = (address, socket)
        return self._sockets[server][1]

"""Where the members of torch groups meet: a few keys and values, for members alone.

torch's own store (TCPStore) asks nobody who he is: whoever reaches its port can read where members listen, and name
other addresses instead. This one listens on an encrypted socket (CURVE) and verifies the signatures of messages. It
runs in a process of its own, so that no member's death takes it away.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import msgspec
import zmq

from distbelief.control.connectionlimit import ConnectionLimit
from distbelief.control.credentials import Credential
from distbelief.control.signatures import MALFORMED, UNSIGNED, Refusals, Refused, Verifier
from distbelief.control.sockets import protect
from distbelief.transport.gloo.rendezvousmessages import (
    Add,
    Found,
    Look,
    Put,
    Remove,
    Request,
    Swap,
    Want,
    decode_request,
    encode,
)

MAX_MESSAGE_BYTES = 1 << 20
KEPT = 100_000
"""Keys; the oldest go first. A generation of a hundred members has some hundreds."""
WAITING = 10_000


class Place:
    """The keys, and who waits for them. Without its socket."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}
        self._waiting: dict[bytes, Want] = {}
        """By the identity of the asker, which waits for one answer at a time."""

    def hear(self, asker: bytes, request: Request) -> list[tuple[bytes, Found]]:
        """Whom to tell what."""
        match request:
            case Put(ticket, key, value):
                return [(asker, Found(ticket, [])), *self._put(key, value)]
            case Add(ticket, key, amount):
                total = str(_number(self._kept.get(key, b"0")) + amount).encode()
                return [(asker, Found(ticket, [total])), *self._put(key, total)]
            case Swap(ticket, key, expected, desired):
                there = self._kept.get(key, b"")
                news = self._put(key, desired) if there == expected else []
                return [(asker, Found(ticket, [self._kept.get(key, expected)])), *news]
            case Look(ticket, keys):
                found = [self._kept[key] for key in keys] if self._has(keys) else []
                return [(asker, Found(ticket, found))]
            case Remove(ticket, key):
                gone = self._kept.pop(key, None)
                return [(asker, Found(ticket, [] if gone is None else [gone]))]
            case Want():
                self._waiting.pop(asker, None)
                self._waiting[asker] = request
                if len(self._waiting) > WAITING:
                    del self._waiting[next(iter(self._waiting))]
                return self._answers()

    def _put(self, key: str, value: bytes) -> list[tuple[bytes, Found]]:
        self._kept[key] = value
        if len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        return self._answers()

    def _has(self, keys: list[str]) -> bool:
        return all(key in self._kept for key in keys)

    def _answers(self) -> list[tuple[bytes, Found]]:
        ready = [(asker, want) for asker, want in self._waiting.items() if self._has(want.keys)]
        for asker, _ in ready:
            del self._waiting[asker]
        return [(asker, Found(want.ticket, [self._kept[key] for key in want.keys])) for asker, want in ready]


def _number(text: bytes) -> int:
    try:
        return int(text[:20])
    except ValueError:
        return 0


def serve(host: str, port: int, credential: Credential, listening: Callable[[int], None]) -> None:
    """For ever. `listening` is told the port: that one, if it is free (0: any)."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        protect(socket, credential.server_keys())
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IPV6, int(":" in host))
        where = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        try:
            if not port:
                raise zmq.ZMQError(zmq.EADDRINUSE)
            socket.bind(f"{where}:{port}")
        except zmq.ZMQError:  # somebody else has it now
            port = socket.bind_to_random_port(where)
        listening(port)
        place, verifier, refusals = Place(), credential.verifier(), Refusals()
        with contextlib.closing(ConnectionLimit(socket, refusals)) as limit:
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(limit.events, zmq.POLLIN)
            while True:
                there = dict(poller.poll())
                if socket in there:
                    identity, request = socket.recv(copy=False), _heard(socket.recv_multipart(), verifier, refusals)
                    if request is not None:
                        limit.authenticated(identity)
                        _answer(socket, place.hear(identity.bytes, request))
                if limit.events in there:
                    limit.enforce()
                if news := refusals.news(time.monotonic()):
                    print(news, flush=True)


def _heard(frames: list[bytes], verifier: Verifier, refusals: Refusals) -> Request | None:
    """None: it counts for nothing."""
    try:
        if len(frames) != 2:
            raise Refused(UNSIGNED)
        verifier.verify(frames[0], frames[1])
        return decode_request(frames[1])
    except (Refused, msgspec.MsgspecError) as error:
        refusals.add(error.reason if isinstance(error, Refused) else MALFORMED)
        return None


def _answer(socket: zmq.Socket[bytes], answers: list[tuple[bytes, Found]]) -> None:
    for asker, found in answers:
        with contextlib.suppress(zmq.ZMQError):  # it is gone
            socket.send_multipart([asker, encode(found)], zmq.NOBLOCK)

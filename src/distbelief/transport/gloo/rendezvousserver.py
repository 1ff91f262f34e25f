"""The rendezvous server of torch groups: a table of keys and values where members find each other's addresses.
Torch-free.

torch's own store (TCPStore) authenticates nobody: any process that reaches its port can read where members listen, and
can write other addresses. This server listens on an encrypted socket (CURVE) and verifies the signatures of messages.
It runs in its own process, so that no member's death ends it. Its messages mirror the methods of
torch's `Store` that torch's groups call; a key belongs to a generation.

When the server dies, another one takes its place at the same address, with an empty table. A member whose group is not
complete would then wait for keys that are lost. So every answer names its server, and a request names the server that
the member has used so far; another server answers it at once, and the member gives the group up.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable

import msgspec
import zmq
from msgspec import Struct

from distbelief.control.connectionlimit import ConnectionLimit
from distbelief.control.credentials import Credential
from distbelief.control.messages import Decoder
from distbelief.control.signatures import MALFORMED, TOO_LONG, UNSIGNED, Refusals, Refused, Verifier
from distbelief.control.sockets import protect

MAX_MESSAGE_BYTES = 1 << 20
MAX_KEYS = 100_000
"""The oldest keys are dropped beyond this number. A generation of a hundred members has some hundreds of keys."""
MAX_WAITING = 10_000


class Set(Struct, frozen=True, tag=True):
    ticket: int
    server: str
    """The server that answered the client before; empty: none has."""
    key: str
    value: bytes


class Wait(Struct, frozen=True, tag=True):
    """Answered when all keys have values."""

    ticket: int
    server: str
    keys: list[str]


class Add(Struct, frozen=True, tag=True):
    """Add to a number. Answered with the sum, in decimals."""

    ticket: int
    server: str
    key: str
    amount: int


class Check(Struct, frozen=True, tag=True):
    """Answered at once: with the values of all keys, or with none if a key is missing."""

    ticket: int
    server: str
    keys: list[str]


class Answer(Struct, frozen=True, tag=True):
    ticket: int
    server: str
    """The server's own name. If the request named another one, nothing else in the answer counts."""
    values: list[bytes]


Request = Set | Wait | Add | Check
_encoder = msgspec.msgpack.Encoder()
_requests = Decoder[Request](Request)
_answers = Decoder[Answer](Answer)


def encode(message: Request | Answer) -> bytes:
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """Raises msgspec.MsgspecError for anything else."""
    return _requests.decode(data)


def decode_answer(data: bytes) -> Answer:
    return _answers.decode(data)


class KeyTable:
    """The keys with their values, and the requests that wait for keys. Knows no socket."""

    def __init__(self, server: str) -> None:
        """`server`: a name that no other server has."""
        self._server = server
        self._kept: dict[str, bytes] = {}
        self._waiting: dict[bytes, Wait] = {}
        """The waiting requests, by the client's identity. A client waits for one answer at a time."""

    def hear(self, asker: bytes, request: Request) -> list[tuple[bytes, Answer]]:
        """Returns the answers to send, each with its receiver."""
        if request.server not in ("", self._server):
            return [(asker, self._answer(request, []))]
        match request:
            case Set(key=key, value=value):
                return [(asker, self._answer(request, [])), *self._put(key, value)]
            case Add(key=key, amount=amount):
                total = str(_number(self._kept.get(key, b"0")) + amount).encode()
                return [(asker, self._answer(request, [total])), *self._put(key, total)]
            case Check(keys=keys):
                found = [self._kept[key] for key in keys] if self._has(keys) else []
                return [(asker, self._answer(request, found))]
            case Wait():
                self._waiting.pop(asker, None)
                self._waiting[asker] = request
                if len(self._waiting) > MAX_WAITING:
                    del self._waiting[next(iter(self._waiting))]
                return self._answers()

    def _answer(self, request: Request, values: list[bytes]) -> Answer:
        return Answer(request.ticket, self._server, values)

    def _put(self, key: str, value: bytes) -> list[tuple[bytes, Answer]]:
        self._kept[key] = value
        if len(self._kept) > MAX_KEYS:
            del self._kept[next(iter(self._kept))]
        return self._answers()

    def _has(self, keys: list[str]) -> bool:
        return all(key in self._kept for key in keys)

    def _answers(self) -> list[tuple[bytes, Answer]]:
        ready = [(asker, want) for asker, want in self._waiting.items() if self._has(want.keys)]
        for asker, _ in ready:
            del self._waiting[asker]
        return [(asker, self._answer(want, [self._kept[key] for key in want.keys])) for asker, want in ready]


def _number(text: bytes) -> int:
    try:
        return int(text[:20])
    except ValueError:
        return 0


def serve(host: str, port: int, credential: Credential, listening: Callable[[int], None]) -> None:
    """Serve until the process is killed. `listening` is called with the port: `port` if it is free, else another one
    (0: any)."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        protect(socket, credential.server_keys())
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IPV6, int(":" in host))
        where = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        try:
            if not port:
                raise zmq.ZMQError(zmq.EADDRINUSE)
            socket.bind(f"{where}:{port}")
        except zmq.ZMQError:  # another process has the port now
            port = socket.bind_to_random_port(where)
        listening(port)
        table, verifier, refusals = KeyTable(secrets.token_hex(8)), credential.verifier(), Refusals()
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
                        _answer(socket, table.hear(identity.bytes, request))
                if limit.events in there:
                    limit.enforce()
                if news := refusals.news(time.monotonic()):
                    print(news, flush=True)


def _heard(frames: list[bytes], verifier: Verifier, refusals: Refusals) -> Request | None:
    """The verified request; None if the message is refused."""
    try:
        if len(frames) != 2:
            raise Refused(UNSIGNED)
        sender = verifier.verify(frames[0], frames[1])
        if len(frames[1]) > MAX_MESSAGE_BYTES:
            print(f"dropped a message of {len(frames[1]) / 1e6:.1f} MB of {sender.role} {sender.number}", flush=True)
            raise Refused(TOO_LONG)
        return decode_request(frames[1])
    except (Refused, msgspec.MsgspecError) as error:
        refusals.add(error.reason if isinstance(error, Refused) else MALFORMED)
        return None


def _answer(socket: zmq.Socket[bytes], answers: list[tuple[bytes, Answer]]) -> None:
    for asker, found in answers:
        with contextlib.suppress(zmq.ZMQError):  # the receiver is gone
            socket.send_multipart([asker, encode(found)], zmq.NOBLOCK)

"""What strangers, and members that pretend to be others, throw at a listening socket. Every attack returns how many
frames it has got rid of; it is no failure that the other side hangs up."""

from __future__ import annotations

import contextlib
import json
import socket as sockets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, get_args

import msgspec
import zmq

from distbelief.control import messages as m
from distbelief.control.credentials import Authority
from distbelief.control.signatures import SIGNATURE_BYTES, Signer
from distbelief.coordinator.rules.authorization import FROM_SERVERS, FROM_WORKERS
from distbelief.launch.manualworkers import SOCKET, short_path
from distbelief.strategies.ps.protocol.frames import RUN_MESSAGES, Framed, pack
from tests.fuzz.instances import instance
from tests.fuzz.mutation import garbage, mutated

HANDSHAKE_MS = 400
STUCK_MS = 5000
MOST_CONNECTIONS = 100
NOBODYS = 1_000_000
"""Numbers of workers from here on are nobody's in the run."""
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
_HARMLESS = tuple(one for one in FROM_WORKERS if one not in (m.WorkerJoined, m.WorkerReady))
"""What a worker that nobody let in may say without being let in by it."""


@dataclass
class Attacker:
    """Knows everything, and uses it wrongly."""

    authority: Authority
    random: Random
    context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)
    hanging: list[sockets.socket] = field(default_factory=list)
    """Connections that say nothing."""
    _used: list[zmq.Socket[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        random = self.random
        self.events = [m.encode(instance(random.choice(get_args(m.Event)), random)) for _ in range(300)]
        kinds = (get_args(RUN_MESSAGES.from_clients)[0], *get_args(RUN_MESSAGES.from_servers))
        made = [[instance(random.choice(kinds), random) for _ in range(random.randrange(1, 4))] for _ in range(300)]
        self.letters = [pack([Framed(one) for one in some])[0] for some in made]

    def close(self) -> None:
        for one in self.hanging:
            one.close()
        self.context.destroy(linger=0)

    # --- without a key -----------------------------------------------------------------------------------------------

    def raw(self, host: str, port: int, count: int) -> int:
        """Bytes that are no protocol, or almost that of ZeroMQ."""
        sent = tries = 0
        while sent < count and tries < count:
            tries += 1
            with contextlib.suppress(OSError):
                connection = sockets.create_connection((host, port), timeout=2)
                self.hanging.append(connection)
                for _ in range(self.random.randrange(1, 6)):
                    connection.sendall(self._raw() or b"\0")
                    sent += 1
            while len(self.hanging) > 50:
                self.hanging.pop(self.random.randrange(len(self.hanging))).close()
        return sent

    def _raw(self) -> bytes:
        random = self.random
        frames = b"".join(_framed(garbage(random)) for _ in range(3))
        talk = random.choice((b"", _GREETING, _GREETING + _READY, _GREETING + _READY + frames))
        return random.choice((garbage(random), talk, mutated(talk, [_READY, frames], random)))

    def strangers(self, address: str, count: int) -> int:
        """The protocol without encryption, and with the key of another run."""
        sent = self._frames(address, b"", count // 2, lambda: [garbage(self.random)] * self.random.randrange(1, 4))
        wrong = zmq.curve_keypair()[0]
        return sent + self._frames(address, wrong, count // 2, lambda: [garbage(self.random)] * 2)

    # --- with the right key, unsigned ---------------------------------------------------------------------------------

    def unsigned(self, address: str, server_key: bytes, count: int) -> int:
        """No signature, or one that is no member's."""
        random, stranger = self.random, Signer("owner", 1, b"not the token")

        def frames() -> list[bytes]:
            message = random.choice(self.events)
            signature = random.choice((stranger.sign(message), random.randbytes(SIGNATURE_BYTES), garbage(random), b""))
            return [signature, message, *[garbage(random)] * random.randrange(0, 3)][: random.randrange(1, 4)]

        return self._frames(address, server_key, count, frames)

    def too_large(self, address: str, server_key: bytes, size_bytes: int) -> int:
        return self._frames(address, server_key, 1, lambda: [bytes(SIGNATURE_BYTES), bytes(size_bytes)])

    def replayed(self, address: str, server_key: bytes, signer: Signer, message: bytes, count: int) -> int:
        """The same frames, again and again."""
        frames = [signer.sign(message), message]
        return self._frames(address, server_key, count, lambda: frames)

    # --- with a member's token ---------------------------------------------------------------------------------------

    def member(self, address: str, server_key: bytes, count: int, servers: bool) -> int:
        """Garbage, messages that are almost right, and what others are to say, signed with a credential of the run."""
        random = self.random
        credential = self.authority.worker(NOBODYS + random.randrange(1000))
        signer = credential.signer_to_servers() if servers else credential.signer()
        corpus = self.letters if servers else self.events

        def frames() -> list[bytes]:
            message = random.choice(corpus)
            match random.randrange(3):
                case 0:
                    message = mutated(message, corpus, random)
                case 1:
                    message = garbage(random)
                case _ if not servers and random.random() < 0.5:
                    message = m.encode(self._own(credential.number))
            return [signer.sign(message), message, *[garbage(random)] * (random.randrange(3) if servers else 0)]

        return self._frames(address, server_key, count, frames)

    def _own(self, number: int) -> m.Event:
        event: Any = instance(self.random.choice(_HARMLESS), self.random)
        return msgspec.structs.replace(event, worker=number)

    def claims(self, address: str, server_key: bytes, count: int) -> int:
        """A member speaks in the name of others, and for the run's owner."""
        random, signer = self.random, self.authority.worker(NOBODYS - 1).signer()

        def frames() -> list[bytes]:
            kinds = (m.StopRequested, m.ScaleRequested, m.WorkerExited, m.ServerExited, m.EngineAttached)
            event = instance(random.choice((*kinds, *FROM_SERVERS)), random)
            if random.random() < 0.5:
                event = msgspec.structs.replace(
                    instance(random.choice(FROM_WORKERS), random), worker=random.randrange(4)
                )
            message = m.encode(event)
            return [signer.sign(message), message]

        return self._frames(address, server_key, count, frames)

    # --- plumbing ----------------------------------------------------------------------------------------------------

    def _frames(self, address: str, server_key: bytes, count: int, make: Callable[[], list[bytes]]) -> int:
        """Send so many messages over one connection, as far as it is one. It stays open: what is on its way arrives."""
        socket = self.context.socket(zmq.DEALER)
        self._used.append(socket)
        if len(self._used) > MOST_CONNECTIONS:
            self._used.pop(0).close(linger=0)
        socket.setsockopt(zmq.SNDTIMEO, HANDSHAKE_MS)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing waits for a connection that is refused
        if server_key:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = server_key
        socket.connect(address)
        sent = 0
        with contextlib.suppress(zmq.Again):
            for _ in range(count):
                socket.send_multipart(make())
                sent += 1
                if sent == 1:
                    socket.setsockopt(zmq.SNDTIMEO, STUCK_MS)  # it is connected; now it may take its time
                while socket.poll(0):  # what it is answered is nobody's
                    socket.recv_multipart()
        return sent

    def join_socket(self, run_dir: Path, count: int) -> int:
        """The Unix socket of guests, as its owner could misuse it."""
        random, sent = self.random, 0
        said = [
            json.dumps({"worker": 7, "secret": "00" * 32}).encode(),
            json.dumps({"worker": "x", "secret": 5}).encode(),
            b'{"worker": 1e400, "secret": "zz"}',
            b"[" * 60000,
        ]
        for _ in range(count):
            with contextlib.suppress(OSError), sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET) as guest:
                guest.settimeout(5)
                with short_path(run_dir) as folder:
                    guest.connect(f"{folder}/{SOCKET}")
                guest.send(mutated(random.choice(said), said, random) or b"x")
                sent += 1
                assert guest.recv(100) == b"", "a guest that nobody knows was let in"
        return sent


def _framed(data: bytes) -> bytes:
    """As a ZeroMQ frame, with another to come or none."""
    return b"\x00" + bytes([len(data)]) + data if len(data) < 256 else b"\x02" + len(data).to_bytes(8, "big") + data

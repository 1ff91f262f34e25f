"""The sockets between doctors, and to a run's coordinator: only who has the key is heard."""

from __future__ import annotations

import contextlib
import hmac
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

from distbelief.comm.commands import RunFacts
from distbelief.comm.events import FactsAsked
from distbelief.comm.messages import SECRET_BYTES
from distbelief.comm.network import dial, protect
from distbelief.comm.reaching import reach, unanswered
from distbelief.coordinator.client import whereabouts
from distbelief.doctor import words
from distbelief.doctor.clock import Exchange
from distbelief.errors import DistBeliefError

ANSWER_S = 10.0
PATIENCE_S = 10.0
"""Doctors may be started on all hosts at once: who leads may not listen yet."""
EXCHANGES = 8
_KEY_HINT = "a key is 64 hexadecimal digits in a file with mode 0600; all hosts need the same one"


class Line:
    """From here to who leads, or to a coordinator. A context manager."""

    def __init__(self, endpoint: str, secret: bytes) -> None:
        self.endpoint = endpoint
        self._secret = secret
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, words.MOST_BYTES)
        dial(self._socket, endpoint, secret)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy()

    def send(self, message: words.ToLeader) -> None:
        self._socket.send_multipart([self._secret, words.encode(message)])

    def hear(self, limit_s: float | None = None) -> words.FromLeader:
        """What comes next. Raises an error that explains why nothing does."""
        until = time.monotonic() + (ANSWER_S if limit_s is None else limit_s)
        while (left_s := until - time.monotonic()) > 0:
            if self._socket.poll(int(left_s * 1000) + 1):
                with contextlib.suppress(msgspec.MsgspecError):  # what is no word of ours is not for us
                    return words.decode_from_leader(self._socket.recv_multipart()[-1])
        raise unanswered(self.endpoint, self._secret, "who listens")

    def ask(self) -> tuple[RunFacts | words.Gathering, list[Exchange]]:
        """Who is there, and what its clock says, several times."""
        exchanges = []
        for number in range(EXCHANGES):
            asked = time.time()
            self.send(FactsAsked(number))
            answer = self._answer_to(number)
            exchanges.append(Exchange(asked, answer.now, time.time()))
        return answer, exchanges

    def _answer_to(self, number: int) -> RunFacts | words.Gathering:
        while True:
            answer = self.hear()
            if isinstance(answer, RunFacts | words.Gathering) and answer.number == number:
                return answer


class Door:
    """Where the leader is reached. A context manager."""

    def __init__(self, listen: str, secret: bytes) -> None:
        self._secret = secret
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, words.MOST_BYTES)
        self._socket.setsockopt(zmq.IPV6, "[" in listen)
        protect(self._socket, listen, secret)
        try:
            self._socket.bind(listen)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise DistBeliefError(f"cannot listen on {listen}: {error}", hint="give another port, or none") from error
        address = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(address, bytes)
        self.address = address.rstrip(b"\0").decode()

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()  # what was said last gets out

    def send(self, to: bytes, message: words.FromLeader) -> None:
        with contextlib.suppress(zmq.ZMQError):  # it is gone
            self._socket.send_multipart([to, words.encode(message)], zmq.NOBLOCK)

    def heard(self, limit_s: float) -> Iterator[tuple[bytes, words.ToLeader]]:
        """What is there, after so long at most."""
        if not self._socket.poll(int(limit_s * 1000)):
            return
        while self._socket.poll(0):
            identity, *frames = self._socket.recv_multipart()
            if len(frames) == 2 and hmac.compare_digest(frames[0], self._secret):
                with contextlib.suppress(msgspec.MsgspecError):
                    yield identity, words.decode_to_leader(frames[1])


def way_in(where: str, key: Path | None) -> tuple[str, bytes]:
    """The endpoint and the secret of what a person named: a run directory, or HOST:PORT and a key file."""
    if key is None:
        if not Path(where).is_dir():
            raise DistBeliefError(f"to join {where} a key is needed", hint=f"give --key FILE: {_KEY_HINT}")
        endpoint, digits = whereabouts(Path(where))
        return reach(endpoint), bytes.fromhex(digits)
    secret = read_key(key)
    return reach(where, PATIENCE_S), secret


def read_key(path: Path) -> bytes:
    try:
        if path.stat().st_mode & 0o077:
            raise DistBeliefError(f"others may read the key file {path}", hint=f"chmod 600 {path}")
        secret = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no hexadecimal number"
        raise DistBeliefError(f"cannot read the key file {path}: {why}", hint=_KEY_HINT) from error
    if len(secret) != SECRET_BYTES:
        raise DistBeliefError(f"the key in {path} has {len(secret)} bytes, not {SECRET_BYTES}", hint=_KEY_HINT)
    return secret

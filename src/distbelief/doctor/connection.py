"""Sockets between doctors, and to a run's coordinator. Messages without the key's signature are dropped."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

from distbelief.control.commands import RunFacts
from distbelief.control.credentials import Authority, KeyAuthority
from distbelief.control.events import FactsAsked
from distbelief.control.keyfiles import required_key, run_secret
from distbelief.control.signatures import Refused
from distbelief.control.sockets import dial, protect
from distbelief.control.unreachable import reach, unanswered
from distbelief.coordinator.client import whereabouts
from distbelief.doctor import messages
from distbelief.doctor.rules.clock import ClockSample
from distbelief.errors import DistBeliefError

ANSWER_S = 10.0
PATIENCE_S = 10.0
"""Doctors may be started on all hosts at once: the leader may not listen yet."""
EXCHANGES = 8


class Connection:
    """The connection to the leader or to a coordinator. A context manager."""

    def __init__(self, endpoint: str, access: Authority | KeyAuthority) -> None:
        self.endpoint = endpoint
        credential = access.applicant()
        self._signer = credential.signer()
        self._key = credential.coordinator_key
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MOST_BYTES)
        dial(self._socket, endpoint, credential.coordinator_key)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy()

    def send(self, message: messages.ToLeader) -> None:
        data = messages.encode(message)
        self._socket.send_multipart([self._signer.sign(data), data])

    def hear(self, limit_s: float | None = None) -> messages.FromLeader:
        """The next message. If none comes, raises an error that explains why."""
        until = time.monotonic() + (ANSWER_S if limit_s is None else limit_s)
        while (left_s := until - time.monotonic()) > 0:
            if self._socket.poll(int(left_s * 1000) + 1):
                with contextlib.suppress(msgspec.MsgspecError):  # a message of another kind
                    return messages.decode_from_leader(self._socket.recv_multipart()[-1])
        raise unanswered(self.endpoint, self._key, "the process")

    def ask(self) -> tuple[RunFacts | messages.Gathering, list[ClockSample]]:
        """Ask for the other end's kind and clock, several times."""
        samples = []
        for number in range(EXCHANGES):
            asked = time.time()
            self.send(FactsAsked(number))
            answer = self._answer_to(number)
            samples.append(ClockSample(asked, answer.now, time.time()))
        return answer, samples

    def _answer_to(self, number: int) -> RunFacts | messages.Gathering:
        while True:
            answer = self.hear()
            if isinstance(answer, RunFacts | messages.Gathering) and answer.number == number:
                return answer


class LeaderSocket:
    """The leader's listening socket. A context manager."""

    def __init__(self, listen: str, authority: KeyAuthority) -> None:
        self._verifier = authority.verifier()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MOST_BYTES)
        self._socket.setsockopt(zmq.IPV6, "[" in listen)
        protect(self._socket, authority.keys())
        try:
            self._socket.bind(listen)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise DistBeliefError(f"cannot listen on {listen}: {error}", hint="give another port, or none") from error
        address = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(address, bytes)
        self.address = address.rstrip(b"\0").decode()

    def __enter__(self) -> LeaderSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()  # sends the last messages

    def send(self, to: bytes, message: messages.FromLeader) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the host is gone
            self._socket.send_multipart([to, messages.encode(message)], zmq.NOBLOCK)

    def heard(self, limit_s: float) -> Iterator[tuple[bytes, messages.ToLeader]]:
        """The messages that arrive within `limit_s`."""
        if not self._socket.poll(int(limit_s * 1000)):
            return
        while self._socket.poll(0):
            identity, *frames = self._socket.recv_multipart()
            with contextlib.suppress(ValueError, Refused, msgspec.MsgspecError):  # a host without the key
                signature, data = frames
                self._verifier.verify(signature, data, time.monotonic())
                yield identity, messages.decode_to_leader(data)


def way_in(where: str, key: Path | None) -> tuple[str, Authority | KeyAuthority]:
    """Endpoint and credentials for the user's text: a run directory, or HOST:PORT and a key file."""
    if Path(where).is_dir():
        endpoint, authority = whereabouts(Path(where))
        return reach(endpoint), authority
    access = with_key(required_key(key, where))
    return reach(where, PATIENCE_S), access


def with_key(key: bytes) -> KeyAuthority:
    """The authority of the key, as for a run that was started with it."""
    return KeyAuthority(run_secret(key))

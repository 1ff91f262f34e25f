"""Credentials: the keys and tokens with which each process of a run authenticates, derived from a secret.

There are two secrets. The *key's secret* follows from the key file, or is random for each start of a run without one:
from it follow the coordinator's private key and the secrets of all runs with that key (KeyAuthority). The *run's
secret* follows from the key's secret and from a random text of each start of a run, so it says nothing about other runs
with the same key (Authority). Only the run's secret is in the run directory.

A process that has the run's secret is an *owner*: the engine, its agents, and every process that can read the run
directory. A process that has the key and does not know the random text yet is a *key holder*: it can offer a host, and
is then sent the text. An owner derives the credentials of workers and parameter servers. A worker's credential signs
its messages to the coordinator and, with another token, its messages to servers. A server's credential holds the key by
which all servers verify workers: a server could speak for a worker to other servers, but not to the coordinator. A
process without the public key (CURVE) of a listening socket cannot connect to that socket.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from msgspec import Struct

from distbelief.control.signatures import (
    AGENT,
    KEY_HOLDER,
    OWNER,
    SERVER,
    WORKER,
    Signer,
    Verifier,
    derive_key,
    derive_token,
)

BURST = 4000
PER_S = 1000
"""The coordinator's rate limit per sender: this many messages at once, and PER_S per second. A member sends about
10."""

Keys = tuple[bytes, bytes]
"""The CURVE key pair of a listening socket: (public, private)."""


class Credential(Struct, frozen=True):
    role: str
    number: int
    """A worker's or server's number. Of the other roles it is random and only tells two processes apart."""
    token: bytes
    """Signs messages to the coordinator."""
    coordinator_key: bytes
    """The coordinator's public key."""
    peer_key: bytes = b""
    """A worker's token for servers; in a server's credential the key from which the tokens of all workers follow."""
    servers_key: bytes = b""
    """The public key that all servers share."""
    start: str = ""
    """See Authority."""

    def __repr__(self) -> str:
        return f"Credential({self.role} {self.number})"  # logs must not show the keys

    def signer(self) -> Signer:
        """Signs messages to the coordinator."""
        return Signer(self.role, self.number, self.token, start=self.start)

    def signer_to_servers(self) -> Signer:
        """Signs messages of a worker or a server to servers."""
        token = derive_token(self.peer_key, SERVER, self.number) if self.role == SERVER else self.peer_key
        return Signer(self.role, self.number, token)

    def verifier(self) -> Verifier:
        """Verifies what workers and other servers send to this server."""
        return Verifier({WORKER: self.peer_key, SERVER: self.peer_key})

    def server_keys(self) -> Keys:
        """The key pair of this server's listening socket."""
        return _curve_keys(self.peer_key)


NO_CREDENTIAL = Credential("", -1, b"", b"")
"""For a process that sends no messages, such as a replay."""


@dataclass(frozen=True)
class Authority:
    """Derives the credentials of one start of a run. Its three values are in `coordinator.json`.

    `start` is a random text for each start of the run, of at most 16 characters. It is no secret.
    """

    secret: bytes = field(repr=False)
    """The run's secret."""
    coordinator_key: bytes
    """The coordinator's public key."""
    start: str = ""

    def owner(self) -> Credential:
        return self._of_anyone(OWNER)

    def agent(self) -> Credential:
        """The credential of a host's agent."""
        return self._of_anyone(AGENT)

    def worker(self, number: int) -> Credential:
        token, to_servers = derive_token(self.secret, WORKER, number), derive_token(self._peers, WORKER, number)
        return Credential(WORKER, number, token, self.coordinator_key, to_servers, self._servers_key, self.start)

    def server(self, number: int) -> Credential:
        token = derive_token(self.secret, SERVER, number)
        return Credential(SERVER, number, token, self.coordinator_key, self._peers, self._servers_key, self.start)

    def applicant(self) -> Credential:
        """The credential of a process that offers a host or asks about the run."""
        return self.owner()

    def of_start(self, start: str) -> Authority:
        """The coordinator answers nobody who has the secret of another start."""
        assert start == self.start
        return self

    def _of_anyone(self, role: str) -> Credential:
        token = derive_token(self.secret, role, 0)
        return Credential(role, secrets.randbits(62), token, self.coordinator_key, start=self.start)

    @property
    def _peers(self) -> bytes:
        return derive_key(self.secret, b"distbelief-peers")

    @property
    def _servers_key(self) -> bytes:
        return _curve_keys(self._peers)[0]


@dataclass(frozen=True)
class KeyAuthority:
    """The authority over all runs with one secret: of a process that leads a run, or has the key file.

    `start`: of the run that this process leads. With it the coordinator recognises messages of processes that outlived
    another start with the same secret, and drops them.
    """

    secret: bytes = field(repr=False)
    """The key's secret."""
    start: str = ""

    def applicant(self) -> Credential:
        """The credential of a process that does not know the run's start yet."""
        return Credential(KEY_HOLDER, secrets.randbits(62), derive_token(self.secret, KEY_HOLDER, 0), self.keys()[0])

    def of_start(self, start: str) -> Authority:
        return Authority(self._key_of(start), self.keys()[0], start)

    @property
    def run(self) -> Authority:
        """Of the run that this process leads."""
        return self.of_start(self.start)

    def keys(self) -> Keys:
        """The key pair of the coordinator's listening socket."""
        return _curve_keys(self.secret)

    def verifier(self) -> Verifier:
        """Verifies messages to the coordinator."""
        of_run = dict.fromkeys((OWNER, AGENT, WORKER, SERVER), self._key_of(self.start))
        return Verifier({KEY_HOLDER: self.secret, **of_run}, BURST, PER_S, self._key_of)

    def _key_of(self, start: str) -> bytes:
        return derive_key(self.secret, b"distbelief-start", start.encode())


def _curve_keys(key: bytes) -> Keys:
    import zmq  # here and not above: commands that start no run do not import ZeroMQ
    from zmq.utils import z85

    private = z85.encode(derive_key(key, b"distbelief-curve"))
    return zmq.curve_public(private), private

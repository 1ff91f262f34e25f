"""Credentials: the keys and tokens with which each process of a run authenticates, derived from the run's secret.

A process that has the secret is an *owner*: the engine, its agents, and every process that can read the run directory.
An owner derives the credentials of workers and parameter servers. A worker's credential signs its messages to the
coordinator and, with another token, its messages to servers. A server's credential holds the key by which all servers
verify workers: a server could speak for a worker to other servers, but not to the coordinator. A process without the
public key (CURVE) of a listening socket cannot connect to that socket.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from msgspec import Struct

from distbelief.control.signatures import AGENT, OWNER, SERVER, WORKER, Signer, Verifier, derive_key, derive_token

BURST = 4000
PER_S = 1000
"""The coordinator's rate limit per sender: this many messages at once, and PER_S per second. A member sends about
10."""

Keys = tuple[bytes, bytes]
"""The CURVE key pair of a listening socket: (public, private)."""


class Credential(Struct, frozen=True):
    role: str
    number: int
    """A worker's or server's number. An owner's or agent's is random and only tells two processes apart."""
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
    """Derives all credentials of a run from its secret.

    `start` is a random text for each start of the run, of at most 16 characters: tokens of agents, workers and servers
    follow from it too, so messages of processes that outlived another start with the same secret are recognised and
    dropped. `start` is no secret.
    """

    secret: bytes = field(repr=False)
    start: str = ""

    def owner(self) -> Credential:
        return Credential(OWNER, secrets.randbits(62), derive_token(self.secret, OWNER, 0), self.keys()[0])

    def agent(self) -> Credential:
        """The credential of a host's agent. Valid for this start of the run only."""
        token = derive_token(self._run, AGENT, 0)
        return Credential(AGENT, secrets.randbits(62), token, self.keys()[0], start=self.start)

    def worker(self, number: int) -> Credential:
        token, to_servers = derive_token(self._run, WORKER, number), derive_token(self._peers, WORKER, number)
        return Credential(WORKER, number, token, self.keys()[0], to_servers, self._servers_key, self.start)

    def server(self, number: int) -> Credential:
        token = derive_token(self._run, SERVER, number)
        return Credential(SERVER, number, token, self.keys()[0], self._peers, self._servers_key, self.start)

    def keys(self) -> Keys:
        """The key pair of the coordinator's listening socket."""
        return _curve_keys(self.secret)

    def verifier(self) -> Verifier:
        """Verifies messages to the coordinator."""
        keys = {OWNER: self.secret, **dict.fromkeys((AGENT, WORKER, SERVER), self._run)}
        return Verifier(keys, BURST, PER_S, self._key_of)

    @property
    def _run(self) -> bytes:
        return self._key_of(self.start)

    def _key_of(self, start: str) -> bytes:
        return derive_key(self.secret, b"distbelief-start", start.encode())

    @property
    def _peers(self) -> bytes:
        return derive_key(self._run, b"distbelief-peers")

    @property
    def _servers_key(self) -> bytes:
        return _curve_keys(self._peers)[0]


def _curve_keys(key: bytes) -> Keys:
    import zmq  # here and not above: commands that start no run do not import ZeroMQ
    from zmq.utils import z85

    private = z85.encode(derive_key(key, b"distbelief-curve"))
    return zmq.curve_public(private), private

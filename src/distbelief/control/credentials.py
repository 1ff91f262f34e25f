"""What each member of a run has of its own, in place of the run's secret: with it, it can speak for itself alone.

Whoever has the secret (the engine, its agents, whoever can read the run directory) is an *owner*, and makes the badges
of workers and parameter servers. A worker's badge lets it sign what it says to the coordinator, and what it says to
servers; a server's holds what servers check all workers by, so servers could speak for workers to other servers, but
not to the coordinator. Doors are the public keys (CURVE) of those that listen: who does not know them cannot connect.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from msgspec import Struct

from distbelief.control.signatures import AGENT, OWNER, SERVER, WORKER, Checker, Signer, derived, token_of

BURST = 4000
PER_S = 1000
"""Of one sender the coordinator hears so many messages. A member says about ten a second."""

Keys = tuple[bytes, bytes]
"""Of one that listens: (public, private)."""


class Badge(Struct, frozen=True):
    role: str
    number: int
    """An owner's is any."""
    token: bytes
    """Signs what it says to the coordinator."""
    door: bytes
    """The coordinator's public key."""
    among: bytes = b""
    """A worker's: signs what it says to servers. A server's: what all servers check by."""
    servers_door: bytes = b""
    """The public key of all servers."""

    def __repr__(self) -> str:
        return f"Badge({self.role} {self.number})"  # what is printed is read by others

    def signer(self) -> Signer:
        """For what it says to the coordinator."""
        return Signer(self.role, self.number, self.token)

    def signer_to_servers(self) -> Signer:
        token = token_of(self.among, SERVER, self.number) if self.role == SERVER else self.among
        return Signer(self.role, self.number, token)

    def checker(self) -> Checker:
        """A server's: of what workers and other servers say to it."""
        return Checker({WORKER: self.among, SERVER: self.among})

    def server_keys(self) -> Keys:
        """A server's own."""
        return _curve_keys(self.among)


NOBODY = Badge("", -1, b"", b"")
"""For somebody who is alone."""


@dataclass(frozen=True)
class Authority:
    """Who has the run's secret. `start`: what tells this start of the run from others with the same secret, so that
    members of an earlier one are not heard."""

    secret: bytes = field(repr=False)
    start: str = ""

    def owner(self) -> Badge:
        return Badge(OWNER, secrets.randbits(62), token_of(self.secret, OWNER, 0), self.keys()[0])

    def agent(self) -> Badge:
        """Of a host, in this start of the run: those of an earlier one are not heard."""
        return Badge(AGENT, secrets.randbits(62), token_of(self._run, AGENT, 0), self.keys()[0])

    def worker(self, number: int) -> Badge:
        among = token_of(self._among, WORKER, number)
        return Badge(WORKER, number, token_of(self._run, WORKER, number), self.keys()[0], among, self._servers_door)

    def server(self, number: int) -> Badge:
        token = token_of(self._run, SERVER, number)
        return Badge(SERVER, number, token, self.keys()[0], self._among, self._servers_door)

    def keys(self) -> Keys:
        """The coordinator's."""
        return _curve_keys(self.secret)

    def checker(self) -> Checker:
        """The coordinator's."""
        return Checker({OWNER: self.secret, **dict.fromkeys((AGENT, WORKER, SERVER), self._run)}, BURST, PER_S)

    @property
    def _run(self) -> bytes:
        return derived(self.secret, b"distbelief-start", self.start.encode())

    @property
    def _among(self) -> bytes:
        return derived(self._run, b"distbelief-among")

    @property
    def _servers_door(self) -> bytes:
        return _curve_keys(self._among)[0]


def _curve_keys(key: bytes) -> Keys:
    import zmq  # only by whoever makes keys: commands that start nothing start without it
    from zmq.utils import z85

    private = z85.encode(derived(key, b"distbelief-curve"))
    return zmq.curve_public(private), private

"""Diagnoses an unreachable coordinator: tries each address of its name, and explains the result to the user.

It connects and reads a greeting. It sends nothing that could change a run.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import zmq

from distbelief.control.addresses import resolve, route_to, split, tcp
from distbelief.control.sockets import dial, next_event
from distbelief.errors import DistBeliefError, JobError

CONNECT_S = 3.0
GREETING_S = 2.0
HANDSHAKE_S = 3.0
_AGAIN_S = 0.2

What = Literal["open", "refused", "silent", "no route", "failed"]
Speaks = Literal["ours", "another protocol", "nothing", "another key"]

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_GREETING = _SIGNATURE + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)  # ZMTP 3.1 (rfc.zeromq.org/spec/37)

_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EACCES, errno.EINVAL, errno.EPERM)
_ADVICE: dict[What, str] = {
    "refused": "no process listens on that port: is the run still running, and is this the port that it printed?",
    "silent": "packets get lost on the way: is the host up, and do the firewalls in between let that port through?",
    "no route": "this machine has no route to that network: check its network cards and routes (`ip route`)",
    "failed": "check the address",
}


@dataclass(frozen=True)
class Attempt:
    """The result of trying one address."""

    address: str
    card: str
    """The network card on the route to it; empty: there is no route."""
    what: What
    error: str = ""

    def __str__(self) -> str:
        way = f" by {self.card}" if self.card else ""
        words = {
            "open": "connected",
            "refused": "refused the connection",
            "silent": f"did not answer within {CONNECT_S:.0f} s",
            "no route": f"there is no route ({self.error})",
            "failed": self.error,
        }
        return f"{self.address}{way}: {words[self.what]}"


def reach(where: str, patience_s: float = 0.0, say: Callable[[str], None] = lambda text: None) -> str:
    """The numeric endpoint of a coordinator given as HOST:PORT: the first of its addresses that accepts a connection.

    Raises an error that lists the attempts. `patience_s`: how long to wait until the port is listening.
    """
    port, addresses = _resolved(where)
    until, waited = time.monotonic() + patience_s, False
    while True:
        tried = []
        for address in addresses:
            tried.append(attempt(address, int(port)))
            if tried[-1].what == "open":
                return tcp(address, port)
        told = f"cannot reach {where}: {'; '.join(map(str, tried))}"
        if time.monotonic() >= until:
            raise DistBeliefError(told, hint=_advice(tried))
        if not waited:
            say(f"waiting: {told}")
        waited = True
        time.sleep(_AGAIN_S)


def find(where: str, patience_s: float, say: Callable[[str], None]) -> str:
    """As `reach`, for a caller that itself waits for the coordinator to start. Only a host with several addresses is
    tried first, to see on which of them the coordinator listens."""
    port, addresses = _resolved(where)
    return reach(where, patience_s, say) if len(addresses) > 1 else tcp(addresses[0], port)


def _resolved(where: str) -> tuple[str, list[str]]:
    host, port = split(where)
    if not port.isdigit():
        raise JobError(f"{where} has no port", hint="give HOST:PORT, as the coordinator printed it")
    if host.lower().startswith("fe80:"):
        raise JobError(
            f"{where} is a link-local address, which means something else on every host",
            hint="give another address of that host: the one that its coordinator printed",
        )
    addresses = resolve(host)
    if not addresses:
        raise DistBeliefError(
            f"cannot reach {where}: no host called {host} is known here",
            hint="check the spelling, /etc/hosts and the name server of this machine, or give a numeric address",
        )
    return port, addresses


def _advice(tried: list[Attempt]) -> str:
    if all(one.card == "lo" for one in tried):
        return (
            "that is this machine itself; if the coordinator is on another host, give the address that it printed, and "
            "start it with --listen and an address of its network card"
        )
    return "; ".join(dict.fromkeys(_ADVICE[one.what] for one in tried))


def attempt(address: str, port: int) -> Attempt:
    """Connect, and close the connection."""
    try:
        card = route_to(address).card
    except OSError as error:
        return Attempt(address, "", "no route", error.strerror or str(error))
    try:
        with _connected(address, port):
            return Attempt(address, card, "open")
    except TimeoutError:
        return Attempt(address, card, "silent")
    except ConnectionRefusedError:
        return Attempt(address, card, "refused")
    except OSError as error:
        what: What = "no route" if error.errno in _UNREACHABLE else "failed"
        return Attempt(address, card, what, error.strerror or str(error))


def unanswered(endpoint: str, server_key: bytes, who: str = "the coordinator") -> DistBeliefError:
    """The error for an answer that did not come, with its cause. `server_key`: the expected public key."""
    host, port = split(endpoint)
    tried = attempt(host, int(port))
    if tried.what != "open":
        return DistBeliefError(f"{who} at {endpoint} does not answer: {tried}", hint=_advice([tried]))
    found = greeting(endpoint)
    if found == "ours":
        found = handshake(endpoint, server_key)
    if found == "another key":
        return DistBeliefError(
            f"{who} at {endpoint} refuses this host: it has another key",
            hint="use the run's key file; a run started without --key makes a new key each time",
        )
    if found != "ours":
        said = "says nothing" if found == "nothing" else "speaks another protocol"
        return DistBeliefError(
            f"the program at {endpoint} is not DistBelief: it {said}", hint="use the port that the coordinator printed"
        )
    return DistBeliefError(
        f"{who} at {endpoint} accepts our key, but does not answer",
        hint="it may be overloaded or another version: look at its log, and at `distbelief --version` on both hosts",
    )


def greeting(endpoint: str) -> Speaks:
    """Read the first bytes from a listening port: in our protocol (ZeroMQ) both sides send a greeting."""
    host, port = split(endpoint)
    data = b""
    try:
        with _connected(host, int(port)) as there:
            there.settimeout(GREETING_S)
            there.sendall(_GREETING)
            while len(data) < len(_SIGNATURE) and (more := there.recv(64)):
                data += more
    except OSError:  # a time-out, or it hung up
        pass
    if data[:1] == b"\xff" and data[9:10] == b"\x7f":
        return "ours"
    return "another protocol" if data else "nothing"


def handshake(endpoint: str, server_key: bytes) -> Speaks:
    """Whether the listening process has the key pair whose public half is `server_key`."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        dial(socket, endpoint, server_key)
        until = time.monotonic() + HANDSHAKE_S
        try:
            while (left_s := until - time.monotonic()) > 0:
                if monitor.poll(int(left_s * 1000) + 1):  # the monitor reports nothing but success
                    next_event(monitor)
                    return "ours"
        finally:
            socket.disable_monitor()
            monitor.close()
    return "another key"


def _connected(address: str, port: int) -> socket.socket:
    try:
        return socket.create_connection((address, port), timeout=CONNECT_S)
    except OSError as error:
        if error.errno == errno.ETIMEDOUT:
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from error
        raise

"""Limits unauthenticated connections per socket: each one costs a file descriptor and memory.

A connection is unauthenticated until a validly signed message has come over it. When there are too many, the oldest
unauthenticated connection is closed. Members send as soon as they are connected, so the oldest is hardly ever a
member's; a member that is hit reconnects by itself. Connections of members are not limited: members have the run's
keys.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket as sockets
import stat
from urllib.parse import urlsplit

import zmq

from distbelief.control.signatures import CONNECTIONS_CLOSED, Refusals
from distbelief.control.sockets import next_event

MOST_UNAUTHENTICATED = 1000
LEAST_UNAUTHENTICATED = 16
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


def default_limit() -> int:
    """Half of the file descriptors that this process may open, within the bounds above: the rest is for its work.

    >>> LEAST_UNAUTHENTICATED <= default_limit() <= MOST_UNAUTHENTICATED
    True
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(LEAST_UNAUTHENTICATED, min(MOST_UNAUTHENTICATED, soft // 2 if soft > 0 else MOST_UNAUTHENTICATED))


class Connections:
    """A socket's connections by file descriptor; the unauthenticated ones in the order in which they were opened.

    >>> connections = Connections(most=2)
    >>> for descriptor in (7, 8, 9, 10):
    ...     connections.opened(descriptor)
    >>> connections.authenticated(7)
    >>> connections.surplus()
    [8]
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._unauthenticated: dict[int, None] = {}
        self._members: set[int] = set()

    def opened(self, connection: int) -> None:
        self.closed(connection)  # the event of the descriptor's earlier connection may have been lost
        self._unauthenticated[connection] = None

    def is_member(self, connection: int) -> bool:
        return connection in self._members

    def authenticated(self, connection: int) -> None:
        """A validly signed message came over this connection."""
        self._unauthenticated.pop(connection, None)
        self._members.add(connection)

    def closed(self, connection: int) -> None:
        self._unauthenticated.pop(connection, None)
        self._members.discard(connection)

    def surplus(self) -> list[int]:
        """The connections to close. Each is returned once."""
        found = list(self._unauthenticated)[: max(len(self._unauthenticated) - self._most, 0)]
        for connection in found:
            del self._unauthenticated[connection]
        return found


class ConnectionLimit:
    """Limits the unauthenticated connections of one bound ZeroMQ socket.

    The owner of the socket also polls `events`, and calls `enforce` when there are some.
    """

    def __init__(self, socket: zmq.Socket[bytes], refusals: Refusals, most: int = 0) -> None:
        self._socket = socket
        self._refusals = refusals
        self._connections = Connections(most or default_limit())
        self._port = _port_of(socket)
        self.events: zmq.Socket[bytes] = socket.get_monitor_socket(_EVENTS)

    def authenticated(self, frame: zmq.Frame) -> None:
        """The message of this frame was validly signed: its connection is a member's."""
        connection = frame.get(zmq.SRCFD)
        assert isinstance(connection, int)
        if not self._connections.is_member(connection):
            self._read_events()  # else its event "opened", read later, would make it unauthenticated again
            self._connections.authenticated(connection)

    def enforce(self) -> None:
        """Read the socket's events and close surplus connections.

        Call this after all waiting messages were verified: then no connection with a valid message counts as surplus.
        """
        self._read_events()
        for connection in self._connections.surplus():
            self._close(connection)

    def _read_events(self) -> None:
        for _ in range(1000):  # bounded: a flood of connections must not stop the caller
            try:
                event, connection = next_event(self.events)
            except zmq.Again:
                return
            if event == zmq.EVENT_DISCONNECTED:
                self._connections.closed(connection)
            else:
                self._connections.opened(connection)

    def _close(self, connection: int) -> None:
        """Shut the connection down; ZeroMQ then closes its descriptor.

        The descriptor may belong to something else by now, so only a connection to our own port is touched.
        """
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            same = os.dup(connection)
            stack.callback(os.close, same)
            if not stat.S_ISSOCK(os.fstat(same).st_mode):
                return
            there = sockets.socket(fileno=same)
            stack.callback(there.detach)
            if there.family in (sockets.AF_INET, sockets.AF_INET6) and there.getsockname()[1] == self._port:
                there.shutdown(sockets.SHUT_RDWR)
                self._refusals.add(CONNECTIONS_CLOSED)

    def close(self) -> None:
        """Call this before the socket itself is closed."""
        self._socket.disable_monitor()
        self.events.close(linger=0)


def _port_of(socket: zmq.Socket[bytes]) -> int:
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return urlsplit(address.rstrip(b"\0").decode()).port or 0

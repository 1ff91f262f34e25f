"""How many strangers may stand at a listening socket: who connects and says nothing costs a descriptor and memory.

A stranger is a connection over which nothing sealed has come yet. When there are too many, the one that has stood there
longest is turned away: a member speaks as soon as it is connected, so that is hardly ever one; and if it is, it
connects again by itself. Members are not counted: they have the run's key.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket as sockets
import stat
from urllib.parse import urlsplit

import zmq

from distbelief.control.signatures import TURNED_AWAY, Refusals
from distbelief.control.sockets import hear_event

MOST_STRANGERS = 1000
LEAST_STRANGERS = 16
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


def most_strangers() -> int:
    """Half of what this process may open at most: the other half is for its work.

    >>> LEAST_STRANGERS <= most_strangers() <= MOST_STRANGERS
    True
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(LEAST_STRANGERS, min(MOST_STRANGERS, soft // 2 if soft > 0 else MOST_STRANGERS))


class Strangers:
    """Connections, by their descriptors, in the order in which they came.

    >>> strangers = Strangers(most=2)
    >>> for connection in (7, 8, 9, 10):
    ...     strangers.came(connection)
    >>> strangers.spoke(7)
    >>> strangers.surplus()
    [8]
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._silent: dict[int, None] = {}
        self._members: set[int] = set()

    def came(self, connection: int) -> None:
        self.gone(connection)  # the end of whoever had that number before was not heard
        self._silent[connection] = None

    def is_member(self, connection: int) -> bool:
        return connection in self._members

    def spoke(self, connection: int) -> None:
        """It is a member's."""
        self._silent.pop(connection, None)
        self._members.add(connection)

    def gone(self, connection: int) -> None:
        self._silent.pop(connection, None)
        self._members.discard(connection)

    def surplus(self) -> list[int]:
        """Whom to turn away: not to be asked for again."""
        found = list(self._silent)[: max(len(self._silent) - self._most, 0)]
        for connection in found:
            del self._silent[connection]
        return found


class Doorkeeper:
    """Of one socket of ZeroMQ that is bound to a port. Whoever has the socket polls `events` too, and calls `attend`
    when there are some."""

    def __init__(self, socket: zmq.Socket[bytes], refusals: Refusals, most: int = 0) -> None:
        self._socket = socket
        self._refusals = refusals
        self._strangers = Strangers(most or most_strangers())
        self._port = _port_of(socket)
        self.events: zmq.Socket[bytes] = socket.get_monitor_socket(_EVENTS)

    def know(self, frame: zmq.Frame) -> None:
        """A message that this frame is of bore a good seal."""
        connection = frame.get(zmq.SRCFD)
        assert isinstance(connection, int)
        if not self._strangers.is_member(connection):
            self._hear()  # its coming comes before its words, but may not have been heard: it would count as silent
            self._strangers.spoke(connection)

    def attend(self) -> None:
        """Hear who came and went. Call it after the messages that wait were heard: then nobody who spoke is silent."""
        self._hear()
        for connection in self._strangers.surplus():
            self._turn_away(connection)

    def _hear(self) -> None:
        for _ in range(1000):  # a flood does not stop the rest
            try:
                event, connection = hear_event(self.events)
            except zmq.Again:
                return
            if event == zmq.EVENT_DISCONNECTED:
                self._strangers.gone(connection)
            else:
                self._strangers.came(connection)

    def _turn_away(self, connection: int) -> None:
        """ZeroMQ closes it when it sees that nothing comes any more. Its descriptor may have become another's in this
        very moment: nothing is done to what is no connection to our port."""
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            same = os.dup(connection)
            stack.callback(os.close, same)
            if not stat.S_ISSOCK(os.fstat(same).st_mode):
                return
            there = sockets.socket(fileno=same)
            stack.callback(there.detach)
            if there.family in (sockets.AF_INET, sockets.AF_INET6) and there.getsockname()[1] == self._port:
                there.shutdown(sockets.SHUT_RDWR)
                self._refusals.add(TURNED_AWAY)

    def close(self) -> None:
        """Before the socket itself."""
        self._socket.disable_monitor()
        self.events.close(linger=0)


def _port_of(socket: zmq.Socket[bytes]) -> int:
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return urlsplit(address.rstrip(b"\0").decode()).port or 0

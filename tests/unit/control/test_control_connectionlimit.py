"""At most n unauthenticated connections stay open at a listening socket, and members are not disturbed."""

from __future__ import annotations

import contextlib
import resource
import socket as sockets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from distbelief.control.connectionlimit import (
    LEAST_UNAUTHENTICATED,
    MOST_UNAUTHENTICATED,
    ConnectionLimit,
    Connections,
    default_limit,
)
from distbelief.control.credentials import KeyAuthority
from distbelief.control.signatures import CONNECTIONS_CLOSED, Refusals
from distbelief.control.sockets import dial, protect

MOST = 5


class House:
    """A socket with a connection limit; a connection that sends `member` counts as authenticated."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], authority: KeyAuthority) -> None:
        self.refusals = Refusals()
        self.socket = context.socket(zmq.ROUTER)
        protect(self.socket, authority.keys())
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.limit = ConnectionLimit(self.socket, self.refusals, MOST)
        self.said: list[bytes] = []

    def serve(self, until: Callable[[], object], limit_s: float = 100) -> None:
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.limit.events, zmq.POLLIN)
        deadline = time.monotonic() + limit_s
        while not until():
            assert time.monotonic() < deadline, "it never happened"
            there = dict(poller.poll(20))
            while self.socket.poll(0):
                identity, words = self.socket.recv(copy=False), self.socket.recv_multipart()
                if words == [b"member"]:
                    self.limit.authenticated(identity)
                self.said += words
            if self.limit.events in there:
                self.limit.enforce()


@pytest.fixture
def authority() -> KeyAuthority:
    return KeyAuthority(b"s" * 32)


@pytest.fixture
def house(authority: KeyAuthority) -> Iterator[House]:
    with zmq.Context() as context:
        house = House(context, authority)
        yield house
        house.limit.close()
        house.socket.close(linger=0)


@contextlib.contextmanager
def member(house: House, authority: KeyAuthority) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        dial(socket, f"tcp://127.0.0.1:{house.port}", authority.applicant().coordinator_key)
        yield socket


def is_open(connection: sockets.socket) -> bool:
    """Whether the other side has not hung up; what it says first is of no interest."""
    try:
        while content := connection.recv(1000):
            assert content
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False
    return False


def connections_at(port: int) -> int:
    """Of this process, on the side that listens, as the kernel knows them."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "01" for line in lines)


def test_the_oldest_unauthenticated_connections_are_closed_and_members_stay(
    house: House, authority: KeyAuthority
) -> None:
    with member(house, authority) as friend, contextlib.ExitStack() as stack:
        friend.send(b"member")
        house.serve(lambda: house.said == [b"member"])
        connections = []
        for number in range(40):
            connections.append(stack.enter_context(sockets.create_connection(("127.0.0.1", house.port))))
            connections[-1].setblocking(False)
            if number % 7 == 0:
                house.serve(lambda: connections_at(house.port) <= MOST + 1)
        house.serve(lambda: house.refusals.counts[CONNECTIONS_CLOSED] == 40 - MOST)
        house.serve(lambda: [is_open(one) for one in connections] == [False] * (40 - MOST) + [True] * MOST)
        assert connections_at(house.port) == MOST + 1
        before = house.refusals.counts.copy()
        friend.send(b"again")
        house.serve(lambda: house.said == [b"member", b"again"])
        assert house.refusals.counts == before
        assert house.refusals.news(0.0) == f"refused {40 - MOST} unauthenticated connections"


def test_a_member_gets_in_while_other_connections_stay_silent_and_more_come(
    house: House, authority: KeyAuthority
) -> None:
    with contextlib.ExitStack() as stack:

        def crowd(count: int) -> None:
            for _ in range(count):
                stack.enter_context(sockets.create_connection(("127.0.0.1", house.port)))

        crowd(3 * MOST)
        house.serve(lambda: house.refusals.counts[CONNECTIONS_CLOSED] == 2 * MOST)
        friend = stack.enter_context(member(house, authority))
        friend.send(b"member")
        crowd(MOST - 1)  # not enough to make it the oldest
        house.serve(lambda: b"member" in house.said)
        crowd(3 * MOST)
        house.serve(lambda: house.refusals.counts[CONNECTIONS_CLOSED] == 6 * MOST - 1)
        friend.send(b"again")
        house.serve(lambda: b"again" in house.said)
        assert house.refusals.counts[CONNECTIONS_CLOSED] == 6 * MOST - 1, "it did not have to come again"


def test_who_leaves_makes_room(house: House) -> None:
    for _ in range(3 * MOST):
        with sockets.create_connection(("127.0.0.1", house.port)):
            house.serve(lambda: connections_at(house.port))
        house.serve(lambda: not connections_at(house.port))
    assert house.refusals.counts.total() == 0


def test_a_descriptor_that_has_become_something_else_is_left_alone(house: House) -> None:
    mine, other = sockets.socketpair()
    listener = sockets.create_server(("127.0.0.1", 0))
    client = sockets.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    with mine, other, listener, client, accepted, open("/dev/null") as file:
        for one in (mine, accepted, file):
            house.limit._close(one.fileno())
        house.limit._close(1_000_000)
        other.send(b"x")
        client.send(b"y")
        assert (mine.recv(1), accepted.recv(1)) == (b"x", b"y")
    assert house.refusals.counts.total() == 0


def test_a_connection_whose_message_is_read_before_its_opening_is_a_member(
    house: House, authority: KeyAuthority
) -> None:
    with member(house, authority) as friend:
        friend.send(b"member")
        assert house.socket.poll(30_000)
        assert house.limit.events.poll(0), "nobody has heard who came"
        house.limit.authenticated(house.socket.recv(copy=False))
        house.socket.recv_multipart()
        house.limit.enforce()
        with contextlib.ExitStack() as stack:
            for _ in range(MOST):
                stack.enter_context(sockets.create_connection(("127.0.0.1", house.port)))
            friend.send(b"again")
            house.serve(lambda: b"again" in house.said)
            house.serve(lambda: len(house.limit._connections._unauthenticated) == MOST)
        assert house.refusals.counts.total() == 0


def test_a_number_that_is_used_again_is_another_connection() -> None:
    connections = Connections(2)

    def opened(*descriptors: int) -> list[int]:
        for one in descriptors:
            connections.opened(one)
        return connections.surplus()

    assert opened(4, 5, 4) == []  # the first 4 is gone, unheard
    assert opened(6) == [5]
    connections.closed(4)
    assert opened(7) == []
    connections.authenticated(6)
    connections.authenticated(99)
    assert opened(8, 9) == [7]
    assert opened(6) == [8], "the member that had the number is gone, unheard"
    assert not connections.is_member(6)


def test_how_many_depends_on_what_the_process_may_open(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, expected in (
        (1 << 20, MOST_UNAUTHENTICATED),
        (256, 128),
        (8, LEAST_UNAUTHENTICATED),
        (-1, MOST_UNAUTHENTICATED),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda which, soft=soft: (soft, soft))
        assert default_limit() == expected

"""Reaching a coordinator or a parameter server: only who knows the door's public key is let in, except by servers on
loopback.

127.0.0.2 is this machine too, but not one of the names that count as loopback; so it is protected like any network.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from distbelief.control.credentials import KeyAuthority
from distbelief.control.sockets import dial, dial_server, is_loopback, protect, protect_server

KEYS, OTHERS = KeyAuthority(bytes(range(32))).keys(), KeyAuthority(bytes(32)).keys()
WAIT_MS = 60_000  # only reached when something is broken


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as it:
        yield it


def listening(context: zmq.Context, host: str, server: bool = False) -> tuple[zmq.Socket, str]:
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    if server:
        protect_server(socket, f"tcp://{host}:*", KEYS)
    else:
        protect(socket, KEYS)
    socket.bind(f"tcp://{host}:*")
    return socket, socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()


def dealer(context: zmq.Context) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


@pytest.mark.parametrize("server", [False, True])
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_who_knows_the_door_is_heard(context: zmq.Context, host: str, server: bool) -> None:
    door, address = listening(context, host, server)
    with door, dealer(context) as worker:
        (dial_server if server else dial)(worker, address, KEYS[0])
        worker.send(b"hello")
        assert door.poll(WAIT_MS)
        identity, content = door.recv_multipart()
        assert content == b"hello"
        door.send_multipart([identity, b"welcome"])
        assert worker.poll(WAIT_MS)
        assert worker.recv() == b"welcome"


@pytest.mark.parametrize(("host", "server"), [("127.0.0.1", False), ("127.0.0.2", False), ("127.0.0.2", True)])
def test_nobody_else_is_heard(context: zmq.Context, host: str, server: bool) -> None:
    door, address = listening(context, host, server)
    plain, wrong, right = dealer(context), dealer(context), dealer(context)
    with door, plain, wrong, right:
        plain.connect(address)
        plain.send(b"plain")
        dial(wrong, address, OTHERS[0])
        wrong.send(b"wrong")
        dial(right, address, KEYS[0])
        for number in range(20):  # the others have had every chance by the time that all of these are here
            right.send(b"right")
            assert door.poll(WAIT_MS), number
            assert door.recv_multipart()[1] == b"right"
        assert not door.poll(0)


def test_who_plays_the_coordinator_is_told_nothing(context: zmq.Context) -> None:
    """Its port may be anybody's while it is being restarted."""
    false = context.socket(zmq.ROUTER)
    with false, dealer(context) as worker:
        port = false.bind_to_random_port("tcp://127.0.0.1")
        dial(worker, f"tcp://127.0.0.1:{port}", KEYS[0])
        worker.send(b"how far I am")
        assert not false.poll(500)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("tcp://127.0.0.1:5555", True),
        ("tcp://localhost:*", True),
        ("tcp://[::1]:5555", True),
        ("tcp://10.0.0.1:5555", False),
        ("tcp://0.0.0.0:*", False),
        ("tcp://127.0.0.1.example.org:5555", False),
    ],
)
def test_what_counts_as_loopback(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback

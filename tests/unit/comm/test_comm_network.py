"""Reaching a coordinator: off loopback, only who knows the secret is let in.

127.0.0.2 is this machine too, but not one of the names that count as loopback; so it is protected like any network.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from distbelief.comm.network import dial, is_loopback, protect

SECRET, OTHER = bytes(range(32)), bytes(32)
WAIT_MS = 60_000  # only reached when something is broken


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as it:
        yield it


def listening(context: zmq.Context, host: str, secret: bytes = SECRET) -> tuple[zmq.Socket, str]:
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    protect(socket, f"tcp://{host}:*", secret)
    socket.bind(f"tcp://{host}:*")
    return socket, socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()


def dealer(context: zmq.Context) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_who_knows_the_secret_is_heard(context: zmq.Context, host: str) -> None:
    with listening(context, host)[0] as server, dealer(context) as worker:
        dial(worker, server.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode(), SECRET)
        worker.send(b"hello")
        assert server.poll(WAIT_MS)
        identity, content = server.recv_multipart()
        assert content == b"hello"
        server.send_multipart([identity, b"welcome"])
        assert worker.poll(WAIT_MS)
        assert worker.recv() == b"welcome"


def test_off_loopback_nobody_else_is_heard(context: zmq.Context) -> None:
    server, address = listening(context, "127.0.0.2")
    plain, wrong, right = dealer(context), dealer(context), dealer(context)
    with server, plain, wrong, right:
        plain.connect(address)
        plain.send(b"plain")
        dial(wrong, address, OTHER)
        wrong.send(b"wrong")
        dial(right, address, SECRET)
        for number in range(20):  # the others have had every chance by the time that all of these are here
            right.send(b"right")
            assert server.poll(WAIT_MS), number
            assert server.recv_multipart()[1] == b"right"
        assert not server.poll(0)


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

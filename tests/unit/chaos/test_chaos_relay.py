"""A line that can be cut: real sockets, no sleeps that a result depends on."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import zmq

from distbelief.chaos.relay import Relay

PATIENCE_S = 30
SHORT_S = 0.2  # how long nothing is seen to come over a cut line


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        yield listener


def address(listener: socket.socket) -> str:
    return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S)


def read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            break
        data += part
    return data


def test_bytes_flow_both_ways_and_ends_close_together(server: socket.socket) -> None:
    big = bytes(range(256)) * 40_000  # more than the sockets' buffers hold
    with Relay() as relay:
        url = relay.dial(0, address(server))
        assert relay.dial(0, address(server)) == url
        assert relay.dial(1, address(server)) != url
        with connect(url) as near:
            far, _ = server.accept()
            with far:
                far.settimeout(PATIENCE_S)
                near.sendall(b"hello")
                assert read(far, 5) == b"hello"
                far.setblocking(False)
                sent = 0
                near.setblocking(False)
                back = b""
                while len(back) < len(big):
                    if sent < len(big):
                        with contextlib.suppress(BlockingIOError):
                            sent += far.send(big[sent:])
                    with contextlib.suppress(BlockingIOError):
                        back += near.recv(1 << 16)
                assert back == big
            near.settimeout(PATIENCE_S)
            assert near.recv(1) == b""


def test_a_cut_line_carries_nothing_and_closes_nothing(server: socket.socket) -> None:
    with Relay() as relay:
        url = relay.dial(0, address(server))
        with connect(url) as near:
            far, _ = server.accept()
            with far:
                far.settimeout(PATIENCE_S)
                near.sendall(b"1")
                assert read(far, 1) == b"1"
                assert relay.cut(0)
                near.sendall(b"2")
                far.sendall(b"3")
                for end in (near, far):
                    end.settimeout(SHORT_S)
                    with pytest.raises(TimeoutError):
                        end.recv(1)
                    end.settimeout(PATIENCE_S)
                assert relay.mend(0)
                assert read(far, 1) == b"2"
                assert read(near, 1) == b"3"


def test_an_end_that_closes_on_a_cut_line_is_heard_of_when_it_is_mended(server: socket.socket) -> None:
    with Relay() as relay:
        near = connect(relay.dial(0, address(server)))
        far, _ = server.accept()
        with far:
            relay.cut(0)
            near.close()
            far.settimeout(SHORT_S)
            with pytest.raises(TimeoutError):
                far.recv(1)
            relay.mend(0)
            far.settimeout(PATIENCE_S)
            assert far.recv(1) == b""


def test_other_lines_are_not_cut(server: socket.socket) -> None:
    with Relay() as relay:
        relay.dial(0, address(server))
        other = relay.dial(1, address(server))
        relay.cut(0)
        with connect(other) as near:
            far, _ = server.accept()
            with far:
                near.sendall(b"x")
                far.settimeout(PATIENCE_S)
                assert read(far, 1) == b"x"
        assert not relay.cut(7)


def test_nobody_at_the_other_end_closes_the_connection(server: socket.socket) -> None:
    with Relay() as relay:
        url = relay.dial(0, address(server))
        server.close()
        with connect(url) as near:
            assert near.recv(1) == b""


def test_messages_go_on_when_the_coordinator_comes_back_elsewhere() -> None:
    with (
        Relay() as relay,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as worker,
        context.socket(zmq.ROUTER) as first,
        context.socket(zmq.ROUTER) as second,
    ):
        for sock in (worker, first, second):
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.RCVTIMEO, PATIENCE_S * 1000)
        port = first.bind_to_random_port("tcp://127.0.0.1")
        worker.connect(relay.dial(0, f"tcp://127.0.0.1:{port}"))
        worker.send(b"one")
        assert first.recv_multipart()[1] == b"one"
        first.close()
        port = second.bind_to_random_port("tcp://127.0.0.1")
        relay.moved(f"tcp://127.0.0.1:{port}")
        for _ in range(PATIENCE_S * 20):  # what was given to the old connection before it broke is lost, as without us
            worker.send(b"two")
            if second.poll(50):
                break
        identity, body = second.recv_multipart()
        assert body == b"two"
        second.send_multipart([identity, b"three"])
        assert worker.recv() == b"three"

"""Why nobody is reached. Off loopback is 127.0.0.2 here, which counts as any other network."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
import zmq

from distbelief.control import unreachable as reaching
from distbelief.control.credentials import KeyAuthority
from distbelief.control.sockets import protect
from distbelief.control.unreachable import find, reach, unanswered
from distbelief.errors import DistBeliefError
from tests.support.ports import free_port

KEYS, OTHERS = KeyAuthority(bytes(range(32))).keys(), KeyAuthority(bytes(32)).keys()
DOOR, OTHER = KEYS[0], OTHERS[0]


@contextlib.contextmanager
def program(says: bytes) -> Iterator[str]:
    """Another program on a port: it says something to whoever connects, and waits."""
    with socket.create_server(("127.0.0.2", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    visitor, _ = listener.accept()
                    visitor.sendall(says)
                    kept.append(visitor)

        kept: list[socket.socket] = []
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"tcp://127.0.0.2:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for visitor in kept:
        visitor.close()


@contextlib.contextmanager
def coordinator() -> Iterator[str]:
    """Something that listens as a coordinator does, and never answers."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        protect(router, KEYS)
        router.bind("tcp://127.0.0.2:*")
        yield router.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()


def test_a_name_becomes_an_address_that_can_be_connected_to() -> None:
    with coordinator() as address:
        port = address.rpartition(":")[2]
        assert reach(f"127.0.0.2:{port}") == reach(address) == address


@pytest.mark.parametrize(
    ("where", "complaint"),
    [
        ("no-such-host.invalid:5", "no host called no-such-host.invalid"),
        ("127.0.0.2", "has no port"),
        ("[fe80::1%lo]:5", "link-local"),
    ],
)
def test_what_cannot_be_tried(where: str, complaint: str) -> None:
    with pytest.raises(DistBeliefError, match=complaint) as caught:
        reach(where)
    assert caught.value.hint


def test_a_port_where_nobody_listens() -> None:
    port = free_port("127.0.0.2")
    with pytest.raises(DistBeliefError, match=r"127\.0\.0\.2 by lo: refused the connection") as caught:
        reach(f"127.0.0.2:{port}")
    assert "this machine itself" in caught.value.hint, "an address of loopback is never another host"
    assert "refused" in unanswered(f"tcp://127.0.0.2:{port}", DOOR).message


def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with coordinator() as address:
        port = address.rpartition(":")[2]
        monkeypatch.setattr(reaching, "resolve", lambda name: ["127.0.0.3", "127.0.0.2"])
        assert reach(f"name:{port}") == address
        monkeypatch.setattr(reaching, "resolve", lambda name: ["127.0.0.3", "127.0.0.4"])
        with pytest.raises(DistBeliefError, match=r"127\.0\.0\.3 by lo: .*127\.0\.0\.4 by lo: "):
            reach(f"name:{port}")


def test_who_may_wait_is_told_at_which_address_somebody_listens_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with two addresses, and a coordinator that begins to listen at the second while it is waited for."""
    monkeypatch.setattr(reaching, "resolve", lambda name: ["127.0.0.3", "127.0.0.2"])
    port, said = free_port("127.0.0.2"), []
    with contextlib.ExitStack() as stack:

        def say(text: str) -> None:
            said.append(text)
            stack.enter_context(socket.create_server(("127.0.0.2", port)))

        assert find(f"name:{port}", 60.0, say) == f"tcp://127.0.0.2:{port}"
    (text,) = said
    assert "127.0.0.3 by lo: refused" in text
    with pytest.raises(DistBeliefError, match="refused"):
        find(f"name:{port}", 0.0, print)


def test_a_host_with_one_address_may_be_there_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "resolve", lambda name: ["127.0.0.3"])
    assert find("name:1", 60.0, print) == "tcp://127.0.0.3:1"
    monkeypatch.setattr(reaching, "resolve", lambda name: [])
    with pytest.raises(DistBeliefError, match="no host called name"):
        find("name:1", 60.0, print)


@pytest.mark.parametrize(
    ("says", "complaint"), [(b"HTTP/1.1 400\r\n", "speaks another protocol"), (b"", "says nothing")]
)
def test_another_program_on_the_port(says: bytes, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "GREETING_S", 60.0 if says else 0.3)
    with program(says) as address:
        assert complaint in unanswered(address, DOOR).message


def test_another_key() -> None:
    with coordinator() as address:
        assert "another key" in unanswered(address, OTHER).message


def test_the_right_key_and_no_answer() -> None:
    with coordinator() as address:
        assert "accepts our key, but does not answer" in unanswered(address, DOOR).message

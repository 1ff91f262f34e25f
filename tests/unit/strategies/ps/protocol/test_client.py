"""A worker's client against sockets that play servers: it sends unanswered messages again, to the new primary."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from distbelief.control.credentials import KeyAuthority
from distbelief.control.messages import ServerMap
from distbelief.strategies.ps.protocol import client as serverclient
from distbelief.strategies.ps.protocol.client import ServerClient
from distbelief.strategies.ps.protocol.frames import RUN_MESSAGES, Framed, pack
from distbelief.strategies.ps.protocol.messages import (
    Acknowledged,
    ApplyStep,
    Inspect,
    Inspected,
    NotPrimary,
    PulledValues,
    PullValues,
    Push,
)
from distbelief.transport.abort import Abort, Aborted

BADGE = KeyAuthority(bytes(range(32))).run.worker(3)


class Played:
    """A server's door, opened by the test."""

    def __init__(self, context: zmq.Context) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self.client = b""
        self._verifier = KeyAuthority(bytes(range(32))).run.server(0).verifier()

    def heard(self) -> list[Framed]:
        self.client, signature, *frames = self.socket.recv_multipart(copy=False)
        self.client = self.client.bytes
        assert self._verifier.verify(signature.bytes, frames[0].buffer) == ("worker", 3)
        return RUN_MESSAGES.unpack_for_server(frames)

    def say(self, *messages: object, payloads: tuple[bytes, ...] = ()) -> None:
        several = [Framed(message) for message in messages]
        self.socket.send_multipart([self.client, *pack(several), *payloads])


@pytest.fixture
def servers() -> Iterator[list[Played]]:
    context = zmq.Context()
    played = [Played(context), Played(context)]
    yield played
    for one in played:
        one.socket.close()
    context.term()


@pytest.fixture
def client() -> Iterator[ServerClient]:
    made = ServerClient(BADGE, RUN_MESSAGES)
    yield made
    made.close()


def map_of(servers: list[Played], primaries: list[int], version: int = 1, life: int = 1) -> ServerMap:
    none = [-1] * len(primaries)
    addresses = {number: one.address for number, one in enumerate(servers)}
    return ServerMap(version, life, primaries, none, none, addresses)


class Waiting:
    """Something that waits in a thread, as the training thread does."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.error: BaseException | None = None

        def run() -> None:
            try:
                wait()
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def end(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()
        if self.error:
            raise self.error


def test_pushes_are_numbered_by_slice_and_settle_when_answered(servers: list[Played], client: ServerClient) -> None:
    client.learn(map_of(servers, [0, 1, 0]))
    assert client.slices(Abort()) == 3
    for number in (0, 0, 1):
        client.push(number, ApplyStep(5, 1.0))
    waiting = Waiting(lambda: client.settle(Abort()))
    first = [framed.message for framed in servers[0].heard()]
    assert first == [Push(3, 0, 0, ApplyStep(5, 1.0), 1), Push(3, 1, 0, ApplyStep(5, 1.0), 1)]
    assert [framed.message for framed in servers[1].heard()] == [Push(3, 0, 1, ApplyStep(5, 1.0), 1)]
    servers[0].say(Acknowledged(0, 0), Acknowledged(0, 1))
    servers[1].say(Acknowledged(1, 0))
    waiting.end()


def test_what_waits_goes_to_the_new_primary(servers: list[Played], client: ServerClient) -> None:
    client.learn(map_of(servers, [0, 0]))
    found: list[object] = []
    questions = [lambda ticket: Inspect(ticket, 0), lambda ticket: Inspect(ticket, 1)]
    waiting = Waiting(lambda: client.ask(questions, Abort(), lambda framed: found.append(framed.message)))
    asked = [framed.message for framed in servers[0].heard()]
    assert asked == [Inspect(1, 0), Inspect(2, 1)]
    servers[0].say(Inspected(1, 0, 7, []))
    end = time.monotonic() + 60
    while not found:
        assert time.monotonic() < end, "it was not heard"
        time.sleep(0.005)
    # Then it dies.
    client.learn(map_of(servers, [1, 1], version=2))
    assert [framed.message for framed in servers[1].heard()] == [Inspect(2, 1)]
    servers[1].say(Inspected(2, 1, 7, []))
    waiting.end()
    assert found == [Inspected(1, 0, 7, []), Inspected(2, 1, 7, [])]


def test_what_is_refused_is_asked_again(servers: list[Played], client: ServerClient) -> None:
    """The server does not know yet that it is primary. No new map comes."""
    client.learn(map_of(servers, [0]))
    client.push(0, ApplyStep(1, 1.0))
    waiting = Waiting(lambda: client.settle(Abort()))
    for _ in range(3):
        assert [framed.message for framed in servers[0].heard()] == [Push(3, 0, 0, ApplyStep(1, 1.0))]
        servers[0].say(NotPrimary(0, 1))
    servers[0].heard()
    servers[0].say(Acknowledged(0, 0))
    waiting.end()


def test_what_was_lost_is_sent_again(
    servers: list[Played], client: ServerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serverclient, "AGAIN_S", 0.2)
    client.learn(map_of(servers, [0]))
    client.push(0, ApplyStep(1, 1.0))
    waiting = Waiting(lambda: client.settle(Abort()))
    assert servers[0].heard() == servers[0].heard()
    servers[0].say(Acknowledged(0, 0))
    waiting.end()


def test_what_makes_no_sense_is_ignored(servers: list[Played], client: ServerClient) -> None:
    client.learn(map_of(servers, [0]))
    found: list[Framed] = []
    waiting = Waiting(lambda: client.ask([lambda ticket: PullValues(ticket, 0, 2)], Abort(), found.append))
    servers[0].heard()
    door = servers[0]
    for frames in ([b"garbage"], [b""], [b"\x91\x81\xa4type\xa3Odd"], [b"\x80"] * 3):
        door.socket.send_multipart([door.client, *frames])
    door.say(PulledValues(9, 0, 2), payloads=(b"of another question",))
    door.say(Acknowledged(0, 77))
    door.say(PulledValues(1, 0, 2))  # without its bytes
    door.say(PulledValues(1, 0, 2), payloads=(b"values",))
    door.say(PulledValues(1, 0, 2), payloads=(b"twice",))
    waiting.end()
    assert [(framed.message, bytes(framed.payload)) for framed in found] == [(PulledValues(1, 0, 2), b"values")]


def test_when_the_parameters_begin_anew_everything_is_given_up(servers: list[Played], client: ServerClient) -> None:
    client.learn(map_of(servers, [0]))
    client.push(0, ApplyStep(1, 1.0))
    waiting = Waiting(lambda: client.settle(Abort()))
    servers[0].heard()
    client.learn(map_of(servers, [1], version=2, life=2))
    with pytest.raises(Aborted, match="begin anew"):
        waiting.end()
    client.settle(Abort())  # nothing is left to wait for


def test_a_generation_that_begins_after_it_is_not_given_up(servers: list[Played], client: ServerClient) -> None:
    client.learn(map_of(servers, [0]))
    client.slices(Abort())
    client.push(0, ApplyStep(1, 1.0))
    client.learn(map_of(servers, [1, 1], version=2, life=2))
    client.restart()
    assert client.slices(Abort()) == 2
    client.settle(Abort())


def test_a_wait_is_given_up_with_its_generation(servers: list[Played], client: ServerClient) -> None:
    abort = Abort()
    waiting = Waiting(lambda: client.slices(abort))  # no map ever comes
    abort.set("the generation is over")
    with pytest.raises(Aborted):
        waiting.end()
    client.learn(map_of(servers, [0], version=2))
    client.learn(map_of(servers, [1], version=1))  # late
    assert client.version == 2


def test_what_was_not_sent_before_all_began_anew_is_never_sent(servers: list[Played], client: ServerClient) -> None:
    client.learn(map_of(servers, [0]))
    client.slices(Abort())
    client.push(0, ApplyStep(1, 1.0))
    client.learn(map_of(servers, [0], version=2, life=2))
    with pytest.raises(Aborted, match="begin anew"):
        client.settle(Abort())
    client.restart()
    client.push(0, ApplyStep(2, 1.0))
    waiting = Waiting(lambda: client.settle(Abort()))
    assert [framed.message for framed in servers[0].heard()] == [Push(3, 1, 0, ApplyStep(2, 1.0), 2)]
    servers[0].say(Acknowledged(0, 1))
    waiting.end()


def test_a_new_generation_does_not_wait_for_what_the_last_one_sent(servers: list[Played], client: ServerClient) -> None:
    client.learn(map_of(servers, [0]))
    client.slices(Abort())
    client.push(0, ApplyStep(1, 1.0))
    client.restart()
    client.settle(Abort())
    client.push(0, ApplyStep(2, 1.0))
    waiting = Waiting(lambda: client.settle(Abort()))
    assert [framed.message for framed in servers[0].heard()] == [
        Push(3, 1, 0, ApplyStep(2, 1.0), 1)
    ]  # the number goes on
    servers[0].say(Acknowledged(0, 1))
    waiting.end()

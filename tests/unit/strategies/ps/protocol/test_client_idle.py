"""A worker that waits for one answer can ask something else meanwhile: every answer finds its question."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import msgspec
import pytest
import zmq

from distbelief.control.credentials import KeyAuthority
from distbelief.control.messages import ServerMap
from distbelief.strategies.ps.protocol.client import ServerClient
from distbelief.strategies.ps.protocol.frames import RUN_MESSAGES, Framed, pack
from distbelief.strategies.ps.protocol.messages import Inspect, Inspected, MeasureStep, Question, StepMeasured
from distbelief.transport.abort import Abort

BADGE = KeyAuthority(bytes(range(32))).run.worker(1)


@pytest.fixture
def client() -> Iterator[ServerClient]:
    """Of a server that answers looks at once, and the first measure only after three of them."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    over = threading.Event()

    def serve() -> None:
        looks, held = 0, []
        while not over.is_set():
            if not socket.poll(20):
                continue
            identity, _, header, *_ = socket.recv_multipart()
            replies = []
            for message in msgspec.msgpack.decode(header, type=list[RUN_MESSAGES.from_clients]):
                if isinstance(message, Inspect):
                    looks += 1
                    replies.append(Framed(Inspected(message.ticket, message.slice, looks, [])))
                else:
                    assert isinstance(message, MeasureStep)
                    held.append(message)
                if looks >= 3 and held:
                    waiting = held.pop()
                    replies.append(Framed(StepMeasured(waiting.ticket, waiting.slice, [0.5])))
            if replies:
                socket.send_multipart([identity, *pack(replies)])

    thread = threading.Thread(target=serve)
    thread.start()
    found = ServerClient(BADGE, RUN_MESSAGES)
    found.learn(ServerMap(1, 1, [0], [-1], [-1], {0: f"tcp://127.0.0.1:{port}"}))
    yield found
    found.close()
    over.set()
    thread.join()
    socket.close(linger=0)
    context.term()


def look(ticket: int) -> Question:
    return Inspect(ticket, 0)


def test_a_question_inside_of_a_wait(client: ServerClient) -> None:
    told: list[float] = []
    versions: list[int] = []
    waiting: list[bool] = []

    def idle() -> float:
        waiting.append(client.waiting)
        client.ask([look], Abort(), lambda framed: versions.append(framed.message.version))
        return 0.0 if len(versions) < 3 else 60.0

    client.slices(Abort())
    client.ask(
        [partial(MeasureStep, slice=0, step=0)], Abort(), lambda framed: told.append(framed.message.squares[0]), idle
    )
    assert (told, versions) == ([0.5], [1, 2, 3])
    assert not any(waiting)  # who does something does not wait
    assert not client.waiting


def test_nothing_to_do_meanwhile(client: ServerClient) -> None:
    found: list[int] = []
    client.slices(Abort())
    client.ask([look, look], Abort(), lambda framed: found.append(framed.message.version))
    assert found == [1, 2]

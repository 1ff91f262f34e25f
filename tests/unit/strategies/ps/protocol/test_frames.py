"""Messages of workers and servers, with the bytes that go with them, arrive as they were sent; others are refused."""

from __future__ import annotations

import msgspec
import pytest
import zmq

from distbelief.errors import DistBeliefError
from distbelief.strategies.ps.protocol.frames import Letter, pack, unpack_for_client
from distbelief.strategies.ps.protocol.messages import (
    Answered,
    Contents,
    Fetch,
    Fetched,
    Go,
    Look,
    Looked,
    Measure,
    Measured,
    Node,
    Note,
    Push,
    Read,
    Refused,
    StepPast,
)
from distbelief.strategies.ps.protocol.peers import CopySent, Forwarded, TookChange, unpack
from distbelief.strategies.ps.rules.applied import Applied
from distbelief.strategies.ps.server.syncslice import Snapshot

NODE = Node(3, 0, 4, b"rows", b"\x01\x00", b"integers")
NAMED = Node(3, 0, 4, b"rows", b"\x01\x00", b"", "generation 2/slot/1.0")
APPLIED = Applied().add(3, 0)[0].add(3, 2)[0]
ABOUT = Snapshot(3, b"what that kind of slice knows")

TO_SERVERS = [
    Letter(Push(7, 0, 1, NODE), b"sums"),
    Letter(Push(7, 1, 1, NAMED)),
    Letter(Push(7, 2, 1, Go(3, 0.25))),
    Letter(Push(7, 3, 0, Note(3, b"note"))),
    Letter(Fetch(1, 0, 4, inline=True)),
    Letter(Measure(2, 0, 3)),
    Letter(Look(3, 0)),
    Letter(Read(4, 0, 3)),
    Letter(Forwarded(1, 2, 0, 5, (4, 6), (5, 7), (7, 0), NODE), b"sums again"),
    Letter(Forwarded(1, 2, 0, 5, (4, 6), (5, 7), (7, 1), NAMED)),
    Letter(Forwarded(1, 2, 0, 5, (5, 7), (5, 7))),
    Letter(CopySent(1, 2, 0, 5, (5, 7), APPLIED, ABOUT), b"everything"),
    Letter(TookChange(0, 2, 0, 5, (5, 7), 4, differs=True)),
]
TO_CLIENTS = [
    Letter(Answered(0, 5)),
    Letter(Refused(0, 3)),
    Letter(Fetched(1, 0, 4, b"rows", b"integers"), b"values"),
    Letter(Fetched(1, 0, 4, segment="server 0/life 1/slice 0")),
    Letter(Fetched(1, 0, -1, b"rows")),
    Letter(Measured(2, 0, [0.5])),
    Letter(Looked(3, 0, 4, [(0, 2)], [StepPast(3, b"rows", 1e9)], (3, b"note"), b"integers")),
    Letter(Contents(4, 0, 4), b"contents"),
    Letter(Contents(4, 0, -1)),
]


def frames(letters: list[Letter]) -> list[zmq.Frame]:
    return [zmq.Frame(part) for part in pack(letters)]


def plain(letters: list[Letter]) -> list[tuple[object, bytes | None]]:
    return [(one.message, None if one.payload is None else bytes(one.payload)) for one in letters]


def test_all_arrive_as_they_were_sent_each_with_its_bytes() -> None:
    assert plain(unpack(frames(TO_SERVERS))) == plain(TO_SERVERS)
    assert plain(unpack_for_client(frames(TO_CLIENTS))) == plain(TO_CLIENTS)


@pytest.mark.parametrize(
    "letter", [one for one in TO_SERVERS if one.payload], ids=lambda one: type(one.message).__name__
)
def test_one_that_comes_without_its_bytes_is_refused(letter: Letter) -> None:
    with pytest.raises(DistBeliefError, match="came without its bytes"):
        unpack(frames([Letter(letter.message)]))


def test_what_is_for_others_and_garbage_is_refused() -> None:
    for odd in (b"", b"garbage", msgspec.msgpack.encode([{"type": "Push"}]), msgspec.msgpack.encode({"type": "Look"})):
        with pytest.raises(msgspec.MsgspecError):
            unpack([zmq.Frame(odd)])
        with pytest.raises(msgspec.MsgspecError):
            unpack_for_client([zmq.Frame(odd)])
    for letter in TO_CLIENTS:
        with pytest.raises(msgspec.MsgspecError):
            unpack(frames([letter]))
    for letter in TO_SERVERS:
        with pytest.raises(msgspec.MsgspecError):
            unpack_for_client(frames([letter]))

"""Messages of workers and servers, with the bytes that go with them, arrive as they were sent; others are refused."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
import zmq

from distbelief.control.signatures import SERVER, WORKER, Sender
from distbelief.errors import DistBeliefError
from distbelief.kv.messages import MESSAGES as KV_MESSAGES
from distbelief.kv.messages import Consult, Withdraw
from distbelief.strategies.ps.protocol.frames import RUN_MESSAGES, Framed, may_say, pack
from distbelief.strategies.ps.protocol.messages import (
    Acknowledged,
    ApplyStep,
    ChangeAcknowledged,
    Content,
    ForwardedChange,
    Inspect,
    Inspected,
    MeasureStep,
    Note,
    NotPrimary,
    PartialSum,
    PulledValues,
    PullValues,
    Push,
    Question,
    ReadState,
    Reply,
    RequestLease,
    SliceCopySent,
    SliceState,
    Snapshot,
    StepMeasured,
    StepRecord,
)
from distbelief.strategies.ps.rules.applied import AppliedChanges
from distbelief.strategies.sandblaster.messages import MESSAGES as SEARCH_MESSAGES
from distbelief.strategies.sandblaster.messages import Take

NODE = PartialSum(3, 0, 4, b"rows", b"\x01\x00", b"integers")
NAMED = PartialSum(3, 0, 4, b"rows", b"\x01\x00", b"", "generation 2/slot/1.0")
APPLIED = AppliedChanges().add(3, 0)[0].add(3, 2)[0]
ABOUT = Snapshot(3, b"what that kind of slice knows")

TO_SERVERS = [
    Framed(Push(7, 0, 1, NODE), b"sums"),
    Framed(Push(7, 1, 1, NAMED)),
    Framed(Push(7, 2, 1, ApplyStep(3, 0.25))),
    Framed(Push(7, 3, 0, Note(3, b"note"))),
    Framed(PullValues(1, 0, 4, inline=True)),
    Framed(MeasureStep(2, 0, 3)),
    Framed(Inspect(3, 0)),
    Framed(ReadState(4, 0, 3)),
    Framed(ForwardedChange(1, 2, 0, 5, (4, 6), (5, 7), (7, 0), NODE), b"sums again"),
    Framed(ForwardedChange(1, 2, 0, 5, (4, 6), (5, 7), (7, 1), NAMED)),
    Framed(ForwardedChange(1, 2, 0, 5, (5, 7), (5, 7))),
    Framed(SliceCopySent(1, 2, 0, 5, (5, 7), APPLIED, ABOUT), b"everything"),
    Framed(ChangeAcknowledged(0, 2, 0, 5, (5, 7), 4, differs=True)),
]
TO_CLIENTS = [
    Framed(Acknowledged(0, 5)),
    Framed(NotPrimary(0, 3)),
    Framed(PulledValues(1, 0, 4, b"rows", b"integers"), b"values"),
    Framed(PulledValues(1, 0, 4, segment="server 0/life 1/slice 0")),
    Framed(PulledValues(1, 0, -1, b"rows")),
    Framed(StepMeasured(2, 0, [0.5])),
    Framed(Inspected(3, 0, 4, [(0, 2)], [StepRecord(3, b"rows", 1e9)], (3, b"note"), b"integers")),
    Framed(SliceState(4, 0, 4), b"contents"),
    Framed(SliceState(4, 0, -1)),
]


def frames(several: list[Framed]) -> list[zmq.Frame]:
    return [zmq.Frame(part) for part in pack(several)]


def plain(several: list[Framed]) -> list[tuple[object, bytes | None]]:
    return [(one.message, None if one.payload is None else bytes(one.payload)) for one in several]


def test_all_arrive_as_they_were_sent_each_with_its_bytes() -> None:
    assert plain(RUN_MESSAGES.unpack_for_server(frames(TO_SERVERS))) == plain(TO_SERVERS)
    assert plain(RUN_MESSAGES.unpack_for_client(frames(TO_CLIENTS))) == plain(TO_CLIENTS)


@pytest.mark.parametrize(
    "framed", [one for one in TO_SERVERS if one.payload], ids=lambda one: type(one.message).__name__
)
def test_one_that_comes_without_its_bytes_is_refused(framed: Framed) -> None:
    with pytest.raises(DistBeliefError, match="came without its bytes"):
        RUN_MESSAGES.unpack_for_server(frames([Framed(framed.message)]))


def test_what_is_for_others_and_garbage_is_refused() -> None:
    for odd in (
        b"",
        b"garbage",
        msgspec.msgpack.encode([{"type": "Push"}]),
        msgspec.msgpack.encode({"type": "Inspect"}),
    ):
        with pytest.raises(msgspec.MsgspecError):
            RUN_MESSAGES.unpack_for_server([zmq.Frame(odd)])
        with pytest.raises(msgspec.MsgspecError):
            RUN_MESSAGES.unpack_for_client([zmq.Frame(odd)])
    for framed in TO_CLIENTS:
        with pytest.raises(msgspec.MsgspecError):
            RUN_MESSAGES.unpack_for_server(frames([framed]))
    for framed in TO_SERVERS:
        with pytest.raises(msgspec.MsgspecError):
            RUN_MESSAGES.unpack_for_client(frames([framed]))


def leaves(base: type) -> set[type]:
    below = {one for kind in base.__subclasses__() for one in leaves(kind)}
    return below or {base}


def test_every_message_of_a_feature_is_in_a_set() -> None:
    listed: set[type] = set()
    for one in (RUN_MESSAGES, SEARCH_MESSAGES, KV_MESSAGES):
        push, *questions = get_args(one.from_clients)
        content = get_args(push)[0]
        listed |= {*(get_args(content) or (content,)), *questions, *get_args(one.to_clients)[2:]}
    assert listed == leaves(Content) | leaves(Question) | leaves(Reply)


def test_a_server_does_not_decode_the_messages_of_another_feature() -> None:
    with pytest.raises(msgspec.MsgspecError):
        KV_MESSAGES.unpack_for_server(frames([Framed(Push(7, 0, 1, ApplyStep(3, 0.25)))]))
    with pytest.raises(msgspec.MsgspecError):
        RUN_MESSAGES.unpack_for_server(frames([Framed(Push(7, 0, 0, Withdraw(7, 0)))]))


@pytest.mark.parametrize(
    "content", [RequestLease(7), Take(1, 7, 0, 0.0), Withdraw(7, 0)], ids=lambda one: type(one).__name__
)
def test_a_client_speaks_for_itself_alone(content: Content) -> None:
    senders = [Sender(WORKER, 7), Sender(WORKER, 8), Sender(SERVER, 7)]
    assert [may_say(sender, Push(7, 0, 0, content)) for sender in senders] == [True, False, False]
    assert not may_say(Sender(WORKER, 8), Push(8, 0, 0, content))
    assert [may_say(sender, Consult(1, 0, 7, 0, [])) for sender in senders] == [True, False, False]
    assert [may_say(sender, ChangeAcknowledged(7, 2, 0, 5, (5, 7), 4)) for sender in senders] == [False, False, True]

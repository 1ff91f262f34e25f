"""What a server answers, and when: the rules that the simulation only shows together."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distbelief.control.messages import ServerMap
from distbelief.errors import DistBeliefError
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import (
    Acknowledged,
    ApplyStep,
    Inspect,
    MeasureStep,
    NotPrimary,
    PulledValues,
    PullValues,
    Push,
    ReadState,
    SliceState,
    StepMeasured,
)
from distbelief.strategies.ps.server.node import Outgoing, ServerNode
from tests.support.ps.parts import SHARDS, Kit

WORKER, OTHER = b"worker", b"other"


@pytest.fixture(scope="module")
def kit() -> Kit:
    return Kit(clip_norm=None)


def node(kit: Kit, me: int, known: ServerMap | None = None) -> ServerNode:
    made = ServerNode(me, lambda number, first: (kit.store(number, first), ""))
    if known:
        made.learn(known)
    return made


def map_of(kit: Kit, primary: int, backup: int = -1, recruit: int = -1, version: int = 1, life: int = 1) -> ServerMap:
    count = len(kit.shapes)
    return ServerMap(version, life, [primary] * count, [backup] * count, [recruit] * count, {0: "", 1: ""})


def told(out: Outgoing) -> list[object]:
    return [framed.message for _, framed in out.clients]


def push(kit: Kit, sequence: int = 0, step: int = 0) -> Framed:
    change = kit.change(0, kit.history(1)[step], step, (0, SHARDS))
    return Framed(Push(5, sequence, 0, change.content), change.payload)


def go(sequence: int = 1, step: int = 0) -> Framed:
    return Framed(Push(5, sequence, 0, ApplyStep(step, 1.0)))


def both_ways(one: ServerNode, other: ServerNode, out: Outgoing) -> list[object]:
    """What `one` says to `other`, and all that follows; what clients of `one` are told by it."""
    heard: list[object] = []
    while out.servers:
        back = Outgoing()
        for _, framed in out.servers:
            back.add(other.receive(framed))
        out = Outgoing()
        for _, framed in back.servers:
            out.add(one.receive(framed))
        heard += told(out)
    return heard


def test_one_that_is_not_primary_refuses(kit: Kit) -> None:
    for server in (node(kit, 1, map_of(kit, 0, 1)), node(kit, 2, map_of(kit, 0, 1)), node(kit, 1)):
        for framed in (push(kit), Framed(Inspect(1, 0)), Framed(PullValues(1, 0, 1)), Framed(ReadState(1, 0, 0))):
            assert told(server.receive(framed, WORKER)) == [NotPrimary(0, server.version)]


def test_what_was_meant_for_another_life_counts_for_nothing(kit: Kit) -> None:
    """A worker pushes while all parameters begin anew: before it has heard of it, or before the server has."""
    server = node(kit, 0, map_of(kit, 0, version=3, life=2))
    late, early = (Framed(replace(push(kit).message, life=life), push(kit).payload) for life in (1, 3))
    assert told(server.receive(late, WORKER)) == []
    assert told(server.receive(early, WORKER)) == [NotPrimary(0, 3)]
    assert told(server.receive(Framed(Inspect(1, 0)), WORKER))[0].nodes == []  # type: ignore[attr-defined]
    right = Framed(replace(push(kit).message, life=2), push(kit).payload)
    assert told(server.receive(right, WORKER)) == [Acknowledged(0, 0)]


def test_alone_it_answers_at_once(kit: Kit) -> None:
    server = node(kit, 0, map_of(kit, 0))
    assert told(server.receive(Framed(PullValues(7, 0, 1)), OTHER)) == []
    assert told(server.receive(push(kit), WORKER)) == [Acknowledged(0, 0)]
    assert told(server.receive(push(kit), WORKER)) == [Acknowledged(0, 0)]  # it came twice
    assert told(server.receive(Framed(MeasureStep(8, 0, 0)), WORKER)) == [StepMeasured(8, 0, [])]
    out = server.receive(go(), WORKER)
    values = kit.history(1)[1][kit.shapes[0].first_byte : kit.shapes[0].end_byte]
    ((_, answered), (client, fetched)) = out.clients
    assert (answered.message, client) == (Acknowledged(0, 1), OTHER)
    assert isinstance(fetched.message, PulledValues)
    assert (fetched.message.ticket, fetched.message.version, bytes(fetched.payload)) == (7, 1, values)


def test_nothing_is_said_of_sums_that_the_backup_does_not_have(kit: Kit) -> None:
    """A look, a measure and a fetch: what follows from each of them must not be undone by a death."""
    primary, backup = node(kit, 0), node(kit, 1, map_of(kit, 0, 1))
    both_ways(primary, backup, primary.learn(map_of(kit, 0, 1)))
    out = primary.receive(push(kit), WORKER)
    assert told(out) == []
    for question in (Inspect(1, 0), MeasureStep(2, 0, 0)):
        assert told(primary.receive(Framed(question), WORKER)) == []
    heard = both_ways(primary, backup, out)
    assert {type(one).__name__ for one in heard} == {"Acknowledged", "Inspected", "StepMeasured"}
    out = primary.receive(go(), WORKER)
    assert told(primary.receive(Framed(PullValues(3, 0, 1)), WORKER)) == []
    assert {type(one).__name__ for one in both_ways(primary, backup, out)} == {"Acknowledged", "PulledValues"}


def test_a_question_that_comes_again_is_answered_once(kit: Kit) -> None:
    server = node(kit, 0, map_of(kit, 0))
    for _ in range(3):
        assert told(server.receive(Framed(PullValues(7, 0, 1)), WORKER)) == []
    server.receive(push(kit), WORKER)
    assert [type(one) for one in told(server.receive(go(), WORKER))] == [Acknowledged, PulledValues]


def test_who_waits_at_one_that_is_primary_no_more_is_sent_away(kit: Kit) -> None:
    for later in (map_of(kit, 1, 0, version=2), map_of(kit, 1, version=2)):  # it is backup, or nothing
        server = node(kit, 0, map_of(kit, 0))
        server.receive(Framed(PullValues(7, 0, 1)), WORKER)
        assert told(server.learn(later)) == [NotPrimary(0, 2)]
        assert told(server.learn(later)) == []


def test_a_read_of_another_version_brings_nothing(kit: Kit) -> None:
    server = node(kit, 0, map_of(kit, 0))
    assert told(server.receive(Framed(ReadState(1, 0, 3)), WORKER)) == [SliceState(1, 0, -1)]
    out = server.receive(Framed(ReadState(2, 0, 0)), WORKER)
    assert told(out) == [SliceState(2, 0, 0)]
    assert len(out.clients[0][1].payload) == kit.shapes[0].size_bytes


def test_a_new_life_begins_anew_and_forgets_what_others_say_of_the_old_one(kit: Kit) -> None:
    primary, backup = node(kit, 0), node(kit, 1, map_of(kit, 0, 1))
    both_ways(primary, backup, primary.learn(map_of(kit, 0, 1)))
    late = primary.receive(push(kit), WORKER)
    backup.learn(map_of(kit, 1, 0, version=2, life=2))
    for _, framed in late.servers:
        assert backup.receive(framed) == Outgoing()
    assert told(backup.receive(Framed(Inspect(1, 0)), WORKER)) == []  # the other one has not said that it is there
    hello = primary.learn(map_of(kit, 1, 0, version=2, life=2))
    assert told(hello) == []  # the push is of the old life: the worker gives it up with its generation
    (looked,) = both_ways(backup, primary, backup.remind())
    assert (looked.version, looked.nodes) == (0, [])  # type: ignore[attr-defined]


def test_what_no_server_is_told(kit: Kit) -> None:
    with pytest.raises(DistBeliefError, match="a server does not take the message Acknowledged"):
        node(kit, 0, map_of(kit, 0)).receive(Framed(Acknowledged(0, 0)), WORKER)

"""Messages: what is sent is what arrives, and nothing else is taken for a message."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distbelief.control import messages as m

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a noisy machine is no failure

EVENTS: list[m.Event] = [
    m.EngineAttached("here"),
    m.EngineAttached("here", {0: 4711, 3: 4712}, {1: -9, 2: 0}),
    m.WorkerJoined(0, "here", 12345),
    m.WorkerReady(
        1,
        m.JobFacts("digits", 8, 100, 64, 1797, 12345, "allreduce"),
        m.Canary("abcdef", {"threads": "1", "torch": "2.13"}),
    ),
    m.Heartbeat(1, 2, 3, 4, m.Timing()),
    m.Heartbeat(1, 2, 3, 4, m.Timing(0.1, 0.2, 0.3, 5, {0: 0.25, 3: 0.0})),
    m.Heartbeat(
        1,
        2,
        3,
        4,
        m.Timing(0.1, 0.2, 0.3, 5),
        [m.StepReport(3, 0.5, 64, "ff", 1e9), m.StepReport(4, float("inf"), 64, "00", 1e9)],
        [m.Evaluation(4, {"loss": 0.25, "accuracy": 0.97})],
    ),
    m.WorkerFinished(2, 3, 100),
    m.WorkerFinished(0, 3, 100, "sha", 0.125, {"accuracy": 1.0}, 1e6),
    m.WorkerFailed(1, "here", "user", "ValueError: bad", "look", "Traceback …", 7, 3),
    m.WorkerExited(1, -9),
    m.StepTakenOver(0, 3, 7, 2),
    m.StepTakenOver(0, 3, 7, 2, [m.BrokenShard(1, 7, 3)]),
    m.RolledBack(0, 3, reached=57, step=50, source="snapshots"),
    m.PlanShown(0, 3, ["stage 1/2: embedding, blocks.0–2"]),
    m.TracePart(0, "worker-0-77.spans", 1 << 20, b"\x00x"),
    m.CollectiveFailed(1, 3, "connection reset"),
    m.PeerDied(worker=1, generation=3, dead=2),
    m.LeaveRequested(2),
    m.WorkerLeft(2, 3),
    m.JoinRequested(4711),
    m.HostOffered("node7", "cd" * 16, 4, grows=True),
    m.HostDeclined("node7", "it has no strategy 'vote'", "cd" * 16),
    m.HostLost("node7", "its actor has died"),
    m.FactsAsked(3),
    m.ScaleRequested(4),
    m.ServersRequested(3),
    m.StopRequested("Ctrl-C"),
    m.StopRequested("Ctrl-C", at_once=True),
    m.CheckpointRequested(),
    m.CheckpointLoaded(0, 120, "s3://bucket/run", [(130, "a file is torn")]),
    m.PartSaved(1, 3, 120, m.WrittenPart(4096, "ab" * 32), 0.001, 0.5),
    m.CheckpointSealed(1, 120, 8192, 2),
    m.SaveFailed(1, 120, "cannot write", "free some space", gave_up=True),
    m.SaveMissed(1, 120),
    m.EngineAttached("here", servers={0: 4713}, servers_exited={1: -9}),
    m.ServerReady(1, "here", 4713, "tcp://127.0.0.1:5000", [4096, 64], {"threads": "1"}),
    m.ServerBeat(1, 2, 3),
    m.SliceCopied(1, 0, 2, 7),
    m.ServerFailed(1, "here", "ValueError: bad", "look", "Traceback …"),
    m.ServerExited(1, -9),
]
COMMANDS: list[m.Command] = [
    m.JoinAgain(3),
    m.StartGeneration(1, 2, [m.Member(0, "here", (0, 4)), m.Member(3, "there", (4, 8))], "shm"),
    m.StartGeneration(1, 2, [], "gloo"),
    m.StartGeneration(
        1, 2, [m.Member(0, "here", (0, 8), 4711)], "shm", [m.PastGeneration(1, [m.Member(1, "here", (0, 8))])], 17
    ),
    m.StartGeneration(
        1,
        2,
        [m.Member(0, "here", (0, 8), 4711, "stage 1/2"), m.Member(3, "here", (0, 8), 4712, "stage 2/2")],
        "gloo",
        [m.PastGeneration(1, [m.Member(1, "here", (0, 8))], [1, 1, 1, 1])],
        degrees=[2, 1, 1, 1],
    ),
    m.Refuse(1, "another thread count"),
    m.Retire(1, 2),
    m.Introduce(2, 17),
    m.StartWorker(1, 4),
    m.StartWorker(1, 4, "node7"),
    m.KillWorker(1, 2, "it is frozen"),
    m.Admit(1, 5),
    m.Welcome(1, "node7-2"),
    m.RunFacts(1, 3, 1e9, "training", "allreduce", 17, {0: "here"}, {"torch": "2.13"}, {"threads": "1"}),
    m.SaveAt(1, 120),
    m.SealCheckpoint(1, 120, [m.WrittenPart(4096, "ab" * 32), m.WrittenPart(0, "cd" * 32)]),
    m.Answer(1, True, "2 more workers are being started"),
    m.Serve(1, m.ServerMap(3, 1, [0, 1], [1, -1], [-1, 2], {0: "tcp://127.0.0.1:5000"}, sealed=40)),
    m.StartServer(1, 4),
    m.KillServer(1, 2, "it is frozen"),
    m.EndRun(1, "completed"),
    m.EndRun(2, "failed", "worker 1: ValueError"),
]


def test_the_examples_cover_every_kind() -> None:
    assert {type(event) for event in EVENTS} == set(typing.get_args(m.Event))
    assert {type(command) for command in COMMANDS} == set(typing.get_args(m.Command))


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_arrives_as_it_was_sent(event: m.Event) -> None:
    assert m.decode_event(m.encode(event)) == event
    with pytest.raises(msgspec.MsgspecError):
        m.decode_command(m.encode(event))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_command_arrives_as_it_was_sent(command: m.Command) -> None:
    assert m.decode_command(m.encode(command)) == command
    with pytest.raises(msgspec.MsgspecError):
        m.decode_event(m.encode(command))


@pytest.mark.parametrize("message", [*EVENTS, *COMMANDS], ids=lambda message: type(message).__name__)
def test_a_message_cut_short_is_rejected(message: m.Event | m.Command) -> None:
    data = m.encode(message)
    for length in range(len(data)):
        for decode in (m.decode_event, m.decode_command):
            with pytest.raises(msgspec.MsgspecError):
                decode(data[:length])


@patient
@given(st.binary(max_size=200))
def test_garbage_is_rejected(data: bytes) -> None:
    for decode in (m.decode_event, m.decode_command):
        with pytest.raises(msgspec.MsgspecError):
            decode(data)


@pytest.mark.parametrize(
    "content",
    [
        {"type": "Heartbeat"},
        {"type": "NoSuchEvent", "worker": 1},
        {"worker": 0, "host": "here", "pid": 1},
        {"type": "WorkerJoined", "worker": "0", "host": "here", "pid": 1},
        {"type": "WorkerExited", "worker": 0, "status": 1.5},
        {"type": "StopRequested", "reason": None},
        ["StopRequested", "x"],
        None,
    ],
)
def test_well_formed_messages_of_the_wrong_shape_are_rejected(content: object) -> None:
    with pytest.raises(msgspec.MsgspecError):
        m.decode_event(msgspec.msgpack.encode(content))


FAILED = m.WorkerFailed(1, "here", "user", "a" * 3_000_000, "", "b" * 3_000_000, 7, 3)


def test_an_event_is_cut_where_the_coordinator_would_drop_it() -> None:
    data = m.encode(FAILED)
    assert len(data) < 100_000
    found = m.decode_event(data)
    assert isinstance(found, m.WorkerFailed)
    assert (found.worker, found.kind, found.step, found.shard) == (1, "user", 7, 3)
    assert " … 3.0 MB cut … aaa" in found.message
    assert " … 3.0 MB cut … bbb" in found.traceback


def test_text_that_is_no_unicode_arrives_as_escapes() -> None:
    found = m.decode_event(m.encode(m.HostDeclined("here\udcff", "no \0 room", "n")))
    assert found == m.HostDeclined("here\\udcff", "no \\x00 room", "n")
    part = m.TracePart(1, "worker-1-0.json", 0, b"\xff\0")
    assert m.decode_event(m.encode(part)) == part


def test_an_event_that_no_cut_makes_short_enough_is_refused_by_its_sender() -> None:
    many = m.Evaluation(4, {f"{number:07}": 1.0 for number in range(200_000)})
    with pytest.raises(m.MessageTooLong, match=r"Heartbeat of 3.4 MB is longer than the coordinator takes \(2.1 MB\)"):
        m.encode(m.Heartbeat(1, 2, 3, 4, m.Timing(), [], [many]))


def test_bytes_are_never_cut_so_a_message_with_too_many_names_its_kind_and_its_size() -> None:
    with pytest.raises(m.MessageTooLong, match=r"TracePart of 3.0 MB is longer than the coordinator takes"):
        m.encode(m.TracePart(1, "worker-1-0.json", 0, b"x" * 3_000_000))


def test_commands_have_no_limit() -> None:
    """Their receivers take any length."""
    members = [m.Member(number, "host" * 10, (number, number + 1)) for number in range(50_000)]
    start = m.StartGeneration(1, 1, members, "gloo")
    assert m.decode_command(m.encode(start)) == start

"""Who may say what to the coordinator: every event has one kind of speaker."""

from __future__ import annotations

from typing import get_args

import pytest

from distbelief.control import messages as m
from distbelief.control.events import Event
from distbelief.control.signatures import Sender
from distbelief.coordinator.rules.authorization import FROM_SERVERS, FROM_WORKERS, is_introduced, may_send

OF_AGENTS = (m.EngineAttached("here"), m.WorkerExited(3, 0), m.ServerExited(3, 0))
OF_OWNERS = (
    m.HostOffered("there", "nonce"),
    m.HostDeclined("there", "it has no strategy 'vote'", "nonce"),
    m.HostLost("there", "its actor has died"),
    m.JoinRequested(3),
    m.ScaleRequested(3),
    m.ServersRequested(3),
    m.StopRequested("enough"),
    m.FactsAsked(),
    m.CheckpointRequested(),
)
SENDERS = [Sender(role, number) for role in ("owner", "agent", "worker", "server") for number in (3, 4)]


@pytest.mark.parametrize("event", OF_OWNERS)
def test_what_only_owners_say(event: m.Event) -> None:
    assert [sender.role for sender in SENDERS if may_send(sender, event)] == ["owner", "owner", "agent", "agent"]


@pytest.mark.parametrize("event", OF_AGENTS)
def test_what_only_agents_of_this_start_say(event: m.Event) -> None:
    assert [sender.role for sender in SENDERS if may_send(sender, event)] == ["agent", "agent"]


@pytest.mark.parametrize(
    "event",
    [m.WorkerLeft(3, 1), m.WorkerJoined(3, "here", 1), m.Heartbeat(3, 1, 1, 0, m.Timing())],
)
def test_a_worker_speaks_for_itself(event: m.Event) -> None:
    assert [sender for sender in SENDERS if may_send(sender, event)] == [("worker", 3)]


def test_a_worker_leaves_by_itself_or_with_its_host() -> None:
    may = [sender for sender in SENDERS if may_send(sender, m.LeaveRequested(3))]
    assert may == [("agent", 3), ("agent", 4), ("worker", 3)]


@pytest.mark.parametrize("event", [m.ServerBeat(3, 1, 1), m.SliceCopied(3, 0, 1, 1)])
def test_a_server_speaks_for_itself(event: m.Event) -> None:
    assert [sender for sender in SENDERS if may_send(sender, event)] == [("server", 3)]


def test_no_event_is_forgotten() -> None:
    """One that is in neither list is an owner's: the safe side for a new one."""
    assert set(get_args(Event)) == {*FROM_WORKERS, *FROM_SERVERS, *map(type, OF_OWNERS + OF_AGENTS)}
    assert all("worker" in one.__struct_fields__ for one in FROM_WORKERS)
    assert all("server" in one.__struct_fields__ for one in FROM_SERVERS)


def test_who_has_not_joined_says_who_it_is_and_nothing_else() -> None:
    assert is_introduced({3}, m.LeaveRequested(3))
    assert not is_introduced({3}, m.LeaveRequested(4))
    assert is_introduced({3}, m.WorkerJoined(4, "here", 1))
    assert is_introduced({3}, m.Heartbeat(4, 1, 1, 0, m.Timing()))  # it is asked to introduce itself
    assert is_introduced({3}, m.WorkerExited(4, 0))

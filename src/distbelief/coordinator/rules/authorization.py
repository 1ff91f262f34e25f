"""Authorization: which sender may send which event. Members report for themselves; owners and agents send the rest, of
which key holders may send what offers a host.

A file of its own so that a security review finds the whole rule; docs/security.md refers to it.
"""

from __future__ import annotations

from collections.abc import Container

from distbelief.control import messages as m
from distbelief.control.signatures import AGENT, KEY_HOLDER, OWNER, SERVER, WORKER, Sender

FROM_WORKERS = (
    m.WorkerJoined,
    m.WorkerReady,
    m.Heartbeat,
    m.StepTakenOver,
    m.RolledBack,
    m.PlanShown,
    m.TracePart,
    m.PeerDied,
    m.CollectiveFailed,
    m.LeaveRequested,
    m.WorkerLeft,
    m.WorkerFinished,
    m.WorkerFailed,
    m.CheckpointLoaded,
    m.PartSaved,
    m.CheckpointSealed,
    m.SaveFailed,
    m.SaveMissed,
)
"""The events that a worker reports itself; an agent reports its exit."""
_INTRODUCTIONS = (m.WorkerJoined, m.WorkerReady, m.Heartbeat)
FROM_AGENTS = (m.EngineAttached, m.WorkerExited, m.ServerExited)
"""The events that only agents may report."""
FROM_KEY_HOLDERS = (m.HostOffered, m.HostDeclined, m.FactsAsked)
"""The events of a process that has the key and was not sent the run's start yet."""
FROM_SERVERS = (m.ServerReady, m.ServerBeat, m.SliceCopied, m.ServerFailed)


def may_send(sender: Sender, event: m.Event) -> bool:
    """
    >>> may_send(Sender(WORKER, 3), m.LeaveRequested(3)), may_send(Sender(WORKER, 3), m.LeaveRequested(4))
    (True, False)
    >>> may_send(Sender(WORKER, 3), m.StopRequested("I do not like it"))
    False
    """
    if isinstance(event, m.LeaveRequested) and sender.role == AGENT:  # a host that leaves asks for its workers
        return True
    if isinstance(event, FROM_AGENTS):
        return sender.role == AGENT
    if isinstance(event, FROM_WORKERS):
        return sender == (WORKER, event.worker)
    if isinstance(event, FROM_SERVERS):
        return sender == (SERVER, event.server)
    return sender.role in (OWNER, AGENT) or (sender.role == KEY_HOLDER and isinstance(event, FROM_KEY_HOLDERS))


def is_introduced(workers: Container[int], event: m.Event) -> bool:
    """Whether the sender is known or introduces itself with this event. A coordinator that was restarted asks unknown
    workers to introduce themselves (Introduce); they then repeat their reports."""
    if isinstance(event, FROM_WORKERS) and not isinstance(event, _INTRODUCTIONS):
        return event.worker in workers
    return True

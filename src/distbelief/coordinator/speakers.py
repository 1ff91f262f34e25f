"""Who may say what to the coordinator: members speak for themselves, owners of the run for the rest. Pure."""

from __future__ import annotations

from distbelief.comm import messages as m
from distbelief.comm.seals import OWNER, SERVER, WORKER, Claim

FROM_WORKERS = (
    m.WorkerJoined,
    m.WorkerReady,
    m.Heartbeat,
    m.StepTakenOver,
    m.RolledBack,
    m.PlanShown,
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
"""What a worker says itself; its exit is told by the engine."""
FROM_SERVERS = (m.ServerReady, m.ServerBeat, m.SliceCopied, m.ServerFailed)


def may_say(claim: Claim, event: m.Event) -> bool:
    """
    >>> may_say(Claim(WORKER, 3), m.LeaveRequested(3)), may_say(Claim(WORKER, 3), m.LeaveRequested(4))
    (True, False)
    >>> may_say(Claim(WORKER, 3), m.StopRequested("I do not like it"))
    False
    """
    if isinstance(event, m.LeaveRequested) and claim.role == OWNER:  # a host that leaves takes its workers along
        return True
    if isinstance(event, FROM_WORKERS):
        return claim == (WORKER, event.worker)
    if isinstance(event, FROM_SERVERS):
        return claim == (SERVER, event.server)
    return claim.role == OWNER

"""The coordinator's decisions: step(state, event, now) -> (state, outputs).

The rules of these files (joining, regroup, faults, ending, and this one with the table):
- They are pure: no socket, clock, thread, randomness or torch. Time comes in as `now`; whoever calls performs the
  outputs.
- Which event means what in which phase is the table `TRANSITIONS` at the end. An event that is not in the table for a
  phase raises ProtocolError and changes nothing; late and repeated messages are expected and are ignored on purpose.
- Outputs are performed in order. A decision is a Record with a reason, and comes before the Sends that carry it out.
- A message may be lost. So a worker that does not know the present generation, or a later coordinator, is told again
  whenever it is heard of; and an engine says again and again which workers run.

Phases: gathering (workers join and load the job) -> training (generations of members) -> ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from distbelief.control import messages as m
from distbelief.coordinator.rules import cutoff, facts, faults, hosting, joining, rollback, saving
from distbelief.coordinator.rules.ending import Result, end, fail
from distbelief.coordinator.rules.progress import Seen, absorb
from distbelief.coordinator.rules.regroup import committed
from distbelief.coordinator.rules.replay import replay
from distbelief.coordinator.rules.servers import fleet, fleetsize, pacing, serverpauses
from distbelief.coordinator.rules.vocabulary import (
    ENGINE,
    EVERYBODY,
    CoordinatorFailed,
    Exit,
    Input,
    Output,
    Phase,
    ProtocolError,
    Record,
    Reply,
    Report,
    RunConfig,
    Send,
    SendServer,
    State,
    Ticked,
    Worker,
)

__all__ = [
    "ENGINE",
    "EVERYBODY",
    "CoordinatorFailed",
    "Exit",
    "Input",
    "Output",
    "ProtocolError",
    "Record",
    "Reply",
    "Report",
    "RunConfig",
    "Send",
    "SendServer",
    "State",
    "Ticked",
    "Worker",
    "begin",
    "resume",
    "step",
]


def begin(config: RunConfig, epoch: int, now: float) -> State:
    """A run that has nobody yet; the launching process starts the first workers by itself, if it starts any."""
    workers = config.workers
    local = workers if config.local_workers < 0 else min(config.local_workers, workers)
    servers = fleet.begun(config.servers, now, local=config.local_servers if local else 0)
    return State(
        config,
        epoch,
        active_at=now,
        target=workers,
        next_worker=workers,
        hired=dict.fromkeys(range(workers), now),
        placed=dict.fromkeys(range(local), ""),
        fleet=servers,
    )


def resume(
    config: RunConfig,
    epoch: int,
    now: float,
    records: Iterable[Mapping[str, Any]],
    steps: Seen | None = None,
    evaluations: Seen | None = None,
) -> State:
    """The run as its journal tells it, and what its metrics file has of steps and evaluations. Whoever is alive says so
    soon."""
    state = begin(config, epoch, now)
    for entry in records:
        state = replay(state, entry, now)
    pulse = state.pulse.restart(state.seats, now)
    progress = replace(state.progress, reported=steps or Seen(), evaluated=evaluations or Seen())
    return replace(state, pulse=pulse, looked_at=now, progress=progress)


def step(state: State, event: Input, now: float) -> Result:
    """One event in; the new state and what to do about it out. Raises ProtocolError for an event out of place."""
    handler = TRANSITIONS[state.phase].get(type(event))
    if handler is None:
        raise ProtocolError(f"{type(event).__name__} makes no sense while {state.phase}: {event}")
    return handler(state, event, now)


def _ignored(state: State, event: object, now: float) -> Result:
    return state, []


def _attached(state: State, event: m.EngineAttached, now: float) -> Result:
    """What an engine tells again and again includes the exits: whichever of them was missed is heard now."""
    state, outputs = hosting.attached(state, event, now)
    for worker, status in event.exited.items():
        known = state.workers.get(worker)
        if (known is None or known.exited is None) and state.phase != "ended":
            state, more = faults.exited(state, m.WorkerExited(worker, status), now)
            outputs += more
    state, more = faults.outstanding(state, now)  # who is missing is started before the run grows
    outputs += more
    state, more = hosting.grown(state, event.host, now)
    outputs += more
    state, more = fleet.attached(state, event, now)
    outputs += more
    state, more = fleetsize.kept(state, now)
    return state, outputs + more


# --- workers train ---------------------------------------------------------------------------------------------------


def _heartbeat(state: State, event: m.Heartbeat, now: float) -> Result:
    worker = state.workers.get(event.worker)
    if worker is None or not worker.ready or event.epoch < state.epoch:
        return state, [_introduce(state)] if worker is None or worker.exited is None else []
    if worker.estranged:
        return cutoff.returned(state, worker, now)
    if event.generation != state.generation or not state.is_member(event.worker):
        state = replace(state, pulse=state.pulse.alive(event.worker, now))
        return state, [*fleet.told_worker(state, event), *_told_again(state, worker, event.generation)]
    before = state.progress.reported
    progress, lines = absorb(state.progress, state.members, event, now, exact=state.config.exact)
    pulse = state.pulse.heard(event.worker, event.step, event.waiting, now)
    if progress.reported is not before:
        pulse = pulse.committed([report.at for report in event.reports], now)
        if any(report.step >= progress.redone for report in event.reports):  # else it is where it was before
            state = fleet.committed(committed(state))
    speeds = state.speeds.observe(event.worker, event.timing, now)
    state = replace(state, progress=progress, pulse=pulse, speeds=speeds)
    outputs: list[Output] = [Report(line) for line in lines]
    state, paused = serverpauses.applied(state, event.reports, now)
    state, more = pacing.heard(state, event, now)
    outputs += [*paused, *more, *fleet.told_worker(state, event)]
    if worker.leaving:
        outputs += _told_again(state, worker, event.generation)
    elif event.finished and worker.finished is None:  # that it has finished was not heard
        outputs.append(_introduce(state))
    return state, outputs


def _introduce(state: State) -> Reply:
    return Reply(m.Introduce(state.epoch, state.progress.reported.complete))


def _told_again(state: State, worker: Worker, generation: int) -> list[Output]:
    """It does not know the present generation, or that it is to go: what it was told may be lost."""
    if worker.left:
        return [Reply(m.EndRun(state.epoch, "left", "it has handed its work over"))]
    if worker.leaving and state.is_member(worker.number):
        return [Reply(m.Retire(state.epoch, state.generation))]
    if worker.leaving:
        return [Reply(m.EndRun(state.epoch, "left", "it is not needed any more"))]
    return [Reply(state.start)] if state.start and generation < state.generation else []


def _finished(state: State, event: m.WorkerFinished, now: float) -> Result:
    if event.generation != state.generation:
        return state, []
    if not state.is_member(event.worker):
        raise ProtocolError(f"worker {event.worker} has finished a generation in which it has no part")
    worker = state.workers[event.worker]
    if worker.finished is not None:
        return state, []
    workers = state.workers.set(event.worker, replace(worker, finished=event))
    pending = {w: until for w, until in state.pending.items() if w != event.worker}
    pulse = state.pulse.left(event.worker, now)
    state = replace(state, workers=workers, pending=pending, pulse=pulse, finished=state.finished + 1)
    return saving.complete_if_done(state, now)


def _ticked(state: State, event: Ticked, now: float) -> Result:
    state, outputs = faults.ticked(state, event, now)
    state, more = fleet.ticked(state, now)
    outputs += more
    if state.phase != "training":
        return state, outputs
    state, more = saving.ticked(state, now)
    return state, outputs + more


# --- the end ---------------------------------------------------------------------------------------------------------


def _stopped(state: State, event: m.StopRequested, now: float) -> Result:
    if event.at_once or not saving.can_save(state):
        return end(state, "stopped", event.reason, now)
    return saving.stop_after_save(state, event.reason, now)


def _broken(state: State, event: CoordinatorFailed, now: float) -> Result:
    failure = m.WorkerFailed(worker=-1, host="", kind="coordinator", message=event.message, hint=event.hint)
    return fail(state, failure, now)


def _too_late(state: State, event: object, now: float) -> Result:
    assert state.outcome is not None
    return state, [Reply(state.outcome)]


def _over(state: State, event: m.EngineAttached, now: float) -> Result:
    """Only after a restart is there anybody left to attach: the end was decided, but perhaps nobody was told."""
    assert state.outcome is not None
    status: Any = state.outcome.status
    return state, [Reply(state.outcome), Exit(status)]


def _refused(state: State, event: object, now: float) -> Result:
    return state, [Reply(m.Answer(state.epoch, False, "the run is over"))]


# --- the table -------------------------------------------------------------------------------------------------------

Handler = Callable[[State, Any, float], Result]

TRANSITIONS: Mapping[Phase, Mapping[type, Handler]] = {
    "gathering": {
        m.EngineAttached: _attached,
        m.WorkerJoined: joining.joined,
        m.WorkerReady: joining.ready,
        m.Heartbeat: _heartbeat,
        m.WorkerFailed: fail,
        m.WorkerExited: faults.exited,
        m.LeaveRequested: faults.leave_requested,
        m.WorkerLeft: faults.left,
        m.TracePart: _ignored,  # nothing is decided by it
        m.JoinRequested: joining.admitted,
        m.HostOffered: hosting.offered,
        m.HostLost: cutoff.lost,
        m.ScaleRequested: joining.scaled,
        m.ServersRequested: fleetsize.scaled,
        m.FactsAsked: facts.told,
        m.StopRequested: _stopped,
        m.CheckpointRequested: saving.requested,
        m.ServerReady: fleet.ready,
        m.ServerBeat: fleet.beat,
        m.ServerFailed: fleet.failed,
        m.ServerExited: fleet.exited,
        Ticked: faults.ticked,
        CoordinatorFailed: _broken,
    },
    "training": {
        m.EngineAttached: _attached,
        m.WorkerJoined: joining.joined,
        m.WorkerReady: joining.ready,
        m.Heartbeat: _heartbeat,
        m.StepTakenOver: faults.taken_over,
        m.RolledBack: rollback.rolled_back,
        m.PlanShown: rollback.plan_shown,
        m.PeerDied: faults.peer_died,
        m.CollectiveFailed: faults.collective_failed,
        m.WorkerFinished: _finished,
        m.WorkerFailed: faults.failed,
        m.WorkerExited: faults.exited,
        m.LeaveRequested: faults.leave_requested,
        m.WorkerLeft: faults.left,
        m.TracePart: _ignored,  # nothing is decided by it
        m.JoinRequested: joining.admitted,
        m.HostOffered: hosting.offered,
        m.HostLost: cutoff.lost,
        m.ScaleRequested: joining.scaled,
        m.ServersRequested: fleetsize.scaled,
        m.FactsAsked: facts.told,
        m.StopRequested: _stopped,
        m.CheckpointRequested: saving.requested,
        m.CheckpointLoaded: saving.loaded,
        m.PartSaved: saving.part_saved,
        m.CheckpointSealed: saving.sealed,
        m.SaveFailed: saving.failed,
        m.SaveMissed: saving.missed,
        m.ServerReady: fleet.ready,
        m.ServerBeat: fleet.beat,
        m.SliceCopied: fleet.copied,
        m.ServerFailed: fleet.failed,
        m.ServerExited: fleet.exited,
        Ticked: _ticked,
        CoordinatorFailed: _broken,
    },
    "ended": {
        m.EngineAttached: _over,
        m.WorkerJoined: _too_late,
        m.WorkerReady: _ignored,
        m.Heartbeat: _too_late,
        m.StepTakenOver: _ignored,
        m.RolledBack: _ignored,
        m.PlanShown: _ignored,
        m.PeerDied: _ignored,
        m.CollectiveFailed: _ignored,
        m.WorkerFinished: _ignored,
        m.WorkerFailed: _ignored,  # the first failure is the cause; the rest follow from it
        m.WorkerExited: _ignored,
        m.LeaveRequested: _ignored,
        m.WorkerLeft: _ignored,
        m.TracePart: _ignored,
        m.JoinRequested: _refused,
        m.HostOffered: _refused,
        m.HostLost: _refused,
        m.ScaleRequested: _refused,
        m.ServersRequested: _refused,
        m.FactsAsked: facts.told,
        m.StopRequested: _ignored,
        m.CheckpointRequested: _refused,
        m.CheckpointLoaded: _ignored,
        m.PartSaved: _ignored,
        m.CheckpointSealed: _ignored,
        m.SaveFailed: _ignored,
        m.SaveMissed: _ignored,
        m.ServerReady: _too_late,
        m.ServerBeat: _too_late,
        m.SliceCopied: _ignored,
        m.ServerFailed: _ignored,
        m.ServerExited: _ignored,
        Ticked: _ignored,
        CoordinatorFailed: _broken,  # the end that was decided could not be recorded, so nobody was told of it
    },
}

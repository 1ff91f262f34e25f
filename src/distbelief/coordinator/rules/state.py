"""The coordinator's state machine: step(state, event, now) -> (state, outputs).

Phases: gathering (workers join and load the job) -> training (generations of members) -> ended.

The rules of all files in this folder:
- They are pure: no socket, clock, thread, randomness or torch. Time comes in as `now`; the caller performs the outputs.
- The table `TRANSITIONS` at the end says which function handles which event in which phase. An event that is not in the
  table raises ProtocolError and changes nothing; late and repeated messages are expected and ignored on purpose.
- Outputs are performed in order. A decision is a Record with a reason, and comes before the Sends that carry it out.
- A message may be lost. A worker whose heartbeat names an old generation gets the last command again; a worker whose
  heartbeat names an earlier coordinator gets Introduce. Agents repeat once a second which processes run.

Where to find what:
- members.py: workers join, are refused, become spares, are scaled, leave. hosts.py: on which host they are started.
- regroup.py: a new generation; generation.py: its seats; assignment.py and balance.py: its shards.
- faults.py: deaths, broken connections, lost hosts. detector.py: how long a frozen worker is waited for.
- servers/: parameter servers. saving.py: checkpoints. ending.py: results and failures. progress.py: metrics lines.
- replay.py: the state after a restart, from the journal. explain.py: texts for people. authorization.py: who may send
  what.
- vocabulary.py: the values State, RunConfig, Worker, and the outputs.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from distbelief.control import messages as m
from distbelief.coordinator.rules import faults, hosts, members, saving, standins
from distbelief.coordinator.rules.ending import Result, end, fail
from distbelief.coordinator.rules.progress import Seen, absorb, absorb_results
from distbelief.coordinator.rules.regroup import committed
from distbelief.coordinator.rules.replay import replay
from distbelief.coordinator.rules.servers import fleet, lifecycle
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
from distbelief.version import __version__

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
    """A run without any process yet. The launching process starts the first workers by itself, if it starts any."""
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
    """The state of a run from its journal's records and from the steps and evaluations in its metrics file.

    Processes that are alive report soon.
    """
    state = replay(begin(config, epoch, now), records, now)
    pulse = state.pulse.restart(state.seats, now)
    progress = replace(state.progress, reported=steps or Seen(), evaluated=evaluations or Seen())
    return replace(state, pulse=pulse, looked_at=now, progress=progress)


def step(state: State, event: Input, now: float) -> Result:
    """The new state, and what to do. Raises ProtocolError for an event that makes no sense in this state."""
    handler = TRANSITIONS[state.phase].get(type(event))
    if handler is None:
        raise ProtocolError(f"{type(event).__name__} is not valid while {state.phase}: {event}")
    return handler(state, event, now)


def _ignored(state: State, event: object, now: float) -> Result:
    return state, []


def _attached(state: State, event: m.EngineAttached, now: float) -> Result:
    """An agent reports. Its report includes all exits, so an exit that was missed is handled now."""
    state, outputs = hosts.attached(state, event, now)
    for worker, status in event.exited.items():
        known = state.workers.get(worker)
        if (known is None or known.exited is None) and state.phase != "ended":
            state, more = faults.exited(state, m.WorkerExited(worker, status), now)
            outputs += more
    state, more = faults.outstanding(state, now)  # missing workers are started before the run grows
    outputs += more
    state, more = standins.grown(state, event.host, now)
    outputs += more
    state, more = lifecycle.attached(state, event, now)
    outputs += more
    state, more = lifecycle.maintained(state, now)
    return state, outputs + more


# --- workers train ---------------------------------------------------------------------------------------------------


def _heartbeat(state: State, event: m.Heartbeat, now: float) -> Result:
    worker = state.workers.get(event.worker)
    if worker is None or not worker.ready or event.epoch < state.epoch:
        return state, [_introduce(state)] if worker is None or worker.exited is None else []
    if worker.estranged:
        return standins.returned(state, worker, now)
    if event.generation != state.generation or not state.is_member(event.worker):
        state = replace(state, pulse=state.pulse.alive(event.worker, now))
        told = [*lifecycle.told_worker(state, event), *_told_again(state, worker, event.generation)]
        if not 0 < event.generation < state.generation:
            return state, told
        # The results of an earlier generation count: all members that know them may die before one repeats them, if
        # heartbeats have waited while a decision waited for room on a full disk.
        progress, lines = absorb_results(state.progress, event, now, exact=state.config.exact)
        return replace(state, progress=progress), [*map(Report, lines), *told]
    before = state.progress.reported
    progress, lines = absorb(state.progress, state.members, event, now, exact=state.config.exact)
    pulse = state.pulse.heard(event.worker, event.step, event.waiting, now)
    if progress.reported is not before:
        pulse = pulse.committed([report.at for report in event.reports], now)
        if any(report.step >= progress.redone for report in event.reports):  # else a lost step was only repeated
            state = lifecycle.committed(committed(state))
    speeds = state.speeds.observe(event.worker, event.timing, now)
    state = replace(state, progress=progress, pulse=pulse, speeds=speeds)
    outputs: list[Output] = [Report(line) for line in lines]
    state, pauses = lifecycle.applied(state, event.reports, now)
    state, more = lifecycle.paced(state, event, now)
    outputs += [*pauses, *more, *lifecycle.told_worker(state, event)]
    if worker.leaving:
        outputs += _told_again(state, worker, event.generation)
    elif event.finished and worker.finished is None:  # its WorkerFinished was lost
        outputs.append(_introduce(state))
    return state, outputs


def _introduce(state: State) -> Reply:
    return Reply(m.Introduce(state.epoch, state.progress.reported.complete))


def _told_again(state: State, worker: Worker, generation: int) -> list[Output]:
    """Repeat the last command to a worker that does not know the present generation, or that it is to leave."""
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
        raise ProtocolError(f"worker {event.worker} has finished a generation in which it has no seat")
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
    state, more = lifecycle.ticked(state, now)
    outputs += more
    if state.phase != "training":
        return state, outputs
    state, more = saving.ticked(state, now)
    return state, outputs + more


# --- the end ---------------------------------------------------------------------------------------------------------


def _stopped(state: State, event: m.StopRequested, now: float) -> Result:
    if event.at_once or not saving.can_save(state):
        state, outputs = end(state, "stopped", event.reason, now)
        text = "the run stops; it saves no checkpoint"
    else:
        state, outputs = saving.stop_after_save(state, event.reason, now)
        text = "the run stops when a checkpoint is saved"
    return state, [Reply(m.Answer(state.epoch, True, text)), *outputs]


def _broken(state: State, event: CoordinatorFailed, now: float) -> Result:
    failure = m.WorkerFailed(worker=-1, host="", kind="coordinator", message=event.message, hint=event.hint)
    return fail(state, failure, now)


def _too_late(state: State, event: object, now: float) -> Result:
    assert state.outcome is not None
    return state, [Reply(state.outcome)]


def _over(state: State, event: m.EngineAttached, now: float) -> Result:
    """An agent reports after the end, which happens only after a restart: the end was recorded but perhaps not sent."""
    assert state.outcome is not None
    status: Any = state.outcome.status
    return state, [Reply(state.outcome), Exit(status)]


def _refused(state: State, event: object, now: float) -> Result:
    return state, [Reply(m.Answer(state.epoch, False, "the run is over"))]


# --- questions from outside ------------------------------------------------------------------------------------------

_SOFTWARE = {"distbelief": __version__, "python": platform.python_version()}


def _facts_asked(state: State, event: m.FactsAsked, now: float) -> Result:
    """An outside process (doctor) compares a host with the run. The run does not change."""
    answer = m.RunFacts(
        epoch=state.epoch,
        number=event.number,
        now=now,
        phase=state.phase,
        strategy=state.config.strategy,
        step=state.progress.reported.complete,
        members={worker.number: worker.host for worker in state.workers.values() if worker.counts},
        software=_SOFTWARE,
        facts=state.reference.canary.facts if state.reference else {},
    )
    return state, [Reply(answer)]


# --- the table -------------------------------------------------------------------------------------------------------

Handler = Callable[[State, Any, float], Result]

TRANSITIONS: Mapping[Phase, Mapping[type, Handler]] = {
    "gathering": {
        m.EngineAttached: _attached,
        m.WorkerJoined: members.joined,
        m.WorkerReady: members.ready,
        m.Heartbeat: _heartbeat,
        m.WorkerFailed: fail,
        m.WorkerExited: faults.exited,
        m.LeaveRequested: members.leave_requested,
        m.WorkerLeft: members.left,
        m.TracePart: _ignored,  # the server stores it
        m.JoinRequested: members.admitted,
        m.HostOffered: hosts.offered,
        m.HostDeclined: faults.host_declined,
        m.HostLost: faults.host_lost,
        m.ScaleRequested: members.scaled,
        m.ServersRequested: lifecycle.scaled,
        m.FactsAsked: _facts_asked,
        m.StopRequested: _stopped,
        m.CheckpointRequested: saving.requested,
        m.ServerReady: lifecycle.ready,
        m.ServerBeat: lifecycle.beat,
        m.ServerFailed: lifecycle.failed,
        m.ServerExited: lifecycle.exited,
        Ticked: faults.ticked,
        CoordinatorFailed: _broken,
    },
    "training": {
        m.EngineAttached: _attached,
        m.WorkerJoined: members.joined,
        m.WorkerReady: members.ready,
        m.Heartbeat: _heartbeat,
        m.StepTakenOver: faults.taken_over,
        m.RolledBack: faults.rolled_back,
        m.PlanShown: faults.plan_shown,
        m.PeerDied: faults.peer_died,
        m.CollectiveFailed: faults.collective_failed,
        m.WorkerFinished: _finished,
        m.WorkerFailed: faults.failed,
        m.WorkerExited: faults.exited,
        m.LeaveRequested: members.leave_requested,
        m.WorkerLeft: members.left,
        m.TracePart: _ignored,  # the server stores it
        m.JoinRequested: members.admitted,
        m.HostOffered: hosts.offered,
        m.HostDeclined: faults.host_declined,
        m.HostLost: faults.host_lost,
        m.ScaleRequested: members.scaled,
        m.ServersRequested: lifecycle.scaled,
        m.FactsAsked: _facts_asked,
        m.StopRequested: _stopped,
        m.CheckpointRequested: saving.requested,
        m.CheckpointLoaded: saving.loaded,
        m.PartSaved: saving.part_saved,
        m.CheckpointSealed: saving.sealed,
        m.SaveFailed: saving.failed,
        m.SaveMissed: saving.missed,
        m.ServerReady: lifecycle.ready,
        m.ServerBeat: lifecycle.beat,
        m.SliceCopied: lifecycle.copied,
        m.ServerFailed: lifecycle.failed,
        m.ServerExited: lifecycle.exited,
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
        m.HostDeclined: _refused,
        m.HostLost: _refused,
        m.ScaleRequested: _refused,
        m.ServersRequested: _refused,
        m.FactsAsked: _facts_asked,
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
        CoordinatorFailed: _broken,  # the end could not be recorded, so no process was told of it
    },
}

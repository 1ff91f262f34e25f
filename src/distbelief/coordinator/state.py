"""The coordinator's decisions: step(state, event, now) -> (state, outputs).

The rules of this file:
- It is pure: no socket, clock, thread, randomness or torch. Time comes in as `now`; whoever calls performs the outputs.
- Which event means what in which phase is the table `TRANSITIONS` at the end. An event that is not in the table for a
  phase raises ProtocolError and changes nothing; late and repeated messages are expected and are ignored on purpose.
- Outputs are performed in order. A decision is a Record with a reason, and comes before the Sends that carry it out.

Phases: gathering (workers join and load the job) -> training (one generation of members) -> ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from distbelief.comm import messages as m
from distbelief.coordinator import explain, membership
from distbelief.coordinator.progress import absorb, notice, workers_line
from distbelief.coordinator.vocabulary import (
    ENGINE,
    EXIT_GRACE_S,
    REPORTED_GRACE_S,
    CoordinatorFailed,
    Exit,
    Input,
    Output,
    Phase,
    ProtocolError,
    Record,
    Report,
    RunConfig,
    Send,
    State,
    Status,
    Ticked,
    Worker,
)

__all__ = [
    "ENGINE",
    "CoordinatorFailed",
    "Exit",
    "Input",
    "Output",
    "ProtocolError",
    "Record",
    "Report",
    "RunConfig",
    "Send",
    "State",
    "Ticked",
    "Worker",
    "begin",
    "step",
]

Result = tuple[State, list[Output]]


def begin(config: RunConfig, epoch: int, now: float, generation: int = 0) -> State:
    """A run that has nobody yet. `generation` is the highest one in the journal, so that numbers are never reused."""
    return State(config=config, epoch=epoch, active_at=now, generation=generation)


def step(state: State, event: Input, now: float) -> Result:
    """One event in; the new state and what to do about it out. Raises ProtocolError for an event out of place."""
    handler = TRANSITIONS[state.phase].get(type(event))
    if handler is None:
        raise ProtocolError(f"{type(event).__name__} makes no sense while {state.phase}: {event}")
    return handler(state, event, now)


# --- workers come ----------------------------------------------------------------------------------------------------


def _ignored(state: State, event: object, now: float) -> Result:
    return state, []


def _attached(state: State, event: m.EngineAttached, now: float) -> Result:
    return replace(state, active_at=now), []


def _joined(state: State, event: m.WorkerJoined, now: float) -> Result:
    known = state.workers.get(event.worker)
    newcomer = Worker(event.worker, event.host, event.pid)
    if known is not None and known.pid in (0, event.pid):
        # A repeat, or a worker whose exit overtook its joining: what is known of it stays.
        newcomer = replace(known, host=event.host, pid=event.pid)
    elif known is not None and known.exited is None:
        raise ProtocolError(f"{newcomer.name} says it is worker {event.worker}, which is {known.name} and alive")
    elif event.worker in state.pending or state.is_member(event.worker):
        raise ProtocolError(f"{newcomer.name} takes the number of a member that is gone; give it another one")
    return replace(_with_worker(state, newcomer), active_at=now), []


def _ready(state: State, event: m.WorkerReady, now: float) -> Result:
    worker = state.workers.get(event.worker)
    if worker is None:
        raise ProtocolError(f"worker {event.worker} is ready but never joined")
    if worker.ready or worker.refused or worker.exited is not None:
        return state, []
    outputs: list[Output] = []
    if state.reference is None:
        reason = f"worker {event.worker} was the first to be ready; all others must match it"
        facts = {"job": msgspec.to_builtins(event.job), "canary": msgspec.to_builtins(event.canary)}
        outputs.append(_record(state, now, "reference", reason, worker=event.worker, **facts))
        state = replace(state, reference=event)
    else:
        run = state.reference
        reason = explain.refusal(event.worker, event.job, event.canary, run.job, run.canary, state.config.exact)
        if reason:
            return _refuse(state, worker, reason, now)
    state = replace(_with_worker(state, replace(worker, ready=True)), active_at=now)
    state, more = _seat(state, worker, now) if state.phase == "training" else _start_when_complete(state, now)
    return state, outputs + more


def _refuse(state: State, worker: Worker, reason: str, now: float) -> Result:
    state = _with_worker(state, replace(worker, refused=True))
    outputs: list[Output] = [
        _record(state, now, "refused", reason, worker=worker.number),
        Send(worker.number, m.Refuse(epoch=state.epoch, reason=reason)),
    ]
    if state.phase == "training":
        return state, [*outputs, Report(notice(f"refused: {reason}", now))]
    # The run counts on this worker and would wait for it for ever.
    failure = m.WorkerFailed(worker=worker.number, host=worker.host, kind="refused", message=reason)
    state, more = _fail(state, failure, now)
    return state, outputs + more


def _seat(state: State, worker: Worker, now: float) -> Result:
    """A worker that is ready after the start is a spare: it is told the generation, in which it has no part."""
    assert state.start is not None
    reason = f"{worker.name} became ready after the start of generation {state.generation}: it is a spare"
    return state, [
        _record(state, now, "spare", reason, worker=worker.number),
        Send(worker.number, state.start),
        Report(notice(reason, now)),
    ]


def _start_when_complete(state: State, now: float) -> Result:
    ready = [w for _, w in sorted(state.workers.items()) if w.ready and w.exited is None]
    # A worker that is gone is not replaced by a later one in silence: its pending exit decides.
    if len(ready) < state.config.workers or state.pending:
        return state, []
    assert state.reference is not None
    shards = state.reference.job.shards
    plan = membership.plan(state.config, shards, ready)
    if plan.problem:
        hint = 'use transport "auto" or "gloo"'
        return _fail(state, m.WorkerFailed(worker=-1, host="", kind="job", message=plan.problem, hint=hint), now)
    generation = state.generation + 1
    start = m.StartGeneration(state.epoch, generation, plan.members, plan.transport)
    state = replace(state, phase="training", generation=generation, start=start)
    reason = f"all {len(ready)} workers are ready, on {len(plan.hosts)} host{'s' if len(plan.hosts) > 1 else ''}"
    members = msgspec.to_builtins(plan.members)
    facts = {"members": members, "spares": plan.spares, "transport": plan.transport}
    outputs: list[Output] = [_record(state, now, "generation", reason, generation=generation, **facts)]
    outputs += [Send(worker.number, start) for worker in ready]
    if plan.spares:
        outputs.append(Report(notice(explain.spares(len(ready), shards, plan.spares), now)))
    return state, outputs


# --- workers train ---------------------------------------------------------------------------------------------------


def _heartbeat(state: State, event: m.Heartbeat, now: float) -> Result:
    current = event.epoch == state.epoch and event.generation == state.generation
    if not current or not state.is_member(event.worker):
        return state, []
    progress, lines = absorb(state.progress, state.members, event, now)
    return replace(state, progress=progress), [Report(line) for line in lines]


def _finished(state: State, event: m.WorkerFinished, now: float) -> Result:
    if event.generation != state.generation:
        return state, []
    if not state.is_member(event.worker):
        raise ProtocolError(f"worker {event.worker} has finished a generation in which it has no part")
    worker = state.workers[event.worker]
    if worker.finished is not None:
        return state, []
    state = _with_worker(state, replace(worker, finished=event))
    state = replace(state, pending={w: until for w, until in state.pending.items() if w != event.worker})
    ends = [state.workers[member.worker].finished for member in state.members]
    if None in ends or ends[0] is None:
        return state, []
    first = ends[0]
    odd = [end.worker for end in ends if end and end.weights_sha256 not in ("", first.weights_sha256)]
    if odd:
        who = ", ".join(state.workers[worker].name for worker in odd)
        message = f"the weights of {who} differ from those of {state.workers[first.worker].name} at the end of the run"
        hint = "this must not happen in an exact strategy: please report it, with the run directory"
        return _fail(state, m.WorkerFailed(odd[0], "", "internal", message, hint), now)
    result = {
        "steps": first.step,
        "loss": first.loss,
        "metrics": first.metrics,
        "weights_sha256": first.weights_sha256,
        "samples_per_s": first.samples_per_s,
        "workers": len(state.members),
        "recoveries": 0,
    }
    line = workers_line(state.progress, state.members, state.generation, now)
    state, outputs = _end(state, "completed", f"all {len(ends)} members have finished", now, result=result)
    return state, [Report(line), *outputs]


# --- workers fail ----------------------------------------------------------------------------------------------------


def _failed(state: State, event: m.WorkerFailed, now: float) -> Result:
    if state.phase == "training" and not state.is_member(event.worker):
        # The members do not need it: a newcomer that cannot load the job must not end a healthy run.
        return state, [Report(notice(f"worker {event.worker} failed, but it is no member: {event.message}", now))]
    return _fail(state, event, now)


def _exited(state: State, event: m.WorkerExited, now: float) -> Result:
    worker = state.workers.get(event.worker, Worker(event.worker))
    if worker.exited is not None:
        return state, []
    state = _with_worker(state, replace(worker, exited=event.status))
    if worker.finished is not None or worker.refused:
        return state, []
    if state.phase == "training" and not state.is_member(event.worker):
        return state, [Report(notice(f"{worker.name}, a spare, {explain.ending(event.status)}", now))]
    grace_s = REPORTED_GRACE_S if event.status == m.EXIT_REPORTED else EXIT_GRACE_S
    return replace(state, pending={**state.pending, event.worker: now + grace_s}), []


def _member_lost(state: State, worker: Worker, now: float) -> Result:
    """The policy for a member that is gone without a reported cause: the run ends."""
    assert worker.exited is not None
    reached = state.progress.steps.get(worker.number, 0)
    when = f"after {reached} steps" if state.phase == "training" else "before the run had started"
    message = f"{worker.name} {explain.ending(worker.exited)} {when}"
    hint = f"look in logs/worker-{worker.number}.log"
    failure = m.WorkerFailed(
        worker=worker.number, host=worker.host, kind="exit", message=message, hint=hint, step=reached
    )
    return _fail(state, failure, now)


def _ticked(state: State, event: Ticked, now: float) -> Result:
    overdue = [(until, worker) for worker, until in state.pending.items() if until <= now]
    if overdue:
        return _member_lost(state, state.workers[min(overdue)[1]], now)
    if state.phase == "gathering" and now - state.active_at > state.config.gather_timeout_s:
        expected = state.config.workers
        loading = [w.name for _, w in sorted(state.workers.items()) if not w.ready]
        absent = [number for number in range(expected) if number not in state.workers]
        message = explain.not_ready(now - state.active_at, expected, loading, absent)
        hint = "look in the logs folder of the run for what they are doing"
        return _fail(state, m.WorkerFailed(worker=-1, host="", kind="timeout", message=message, hint=hint), now)
    return state, []


# --- the end ---------------------------------------------------------------------------------------------------------


def _stopped(state: State, event: m.StopRequested, now: float) -> Result:
    return _end(state, "stopped", event.reason, now)


def _broken(state: State, event: CoordinatorFailed, now: float) -> Result:
    failure = m.WorkerFailed(worker=-1, host="", kind="coordinator", message=event.message, hint=event.hint)
    return _fail(state, failure, now)


def _too_late(state: State, event: m.WorkerJoined | m.EngineAttached, now: float) -> Result:
    assert state.outcome is not None
    return state, [Send(event.worker if isinstance(event, m.WorkerJoined) else ENGINE, state.outcome)]


def _fail(state: State, failure: m.WorkerFailed, now: float) -> Result:
    exits = [
        f"{state.workers[worker].name} {explain.ending(state.workers[worker].exited or 0)}"
        for worker in sorted(state.pending)
        if worker != failure.worker
    ]
    return _end(state, "failed", failure.message, now, failure=msgspec.to_builtins(failure), exits=exits)


def _end(state: State, status: Status, reason: str, now: float, **facts: Any) -> Result:
    outcome = m.EndRun(epoch=state.epoch, status=status, reason=reason)
    state = replace(state, phase="ended", outcome=outcome)
    alive = [w.number for _, w in sorted(state.workers.items()) if w.exited is None and not w.refused]
    outputs: list[Output] = [_record(state, now, "ended", reason, status=status, **facts)]
    outputs += [Send(worker, outcome) for worker in [*alive, ENGINE]]
    return state, [*outputs, Exit(status)]


def _record(state: State, now: float, kind: str, reason: str, **facts: Any) -> Record:
    return Record({"kind": kind, "epoch": state.epoch, "at": now, "reason": reason, **facts})


def _with_worker(state: State, worker: Worker) -> State:
    return replace(state, workers={**state.workers, worker.number: worker})


# --- the table -------------------------------------------------------------------------------------------------------

Handler = Callable[[State, Any, float], Result]

TRANSITIONS: Mapping[Phase, Mapping[type, Handler]] = {
    "gathering": {
        m.EngineAttached: _attached,
        m.WorkerJoined: _joined,
        m.WorkerReady: _ready,
        m.Heartbeat: _ignored,  # from a member of an earlier coordinator's generation
        m.WorkerFailed: _fail,
        m.WorkerExited: _exited,
        m.StopRequested: _stopped,
        Ticked: _ticked,
        CoordinatorFailed: _broken,
    },
    "training": {
        m.EngineAttached: _ignored,
        m.WorkerJoined: _joined,
        m.WorkerReady: _ready,
        m.Heartbeat: _heartbeat,
        m.WorkerFinished: _finished,
        m.WorkerFailed: _failed,
        m.WorkerExited: _exited,
        m.StopRequested: _stopped,
        Ticked: _ticked,
        CoordinatorFailed: _broken,
    },
    "ended": {
        m.EngineAttached: _too_late,
        m.WorkerJoined: _too_late,
        m.WorkerReady: _ignored,
        m.Heartbeat: _ignored,
        m.WorkerFinished: _ignored,
        m.WorkerFailed: _ignored,  # the first failure is the cause; the rest follow from it
        m.WorkerExited: _ignored,
        m.StopRequested: _ignored,
        Ticked: _ignored,
        CoordinatorFailed: _broken,  # the end that was decided could not be recorded, so nobody was told of it
    },
}

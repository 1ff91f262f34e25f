"""Workers die, freeze, leave or lose their connections, and the run goes on. Pure."""

from __future__ import annotations

from dataclasses import replace

from distbelief.control import messages as m
from distbelief.coordinator.rules import balance, cutoff, detector, explain
from distbelief.coordinator.rules.ending import Result, fail, fail_without_culprit, record, say, with_worker
from distbelief.coordinator.rules.hiring import MOST_FAILED_HIRES, hire
from distbelief.coordinator.rules.regroup import regroup, release, start_when_complete
from distbelief.coordinator.rules.vocabulary import (
    ENGINE,
    EXIT_GRACE_S,
    REPORTED_GRACE_S,
    Output,
    Report,
    Send,
    State,
    Ticked,
    Worker,
)

LOOK_EVERY_S = 2.0
EXPLAINED_S = 1.0
"""A connection that breaks is most often the first sign of a death: wait this long for the news of it."""
MOST_RETRIES = 10


def failed(state: State, event: m.WorkerFailed, now: float) -> Result:
    worker = state.workers.get(event.worker)
    if state.phase == "training" and not state.is_member(event.worker):
        # The members do not need it: a newcomer that cannot load the job must not end a healthy run.
        text = f"worker {event.worker} failed, but it is no member: {event.message}"
        goodbye = Send(event.worker, m.EndRun(state.epoch, "failed", text))
        if worker is None or worker.refused or worker.exited is not None:
            return state, [goodbye]
        state = with_worker(state, replace(worker, refused=True))
        return _after_failed_hire(state, text, now, [goodbye])
    return fail(state, event, now)


def exited(state: State, event: m.WorkerExited, now: float) -> Result:
    worker = state.workers.get(event.worker, Worker(event.worker))
    if worker.exited == m.STATUS_UNKNOWN:
        state = with_worker(state, replace(worker, exited=event.status))
        return state, [say(f"{worker.name} {explain.ending(event.status)}", now)]
    if worker.exited is not None:
        return state, []
    known = event.worker in state.workers
    if event.worker in state.guests:  # somebody's own worker, and it thought better of it
        state = with_worker(state, replace(worker, exited=event.status))  # the engine will tell of it again
        return replace(state, guests=state.guests - {event.worker}), []
    state = with_worker(state, replace(worker, exited=event.status))
    state = replace(state, hired={w: at for w, at in state.hired.items() if w != event.worker})
    if worker.finished is not None or worker.refused or worker.left:
        return state, []
    if worker.leaving and not state.is_member(event.worker):
        return state, []
    if worker.leaving:  # gone before we heard that it had let go
        return regroup(state, "leave", f"{worker.name} has left", now)
    if state.phase == "training" and not state.is_member(event.worker):
        text = f"{worker.name}, which was no member, {explain.ending(event.status)}"
        # The engine tells of it again; the next coordinator must not count it once more.
        written = record(state, now, "exited", text, worker=event.worker, status=event.status)
        if known and worker.ready:
            state, outputs = hire(state, now)
            return state, [written, say(text, now), *outputs]
        return _after_failed_hire(state, text, now, [written])
    if event.status < 0:  # a signal: there is no report of a cause to wait for
        return _lost(state, state.workers[event.worker], now)
    grace_s = REPORTED_GRACE_S if event.status == m.EXIT_REPORTED else EXIT_GRACE_S
    return replace(state, pending={**state.pending, event.worker: now + grace_s}), []


def peer_died(state: State, event: m.PeerDied, now: float) -> Result:
    """A member saw it before the engine could. Whatever of the process is left does not touch the shared memory."""
    worker = state.workers.get(event.dead)
    if event.generation != state.generation or not state.is_member(event.dead) or worker is None or worker.gone:
        return state, []
    if worker.finished is not None or worker.leaving:
        return state, []  # its process ends soon, one way or the other, and the engine tells how
    worker = replace(worker, exited=m.STATUS_UNKNOWN)
    return _lost(with_worker(state, worker), worker, now)


def _after_failed_hire(state: State, text: str, now: float, outputs: list[Output]) -> Result:
    """A new worker came to nothing. Try again, but not for ever."""
    failed_hires = state.troubles.failed_hires + 1
    state = replace(state, troubles=replace(state.troubles, failed_hires=failed_hires))
    if failed_hires >= MOST_FAILED_HIRES:
        text += f"; after {failed_hires} such failures no more are started (distbelief scale tries again)"
    state, more = hire(state, now)
    outputs = [*outputs, say(text, now), *more]
    if state.paused and state.phase == "training":  # nobody may be left to wait for
        state, more = regroup(state, "death", text, now)
        outputs += more
    return state, outputs


def _lost(state: State, worker: Worker, now: float) -> Result:
    """A member, or a worker that was to become one, is gone without a reported cause."""
    assert worker.exited is not None
    state = replace(state, pending={w: until for w, until in state.pending.items() if w != worker.number})
    losses = state.troubles.losses + 1
    state = replace(state, troubles=replace(state.troubles, losses=losses))
    ended = f"{worker.name} {explain.ending(worker.exited)}"
    hint = f"look in logs/worker-{worker.number}.log"
    limit = 3 if state.phase == "gathering" else 10 + 2 * state.target
    if losses >= limit:
        reached = state.progress.steps.get(worker.number, 0)
        when = f"after {reached} steps" if state.phase == "training" else "before the run had started"
        message = f"{losses} workers have died one after the other, without a step in between; the last: {ended} {when}"
        failure = m.WorkerFailed(worker.number, worker.host, "exit", message, hint, step=reached)
        return fail(state, failure, now)
    outputs: list[Output] = [record(state, now, "lost", ended, worker=worker.number, status=worker.exited)]
    if state.phase == "gathering":
        outputs.append(say(f"{ended} before the run had started; another one is started", now))
        if state.reference:  # the others may have been ready all the time that the cause of this exit was waited for
            state, more = start_when_complete(state, now)
            outputs += more
    else:
        state = replace(state, lost=(*state.lost, worker.number))
        state, more = regroup(state, "death", ended, now)
        outputs += more
    state, more = hire(state, now)
    return state, outputs + more


def outstanding(state: State, now: float) -> Result:
    """What follows from decisions that are on record and was not carried out: a coordinator died in between."""
    if state.pending or state.phase == "ended":
        return state, []
    outputs: list[Output] = []
    if state.lost:
        names = ", ".join(state.workers[worker].name for worker in state.lost)
        state, outputs = regroup(state, "death", f"{names} died; the others go on", now)
    state, more = hire(state, now)
    return state, outputs + more


def taken_over(state: State, event: m.StepTakenOver, now: float) -> Result:
    """The members of a new generation found a step begun. A shard that kills whoever computes it must not go round."""
    if event.generation <= state.taken_over:
        return state, []
    killers = dict(state.troubles.killers)
    for one in event.broken:
        before = killers.get((one.step, one.shard), ())
        if one.worker not in before:
            killers[one.step, one.shard] = (*before, one.worker)
    line = {"kind": "recovery", "generation": event.generation, "step": event.step, "recomputed": event.recomputed}
    state = replace(state, taken_over=event.generation, troubles=replace(state.troubles, killers=killers))
    for (step, shard), workers in killers.items():
        if len(workers) > 1:
            which = f"step {step}" if state.config.stride == 1 else f"the steps from {step} on"
            message = (
                f"shard {shard} of {which} has killed {len(workers)} workers "
                f"({', '.join(map(str, workers))}): whoever computes it dies"
            )
            hint = f"look at the samples of that shard, and in logs/worker-{workers[-1]}.log"
            failure = m.WorkerFailed(workers[-1], "", "exit", message, hint, step=step, shard=shard)
            return fail(state, failure, now)
    outputs: list[Output] = [Report({**line, "at": now})]
    if state.config.stride > 1 and event.recomputed and state.reference:
        outputs.append(say(_back_to_outer_step(event, state.reference.job.shards), now))
    return state, outputs


def _back_to_outer_step(event: m.StepTakenOver, replicas: int) -> str:
    again = f"{event.recomputed} of {replicas} replica{'s' if replicas > 1 else ''}"
    return f"goes back to the last outer step, after step {event.step}: {again} computed again from there"


def collective_failed(state: State, event: m.CollectiveFailed, now: float) -> Result:
    if event.generation != state.generation or not state.is_member(event.worker):
        return state, []
    if state.troubles.broken_at is None:
        what = f"worker {event.worker}: {event.message}"
        state = replace(state, troubles=replace(state.troubles, broken_at=now, broken=what))
    return state, []


def leave_requested(state: State, event: m.LeaveRequested, now: float) -> Result:
    worker = state.workers.get(event.worker)
    if worker is None or worker.gone or worker.leaving or state.saves.stopping:
        return state, []  # a batch system tells everybody to go: those who save are needed until the end
    target = max(state.target - 1, state.config.min_workers)
    text = f"{worker.name} was asked to go, and leaves after the present step"
    state = replace(state, target=target)
    outputs: list[Output] = [record(state, now, "leaves", text, worker=worker.number, target=target), say(text, now)]
    state, more = release(state, worker, now)
    outputs += more
    if state.phase == "gathering" and state.reference:  # it may have been the last one that was waited for
        state, more = start_when_complete(state, now)
        outputs += more
    state, more = hire(state, now)
    return state, outputs + more


def left(state: State, event: m.WorkerLeft, now: float) -> Result:
    """It has let go of the generation: the others go on without it, and it may end."""
    worker = state.workers.get(event.worker)
    if worker is None or worker.exited is not None or event.generation < state.generation:
        return state, []
    goodbye = Send(event.worker, m.EndRun(state.epoch, "left", "it has handed its work over"))
    if worker.left:
        return state, [goodbye]
    state = with_worker(state, replace(worker, left=True, leaving=True))
    state, outputs = regroup(state, "leave", f"{worker.name} has left", now)
    return state, [*outputs, goodbye]


# --- time passes -----------------------------------------------------------------------------------------------------


def ticked(state: State, event: Ticked, now: float) -> Result:
    state = replace(state, pulse=state.pulse.ticked(now))
    overdue = [(until, worker) for worker, until in state.pending.items() if until <= now]
    if overdue:
        return _lost(state, state.workers[min(overdue)[1]], now)
    state, outputs = cutoff.ticked(state, now)
    if outputs:
        return state, outputs
    if state.phase == "gathering":
        return _gathering_too_long(state, now)
    broken_at = state.troubles.broken_at
    if broken_at is not None and now - broken_at > EXPLAINED_S and not state.pending:
        return _try_again(state, now)
    frozen = detector.suspects(state.pulse, now, stuck_after_s=state.config.stuck_after_s)
    fresh = [one for one in frozen if not state.workers[one.worker].fenced and not state.paused]
    if fresh:
        return _fence(state, fresh, now)
    if now - state.looked_at >= LOOK_EVERY_S:
        return _look(replace(state, looked_at=now), now)
    return state, []


def _gathering_too_long(state: State, now: float) -> Result:
    if now - state.active_at <= state.config.gather_timeout_s:
        return state, []
    loading = [worker.name for worker in state.workers.values() if not worker.ready and worker.exited is None]
    absent = sorted(state.hired)
    message = explain.not_ready(now - state.active_at, state.target, loading, absent)
    hint = "look in the logs folder of the run for what they are doing"
    return fail_without_culprit(state, "timeout", message, hint, now)


def _try_again(state: State, now: float) -> Result:
    retries = state.troubles.retries + 1
    state = replace(state, troubles=replace(state.troubles, broken_at=None, retries=retries))
    if retries > MOST_RETRIES:
        message = f"connections between members broke {retries} times in a row: {state.troubles.broken}"
        return fail_without_culprit(state, "network", message, "see the workers' logs; is the network up?", now)
    return regroup(state, "broken", f"{state.troubles.broken}; all are alive, and meet again", now)


def _fence(state: State, suspects: list[detector.Suspect], now: float) -> Result:
    """Frozen, not dead: it may wake in the middle of a write. So it is killed first; its exit brings the change."""
    outputs: list[Output] = []
    for one in suspects:
        worker = replace(state.workers[one.worker], fenced=True)
        if cutoff.is_out_of_reach(state, worker, now):
            state, more = cutoff.estrange(state, {one.worker: one.reason}, now)
            outputs += more
            continue
        state = with_worker(state, worker)
        outputs.append(record(state, now, "fenced", one.reason, worker=one.worker))
        outputs.append(Send(ENGINE, m.KillWorker(state.epoch, one.worker, one.reason)))
        outputs.append(say(f"{one.reason}; it is killed and replaced", now))
    return state, outputs


def _look(state: State, now: float) -> Result:
    """Would the step be shorter with the shards divided otherwise?"""
    if not state.config.balances or state.paused or state.finished:
        return state, []
    ranges = [member.shards for member in state.members]
    members = [member.worker for member in state.members]
    look, better = balance.look(state.look, ranges, members, state.speeds)
    state = replace(state, look=look)
    if better is None:
        return state, []
    return regroup(state, "balance", balance.explain(ranges, better, members, state.speeds), now, better)

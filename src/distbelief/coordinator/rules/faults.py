"""Workers fail, die, freeze or become unreachable, and connections break: what follows, so that the run goes on.

How it works:
- *A process ended.* Its agent reports the exit (`exited`). A signal counts at once. After an exit code the coordinator
  waits briefly for the WorkerFailed that names the cause (REPORTED_GRACE_S, EXIT_GRACE_S): user errors end the run, all
  else is a death. The others regroup without the dead worker, and a new worker is started (`_lost`). Too many deaths
  without a committed step in between end the run.
- *A worker is frozen.* detector.py decides which worker is frozen, and after how long. A frozen worker is not dead: it
  may wake in the middle of a write. So it is killed first (`_fence`), and only its exit brings the next generation.
- *A worker cannot be killed*, because its host's agent is silent too. Where members share no memory a cut-off member
  can do no harm: it is left out (estranged). If it reports again, it finds that its generation is over and joins
  anew. In shared memory it must be killed, so the run waits.
- *A host is silent* for hosts.LOST_S, or is reported lost: all its workers and servers are given up.
- *A connection broke* and no death is reported within EXPLAINED_S: the same members start a new generation.
- *A step was begun* by the last generation: the new one reports which step it took over, and which shard each dead
  worker was computing. A shard that killed two workers ends the run: it would kill every worker in turn.
- *A part of a divided model is lost*: the members go back to an older state and report how far.
"""

from __future__ import annotations

from dataclasses import replace

from distbelief.control import messages as m
from distbelief.coordinator.rules import balance, detector, explain, hosts, standins
from distbelief.coordinator.rules.ending import Result, fail, fail_without_culprit, record, say, with_worker
from distbelief.coordinator.rules.hosts import MOST_FAILED_HIRES, hire, launching, slowed
from distbelief.coordinator.rules.progress import forget
from distbelief.coordinator.rules.regroup import regroup, start_when_complete
from distbelief.coordinator.rules.servers import lifecycle
from distbelief.coordinator.rules.vocabulary import (
    ENGINE,
    EXIT_GRACE_S,
    REPORTED_GRACE_S,
    Output,
    Reply,
    Report,
    Send,
    State,
    Ticked,
    Worker,
)
from distbelief.transport.rules import choice

LOOK_EVERY_S = 2.0
"""Seconds between two looks at the load balance."""
EXPLAINED_S = 1.0
"""A connection that breaks is most often the first sign of a death: wait this long for the report of it."""
MOST_RETRIES = 10
MOST_REFUSED = 10
"""After this many starts in a row that hosts refused, with longer and longer pauses, no more are tried."""
MOST_STARTS = 3
"""How often each worker's start may be refused before the run has begun."""


# --- a process fails or ends -----------------------------------------------------------------------------------------


def failed(state: State, event: m.WorkerFailed, now: float) -> Result:
    worker = state.workers.get(event.worker)
    if state.phase == "training" and not state.is_member(event.worker):
        # The members do not need it: a new worker that cannot load the job must not end a healthy run.
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
    if event.worker in state.arriving:  # started by hand and ended before it joined: the target did not include it
        state = with_worker(state, replace(worker, exited=event.status))
        return replace(state, arriving=state.arriving - {event.worker}), []
    state = with_worker(state, replace(worker, exited=event.status))
    state = replace(state, hired={w: at for w, at in state.hired.items() if w != event.worker})
    if worker.finished is not None or worker.refused or worker.left:
        return state, []
    if worker.leaving and not state.is_member(event.worker):
        return state, []
    if worker.leaving:  # its exit arrived before its WorkerLeft
        return regroup(state, "leave", f"{worker.name} has left", now)
    if state.phase == "training" and not state.is_member(event.worker):
        refused = event.status == m.STATUS_NOT_STARTED
        who = worker.name if refused else f"{worker.name}, which was no member,"
        text = f"{who} {explain.ending(event.status, event.reason)}"
        # Recorded, so that the next coordinator, which hears of the exit again, does not count it again.
        written = record(state, now, "exited", text, worker=event.worker, status=event.status)
        if known and worker.ready:
            state, outputs = hire(state, now)
            return state, [written, say(text, now), *outputs]
        return _after_failed_hire(state, text, now, [written], refused=refused)
    if event.status < 0:  # killed by a signal, or not started: no report of a cause will come
        return _lost(state, state.workers[event.worker], now, event.reason)
    grace_s = REPORTED_GRACE_S if event.status == m.EXIT_REPORTED else EXIT_GRACE_S
    return replace(state, pending={**state.pending, event.worker: now + grace_s}), []


def peer_died(state: State, event: m.PeerDied, now: float) -> Result:
    """A member saw another member's death before the agent could. The dead process no longer touches shared memory. It
    is killed all the same, until the agent reports its exit: the member may be wrong, and the worker may live."""
    worker = state.workers.get(event.dead)
    if event.generation != state.generation or not state.is_member(event.dead) or worker is None or worker.gone:
        return state, []
    if worker.finished is not None or worker.leaving:
        return state, []  # its process ends soon in any case, and the agent reports how
    worker = replace(worker, exited=m.STATUS_UNKNOWN)
    state, outputs = _lost(with_worker(state, worker), worker, now)
    reason = f"worker {event.worker} reports its death"
    return state, [Send(ENGINE, m.KillWorker(state.epoch, event.dead, reason)), *outputs]


def _after_failed_hire(state: State, text: str, now: float, outputs: list[Output], *, refused: bool = False) -> Result:
    """A new worker ended before it was ready. Start another one, up to MOST_FAILED_HIRES in a row, or MOST_REFUSED if
    hosts refused to start them: there may be room again later."""
    failed_hires = state.troubles.failed_hires + (not refused)
    refusals = state.troubles.refused + (refused and not state.restarts.wait_s(now))  # once per attempt
    if refusals >= MOST_REFUSED:
        failed_hires = MOST_FAILED_HIRES
    state = replace(state, troubles=replace(state.troubles, failed_hires=failed_hires, refused=refusals))
    later: list[Output] = []
    if failed_hires >= MOST_FAILED_HIRES:
        count = max(failed_hires, refusals)
        text += f"; after {count} such failures no more are started (distbelief scale tries again)"
    else:
        state, later = slowed(state, now, refused=refused)
    state, more = hire(state, now)
    outputs = [*outputs, say(text, now), *later, *more]
    if state.paused and state.phase == "training":  # perhaps no worker is left to wait for
        state, more = regroup(state, "death", text, now)
        outputs += more
    return state, outputs


def _lost(state: State, worker: Worker, now: float, reason: str = "") -> Result:
    """A member, or a worker that was to become one, died without a reported cause. `reason`: why it was not started."""
    assert worker.exited is not None
    state = replace(state, pending={w: until for w, until in state.pending.items() if w != worker.number})
    losses = state.troubles.losses + 1
    state = replace(state, troubles=replace(state.troubles, losses=losses))
    ended = f"{worker.name} {explain.ending(worker.exited, reason)}"
    hint = f"look in logs/worker-{worker.number}.log"
    refused = worker.exited == m.STATUS_NOT_STARTED
    limit = 3 if state.phase == "gathering" else 10 + 2 * state.target
    if refused:  # of the whole run at once, and it may be a matter of seconds
        limit = max(limit, MOST_STARTS * state.target)
    if losses >= limit:
        reached = state.progress.steps.get(worker.number, 0)
        when = f"after {reached} steps" if state.phase == "training" else "before the run had started"
        message = f"{losses} workers have died one after the other, without a step in between; the last: {ended} {when}"
        failure = m.WorkerFailed(worker.number, worker.host, "exit", message, hint, step=reached)
        return fail(state, failure, now)
    outputs: list[Output] = [record(state, now, "lost", ended, worker=worker.number, status=worker.exited)]
    if state.phase == "gathering":
        outputs.append(say(f"{ended}{'' if refused else ' before the run had started'}; another one is started", now))
        if state.reference:  # the start may only have waited for this exit's cause
            state, more = start_when_complete(state, now)
            outputs += more
    else:
        state = replace(state, lost=(*state.lost, worker.number))
        state, more = regroup(state, "death", ended, now)
        outputs += more
    state, later = slowed(state, now, refused=refused)
    state, more = hire(state, now)
    return state, [*outputs, *later, *more]


def outstanding(state: State, now: float) -> Result:
    """Carry out what follows from recorded decisions and was not done, because a coordinator died in between."""
    if state.pending or state.phase == "ended":
        return state, []
    outputs: list[Output] = []
    if state.lost:
        names = ", ".join(state.workers[worker].name for worker in state.lost)
        state, outputs = regroup(state, "death", f"{names} died; the others go on", now)
    state, more = hire(state, now)
    return state, outputs + more


# --- time passes: frozen workers, broken connections, silent hosts ---------------------------------------------------


def ticked(state: State, event: Ticked, now: float) -> Result:
    state = replace(state, pulse=state.pulse.ticked(now))
    overdue = [(until, worker) for worker, until in state.pending.items() if until <= now]
    if overdue:
        return _lost(state, state.workers[min(overdue)[1]], now)
    state, outputs = _give_up_silent(state, now)
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


def _fence(state: State, suspects: list[detector.Suspect], now: float) -> Result:
    """Kill frozen workers. The generation changes when their exits are reported, not before."""
    outputs: list[Output] = []
    for one in suspects:
        worker = replace(state.workers[one.worker], fenced=True)
        if _is_unreachable(state, worker, now):
            state, more = _estrange(state, {one.worker: one.reason}, now)
            outputs += more
            continue
        state = with_worker(state, worker)
        outputs.append(record(state, now, "fenced", one.reason, worker=one.worker))
        outputs.append(Send(ENGINE, m.KillWorker(state.epoch, one.worker, one.reason)))
        outputs.append(say(f"{one.reason}; it is killed and replaced", now))
    return state, outputs


def _look(state: State, now: float) -> Result:
    """Regroup with another assignment if that makes steps shorter (balance.py)."""
    if not state.config.balances or state.paused or state.finished:
        return state, []
    ranges = [member.shards for member in state.members]
    members = [member.worker for member in state.members]
    look, better = balance.look(state.look, ranges, members, state.speeds)
    state = replace(state, look=look)
    if better is None:
        return state, []
    return regroup(state, "balance", balance.explain(ranges, better, members, state.speeds), now, better)


def collective_failed(state: State, event: m.CollectiveFailed, now: float) -> Result:
    if event.generation != state.generation or not state.is_member(event.worker):
        return state, []
    if state.troubles.broken_at is None:
        what = f"worker {event.worker}: {event.message}"
        state = replace(state, troubles=replace(state.troubles, broken_at=now, broken=what))
    return state, []


def _try_again(state: State, now: float) -> Result:
    retries = state.troubles.retries + 1
    state = replace(state, troubles=replace(state.troubles, broken_at=None, retries=retries))
    if retries > MOST_RETRIES:
        message = f"connections between members broke {retries} times in a row: {state.troubles.broken}"
        return fail_without_culprit(state, "network", message, "see the workers' logs; is the network up?", now)
    return regroup(state, "broken", f"{state.troubles.broken}; all members are alive, and connect again", now)


# --- workers that cannot be killed, and hosts that are lost ----------------------------------------------------------


def _is_unreachable(state: State, worker: Worker, now: float) -> bool:
    """Whether the worker shares no memory with others and its host's agent, which could kill it, is silent.

    A coordinator that has just started does not know its hosts yet: then no worker counts as unreachable.
    """
    apart = state.start is not None and not choice.shares_memory(state.start.transport)
    return apart and bool(state.hosts) and hosts.is_silent(state.hosts, worker.host, now)


def _estrange(state: State, workers: dict[int, str], now: float) -> Result:
    """Go on without these workers. `workers`: number -> reason."""
    outputs: list[Output] = []
    for number, reason in workers.items():
        worker = state.workers[number]
        state = with_worker(state, replace(worker, fenced=False, estranged=True))
        outputs.append(record(state, now, "estranged", reason, worker=number))
    members = [state.workers[number].name for number in workers if state.is_member(number)]
    if not members:
        return state, outputs
    verb = "does" if len(members) == 1 else "do"
    state, more = regroup(state, "cut", f"{', '.join(members)} {verb} not answer", now)
    return state, outputs + more


def host_lost(state: State, event: m.HostLost, now: float) -> Result:
    """A host is reported lost. If its workers are alive all the same, they are taken back when they are heard of."""
    answer = Reply(m.Answer(state.epoch, True, "heard"))
    known = {*state.hosts, *state.placed.values(), *(worker.host for worker in state.workers.values())}
    known |= {*state.fleet.placed.values(), *(one.host for one in state.fleet.there.values())}
    if event.host not in known or (state.start is not None and choice.shares_memory(state.start.transport)):
        return state, [answer]
    reason = f"the host {event.host} is lost: {event.reason}"
    state, outputs, there = _without_host(state, event.host, reason, now)
    for server in [one.number for one in state.fleet.there.values() if one.host == event.host]:
        state, more = _without_server(state, server, now)
        outputs += more
    if state.phase != "ended":
        state, more = _estrange(state, dict.fromkeys(there, reason), now)
        outputs += more
    return state, [*outputs, answer]


def host_declined(state: State, event: m.HostDeclined, now: float) -> Result:
    """A host cannot take part: the run goes on, or waits, without it."""
    answer = Reply(m.Answer(state.epoch, True, "heard"))
    if event.nonce and event.nonce not in state.offers:  # a repeated message
        return state, [answer]
    who = f"the host {event.host}" if event.nonce else f"a worker that was started by hand on {event.host}"
    text = f"{who} is refused: {event.reason}"
    outputs: list[Output]
    if event.nonce and event.host in state.hosts:  # its agent has reported, so members may run there
        state, outputs = host_lost(state, m.HostLost(event.host, event.reason), now)
        outputs = [output for output in outputs if output != answer]
    else:
        outputs = [say(text + (_still_waiting(state) if event.nonce else ""), now)]
    state = replace(state, offers={nonce: offer for nonce, offer in state.offers.items() if nonce != event.nonce})
    return state, [record(state, now, "declined", text, host=event.host, nonce=event.nonce), *outputs, answer]


def _still_waiting(state: State) -> str:
    """What a run that has not begun lacks."""
    there = sum(1 for worker in state.workers.values() if worker.counts)
    there += sum(1 for worker in state.hired if worker in state.placed)
    missing = state.target - there
    if state.phase != "gathering" or missing <= 0:
        return ""
    return f"; the run waits for room for {missing} more worker{'s' * (missing != 1)}"


def _give_up_silent(state: State, now: float) -> Result:
    """Give up hosts that were silent for hosts.LOST_S, with their workers, and frozen members that cannot be killed.

    The launching process's host is never given up: a user may stop that process for a while, which hurts only workers
    that want shared memory from it; and the coordinator ends with that process.
    """
    outputs: list[Output] = []
    cut: dict[int, str] = {}
    awake_s = state.pulse.awake_s(now)
    gone = {*hosts.lost(state.hosts, now, awake_s), *hosts.never_heard(state, now)} - {launching(state)}
    for name in sorted(gone):
        reason = f"the host {name} has not been heard of for {hosts.LOST_S:.0f} s"
        state, more, there = _without_host(state, name, reason, now)
        outputs += more
        # Members of this host are handled below, by their heartbeats. Other workers come back with the next heartbeat.
        cut |= {worker: reason for worker in there if not state.is_member(worker)}
    for one in list(state.fleet.there.values()) if state.hosts else ():  # servers, too, by their own heartbeats
        if one.host not in state.hosts and min(now - one.heard_at, awake_s) > hosts.LOST_S:
            state, more = _without_server(state, one.number, now)
            outputs += more
    if state.phase == "ended":
        return state, outputs
    mute = {member.host for member in state.members} - {
        name for name in state.hosts if not hosts.is_silent(state.hosts, name, now)
    }
    for member in state.members if mute else ():
        worker = state.workers[member.worker]
        given_up = worker.fenced or state.pulse.silent_s(worker.number, now) > hosts.LOST_S
        if given_up and not worker.gone and _is_unreachable(state, worker, now):
            cut[worker.number] = f"{worker.name} does not answer, nor does the agent of its host"
    if not cut:
        return state, outputs
    state, more = _estrange(state, cut, now)
    return state, outputs + more


def _without_host(state: State, name: str, reason: str, now: float) -> tuple[State, list[Output], list[int]]:
    """Expect nothing of that host any more. The list holds the workers that ran there."""
    state, outputs = hosts.forgotten(state, name, reason, now)
    outputs.insert(0, say(reason, now))
    state, more = standins.succeeded(state, name, now)
    outputs += more
    there = [worker.number for worker in state.workers.values() if worker.host == name and not worker.gone]
    return state, outputs, there


def _without_server(state: State, server: int, now: float) -> Result:
    """Treat the server as dead. If it is alive, its next heartbeat is answered with EndRun."""
    if state.phase == "ended":
        return state, []
    return lifecycle.exited(state, m.ServerExited(server, m.STATUS_UNKNOWN), now)


# --- what a new generation found -------------------------------------------------------------------------------------


def taken_over(state: State, event: m.StepTakenOver, now: float) -> Result:
    """The members of a new generation found a step begun. A shard that killed two workers ends the run.

    A worker that was fenced counts too: code that holds the interpreter for long looks like a frozen process. But it
    may be the machine that froze, so a third death must confirm it.
    """
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
        was_fenced = any(number in state.workers and state.workers[number].fenced for number in workers)
        if len(workers) > 1 + was_fenced:
            which = f"step {step}" if state.config.stride == 1 else f"the steps from {step} on"
            message = (
                f"shard {shard} of {which} has killed {len(workers)} workers "
                f"({', '.join(map(str, workers))}): every worker that computes it dies"
            )
            hint = f"look at the samples of that shard, and in logs/worker-{workers[-1]}.log"
            failure = m.WorkerFailed(workers[-1], "", "exit", message, hint, step=step, shard=shard)
            return fail(state, failure, now)
    outputs: list[Output] = [Report({**line, "at": now})]
    units = state.reference.job.shards if state.reference else 0
    if text := state.config.parsed_strategy.takeover_text(event.step, event.recomputed, units):
        outputs.append(say(text, now))
    return state, outputs


def rolled_back(state: State, event: m.RolledBack, now: float) -> Result:
    """The only holder of a part of a divided model died: the members go back to the newest state that is whole.

    The steps since then are executed again. Results are equal only up to rounding, so those steps are reported anew.
    """
    if event.generation <= state.rolled_back:
        return state, []  # repeated to a coordinator that has taken over
    # A rollback counts even if its generation has ended: the next generation continued from that state.
    again = max(event.reached - event.step, 0)
    saves = replace(state.saves, open={})
    if event.source == "checkpoint":  # if it is not the newest, the newer ones were found damaged
        saves = replace(saves, sealed=min(saves.sealed, event.step), sealed_at=now)
    state = replace(
        state,
        rolled_back=event.generation,
        reexecuted=state.reexecuted + again,
        progress=forget(state.progress, event.step, event.reached),
        saves=saves,
    )
    where = state.config.parsed_strategy.source_text(event.source)
    steps = "1 step is" if again == 1 else f"{again} steps are"
    text = f"goes back from step {event.reached} to {event.step} ({where}): {steps} executed again"
    facts = {"generation": event.generation, "step": event.step, "reached": event.reached, "source": event.source}
    return state, [
        record(state, now, "rolled_back", text, **facts),
        Report({"kind": "rollback", **facts, "at": now}),
        say(text, now),
    ]


def plan_shown(state: State, event: m.PlanShown, now: float) -> Result:
    """Report how the model is divided, unless the generation before had the same plan."""
    if event.generation != state.generation or tuple(event.lines) == state.plan:
        return state, []
    state = replace(state, plan=tuple(event.lines))
    reason = f"the plan of generation {event.generation}"
    written = record(state, now, "plan", reason, generation=event.generation, lines=event.lines)
    return state, [written, *(say(line, now) for line in event.lines)]

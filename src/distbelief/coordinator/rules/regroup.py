"""Starts generations: the first one, and one after every change of members or of their shards.

The rule on which all else rests: a member is left out of the next generation only when it certainly does nothing in the
present one any more, because its process is gone or it has reported that it left (WorkerLeft). So no old member writes
where a newer generation works. Where the model is divided, members share no memory, and a live member may become a
spare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from distbelief.control import messages as m
from distbelief.coordinator.rules import balance, explain
from distbelief.coordinator.rules.ending import Result, fail_without_culprit, record, say, with_worker
from distbelief.coordinator.rules.generation import plan_degrees, plan_members
from distbelief.coordinator.rules.hosts import MOST_FAILED_HIRES
from distbelief.coordinator.rules.servers import mapping
from distbelief.coordinator.rules.vocabulary import Output, Send, State, Troubles, Worker
from distbelief.shards import Range
from distbelief.strategies.rules.degrees import Degrees
from distbelief.strategies.rules.degrees import problem as degrees_problem
from distbelief.transport.rules import choice

PAST, MOST_PAST, PAST_MEMBERS = 4, 64, 1024
"""At least PAST earlier generations are remembered. While none of them has committed a step, up to MOST_PAST
generations or PAST_MEMBERS members are: each of them may have begun or half applied the same step."""


def regroup(state: State, cause: str, reason: str, now: float, ranges: Sequence[Range] | None = None) -> Result:
    """Start a generation of all workers that can take part, if that is possible now. `ranges`: the new assignment, if
    that is the reason."""
    if state.phase != "training":
        return state, []
    members = [state.workers[member.worker] for member in state.members]
    if any(worker.leaving and not worker.gone for worker in members):
        return state, []  # the worker was told to leave; its WorkerLeft starts the next generation
    staying = [worker for worker in members if worker.counts]
    waiting = [worker for worker in state.workers.values() if worker.ready and worker.counts]
    candidates = staying + [worker for worker in waiting if not state.is_member(worker.number)]
    if len(candidates) < state.config.min_workers:
        return _pause(state, len(candidates), reason, now)
    return _start(state, candidates, cause, reason, now, ranges)


def start_when_complete(state: State, now: float) -> Result:
    """Start the first generation if all workers and servers that were asked for are ready."""
    if len(state.workers) < state.target:
        return state, []  # cheap check first: this runs once for each worker that becomes ready
    ready = [worker for worker in state.workers.values() if worker.ready and worker.counts]
    if len(ready) < state.target or state.pending:  # first the cause of a pending exit must be known
        return state, []
    if not state.fleet.complete:
        return state, []
    hosts = len({worker.host for worker in ready})
    reason = f"all {len(ready)} workers are ready, on {hosts} host{'s' if hosts > 1 else ''}"
    outputs: list[Output] = []
    if state.fleet.target:  # before the members begin, since they need the map at once
        state, outputs = mapping.found(state, f"all {len(state.fleet.there)} servers are ready", now)
    state, more = _start(state, ready, "start", reason, now, None)
    return state, outputs + more


def _remembered(state: State, past: Sequence[m.PastGeneration]) -> int:
    committed = [number for number, one in enumerate(past, 1) if one.generation <= state.progress.committed_in]
    most = min(PAST_MEMBERS // len(state.members), MOST_PAST)
    return max(PAST, min(committed[0] if committed else most, most))


def _start(
    state: State, candidates: list[Worker], cause: str, reason: str, now: float, ranges: Sequence[Range] | None
) -> Result:
    assert state.reference is not None
    shards = state.reference.job.shards
    problem = _wrong_start(state, len(candidates), shards) if cause == "start" else ""
    if problem:
        return fail_without_culprit(state, "job", problem, "", now)
    if state.config.wish:
        plan = plan_degrees(state, shards, candidates)
    else:
        plan = plan_members(state.config, shards, candidates, ranges or _ranges(state, shards, candidates))
    if plan.problem:
        return fail_without_culprit(state, "job", plan.problem, choice.INSTEAD, now)
    past = list(state.start.past) if state.start else []
    if state.start:
        past = [m.PastGeneration(state.generation, state.members, state.start.degrees), *past]
        past = past[: _remembered(state, past)]
    generation = state.generation + 1
    reported = state.progress.reported.complete
    sealed = state.saves.sealed
    degrees = plan.degrees.as_list() if plan.degrees else []
    start = m.StartGeneration(state.epoch, generation, plan.members, plan.transport, past, reported, sealed, degrees)
    was = state.degrees
    facts = {
        "generation": generation,
        "members": msgspec.to_builtins(plan.members),
        "spares": plan.spares,
        "transport": plan.transport,
        "cause": cause,
        "lost": list(state.lost),
        "past": msgspec.to_builtins(past),
        "degrees": degrees,
    }
    for worker in candidates:
        if worker.finished:
            state = with_worker(state, replace(worker, finished=None))
    numbers = [member.worker for member in plan.members]
    state = replace(
        state,
        phase="training",
        generation=generation,
        start=start,
        seats={number: rank for rank, number in enumerate(numbers)},
        lost=(),
        paused=False,
        finished=0,
        recoveries=state.recoveries + bool(state.lost),
        pulse=state.pulse.restart(numbers, now),
        speeds=state.speeds.restart(numbers),
        look=balance.Look(),
        looked_at=now,
        troubles=replace(state.troubles, broken_at=None),
    )
    outputs: list[Output] = [record(state, now, "generation", reason, **facts)]
    outputs += [Send(worker.number, start) for worker in candidates]
    if cause != "start":
        outputs.append(say(_change(cause, reason, was, plan.degrees), now))
    if plan.spares:
        what_for = str(plan.degrees or f"{shards} {state.config.unit}{'s' if shards > 1 else ''}")
        outputs.append(say(explain.spares(len(candidates), what_for, plan.spares), now))
    return state, outputs


def _wrong_start(state: State, workers: int, shards: int) -> str:
    """Why the degrees do not fit the number of workers that was asked for. Any other number of workers is accepted."""
    wish = state.config.wish
    return degrees_problem(wish, workers, shards) if wish and workers == state.config.workers else ""


def _change(cause: str, reason: str, was: Degrees | None, now: Degrees | None) -> str:
    fewer = cause in ("death", "leave", "cut")
    if was == now:
        return f"{reason}; the others go on" if fewer else reason
    return f"{reason}; {'the others' if fewer else 'the members'} go on as {now} (was {was})"


def _ranges(state: State, shards: int, candidates: list[Worker]) -> Sequence[Range] | None:
    """The assignment by measured speed; None before any speed is measured: by the user's shares, or equal."""
    seated = [worker.number for worker in candidates[:shards]]
    if not state.config.balances or not any(state.speeds.shard_s(number) for number in seated):
        return None
    return balance.assign(shards, seated, state.speeds)


def _pause(state: State, there: int, reason: str, now: float) -> Result:
    if state.troubles.failed_hires >= MOST_FAILED_HIRES and not state.hired:
        message = (
            f"{reason}; {there} of at least {state.config.min_workers} workers are left, and new ones fail to start"
        )
        return fail_without_culprit(state, "exit", message, "see the logs of the last workers in the logs folder", now)
    if state.paused:
        return state, []
    text = (
        f"paused: {reason}; {there} of at least {state.config.min_workers} workers "
        f"{'is' if there == 1 else 'are'} there; the run goes on when there are enough"
    )
    return replace(state, paused=True), [record(state, now, "paused", text), say(text, now)]


def release(state: State, worker: Worker, now: float) -> Result:
    """Let a worker leave: a spare at once, a member once it has left the generation."""
    state = with_worker(state, replace(worker, leaving=True))
    if state.is_member(worker.number) and not worker.gone:
        return state, [Send(worker.number, m.Retire(state.epoch, state.generation))]
    return state, [Send(worker.number, m.EndRun(state.epoch, "left", "it is not needed any more"))]


def dismiss(state: State, workers: Sequence[Worker], reason: str, now: float) -> Result:
    """Record the wanted number of workers, and let those leave that are too many, there or still starting."""
    leaving = [worker.number for worker in workers]
    outputs: list[Output] = [record(state, now, "scaled", reason, target=state.target, leaving=leaving)]
    outputs.append(say(reason, now))
    state = replace(state, hired={number: at for number, at in state.hired.items() if number not in leaving})
    for worker in workers:
        state, more = release(state, worker, now)
        outputs += more
    return state, outputs


def committed(state: State) -> State:
    """A step was committed: forget what went wrong before it."""
    troubles = Troubles(failed_hires=state.troubles.failed_hires, killers=state.troubles.killers)
    return state if state.troubles == troubles else replace(state, troubles=troubles)

"""Workers join, are checked and seated, are scaled, and leave.

How it works:
- A worker joins with a number that it was given: by an agent that was asked to start it, or by `admitted` if a user
  started it by hand. The target counts a manually started worker only from the moment it joins.
- A ready worker is compared with the first ready worker (the reference): another job, or in exact runs other bits for
  the same shard, and it is refused with the reason (explain.py).
- Before the start a ready worker is waited for until all are ready; later it gets a seat at the next regroup if the
  members can be more, else it is a spare.
- A member leaves in two steps: it is told to retire, it leaves its generation and reports that (WorkerLeft), and only
  then the others regroup. So nothing of it writes in the next generation.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from distbelief.control import messages as m
from distbelief.coordinator.rules import explain, generation
from distbelief.coordinator.rules.ending import Result, fail, record, say, with_worker
from distbelief.coordinator.rules.hosts import hire
from distbelief.coordinator.rules.regroup import dismiss, regroup, release, start_when_complete
from distbelief.coordinator.rules.restarts import Restarts
from distbelief.coordinator.rules.standins import without_one
from distbelief.coordinator.rules.vocabulary import Output, ProtocolError, Reply, Send, State, Worker
from distbelief.transport.rules import choice

# --- joining ---------------------------------------------------------------------------------------------------------


def admitted(state: State, event: m.JoinRequested, now: float) -> Result:
    """A user starts one more worker by hand: it gets the next number."""
    number = state.next_worker
    reason = f"a worker was started by hand (pid {event.pid})"
    state = replace(state, next_worker=number + 1, arriving=state.arriving | {number})
    return state, [
        record(state, now, "admitted", reason, worker=number),
        Reply(m.Admit(state.epoch, number)),
    ]


def joined(state: State, event: m.WorkerJoined, now: float) -> Result:
    known = state.workers.get(event.worker)
    newcomer = Worker(event.worker, event.host, event.pid)
    if known is not None and known.pid in (0, event.pid):
        # A repeated message, or the worker's exit was reported before its joining: keep the known facts.
        newcomer = replace(known, host=event.host, pid=event.pid, estranged=known.estranged and known.ready)
    elif known is not None and known.exited is None:
        raise ProtocolError(f"{newcomer.name} has the number of {known.name}, which is alive")
    elif known is not None:
        raise ProtocolError(f"{newcomer.name} takes the number of a worker that is gone; give it another one")
    hired = state.hired
    if event.worker in hired:  # false if the message is repeated
        hired = {worker: at for worker, at in hired.items() if worker != event.worker}
        state = replace(state, placed={worker: host for worker, host in state.placed.items() if worker != event.worker})
    state = replace(state, next_worker=max(state.next_worker, event.worker + 1))
    state = replace(with_worker(state, newcomer), active_at=now, hired=hired)
    if event.worker not in state.arriving:
        return state, []
    state = replace(state, arriving=state.arriving - {event.worker}, target=state.target + 1)
    reason = f"{newcomer.name} was started by hand, and adds to the run's number of workers"
    return state, [record(state, now, "guest", reason, worker=event.worker, target=state.target)]


def ready(state: State, event: m.WorkerReady, now: float) -> Result:
    worker = state.workers.get(event.worker)
    if worker is None or (not worker.pid and worker.exited is None):  # known from the journal only
        return state, [Reply(m.Introduce(state.epoch, state.progress.reported.complete))]
    if worker.refused and worker.exited is None:  # the first refusal may be lost
        return state, [Reply(m.Refuse(state.epoch, "it does not match the run; the journal says why"))]
    if worker.ready or worker.exited is not None:
        return state, []
    outputs: list[Output] = []
    if state.reference is None:
        reason = f"worker {event.worker} was the first to be ready; all others must match it"
        facts = {"job": msgspec.to_builtins(event.job), "canary": msgspec.to_builtins(event.canary)}
        outputs.append(record(state, now, "reference", reason, worker=event.worker, **facts))
        outputs += [say(text, now) for text in event.notices]
        state = replace(state, reference=event)
    else:
        run = state.reference
        reason = explain.refusal(event.worker, event.job, event.canary, run.job, run.canary, state.config.exact)
        reason = reason or _unfit_host(state, worker) or _unfit_device(state, worker, event.gpu)
        if reason:
            return _refuse(state, worker, reason, now)
    worker = replace(worker, ready=True, gpu=event.gpu)
    state = replace(
        with_worker(state, worker), active_at=now, troubles=replace(state.troubles, failed_hires=0, refused=0)
    )
    if worker.leaving:
        state, more = release(state, worker, now)
    else:
        state, more = _seat(state, worker, now) if state.phase == "training" else start_when_complete(state, now)
    return state, outputs + more


def _unfit_host(state: State, worker: Worker) -> str:
    """Why a worker on this host cannot take part; "" if it can."""
    hosts = sorted({member.host for member in state.members} - {worker.host})
    if not choice.shares_memory(state.config.transport) or not hosts:
        return ""
    return f"{worker.name} is on another host than the members ({', '.join(hosts)}), which share memory"


def _unfit_device(state: State, worker: Worker, gpu: str) -> str:
    """Why a worker on this device cannot take part; "" if it can."""
    if gpu and state.start is not None and choice.shares_state(state.start.transport):
        return f"{worker.name} computes on a GPU, and the members share a state in their host's memory"
    others = {member.gpu for member in state.members if not state.workers[member.worker].gone}
    if choice.needs_gpus(state.config.transport) and (not gpu or gpu in others):
        which = "shares its GPU with another" if gpu else "has no GPU"
        return f"{worker.name} {which}, and with NCCL every worker needs one of its own"
    return ""


def _refuse(state: State, worker: Worker, reason: str, now: float) -> Result:
    state = with_worker(state, replace(worker, refused=True))
    if state.phase == "training":
        # A replacement would be refused as well: go on with the present workers.
        state = replace(state, target=max(state.target - 1, 1))
    outputs: list[Output] = [
        record(state, now, "refused", reason, worker=worker.number, target=state.target),
        Send(worker.number, m.Refuse(epoch=state.epoch, reason=reason)),
    ]
    if state.phase == "training":
        return state, [*outputs, say(f"refused: {reason}", now)]
    # The start waits for this worker, and would wait for ever.
    failure = m.WorkerFailed(worker=worker.number, host=worker.host, kind="refused", message=reason)
    state, more = fail(state, failure, now)
    return state, outputs + more


def _seat(state: State, worker: Worker, now: float) -> Result:
    """A worker is ready after the start: it becomes a member if the members can be more, else a spare."""
    assert state.start is not None
    there = sum(1 for one in state.workers.values() if one.ready and one.counts)
    if generation.takes(state, there) or any(state.workers[member.worker].gone for member in state.members):
        return regroup(state, "join", f"{worker.name} has joined", now)
    members = len(state.members)
    why = f"there are {members} shards for {members} other members"
    if state.degrees:
        why = f"{there} workers make no more than {state.degrees}"
    reason = f"{worker.name} has joined: it is a spare, since {why}"
    return state, [
        record(state, now, "spare", reason, worker=worker.number),
        Send(worker.number, state.start),
        say(reason, now),
    ]


# --- how many there should be ----------------------------------------------------------------------------------------


def scaled(state: State, event: m.ScaleRequested, now: float) -> Result:
    """A user wants another number of workers."""
    if not 1 <= event.workers <= 100_000:
        return state, [_answer(state, False, f"a run has 1 to 100,000 workers, not {event.workers:,}")]
    if event.workers < state.config.min_workers:
        text = f"the run was started with --min-workers {state.config.min_workers}; {event.workers} are fewer"
        return state, [_answer(state, False, text)]
    there = [worker for worker in state.workers.values() if worker.counts]
    # Starting workers go first, then spares, then the members of the highest ranks: the lowest ranks keep their shards
    # and what they have cached.
    there.sort(key=lambda worker: (_seniority(state, worker.number), worker.number))
    surplus = [*there, *(Worker(number) for number in sorted(state.hired))][event.workers :]
    reason = f"{event.workers} workers were asked for instead of {state.target}"
    troubles = replace(state.troubles, failed_hires=0, refused=0)
    state = replace(state, target=event.workers, troubles=troubles, restarts=Restarts())
    state, outputs = dismiss(state, surplus, reason, now)
    state, more = hire(state, now)
    waiting = event.workers - len(there) - sum(1 for worker in state.hired if worker in state.placed)
    outputs += [*more, _answer(state, True, _scaling(len(there), event.workers, waiting))]
    if state.phase == "gathering" and state.reference:
        state, more = start_when_complete(state, now)
        outputs += more
    return state, outputs


def _seniority(state: State, worker: int) -> tuple[int, int]:
    """Workers with the lowest value stay longest. Of a divided model whole copies go, so that one copy stays."""
    rank = state.seats.get(worker, len(state.seats))
    if state.degrees and state.is_member(worker):
        return state.degrees.place(rank).data, rank
    return (len(state.seats) if state.degrees else 0), rank


def _scaling(there: int, target: int, waiting: int) -> str:
    """`waiting`: how many workers no host has room for now."""
    if target > there:
        starting = target - there - max(waiting, 0)
        texts = [f"{starting} more {'worker is' if starting == 1 else 'workers are'} being started"] if starting else []
        return "; ".join(
            [*texts, *([f"for {waiting} more no host has room: another host may join"] if waiting > 0 else [])]
        )
    if target < there:
        return f"{there - target} {'worker leaves' if there - target == 1 else 'workers leave'} after the present step"
    return f"there are {target} workers already"


def _answer(state: State, ok: bool, text: str) -> Reply:
    return Reply(m.Answer(state.epoch, ok, text))


# --- leaving ---------------------------------------------------------------------------------------------------------


def leave_requested(state: State, event: m.LeaveRequested, now: float) -> Result:
    """A worker received SIGTERM."""
    worker = state.workers.get(event.worker)
    if worker is None or worker.gone or worker.leaving or state.saves.stopping:
        return state, []  # a batch system terminates all workers at once: they are needed for the last checkpoint
    target = max(state.target - 1, state.config.min_workers)
    text = f"{worker.name} was asked to leave, and leaves after the present step"
    state = without_one(state, worker.host) if target < state.target else state
    state = replace(state, target=target)
    outputs: list[Output] = [record(state, now, "leaves", text, worker=worker.number, target=target), say(text, now)]
    state, more = release(state, worker, now)
    outputs += more
    if state.phase == "gathering" and state.reference:  # perhaps only this worker was waited for
        state, more = start_when_complete(state, now)
        outputs += more
    state, more = hire(state, now)
    return state, outputs + more


def left(state: State, event: m.WorkerLeft, now: float) -> Result:
    """A worker has left its generation: the others go on without it, and it may end."""
    worker = state.workers.get(event.worker)
    if worker is None or worker.exited is not None or event.generation < state.generation:
        return state, []
    goodbye = Send(event.worker, m.EndRun(state.epoch, "left", "it has handed its work over"))
    if worker.left:
        return state, [goodbye]
    state = with_worker(state, replace(worker, left=True, leaving=True))
    state, outputs = regroup(state, "leave", f"{worker.name} has left", now)
    return state, [*outputs, goodbye]

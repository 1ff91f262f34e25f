"""Members that do not answer and that nobody can kill, and hosts that are lost. Pure.

Where members share no memory each has a replica of its own, so one that is cut off can do no harm: the others go on
without it, and when it is heard of again it finds that it is of an old generation, and joins anew.
"""

from __future__ import annotations

from dataclasses import replace

from distbelief.comm import messages as m
from distbelief.coordinator import fleet, hosting, hosts
from distbelief.coordinator.ending import Result, record, say, with_worker
from distbelief.coordinator.regroup import regroup, start_when_complete
from distbelief.coordinator.vocabulary import Output, State, Worker


def is_out_of_reach(state: State, worker: Worker, now: float) -> bool:
    """Whether nobody can kill it. In shared memory somebody must; and a coordinator that has just come up does not know
    its hosts yet."""
    apart = state.start is not None and state.start.transport != "shm"
    return apart and bool(state.hosts) and hosts.is_silent(state.hosts, worker.host, now)


def estrange(state: State, workers: dict[int, str], now: float) -> Result:
    """Go on without them. `workers`: each with the reason."""
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


def ticked(state: State, now: float) -> Result:
    """Give up hosts that were not heard of for long, with their workers; and frozen members that nobody could kill."""
    outputs: list[Output] = []
    cut: dict[int, str] = {}
    for name in {*hosts.lost(state.hosts, now, state.pulse.awake_s(now)), *hosting.strangers(state, now)}:
        reason = f"the host {name} has not been heard of for {hosts.LOST_S:.0f} s"
        outputs.append(say(reason, now))
        state = hosting.forgotten(state, name)
        # Members are judged by their own heartbeats; the others come back with their next one, if they live.
        there = [worker for worker in state.workers.values() if worker.host == name and not worker.gone]
        cut |= {worker.number: reason for worker in there if not state.is_member(worker.number)}
        for server in [one.number for one in state.fleet.there.values() if one.host == name]:
            # If it lives, it hears that it is not needed any more as soon as it is heard of.
            state, more = fleet.exited(state, m.ServerExited(server, m.STATUS_UNKNOWN), now)
            outputs += more
    for member in state.members:
        worker = state.workers[member.worker]
        if worker.fenced and not worker.gone and is_out_of_reach(state, worker, now):
            cut[worker.number] = f"{worker.name} does not answer, nor does the agent of its host"
    if not cut:
        return state, outputs
    state, more = estrange(state, cut, now)
    return state, outputs + more


def returned(state: State, worker: Worker, now: float) -> Result:
    """A worker that was out of reach is heard of again."""
    state = with_worker(state, replace(worker, estranged=False, finished=None))
    if state.phase == "gathering":
        return start_when_complete(state, now)
    return regroup(state, "join", f"{worker.name} is back", now)

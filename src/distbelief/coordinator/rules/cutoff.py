"""Members that do not answer and that nobody can kill, and hosts that are lost. Pure.

Where members share no memory each has a replica of its own, so one that is cut off can do no harm: the others go on
without it, and when it is heard of again it finds that it is of an old generation, and joins anew.
"""

from __future__ import annotations

from dataclasses import replace

from distbelief.control import messages as m
from distbelief.coordinator.rules import hosting, hosts
from distbelief.coordinator.rules.ending import Result, record, say, with_worker
from distbelief.coordinator.rules.hiring import launching
from distbelief.coordinator.rules.membership import SHARING
from distbelief.coordinator.rules.regroup import regroup, start_when_complete
from distbelief.coordinator.rules.servers import fleet
from distbelief.coordinator.rules.vocabulary import Output, Reply, State, Worker


def is_out_of_reach(state: State, worker: Worker, now: float) -> bool:
    """Whether nobody can kill it. In shared memory somebody must; and a coordinator that has just come up does not know
    its hosts yet."""
    apart = state.start is not None and state.start.transport not in SHARING
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


def lost(state: State, event: m.HostLost, now: float) -> Result:
    """Somebody knows that a host is gone. Should its workers live all the same, they are taken back when heard of."""
    answer = Reply(m.Answer(state.epoch, True, "heard"))
    known = {*state.hosts, *state.placed.values(), *(worker.host for worker in state.workers.values())}
    known |= {*state.fleet.placed.values(), *(one.host for one in state.fleet.there.values())}
    if event.host not in known or (state.start is not None and state.start.transport in SHARING):
        return state, [answer]
    reason = f"the host {event.host} is lost: {event.reason}"
    state, outputs, there = _without(state, event.host, reason, now)
    for server in [one.number for one in state.fleet.there.values() if one.host == event.host]:
        state, more = _without_server(state, server, now)
        outputs += more
    if state.phase != "ended":
        state, more = estrange(state, dict.fromkeys(there, reason), now)
        outputs += more
    return state, [*outputs, answer]


def _without(state: State, name: str, reason: str, now: float) -> tuple[State, list[Output], list[int]]:
    """Nothing is expected of that host any more. The third are the workers that were there."""
    state, outputs = hosting.forgotten(state, name, reason, now)
    outputs.insert(0, say(reason, now))
    there = [worker.number for worker in state.workers.values() if worker.host == name and not worker.gone]
    return state, outputs, there


def _without_server(state: State, server: int, now: float) -> Result:
    """If it lives, it hears that it is not needed any more as soon as it is heard of."""
    if state.phase == "ended":
        return state, []
    return fleet.exited(state, m.ServerExited(server, m.STATUS_UNKNOWN), now)


def ticked(state: State, now: float) -> Result:
    """Give up hosts that were not heard of for long, with their workers; and frozen members that nobody could kill.

    Not the launching process's host: whoever stops that process for a while has stopped at the most those who want
    memory from it, and the coordinator does not outlive it."""
    outputs: list[Output] = []
    cut: dict[int, str] = {}
    awake_s = state.pulse.awake_s(now)
    gone = {*hosts.lost(state.hosts, now, awake_s), *hosting.strangers(state, now)} - {launching(state)}
    for name in sorted(gone):
        reason = f"the host {name} has not been heard of for {hosts.LOST_S:.0f} s"
        state, more, there = _without(state, name, reason, now)
        outputs += more
        # Members are judged by their own heartbeats too; the others come back with their next one, if they live.
        cut |= {worker: reason for worker in there if not state.is_member(worker)}
    for one in list(state.fleet.there.values()) if state.hosts else ():  # judged by their own heartbeats too
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
        if given_up and not worker.gone and is_out_of_reach(state, worker, now):
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

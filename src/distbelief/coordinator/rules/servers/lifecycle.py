"""The parameter servers of a training run: they start, freeze, die, are scaled and leave while workers go on.

How it works:
- The wanted number of servers (`target`) is on record. `maintained` moves the fleet towards it whenever an agent
  reports: missing servers are started, surplus servers hand their slices over and leave. A coordinator may die between
  any two decisions; the next one continues from the records.
- placement.py decides which server holds which slice. A new map is recorded before it is sent (mapping.py). A server or
  worker whose heartbeat names an older map is sent the present one, so lost messages do no harm.
- A dead server's backups are promoted and a new server is started; workers only wait for the new map. If all holders of
  a slice die, all servers load the newest checkpoint and the members start a new generation.
- A silent server is killed only while the run stands still: after SILENT_S, or later where its usual gaps are longer.
- The pause that each loss causes is measured, from the loss to the first step after it, for the run's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distbelief.control import messages as m
from distbelief.coordinator.rules import explain, regroup
from distbelief.coordinator.rules.ending import Result, fail, record, say
from distbelief.coordinator.rules.hosts import ASK_AGAIN_S, place_servers
from distbelief.coordinator.rules.servers import placement
from distbelief.coordinator.rules.servers.fleet import (
    ServerProcess,
    fenced,
    frozen,
    heard,
    holds,
    retargeted,
    with_server,
    without_server,
)
from distbelief.coordinator.rules.servers.mapping import decided, found
from distbelief.coordinator.rules.vocabulary import ENGINE, Output, ProtocolError, Reply, Send, State

SILENT_S = 2.0
"""A server is frozen when it was silent for this long (and for several times its longest silence until now) while the
run stands still."""
LONGEST_GAP_S = 30.0
"""A longer silence counts as this long when the usual gaps are measured."""
MOST = 1000


# --- servers come ----------------------------------------------------------------------------------------------------


def ready(state: State, event: m.ServerReady, now: float) -> Result:
    fleet = state.fleet
    if event.server in fleet.gone:  # fewer servers were wanted while this one was starting
        return state, [_end_run(state)]
    if event.server in fleet.there:
        return state, _told(state)
    problem = _misfit(state, event)
    if problem:
        failure = m.WorkerFailed(-1, event.host, "refused", problem, "start it with the same job file and settings")
        return fail(state, failure, now)
    one = ServerProcess(event.server, event.host, event.pid, event.address, now)
    fleet = replace(with_server(fleet, one), slices=tuple(event.slices), facts=event.facts)
    state = replace(state, fleet=fleet, active_at=now)
    if state.phase == "gathering":
        return regroup.start_when_complete(state, now) if state.reference else (state, [])
    if fleet.placement is None:  # all servers were lost
        return _reloaded(state, f"{one.name} has come", now)
    return decided(state, placement.with_server(fleet.placement, event.server, event.host), now)


def _reloaded(state: State, reason: str, now: float) -> Result:
    """All servers load the newest checkpoint. The members start a new generation, because the answers they wait for may
    never come."""
    state, outputs = found(state, reason, now)
    text = f"all servers load the newest checkpoint: {reason}"
    state, more = regroup.regroup(state, "servers", text, now)
    return state, outputs + more


def _misfit(state: State, event: m.ServerReady) -> str:
    """Why a server cannot take part: another job, or in exact strategies another computation."""
    fleet = state.fleet
    if fleet.slices and list(fleet.slices) != event.slices:
        return f"server {event.server} divides the parameters in another way than the other servers: it has another job"
    known = fleet.facts or (state.reference.canary.facts if state.reference else {})
    odd = [name for name, value in event.facts.items() if known.get(name, value) != value]
    if odd and state.config.exact:
        difference, fix = explain.fact(odd[0], event.facts[odd[0]], known[odd[0]])
        return f"server {event.server} {difference}; {fix}"
    return ""


def hire(state: State, now: float) -> Result:
    """Start missing servers, as far as hosts have room."""
    fleet = state.fleet
    staying = sum(1 for one in fleet.there.values() if not one.leaving and not _is_closing(state, one))
    missing = fleet.target - staying - len(fleet.hired)
    if missing <= 0 or state.phase == "ended" or fleet.restarts.wait_s(now):
        return state, []
    placed = place_servers(state, range(fleet.next_server, fleet.next_server + missing), now)
    if not placed:
        return state, []
    state = replace(state, fleet=replace(fleet, next_server=fleet.next_server + len(placed)), active_at=now)
    return _asked(state, placed, f"{staying} of {fleet.target} servers are there", now)


def _is_closing(state: State, server: ServerProcess) -> bool:
    """Whether the server's host takes no servers any more, because it is about to leave."""
    host = state.hosts.get(server.host)
    return host is not None and host.server_room == 0


def _asked(state: State, placed: dict[int, str], reason: str, now: float) -> Result:
    fleet = state.fleet
    hired = {**fleet.hired, **dict.fromkeys(placed, now)}
    state = replace(state, fleet=replace(fleet, hired=hired, placed={**fleet.placed, **placed}))
    where = list(placed.values())
    outputs: list[Output] = [record(state, now, "servers_hired", reason, servers=list(placed), hosts=where)]
    return state, [*outputs, *(Send(ENGINE, m.StartServer(state.epoch, one, host)) for one, host in placed.items())]


def attached(state: State, event: m.EngineAttached, now: float) -> Result:
    """An agent reports its servers: missed exits are handled, and servers that it has not started are asked for
    again."""
    outputs: list[Output] = []
    for server, status in event.servers_exited.items():
        if state.phase != "ended":
            state, more = exited(state, m.ServerExited(server, status), now)
            outputs += more
    hired, placed = dict(state.fleet.hired), dict(state.fleet.placed)
    for server, asked_at in state.fleet.hired.items():
        if server in event.servers:
            hired[server], placed[server] = now, event.host
        elif now - asked_at <= ASK_AGAIN_S:
            continue
        elif placed.get(server) == event.host and event.server_room:
            hired[server] = now
            outputs.append(Send(ENGINE, m.StartServer(state.epoch, server, event.host)))
        elif placed.get(server) in ("", event.host):  # not started by the launching process, or the host is full
            del placed[server]
    outputs += [
        Send(ENGINE, m.KillServer(state.epoch, server, "it is frozen"))
        for server in event.servers
        if server in state.fleet.there and state.fleet.there[server].fenced
    ]
    state = replace(state, fleet=replace(state.fleet, hired=hired, placed=placed))
    waiting = place_servers(state, [server for server in hired if server not in placed], now)
    if not waiting:
        return state, outputs
    state, more = _asked(state, waiting, "there is room for them", now)
    return state, outputs + more


# --- servers report --------------------------------------------------------------------------------------------------


def beat(state: State, event: m.ServerBeat, now: float) -> Result:
    fleet = state.fleet
    one = fleet.there.get(event.server)
    if one is not None and one.leaving and fleet.placement and not holds(fleet, event.server):
        return state, [_end_run(state)]  # the first command may be lost
    if one is None or event.epoch < state.epoch:
        return state, [_end_run(state) if event.server in fleet.gone else Reply(m.Introduce(state.epoch, 0))]
    state = replace(state, fleet=heard(fleet, event.server, now, LONGEST_GAP_S))
    return state, _told(state) if event.version < state.fleet.version else []


def _told(state: State) -> list[Output]:
    known = state.fleet.map()
    return [Reply(m.Serve(state.epoch, known))] if known else []


def told_worker(state: State, event: m.Heartbeat) -> list[Output]:
    """The present map, for a worker that has an older one."""
    return _told(state) if event.servers < state.fleet.version else []


def copied(state: State, event: m.SliceCopied, now: float) -> Result:
    placed = state.fleet.placement
    if placed is None or not 0 <= event.slice < len(placed.slices):
        raise ProtocolError(f"server {event.server} reports a copy of slice {event.slice}, which does not exist")
    return decided(state, placement.copied(placed, event.slice, event.server, event.target, event.known), now)


def failed(state: State, event: m.ServerFailed, now: float) -> Result:
    message = f"server {event.server}: {event.message}"
    return fail(state, m.WorkerFailed(-1, event.host, "job", message, event.hint, event.traceback), now)


# --- servers die or freeze -------------------------------------------------------------------------------------------


def exited(state: State, event: m.ServerExited, now: float) -> Result:
    fleet = state.fleet
    if event.server in fleet.gone or event.server >= fleet.next_server:
        return state, []
    one = fleet.there.get(event.server)
    fleet = without_server(fleet, event.server)
    if one is not None and one.leaving and fleet.placement and not holds(fleet, event.server):
        return replace(state, fleet=fleet), []
    fleet = replace(fleet, deaths=fleet.deaths + 1)
    ended = f"{one.name if one else f'server {event.server}'} {explain.ending(event.status, event.reason)}"
    if event.status == m.STATUS_NOT_STARTED:
        fleet = replace(fleet, restarts=fleet.restarts.died(now, fleet.target, refused=True))
    limit = 3 if state.phase == "gathering" else 10 + 2 * fleet.target
    if fleet.deaths >= limit:
        message = f"{fleet.deaths} servers have died one after the other, without a step in between; the last: {ended}"
        return fail(state, m.WorkerFailed(-1, "", "exit", message, f"look in logs/server-{event.server}.log"), now)
    if state.phase == "training":
        if one is not None:  # a frozen server is lost from its last heartbeat on
            lost_at = {**fleet.lost_at, one.number: one.heard_at if one.fenced else now}
            fleet = replace(fleet, lost_at=lost_at)
        fleet = replace(fleet, kills=fleet.kills + 1)
    state = replace(state, fleet=fleet)
    state, more = hire(state, now)
    outputs: list[Output] = [say(f"{ended}; another one is started" if more else ended, now), *more]
    if fleet.placement is None or state.phase != "training" or one is None:
        return state, outputs
    placed, what = placement.without(fleet.placement, {event.server})
    outputs.append(say(what.reason, now))
    if not what.lost:
        state, more = decided(state, (placed, what), now)
        return state, outputs + more
    if not state.fleet.there:  # the next server that is ready loads the checkpoint
        return replace(state, fleet=replace(state.fleet, placement=None)), outputs
    state, more = _reloaded(state, what.reason, now)
    return state, outputs + more


def ticked(state: State, now: float) -> Result:
    """Kill servers that are silent while the run stands still: they may be frozen, and others wait for them."""
    outputs: list[Output] = []
    stalled_s = state.pulse.stalled_s(now)
    if state.phase != "training" or stalled_s < SILENT_S:
        return state, outputs
    for server, silence_s in frozen(state.fleet, now, SILENT_S, at_most_s=stalled_s):
        reason = f"{state.fleet.there[server].name} is frozen: no heartbeat for {silence_s:.1f} s"
        state = replace(state, fleet=fenced(state.fleet, server))
        outputs += [
            record(state, now, "server_fenced", reason, server=server),
            Send(ENGINE, m.KillServer(state.epoch, server, reason)),
            say(f"{reason}; it is killed and replaced", now),
        ]
    return state, outputs


def committed(state: State) -> State:
    """A step was committed: deaths before it do not count towards the limit any more."""
    return replace(state, fleet=replace(state.fleet, deaths=0)) if state.fleet.deaths else state


# --- how many there should be ----------------------------------------------------------------------------------------


def scaled(state: State, event: m.ServersRequested, now: float) -> Result:
    """A user wants another number of servers."""
    problem = _problem(state, event.servers)
    if problem:
        return state, [Reply(m.Answer(state.epoch, False, problem))]
    before = len(_staying(state)) + len(state.fleet.hired)
    reason = f"{_servers(event.servers)} asked for instead of {state.fleet.target}"
    # Drop servers that are still starting first: they hold nothing. They count as gone, so their readiness is not
    # awaited.
    dropped = sorted(state.fleet.hired)[max(event.servers - len(_staying(state)), 0) :]
    outputs: list[Output] = [
        record(state, now, "servers_scaled", reason, target=event.servers, dropped=dropped),
        say(reason, now),
        *(Send(ENGINE, m.KillServer(state.epoch, server, "it is not needed any more")) for server in dropped),
    ]
    state = replace(state, fleet=retargeted(state.fleet, event.servers, dropped))
    state, more = maintained(state, now)
    outputs += [*more, Reply(m.Answer(state.epoch, True, _answer(before, event.servers)))]
    return state, outputs


def maintained(state: State, now: float) -> Result:
    """Move towards the wanted number: start missing servers, or let the newest ones leave."""
    if state.phase != "training" or state.fleet.placement is None:
        return state, []
    state, outputs = hire(state, now)
    closing = [server for server in _staying(state) if _is_closing(state, state.fleet.there[server])]
    others = [server for server in _staying(state) if server not in closing]
    # A server whose host leaves hands its slices over as soon as another server can take them.
    for server in [*(closing if others else ()), *others[state.fleet.target :]]:
        state, more = _leave(state, server, now)
        outputs += more
    return state, outputs


def _leave(state: State, server: int, now: float) -> Result:
    """The server hands its slices over first."""
    known = state.fleet
    one = known.there[server]
    assert known.placement is not None
    decision = placement.leave(known.placement, server)
    there = {**known.there, server: replace(one, leaving=True)}
    state, outputs = decided(replace(state, fleet=replace(known, there=there)), decision, now)
    return state, [say(f"{one.name} was asked to leave: {decision[1].reason}", now), *outputs]


def _staying(state: State) -> list[int]:
    return sorted(number for number, one in state.fleet.there.items() if not one.leaving)


def _problem(state: State, wanted: int) -> str:
    """Why the number of servers cannot be changed so."""
    if not state.fleet.target:
        return "this run has no parameter servers: its strategy has none"
    if not 1 <= wanted <= MOST:
        return f"a run has 1 to {MOST:,} parameter servers, not {wanted:,}"
    if state.phase != "training" or state.fleet.placement is None:
        return "not all servers are ready yet: try again when the run trains"
    return ""


def _answer(before: int, target: int) -> str:
    if target > before:
        more = target - before
        return f"{more} more {'server is' if more == 1 else 'servers are'} being started"
    if target == before:
        return f"there are {_servers(target, '')} already"
    less = before - target
    text = f"{less} {'server leaves' if less == 1 else 'servers leave'} when the others have copies"
    if target == 1:
        text += "; with one server there is no backup: if it dies, the run goes back to a checkpoint"
    return text


def _servers(count: int, verb: str = " were") -> str:
    return "1 server" + verb.replace("were", "was") if count == 1 else f"{count} servers{verb}"


def _end_run(state: State) -> Reply:
    return Reply(m.EndRun(state.epoch, "left", "it is not needed any more"))


# --- what workers report of servers ----------------------------------------------------------------------------------


def applied(state: State, reports: Sequence[m.StepReport], now: float) -> Result:
    """Steps were applied: for each server lost before one of them, the pause is known now."""
    outputs: list[Output] = []
    for server, at in state.fleet.lost_at.items():
        later = [report.at for report in reports if report.at > at]
        if later:
            pause_s = min(min(later), now) - at  # the member's clock may be ahead of ours
            left = {number: when for number, when in state.fleet.lost_at.items() if number != server}
            fleet = replace(state.fleet, lost_at=left, pauses=(*state.fleet.pauses, pause_s))
            state = replace(state, fleet=fleet)
            reason = f"the first step after the loss of server {server} came {pause_s:.2f} s after it"
            outputs.append(record(state, now, "server_pause", reason, server=server, pause_s=pause_s))
    return state, outputs


def paced(state: State, event: m.Heartbeat, now: float) -> Result:
    """Record a pace that a worker has chosen. Workers begin with the pace whose numbers are all 1."""
    if not event.timing.pace:
        return state, []
    strategy, pace = state.config.parsed_strategy, tuple(event.timing.pace)
    names = strategy.pace_names
    if len(pace) != len(names) or pace == state.fleet.paces.get(event.worker, (1,) * len(names)):
        return state, []
    state = replace(state, fleet=replace(state.fleet, paces={**state.fleet.paces, event.worker: pace}))
    text = f"worker {event.worker} {strategy.pace_text(pace)} from step {event.step} on"
    facts: dict[str, Any] = {"worker": event.worker, **dict(zip(names, pace, strict=True)), "step": event.step}
    return state, [record(state, now, "pace", text, **facts), say(text, now)]

"""Parameter servers come, die, freeze and hand slices over, and workers go on meanwhile. Pure.

`placement.py` decides which server has which slice; this file decides what follows from it for the run. A new map is a
decision: it is on record before anybody hears of it, and everybody who knows an older one is told again.
"""

from __future__ import annotations

from dataclasses import replace

from distbelief.control import messages as m
from distbelief.coordinator.rules import explain, regroup
from distbelief.coordinator.rules.ending import Result, fail, record, say
from distbelief.coordinator.rules.hiring import place_servers
from distbelief.coordinator.rules.hosts import ASK_AGAIN_S
from distbelief.coordinator.rules.servers import placement, serverpauses
from distbelief.coordinator.rules.servers.fleetstate import Fleet, ServerProcess
from distbelief.coordinator.rules.servers.mapping import decided, found
from distbelief.coordinator.rules.servers.roles import Placement
from distbelief.coordinator.rules.vocabulary import ENGINE, Output, ProtocolError, Reply, Send, State

SILENT_S = 2.0
"""A server is frozen when nothing was heard of it for so long, and for several times its longest silence until now, and
the run stands still."""
_GAPS = 4.0
_LONGEST_GAP_S = 30.0


def begun(servers: int, now: float, local: int) -> Fleet:
    """The launching process starts the first servers by itself: so many of them; -1: all."""
    numbers = range(servers)
    there = numbers if local < 0 else numbers[:local]
    return Fleet(servers, servers, hired=dict.fromkeys(numbers, now), placed=dict.fromkeys(there, ""))


def ready(state: State, event: m.ServerReady, now: float) -> Result:
    fleet = state.fleet
    if event.server in fleet.gone:  # it was on its way when fewer were wanted
        return state, [_goodbye(state)]
    if event.server in fleet.there:
        return state, _told(state)
    problem = _misfit(state, event)
    if problem:
        failure = m.WorkerFailed(-1, event.host, "refused", problem, "start it with the same job file and settings")
        return fail(state, failure, now)
    one = ServerProcess(event.server, event.host, event.pid, event.address, now)
    fleet = replace(
        fleet,
        there={**fleet.there, event.server: one},
        hired=_less(fleet.hired, event.server),
        next_server=max(fleet.next_server, event.server + 1),
        slices=tuple(event.slices),
        facts=event.facts,
    )
    state = replace(state, fleet=fleet, active_at=now)
    if state.phase == "gathering":
        return regroup.start_when_complete(state, now) if state.reference else (state, [])
    if fleet.placement is None:  # all were lost
        return founded_anew(state, f"{one.name} has come", now)
    return decided(state, placement.with_server(fleet.placement, event.server, event.host), now)


def founded_anew(state: State, reason: str, now: float) -> Result:
    """After it, the members look again where the parameters are: what they wait for may never come."""
    state, outputs = found(state, reason, now)
    state, more = regroup.regroup(state, "servers", f"all parameters begin anew from a checkpoint: {reason}", now)
    return state, outputs + more


def _misfit(state: State, event: m.ServerReady) -> str:
    """In exact strategies a server must compute what the others do."""
    fleet = state.fleet
    if fleet.slices and list(fleet.slices) != event.slices:
        return f"server {event.server} cuts the parameters otherwise than the others: it does not have the same job"
    known = fleet.facts or (state.reference.canary.facts if state.reference else {})
    odd = [name for name, value in event.facts.items() if known.get(name, value) != value]
    if odd and state.config.exact:
        difference, fix = explain.fact(odd[0], event.facts[odd[0]], known[odd[0]])
        return f"server {event.server} {difference}; {fix}"
    return ""


# --- what is heard ---------------------------------------------------------------------------------------------------


def beat(state: State, event: m.ServerBeat, now: float) -> Result:
    one = state.fleet.there.get(event.server)
    if one is not None and one.leaving and state.fleet.placement and not _holds(state.fleet.placement, event.server):
        return state, [_goodbye(state)]  # what it was told may be lost
    if one is None or event.epoch < state.epoch:
        return state, [_goodbye(state) if event.server in state.fleet.gone else Reply(m.Introduce(state.epoch, 0))]
    gap_s = min(now - one.heard_at, _LONGEST_GAP_S)
    one = replace(one, heard_at=now, longest_gap_s=max(gap_s, 0.98 * one.longest_gap_s))
    state = replace(state, fleet=replace(state.fleet, there={**state.fleet.there, event.server: one}))
    return state, _told(state) if event.version < state.fleet.version else []


def _told(state: State) -> list[Output]:
    known = state.fleet.map()
    return [Reply(m.Serve(state.epoch, known))] if known else []


def told_worker(state: State, event: m.Heartbeat) -> list[Output]:
    """A worker that knows an older map is told of the present one."""
    return _told(state) if event.servers < state.fleet.version else []


def copied(state: State, event: m.SliceCopied, now: float) -> Result:
    placed = state.fleet.placement
    if placed is None or not 0 <= event.slice < len(placed.slices):
        raise ProtocolError(f"server {event.server} tells of a copy of slice {event.slice}, which there is not")
    return decided(state, placement.copied(placed, event.slice, event.server, event.target, event.known), now)


def failed(state: State, event: m.ServerFailed, now: float) -> Result:
    message = f"server {event.server}: {event.message}"
    return fail(state, m.WorkerFailed(-1, event.host, "job", message, event.hint, event.traceback), now)


def exited(state: State, event: m.ServerExited, now: float) -> Result:
    fleet = state.fleet
    if event.server in fleet.gone or event.server >= fleet.next_server:
        return state, []
    one = fleet.there.get(event.server)
    there = {number: other for number, other in fleet.there.items() if number != event.server}
    gone = fleet.gone | {event.server}
    fleet = replace(fleet, there=there, hired=_less(fleet.hired, event.server), gone=gone)
    if one is not None and one.leaving and fleet.placement and not _holds(fleet.placement, event.server):
        return replace(state, fleet=fleet), []
    fleet = replace(fleet, deaths=fleet.deaths + 1)
    ended = f"{one.name if one else f'server {event.server}'} {explain.ending(event.status)}"
    limit = 3 if state.phase == "gathering" else 10 + 2 * fleet.target
    if fleet.deaths >= limit:
        message = f"{fleet.deaths} servers have died one after the other, without a step in between; the last: {ended}"
        return fail(state, m.WorkerFailed(-1, "", "exit", message, f"look in logs/server-{event.server}.log"), now)
    if state.phase == "training":
        fleet = replace(serverpauses.lost(fleet, one, now) if one else fleet, kills=fleet.kills + 1)
    state = replace(state, fleet=fleet)
    state, more = hire(state, now)
    outputs: list[Output] = [say(f"{ended}; another one is started" if more else ended, now), *more]
    if fleet.placement is None or state.phase != "training" or one is None:
        return state, outputs
    placed, what = placement.without(fleet.placement, {event.server})
    if not what.lost:
        state, more = decided(state, (placed, what), now)
        return state, [*outputs, say(what.reason, now), *more]
    return _start_over(state, what.reason, now, outputs)


def _start_over(state: State, reason: str, now: float, outputs: list[Output]) -> Result:
    """Slices are lost: all servers begin anew from a checkpoint, and the members of the run look where they are."""
    outputs = [*outputs, say(reason, now)]
    if not state.fleet.there:
        return replace(state, fleet=replace(state.fleet, placement=None)), outputs
    state, more = founded_anew(state, reason, now)
    return state, outputs + more


def hire(state: State, now: float) -> Result:
    fleet = state.fleet
    staying = sum(1 for one in fleet.there.values() if not one.leaving and not is_closing(state, one))
    missing = fleet.target - staying - len(fleet.hired)
    if missing <= 0 or state.phase == "ended":
        return state, []
    placed = place_servers(state, range(fleet.next_server, fleet.next_server + missing), now)
    if not placed:
        return state, []
    state = replace(state, fleet=replace(fleet, next_server=fleet.next_server + len(placed)), active_at=now)
    return _asked(state, placed, f"{staying} of {fleet.target} servers are there", now)


def is_closing(state: State, server: ServerProcess) -> bool:
    """Its host takes no servers any more: it is about to leave."""
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
    """An engine tells which servers run: what was missed is heard now, what was asked for in vain is asked again."""
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
        elif placed.get(server) in ("", event.host):  # the launching process did not, or the host takes nobody now
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


def ticked(state: State, now: float) -> Result:
    """A server that is silent while the run stands still is killed: it may be frozen, and others wait for it."""
    outputs: list[Output] = []
    if state.phase != "training" or state.pulse.stalled_s(now) < SILENT_S:
        return state, outputs
    for one in state.fleet.there.values():
        silent_s = min(now - one.heard_at, state.pulse.stalled_s(now))
        if one.fenced or silent_s <= max(SILENT_S, _GAPS * one.longest_gap_s):
            continue
        reason = f"{one.name} is frozen: no sign of life for {silent_s:.1f} s"
        fleet = replace(state.fleet, there={**state.fleet.there, one.number: replace(one, fenced=True)})
        state = replace(state, fleet=fleet)
        outputs += [
            record(state, now, "server_fenced", reason, server=one.number),
            Send(ENGINE, m.KillServer(state.epoch, one.number, reason)),
            say(f"{reason}; it is killed and replaced", now),
        ]
    return state, outputs


def committed(state: State) -> State:
    return replace(state, fleet=replace(state.fleet, deaths=0)) if state.fleet.deaths else state


def _goodbye(state: State) -> Reply:
    return Reply(m.EndRun(state.epoch, "left", "it is not needed any more"))


def _holds(placed: Placement, server: int) -> bool:
    return server in {*placed.map.primaries, *placed.map.backups, *placed.recruits}


def _less(hired: object, server: int) -> dict[int, float]:
    assert isinstance(hired, dict)
    return {number: at for number, at in hired.items() if number != server}

"""Somebody wants another number of parameter servers: more are started, or some hand over what they have and go. Pure.

What is on record is the number that is wanted. That it comes to that is looked after again and again: a coordinator may
die between two decisions.
"""

from __future__ import annotations

from dataclasses import replace

from distbelief.control import messages as m
from distbelief.coordinator.rules.ending import Result, record, say
from distbelief.coordinator.rules.servers import fleet, placement
from distbelief.coordinator.rules.servers.mapping import decided
from distbelief.coordinator.rules.vocabulary import ENGINE, Output, Reply, Send, State

MOST = 1000


def scaled(state: State, event: m.ServersRequested, now: float) -> Result:
    problem = _problem(state, event.servers)
    if problem:
        return state, [Reply(m.Answer(state.epoch, False, problem))]
    before = len(_staying(state)) + len(state.fleet.hired)
    reason = f"{_servers(event.servers)} asked for instead of {state.fleet.target}"
    # Those on their way go first: they have nothing. They count as gone, so that nobody waits for them.
    dropped = sorted(state.fleet.hired)[max(event.servers - len(_staying(state)), 0) :]
    outputs: list[Output] = [
        record(state, now, "servers_scaled", reason, target=event.servers, dropped=dropped),
        say(reason, now),
        *(Send(ENGINE, m.KillServer(state.epoch, server, "it is not needed any more")) for server in dropped),
    ]
    state = replace(state, fleet=state.fleet.aiming_at(event.servers, dropped))
    state, more = kept(state, now)
    outputs += [*more, Reply(m.Answer(state.epoch, True, _answer(before, event.servers)))]
    return state, outputs


def kept(state: State, now: float) -> Result:
    """Have as many servers as are wanted: start some, or have the newest ones leave."""
    if state.phase != "training" or state.fleet.placement is None:
        return state, []
    state, outputs = fleet.hire(state, now)
    closing = [server for server in _staying(state) if fleet.is_closing(state, state.fleet.there[server])]
    others = [server for server in _staying(state) if server not in closing]
    # One whose host leaves hands over as soon as there is another one to take it.
    for server in [*(closing if others else ()), *others[state.fleet.target :]]:
        state, more = _leave(state, server, now)
        outputs += more
    return state, outputs


def _leave(state: State, server: int, now: float) -> Result:
    """What it has is handed over first."""
    known = state.fleet
    one = known.there[server]
    assert known.placement is not None
    decision = placement.leave(known.placement, server)
    there = {**known.there, server: replace(one, leaving=True)}
    state, outputs = decided(replace(state, fleet=replace(known, there=there)), decision, now)
    return state, [say(f"{one.name} was asked to go: {decision[1].reason}", now), *outputs]


def _staying(state: State) -> list[int]:
    return sorted(number for number, one in state.fleet.there.items() if not one.leaving)


def _problem(state: State, wanted: int) -> str:
    """Why it cannot be."""
    if not state.fleet.target:
        return "this run has no parameter servers: its strategy has none"
    if not 1 <= wanted <= MOST:
        return f"a run has 1 to {MOST:,} parameter servers, not {wanted:,}"
    if state.phase != "training" or state.fleet.placement is None:
        return "the servers are not all there yet: ask again when the run trains"
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

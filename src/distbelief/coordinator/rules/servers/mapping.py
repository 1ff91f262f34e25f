"""A new map of slices as a decision of a training run: it is recorded first, then sent to all servers and workers."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from distbelief.control import messages as m
from distbelief.coordinator.rules.ending import Result, record, say
from distbelief.coordinator.rules.servers.fleet import first_placement, holds, with_placement
from distbelief.coordinator.rules.servers.roles import Decision, Placement
from distbelief.coordinator.rules.vocabulary import EVERYBODY, Output, Send, SendServer, State


def found(state: State, reason: str, now: float) -> Result:
    """All slices are loaded: at the start of the run, or again from a checkpoint after some were lost."""
    fleet, decision = first_placement(state.fleet, reason, state.saves.sealed)
    return decided(replace(state, fleet=fleet), decision, now)


def decided(state: State, decision: tuple[Placement, Decision], now: float) -> Result:
    """Record a new map and send it. Servers derive their copies and promotions from the map itself."""
    placed, what = decision
    fleet, changed = with_placement(state.fleet, placed)
    state = replace(state, fleet=fleet)
    told = fleet.map()
    if not changed or told is None:
        return state, []
    facts = {
        "placement": msgspec.to_builtins(placed),
        "life": fleet.life,
        "sealed": fleet.sealed,
        "slices": list(fleet.slices),
        "servers": [msgspec.to_builtins(one) for one in fleet.there.values()],
        "target": fleet.target,
        "kills": fleet.kills,
        "gone": sorted(fleet.gone),
        "lost_at": {str(server): at for server, at in fleet.lost_at.items()},
    }
    outputs: list[Output] = [record(state, now, "servers", what.reason, **facts)]
    outputs += [SendServer(EVERYBODY, m.Serve(state.epoch, told)), Send(EVERYBODY, m.Serve(state.epoch, told))]
    for one in [one for one in fleet.there.values() if one.leaving and not holds(fleet, one.number)]:
        text = f"{one.name} has handed its slices over and leaves"
        outputs += [say(text, now), SendServer(one.number, m.EndRun(state.epoch, "left", text))]
    return state, outputs

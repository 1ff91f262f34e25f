"""Who has which slice of the parameters, as a decision: written down, and told to everybody. Pure."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from distbelief.control import messages as m
from distbelief.coordinator.rules.ending import Result, record, say
from distbelief.coordinator.rules.servers import placement
from distbelief.coordinator.rules.servers.roles import Decision, Placement, Slice
from distbelief.coordinator.rules.vocabulary import EVERYBODY, Output, Send, SendServer, State


def found(state: State, reason: str, now: float) -> Result:
    """All slices begin: with the run, or anew from a checkpoint after some were lost."""
    fleet = state.fleet
    slices = [Slice(number, size_bytes) for number, size_bytes in enumerate(fleet.slices)]
    there = dict(fleet.there)
    if all(one.leaving for one in there.values()):  # those that were to stay are dead
        there = {number: replace(one, leaving=False) for number, one in there.items()}
    hosts = {number: one.host for number, one in there.items() if not one.leaving}
    placed = placement.first(slices, hosts, version=fleet.version + 1)
    fleet = replace(fleet, there=there, life=fleet.life + 1, sealed=state.saves.sealed, placement=None)
    state = replace(state, fleet=fleet)
    return decided(state, (placed, Decision((), reason)), now)


def decided(state: State, decision: tuple[Placement, Decision], now: float) -> Result:
    """Write a new map down and tell everybody. Orders to copy follow from the map itself."""
    placed, what = decision
    fleet = state.fleet
    changed = fleet.placement is None or placed.map.version != fleet.placement.map.version
    state = replace(state, fleet=replace(fleet, placement=placed, version=placed.map.version))
    if not changed:
        return state, []
    told = state.fleet.map()
    assert told is not None
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
    return _released(state, outputs, now)


def _released(state: State, outputs: list[Output], now: float) -> Result:
    """Servers that wished to leave and hold nothing any more may go."""
    fleet = state.fleet
    assert fleet.placement is not None
    known = fleet.placement.map
    holders = {*known.primaries, *known.backups, *fleet.placement.recruits}
    for one in [one for one in fleet.there.values() if one.leaving and one.number not in holders]:
        text = f"{one.name} has handed its slices over and leaves"
        outputs += [say(text, now), SendServer(one.number, m.EndRun(state.epoch, "left", text))]
    return state, outputs

"""The servers of a key-value service come, die and freeze, and slices go on elsewhere. Pure.

Which server has which slice is for `coordinator/rules/servers/placement.py`; here is what follows: what to start,
whom to tell. A service has no checkpoint: when all holders of a slice die, all values are gone, a new life begins
empty, and clients of the old one are told.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from distbelief.coordinator.rules.explain import ending
from distbelief.coordinator.rules.servers import placement
from distbelief.coordinator.rules.servers.fleet import Fleet, ServerProcess
from distbelief.coordinator.rules.servers.roles import Decision, Placement, Slice

SILENT_S = 15.0
"""A server is frozen when nothing was heard of it for so long, and for several times its longest silence until now."""
_GAPS = 4.0
_LONGEST_GAP_S = 60.0
_AT_START = 3
"""So many servers may die before the first life begins."""


@dataclass(frozen=True)
class Start:
    server: int


@dataclass(frozen=True)
class Kill:
    server: int


@dataclass(frozen=True)
class TellAll:
    """Servers and clients are told of the map."""


@dataclass(frozen=True)
class Tell:
    """Whoever just spoke is."""


@dataclass(frozen=True)
class Say:
    text: str


@dataclass(frozen=True)
class Fail:
    """The service cannot go on."""

    message: str
    hint: str


Output = Start | Kill | TellAll | Tell | Say | Fail
Result = tuple[Fleet, list[Output]]


def slices_for(servers: int) -> int:
    """How many slices hold values: enough that the loads of servers are alike when one comes or goes.

    >>> slices_for(2), slices_for(10)
    (16, 40)
    """
    return max(16, 4 * servers)


def begun(servers: int, now: float) -> Result:
    # All slices that hold values are filled alike, so for balance they have one size; the catalogue is small.
    sizes = (0, *(1 for _ in range(slices_for(servers))))
    fleet = Fleet(servers, servers, hired=dict.fromkeys(range(servers), now), slices=sizes)
    return fleet, [Start(number) for number in range(servers)]


def ready(fleet: Fleet, server: int, host: str, pid: int, address: str, now: float) -> Result:
    if server in fleet.gone:
        return fleet, []
    if server in fleet.there:
        return fleet, [Tell()] if fleet.placement else []
    one = ServerProcess(server, host, pid, address, now)
    hired = {number: at for number, at in fleet.hired.items() if number != server}
    fleet = replace(fleet, there={**fleet.there, server: one}, hired=hired)
    if fleet.placement is None:
        return _found(fleet, f"{one.name} has come") if fleet.complete else (fleet, [])
    return _decided(fleet, placement.with_server(fleet.placement, server, host))


def beat(fleet: Fleet, server: int, version: int, now: float) -> Result:
    one = fleet.there.get(server)
    if one is None:
        return fleet, []
    gap_s = min(now - one.heard_at, _LONGEST_GAP_S)
    one = replace(one, heard_at=now, longest_gap_s=max(gap_s, 0.98 * one.longest_gap_s))
    fleet = replace(fleet, there={**fleet.there, server: one})
    return fleet, [Tell()] if version < fleet.version else []


def copied(fleet: Fleet, number: int, source: int, target: int, known: int | None = None) -> Result:
    if fleet.placement is None or not 0 <= number < len(fleet.slices):
        return fleet, []
    fleet, outputs = _decided(fleet, placement.copied(fleet.placement, number, source, target, known))
    return replace(fleet, deaths=0) if outputs else fleet, outputs  # those that come do their work


def exited(fleet: Fleet, server: int, status: int, now: float) -> Result:
    if server in fleet.gone:
        return fleet, []
    one = fleet.there.get(server)
    fleet = replace(
        fleet,
        there={number: other for number, other in fleet.there.items() if number != server},
        hired={number: at for number, at in fleet.hired.items() if number != server},
        gone=fleet.gone | {server},
        deaths=fleet.deaths + 1,
        kills=fleet.kills + 1,
    )
    ended = f"{one.name if one else f'server {server}'} {ending(status)}"
    if fleet.deaths >= (10 + 2 * fleet.target if fleet.life else _AT_START):
        message = f"{fleet.deaths} servers have died one after the other; the last: {ended}"
        return fleet, [Fail(message, f"look in server-{server}.log")]
    number = fleet.next_server
    fleet = replace(fleet, next_server=number + 1, hired={**fleet.hired, number: now})
    outputs: list[Output] = [Say(f"{ended}; another one is started"), Start(number)]
    if fleet.placement is None or one is None:
        return fleet, outputs
    placed, what = placement.without(fleet.placement, {server})
    if not what.lost:
        fleet, more = _decided(fleet, (placed, what))
        return fleet, [*outputs, Say(what.reason), *more]
    text = "nobody else had all that it held: the values of all keys are lost, and the store is empty"
    outputs.append(Say(text))
    if not fleet.there:
        return replace(fleet, placement=None), outputs
    fleet, more = _found(fleet, text)
    return fleet, outputs + more


def ticked(fleet: Fleet, now: float) -> Result:
    outputs: list[Output] = []
    for one in fleet.there.values():
        silent_s = now - one.heard_at
        if not one.fenced and silent_s > max(SILENT_S, _GAPS * one.longest_gap_s):
            fleet = replace(fleet, there={**fleet.there, one.number: replace(one, fenced=True)})
            outputs += [Say(f"{one.name} is frozen: no sign of life for {silent_s:.0f} s"), Kill(one.number)]
    return fleet, outputs


def _found(fleet: Fleet, reason: str) -> Result:
    """A life begins."""
    slices = [Slice(number, size) for number, size in enumerate(fleet.slices)]
    hosts = {number: one.host for number, one in fleet.there.items()}
    placed = placement.first(slices, hosts, version=fleet.version + 1)
    return _decided(replace(fleet, life=fleet.life + 1, placement=None), (placed, Decision((), reason)))


def _decided(fleet: Fleet, decision: tuple[Placement, Decision]) -> Result:
    placed, _ = decision
    if fleet.placement == placed:
        return fleet, []
    return replace(fleet, placement=placed, version=placed.map.version), [TellAll()]

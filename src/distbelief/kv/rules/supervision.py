"""The supervision of a key-value service's servers: events in, decisions out.

The rules for a fleet of servers, and for which server holds which slice, are those of training runs
(coordinator/rules/servers). This module decides what follows for a service: which server to start or kill, and who is
told the map. A service has no checkpoint. When all holders of a slice die, all values are lost: a new life begins
empty, and the clients of the old life get an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from distbelief.coordinator.rules.explain import ending
from distbelief.coordinator.rules.servers import fleet as fleets
from distbelief.coordinator.rules.servers import placement
from distbelief.coordinator.rules.servers.fleet import Fleet, ServerProcess
from distbelief.coordinator.rules.servers.roles import Decision, Placement

SILENT_S = 15.0
"""A server is frozen after at least this silence (and a multiple of its longest silence before: `fleets.frozen`)."""
_LONGEST_GAP_S = 60.0
_DEATHS_AT_START = 3
"""The service fails after this number of deaths before its first life."""


@dataclass(frozen=True)
class Start:
    server: int


@dataclass(frozen=True)
class Kill:
    server: int


@dataclass(frozen=True)
class TellAll:
    """Send the map to all servers and clients."""


@dataclass(frozen=True)
class Tell:
    """Send the map to the sender of the event."""


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
    """The number of slices that hold values: enough that loads stay balanced when a server comes or goes.

    >>> slices_for(2), slices_for(10)
    (16, 40)
    """
    return max(16, 4 * servers)


def begun(servers: int, now: float) -> Result:
    # The slices that hold values fill evenly, so for balance they have one size; the catalogue is small.
    sizes = (0, *(1 for _ in range(slices_for(servers))))
    return fleets.begun(servers, now, slices=sizes), [Start(number) for number in range(servers)]


def ready(fleet: Fleet, server: int, host: str, pid: int, address: str, now: float) -> Result:
    if server in fleet.gone:
        return fleet, []
    if server in fleet.there:
        return fleet, [Tell()] if fleet.placement else []
    one = ServerProcess(server, host, pid, address, now)
    fleet = fleets.with_server(fleet, one)
    if fleet.placement is None:
        return _new_life(fleet, f"{one.name} is ready") if fleet.complete else (fleet, [])
    return _decided(fleet, placement.with_server(fleet.placement, server, host))


def beat(fleet: Fleet, server: int, version: int, now: float) -> Result:
    if server not in fleet.there:
        return fleet, []
    fleet = fleets.heard(fleet, server, now, _LONGEST_GAP_S)
    return fleet, [Tell()] if version < fleet.version else []


def copied(fleet: Fleet, number: int, source: int, target: int, known: int | None = None) -> Result:
    if fleet.placement is None or not 0 <= number < len(fleet.slices):
        return fleet, []
    fleet, outputs = _decided(fleet, placement.copied(fleet.placement, number, source, target, known))
    return replace(fleet, deaths=0) if outputs else fleet, outputs  # the new servers work: the count begins again


def exited(fleet: Fleet, server: int, status: int, now: float) -> Result:
    if server in fleet.gone:
        return fleet, []
    one = fleet.there.get(server)
    fleet = replace(fleets.without_server(fleet, server), deaths=fleet.deaths + 1, kills=fleet.kills + 1)
    ended = f"{one.name if one else f'server {server}'} {ending(status)}"
    if fleet.deaths >= (10 + 2 * fleet.target if fleet.life else _DEATHS_AT_START):
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
    text = "no other server had a complete copy of its pieces: the values of all keys are lost, and the store is empty"
    outputs.append(Say(text))
    if not fleet.there:
        return replace(fleet, placement=None), outputs
    fleet, more = _new_life(fleet, text)
    return fleet, outputs + more


def ticked(fleet: Fleet, now: float) -> Result:
    outputs: list[Output] = []
    for server, silent_s in fleets.frozen(fleet, now, SILENT_S):
        outputs += [
            Say(f"{fleet.there[server].name} is frozen: no heartbeat for {silent_s:.0f} s"),
            Kill(server),
        ]
        fleet = fleets.fenced(fleet, server)
    return fleet, outputs


def _new_life(fleet: Fleet, reason: str) -> Result:
    """All slices begin empty, on the servers that are ready."""
    return _decided(*fleets.first_placement(fleet, reason))


def _decided(fleet: Fleet, decision: tuple[Placement, Decision]) -> Result:
    fleet, changed = fleets.with_placement(fleet, decision[0])
    return fleet, [TellAll()] if changed else []

"""A fleet of servers that hold slices, as a value, and the rules that need nothing else.

`Fleet` holds which servers were asked for, which run, which ended, and which slices they hold. The functions below take
a fleet and return a new one; they write no journal and send no messages. For training
runs lifecycle.py decides what follows; a service outside of runs has rules of its own and shares this file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from distbelief.control.messages import ServerMap
from distbelief.coordinator.rules.restarts import Restarts
from distbelief.coordinator.rules.servers import placement
from distbelief.coordinator.rules.servers.roles import Decision, Placement, Slice

GAPS = 4.0
"""A server is frozen only when its silence is longer than GAPS times its longest silence until now."""


@dataclass(frozen=True)
class ServerProcess:
    """A server that is ready and has not ended."""

    number: int
    host: str
    pid: int
    address: str
    heard_at: float
    longest_gap_s: float = 0.0
    """Between two heartbeats: a server that computes a large update is silent for a while."""
    fenced: bool = False
    """The server was frozen and is being killed."""
    leaving: bool = False

    @property
    def name(self) -> str:
        return f"server {self.number} (pid {self.pid} on {self.host})"


@dataclass(frozen=True)
class Fleet:
    """Never changed in place."""

    target: int = 0
    """The wanted number of servers; 0: the strategy has none."""
    next_server: int = 0
    """The number of the next server that is started. Numbers are never used twice."""
    hired: Mapping[int, float] = field(default_factory=dict)
    """Servers that are to be started and are not ready -> when an agent was last asked to start them."""
    placed: Mapping[int, str] = field(default_factory=dict)
    """Hired servers for which an agent was asked -> its host; empty: the launching process."""
    there: Mapping[int, ServerProcess] = field(default_factory=dict)
    """The servers that are ready and have not ended."""
    gone: frozenset[int] = frozenset()
    """Numbers of servers that have ended, so that each end counts once."""
    slices: tuple[int, ...] = ()
    """The size of each slice in bytes."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """The facts of the servers' computation, which must be equal on all servers."""
    placement: Placement | None = None
    version: int = 0
    """The version of the last map. It keeps rising, even across times without a placement."""
    life: int = 0
    """How often all slices were loaded: once at the start, and again after each loss of a slice."""
    sealed: int = 0
    """The newest checkpoint at the start of this life."""
    deaths: int = 0
    """Deaths since a step was last committed."""
    restarts: Restarts = field(default_factory=Restarts)
    kills: int = 0
    """Servers that died in the run."""
    lost_at: Mapping[int, float] = field(default_factory=dict)
    """Lost servers after which no step was applied yet -> when each was lost."""
    pauses: tuple[float, ...] = ()
    """Seconds from each loss to the next step."""
    paces: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Worker -> the numbers of its pace (`Strategy.pace_names`), if it has chosen any number other than 1."""

    @property
    def complete(self) -> bool:
        """Whether as many servers are ready as were asked for."""
        return len(self.there) >= self.target

    def map(self) -> ServerMap | None:
        """The map for servers and workers; None while there is no placement."""
        if self.placement is None:
            return None
        known = self.placement.map
        return ServerMap(
            known.version,
            self.life,
            list(known.primaries),
            list(known.backups),
            list(self.placement.recruits),
            {number: one.address for number, one in self.there.items()},
            self.sealed,
        )


# --- which servers there are -----------------------------------------------------------------------------------------


def begun(servers: int, now: float, local: int = -1, slices: tuple[int, ...] = ()) -> Fleet:
    """A new fleet of `servers` servers, the first `local` of them (-1: all) started by the launching process."""
    numbers = range(servers)
    there = numbers if local < 0 else numbers[:local]
    hired = dict.fromkeys(numbers, now)
    return Fleet(servers, servers, hired=hired, placed=dict.fromkeys(there, ""), slices=slices)


def retargeted(fleet: Fleet, target: int, dropped: Collection[int]) -> Fleet:
    """Another number of servers is wanted; `dropped` are hired servers that are not waited for any more."""
    hired = {server: at for server, at in fleet.hired.items() if server not in dropped}
    return replace(fleet, target=target, hired=hired, gone=fleet.gone | set(dropped))


def with_server(fleet: Fleet, server: ServerProcess) -> Fleet:
    """A server is ready."""
    return replace(
        fleet,
        there={**fleet.there, server.number: server},
        hired={number: at for number, at in fleet.hired.items() if number != server.number},
        next_server=max(fleet.next_server, server.number + 1),
    )


def without_server(fleet: Fleet, server: int) -> Fleet:
    """A server has ended, ready or not."""
    return replace(
        fleet,
        there={number: other for number, other in fleet.there.items() if number != server},
        hired={number: at for number, at in fleet.hired.items() if number != server},
        gone=fleet.gone | {server},
    )


# --- which servers are frozen ----------------------------------------------------------------------------------------


def heard(fleet: Fleet, server: int, now: float, longest_gap_s: float) -> Fleet:
    """A heartbeat of a ready server. Gaps count up to `longest_gap_s`, and old long gaps are forgotten slowly."""
    one = fleet.there[server]
    gap_s = min(now - one.heard_at, longest_gap_s)
    one = replace(one, heard_at=now, longest_gap_s=max(gap_s, 0.98 * one.longest_gap_s))
    return replace(fleet, there={**fleet.there, server: one})


def frozen(fleet: Fleet, now: float, silent_s: float, at_most_s: float = float("inf")) -> list[tuple[int, float]]:
    """(server, its silence in seconds) of each server that is silent for longer than `silent_s` and for longer than
    GAPS times its longest gap, and that is not being killed already. Silence counts up to `at_most_s`."""
    silences = [(one, min(now - one.heard_at, at_most_s)) for one in fleet.there.values() if not one.fenced]
    return [(one.number, silence) for one, silence in silences if silence > max(silent_s, GAPS * one.longest_gap_s)]


def fenced(fleet: Fleet, server: int) -> Fleet:
    """The server is being killed."""
    return replace(fleet, there={**fleet.there, server: replace(fleet.there[server], fenced=True)})


# --- which server has which slice ------------------------------------------------------------------------------------


def first_placement(fleet: Fleet, reason: str, sealed: int = 0) -> tuple[Fleet, tuple[Placement, Decision]]:
    """A new life: all slices are loaded, and placed on the servers that are ready and stay."""
    slices = [Slice(number, size_bytes) for number, size_bytes in enumerate(fleet.slices)]
    there = dict(fleet.there)
    if all(one.leaving for one in there.values()):  # all servers that were to stay are dead
        there = {number: replace(one, leaving=False) for number, one in there.items()}
    hosts = {number: one.host for number, one in there.items() if not one.leaving}
    placed = placement.first(slices, hosts, version=fleet.version + 1)
    fleet = replace(fleet, there=there, life=fleet.life + 1, sealed=sealed, placement=None)
    return fleet, (placed, Decision((), reason))


def with_placement(fleet: Fleet, placed: Placement) -> tuple[Fleet, bool]:
    """The fleet with this placement, and whether its map is new and must be sent to all servers and workers."""
    changed = fleet.placement is None or placed.map.version != fleet.placement.map.version
    return replace(fleet, placement=placed, version=placed.map.version), changed


def holds(fleet: Fleet, server: int) -> bool:
    """Whether a server holds a slice or is receiving one."""
    placed = fleet.placement
    return placed is not None and server in {*placed.map.primaries, *placed.map.backups, *placed.recruits}

"""Members that are missing are started, each on a host that has room for it. Pure.

A start is a decision: that the member is wanted, and of which host, is on record before its agent is asked. So the next
coordinator does not ask another host for the same member while the first one is still starting it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from distbelief.control import messages as m
from distbelief.coordinator.rules import hosts
from distbelief.coordinator.rules.ending import Result, record
from distbelief.coordinator.rules.vocabulary import ENGINE, Output, Send, State

MOST_FAILED_HIRES = 3


def hire(state: State, now: float) -> Result:
    """As many workers as are missing and as there is room for."""
    there = sum(1 for worker in state.workers.values() if worker.counts) + len(state.hired)
    missing = state.target - there
    if missing <= 0 or state.phase == "ended" or state.troubles.failed_hires >= MOST_FAILED_HIRES:
        return state, []
    placed = place(state, range(state.next_worker, state.next_worker + missing), now)
    if not placed:
        return state, []
    reason = f"{there} of {state.target} workers are there or on their way"
    state = replace(
        state,
        next_worker=state.next_worker + len(placed),
        hired={**state.hired, **dict.fromkeys(placed, now)},
        placed={**state.placed, **placed},
        active_at=now,
    )
    outputs: list[Output] = [
        record(state, now, "hired", reason, workers=list(placed), hosts=list(placed.values())),
        *(Send(ENGINE, m.StartWorker(state.epoch, number, host)) for number, host in placed.items()),
    ]
    return state, outputs


def settle(state: State, now: float) -> Result:
    """Find hosts for those that are wanted and that no agent was asked for yet."""
    placed = place(state, [worker for worker in state.hired if worker not in state.placed], now)
    if not placed:
        return state, []
    state = replace(
        state, hired={**state.hired, **dict.fromkeys(placed, now)}, placed={**state.placed, **placed}, active_at=now
    )
    where = ", ".join(sorted(set(placed.values())))
    outputs: list[Output] = [
        record(state, now, "placed", f"there is room on {where}", workers=list(placed), hosts=list(placed.values())),
        *(Send(ENGINE, m.StartWorker(state.epoch, number, host)) for number, host in placed.items()),
    ]
    return state, outputs


def place(state: State, numbers: Iterable[int], now: float) -> dict[int, str]:
    """A host for each of these workers. While no agent is known, the launching process's will do: it comes."""
    if not state.hosts:
        return dict.fromkeys(numbers, "")
    rooms = {name: host.room for name, host in state.hosts.items()}
    return hosts.place(numbers, _speaking(state, now), _held(state), rooms)


def free(state: State, host: str) -> int:
    """How many more workers a host with a limit takes."""
    return max(0, state.hosts[host].room - _held(state)[host])


def _speaking(state: State, now: float) -> hosts.Hosts:
    """One that is silent may be lost: nobody is started there meanwhile."""
    return {name: host for name, host in state.hosts.items() if not hosts.is_silent(state.hosts, name, now)}


def _held(state: State) -> Counter[str]:
    held = Counter(one.host for one in state.workers.values() if one.exited is None and not one.estranged)
    held.update(state.placed[worker] or launching(state) for worker in state.hired if worker in state.placed)
    return held


def launching(state: State) -> str:
    """The host of the launching process, which starts the first members by itself: the one that was not invited."""
    invited = {offer.host for offer in state.offers.values()}
    return next((name for name in state.hosts if name not in invited), "")


def place_servers(state: State, numbers: Iterable[int], now: float) -> dict[int, str]:
    """Likewise for parameter servers: each on the host that has the fewest."""
    if not state.hosts:
        return dict.fromkeys(numbers, "")
    if state.phase == "gathering" and not _all_hosts_are_there(state):
        return {}  # else the first host to come would get all of them
    rooms = {name: host.server_room for name, host in state.hosts.items()}
    fleet = state.fleet
    held = Counter(one.host for one in fleet.there.values())
    held.update(fleet.placed[server] or launching(state) for server in fleet.hired if server in fleet.placed)
    return hosts.place(numbers, _speaking(state, now), held, rooms)


def _all_hosts_are_there(state: State) -> bool:
    if any(host.room == hosts.ANY for host in state.hosts.values()):
        return True
    return sum(host.room for host in state.hosts.values()) >= state.target

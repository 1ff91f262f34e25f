"""The hosts of a run: how they join, which workers and servers start on them, and when one counts as lost.

How it works:
- Each host has an agent that starts and kills processes there. An agent reports once a second all that runs on its host
  (EngineAttached). The journal has the decisions that follow from these reports, not the reports.
- Which processes are wanted, and on which host, is recorded before the host's agent is asked. So after a restart the
  next coordinator does not ask a second host for a worker that the first host is still starting.
- An agent that has not started a process after ASK_AGAIN_S is asked again: the command may have been lost.
- Where workers die again and again, the next one is started later (restarts.py).
- Nothing is started on a host that was silent for SILENT_S; after LOST_S the host is lost (faults.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from distbelief.control import messages as m
from distbelief.coordinator.rules.ending import Result, record, say, with_worker
from distbelief.coordinator.rules.servers.fleet import retargeted
from distbelief.coordinator.rules.vocabulary import (
    ENGINE,
    NO_LIMIT,
    Host,
    Offer,
    Output,
    Reply,
    Send,
    State,
    Worker,
)

SILENT_S = 3.0
"""A host whose agent was silent for this long starts and kills no process for us."""
LOST_S = 10.0
"""A host whose agent was silent for this long is lost, with its workers."""
ASK_AGAIN_S = 5.0
MOST_ROOM = 10_000
MOST_FAILED_HIRES = 3
"""After this many new workers in a row that end before they are ready, no more are started."""

Hosts = Mapping[str, Host]


# --- agents report ---------------------------------------------------------------------------------------------------


def offered(state: State, event: m.HostOffered, now: float) -> Result:
    """An agent of another host offers to take part: it gets a name that no other host has."""
    known = state.offers.get(event.nonce)
    if known is not None:  # the first answer was lost
        return state, [Reply(m.Welcome(state.epoch, known.host))]
    if not 0 <= event.room <= MOST_ROOM or not event.nonce:
        return state, [Reply(m.Answer(state.epoch, False, f"a host has room for 0 to {MOST_ROOM:,} workers"))]
    if not state.config.takes_hosts:
        text = "the members of this run share memory, so no other host can join; start it with --listen"
        return state, [Reply(m.Answer(state.epoch, False, text))]
    taken = {*state.hosts, *(offer.host for offer in state.offers.values()), *(w.host for w in state.workers.values())}
    name = unique(event.host or "host", taken)
    state = replace(
        state, offers={**state.offers, event.nonce: Offer(name, event.grows, asked=event.host)}, active_at=now
    )
    text = f"the host {name} has joined, with room for {some_workers(event.room)}"
    facts = {"host": name, "nonce": event.nonce, "room": event.room, "grows": event.grows, "asked": event.host}
    return state, [record(state, now, "host", text, **facts), say(text, now), Reply(m.Welcome(state.epoch, name))]


def attached(state: State, event: m.EngineAttached, now: float) -> Result:
    """An agent reports which of its workers run; it is asked again for workers that it has not started."""
    known = {**state.hosts, event.host: Host(event.host, now, event.room, event.server_room)}
    outputs: list[Output] = []
    hired, placed = dict(state.hired), dict(state.placed)
    for worker, asked_at in state.hired.items():
        if worker in event.running:
            hired[worker], placed[worker] = now, event.host  # it is loading the job
        elif worker in event.exited or now - asked_at <= ASK_AGAIN_S:
            continue
        elif placed.get(worker) == event.host and event.room:
            hired[worker] = now
            outputs.append(Send(ENGINE, m.StartWorker(state.epoch, worker, event.host)))
        elif placed.get(worker) in ("", event.host):  # not started by the launching process, or the host is full
            del placed[worker]
    for worker in event.running:
        one = state.workers.get(worker)
        if one is not None and (one.fenced or one.exited == m.STATUS_UNKNOWN):
            reason = "it is frozen" if one.fenced else "a member reports its death"
            outputs.append(Send(ENGINE, m.KillWorker(state.epoch, worker, reason)))
    active_at = now if state.phase == "gathering" and not state.workers else state.active_at
    state = replace(state, hired=hired, placed=placed, active_at=active_at, hosts=known)
    state, more = _settle(state, now)
    return state, outputs + more


# --- hosts are lost --------------------------------------------------------------------------------------------------


def forgotten(state: State, name: str, reason: str, now: float) -> Result:
    """A host is lost: no worker or server is expected from it any more.

    Processes that were starting there may be alive. Others with new numbers take their places, and the coordinator ends
    a process of the lost host that reports later, so no two processes ever have the same number.
    """
    state = replace(state, hosts={known: host for known, host in state.hosts.items() if known != name})
    outputs: list[Output] = []
    if state.phase == "gathering":
        state, outputs = _shrunk(state, name, now)
    for worker in [worker for worker in state.hired if state.placed.get(worker) == name]:
        state = replace(state, hired={one: at for one, at in state.hired.items() if one != worker})
        state = with_worker(state, replace(state.workers.get(worker, Worker(worker)), leaving=True))
        outputs.append(record(state, now, "leaves", reason, worker=worker, target=state.target))
    dropped = [server for server in state.fleet.hired if state.fleet.placed.get(server) == name]
    if dropped:
        state = replace(state, fleet=retargeted(state.fleet, state.fleet.target, dropped))
        outputs.append(record(state, now, "servers_scaled", reason, target=state.fleet.target, dropped=dropped))
    return state, outputs


def _shrunk(state: State, name: str, now: float) -> Result:
    """Lower the target by the slots that the lost host had added."""
    added = [(nonce, offer.added) for nonce, offer in state.offers.items() if offer.host == name and offer.added]
    if not added:
        return state, []
    ((nonce, less),) = added
    target = max(state.target - less, state.config.workers)
    state = replace(state, offers={**state.offers, nonce: replace(state.offers[nonce], added=0)}, target=target)
    text = f"{name} is lost before the start: {some_workers(less)} fewer"
    return state, [record(state, now, "grown", text, host=name, nonce=nonce, target=target, added=0)]


def is_silent(hosts: Hosts, name: str, now: float) -> bool:
    return name not in hosts or now - hosts[name].heard_at > SILENT_S


def lost(hosts: Hosts, now: float, awake_s: float) -> list[str]:
    """The hosts that were silent for LOST_S. `awake_s`: how long the coordinator itself has run without a pause."""
    return [name for name, host in hosts.items() if min(now - host.heard_at, awake_s) > LOST_S]


def never_heard(state: State, now: float) -> set[str]:
    """Hosts of an earlier coordinator's records that were asked for a process and have not reported since."""
    fleet = state.fleet
    asked = [(state.placed[worker], at) for worker, at in state.hired.items() if worker in state.placed]
    asked += [(fleet.placed[server], at) for server, at in fleet.hired.items() if server in fleet.placed]
    return {host for host, at in asked if host and host not in state.hosts and now - at > LOST_S}


# --- missing workers are started -------------------------------------------------------------------------------------


def slowed(state: State, now: float, *, refused: bool = False) -> Result:
    """A worker has died, or its start was refused: where that happens again and again, the next one is started
    later."""
    restarts = state.restarts.died(now, state.target, refused=refused)
    wait_s = restarts.wait_s(now)
    if restarts is state.restarts or not wait_s:
        return replace(state, restarts=restarts), []
    state = replace(state, restarts=restarts)
    why = "it could not be started" if refused else "workers die again and again"
    return state, [say(f"{why}: the next one is started in {math.ceil(wait_s)} s", now)]


def hire(state: State, now: float) -> Result:
    """Start missing workers, as far as hosts have room. Agents' reports bring another call each second."""
    there = sum(1 for worker in state.workers.values() if worker.counts) + len(state.hired)
    missing = state.target - there
    if missing <= 0 or state.phase == "ended" or state.troubles.failed_hires >= MOST_FAILED_HIRES:
        return state, []
    if state.restarts.wait_s(now):
        return state, []
    placed = _placesome_workers(state, range(state.next_worker, state.next_worker + missing), now)
    if not placed:
        return state, []
    reason = f"{there} of {state.target} workers are there or starting"
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


def _settle(state: State, now: float) -> Result:
    """Choose hosts for hired workers for which no agent was asked yet."""
    placed = _placesome_workers(state, [worker for worker in state.hired if worker not in state.placed], now)
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


def _placesome_workers(state: State, numbers: Iterable[int], now: float) -> dict[int, str]:
    """Worker -> host, for the workers that hosts have room for. Before any agent has reported, "" (the launching
    process's host) takes all."""
    if not state.hosts:
        return dict.fromkeys(numbers, "")
    rooms = {name: host.room for name, host in state.hosts.items()}
    return place(numbers, _reporting(state, now), workers_by_host(state), rooms)


def place_servers(state: State, numbers: Iterable[int], now: float) -> dict[int, str]:
    """Server -> host, as for workers: each on the host that has the fewest servers."""
    if not state.hosts:
        return dict.fromkeys(numbers, "")
    if state.phase == "gathering" and not _all_hosts_have_joined(state):
        return {}  # else the first host to join would get all servers
    rooms = {name: host.server_room for name, host in state.hosts.items()}
    fleet = state.fleet
    held = Counter(one.host for one in fleet.there.values())
    held.update(fleet.placed[server] or launching(state) for server in fleet.hired if server in fleet.placed)
    return place(numbers, _reporting(state, now), held, rooms)


def _all_hosts_have_joined(state: State) -> bool:
    if any(host.room == NO_LIMIT for host in state.hosts.values()):
        return True
    return sum(host.room for host in state.hosts.values()) >= state.target


def _reporting(state: State, now: float) -> Hosts:
    """The hosts that are not silent: a silent host may be lost, so nothing is started there."""
    return {name: host for name, host in state.hosts.items() if not is_silent(state.hosts, name, now)}


def workers_by_host(state: State) -> Counter[str]:
    """Host -> the workers that run or start there."""
    held = Counter(one.host for one in state.workers.values() if one.exited is None and not one.estranged)
    held.update(state.placed[worker] or launching(state) for worker in state.hired if worker in state.placed)
    return held


def launching(state: State) -> str:
    """The host of the launching process, which has not joined by an offer."""
    invited = {offer.host for offer in state.offers.values()}
    return next((name for name in state.hosts if name not in invited), "")


def place(numbers: Iterable[int], hosts: Hosts, held: Mapping[str, int], rooms: Mapping[str, int]) -> dict[int, str]:
    """Number -> host, for the numbers that hosts have room for. `held`: each host's present number of processes.

    Hosts with a limit are filled first, the emptiest of them first; then hosts without a limit.

    >>> hosts = {name: Host(name, 0.0) for name in "abc"}
    >>> place(range(4), hosts, {"b": 1}, {"a": 1, "b": 3, "c": 0})
    {0: 'b', 1: 'a', 2: 'b'}
    >>> place(range(2), hosts, {}, {"a": NO_LIMIT, "b": 1})
    {0: 'b', 1: 'a'}
    """
    counts = {name: held.get(name, 0) for name in hosts}
    placed: dict[int, str] = {}
    for number in numbers:
        free = [name for name in hosts if rooms.get(name, NO_LIMIT) == NO_LIMIT or counts[name] < rooms[name]]
        if not free:
            break
        chosen = min(free, key=lambda name: _rank(name, rooms.get(name, NO_LIMIT), counts[name]))
        placed[number] = chosen
        counts[chosen] += 1
    return placed


def _rank(name: str, room: int, count: int) -> tuple[bool, int, str]:
    return room == NO_LIMIT, count if room == NO_LIMIT else count - room, name


def unique(wanted: str, taken: Iterable[str]) -> str:
    """A name that no other host has.

    >>> unique("node", ["node", "node-2"])
    'node-3'
    """
    names = set(taken)
    name, number = wanted, 2
    while name in names:
        name, number = f"{wanted}-{number}", number + 1
    return name


def some_workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"

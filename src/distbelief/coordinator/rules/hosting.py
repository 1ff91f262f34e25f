"""Hosts come with their agents, tell what runs there, and are lost. Pure."""

from __future__ import annotations

from dataclasses import replace

from distbelief.control import messages as m
from distbelief.coordinator.rules import hosts
from distbelief.coordinator.rules.ending import Result, record, say, with_worker
from distbelief.coordinator.rules.hiring import free, hire, settle
from distbelief.coordinator.rules.hosts import ASK_AGAIN_S, Host, Offer
from distbelief.coordinator.rules.vocabulary import ENGINE, Output, Reply, Send, State, Worker

MOST_ROOM = 10_000


def offered(state: State, event: m.HostOffered, now: float) -> Result:
    """An agent of another host would take part: it gets a name that no other host has."""
    known = state.offers.get(event.nonce)
    if known is not None:  # the answer was lost
        return state, [Reply(m.Welcome(state.epoch, known.host))]
    if not 0 <= event.room <= MOST_ROOM or not event.nonce:
        return state, [Reply(m.Answer(state.epoch, False, f"a host has room for 0 to {MOST_ROOM:,} workers"))]
    if not state.config.takes_hosts:
        text = "the members of this run share memory, so no other host can take part; start it with --listen"
        return state, [Reply(m.Answer(state.epoch, False, text))]
    taken = {*state.hosts, *(offer.host for offer in state.offers.values()), *(w.host for w in state.workers.values())}
    name = hosts.unique(event.host or "host", taken)
    state = replace(state, offers={**state.offers, event.nonce: Offer(name, event.grows)}, active_at=now)
    text = f"the host {name} has come, with room for {_workers(event.room)}"
    facts = {"host": name, "nonce": event.nonce, "room": event.room, "grows": event.grows}
    return state, [record(state, now, "host", text, **facts), say(text, now), Reply(m.Welcome(state.epoch, name))]


def attached(state: State, event: m.EngineAttached, now: float) -> Result:
    """An agent tells which of its workers run. It is asked again for those that it was asked for in vain."""
    known = {**state.hosts, event.host: Host(event.host, now, event.room, event.server_room)}
    outputs: list[Output] = []
    hired, placed = dict(state.hired), dict(state.placed)
    for worker, asked_at in state.hired.items():
        if worker in event.running:
            hired[worker], placed[worker] = now, event.host  # it is loading
        elif worker in event.exited or now - asked_at <= ASK_AGAIN_S:
            continue
        elif placed.get(worker) == event.host and event.room:
            hired[worker] = now
            outputs.append(Send(ENGINE, m.StartWorker(state.epoch, worker, event.host)))
        elif placed.get(worker) in ("", event.host):  # the launching process did not, or the host takes nobody now
            del placed[worker]
    for worker in event.running:
        one = state.workers.get(worker)
        if one is not None and one.fenced:
            outputs.append(Send(ENGINE, m.KillWorker(state.epoch, worker, "it is frozen")))
    active_at = now if state.phase == "gathering" and not state.workers else state.active_at
    state = replace(state, hired=hired, placed=placed, active_at=active_at, hosts=known)
    state, more = settle(state, now)
    return state, outputs + more


def grown(state: State, host: str, now: float) -> Result:
    """One that was started by hand is there for the first time: what it has room for beyond what was waited for, the
    run has more from now on."""
    nonce = next((nonce for nonce, offer in state.offers.items() if offer.host == host and offer.grows), None)
    if nonce is None or state.phase == "ended":
        return state, []
    more = free(state, host)
    target = state.target + more
    state = replace(state, offers={**state.offers, nonce: Offer(host, added=more)}, target=target)
    text = f"{host} adds {_workers(more)}" if more else f"{host} has the workers that were waited for"
    written = record(state, now, "grown", text, host=host, nonce=nonce, target=target, added=more)
    state, outputs = hire(state, now)
    return state, [written, *outputs]


def forgotten(state: State, name: str, reason: str, now: float) -> Result:
    """That host is lost: nothing is expected of it any more.

    Members that were being started there may live. So others, with new numbers, take their places, and whoever of them
    is heard of yet is sent away: no number is ever two processes'."""
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
        state = replace(state, fleet=state.fleet.aiming_at(state.fleet.target, dropped))
        outputs.append(record(state, now, "servers_scaled", reason, target=state.fleet.target, dropped=dropped))
    return state, outputs


def _shrunk(state: State, name: str, now: float) -> Result:
    """What it had added is not waited for."""
    added = [(nonce, offer.added) for nonce, offer in state.offers.items() if offer.host == name and offer.added]
    if not added:
        return state, []
    ((nonce, less),) = added
    target = max(state.target - less, state.config.workers)
    state = replace(state, offers={**state.offers, nonce: Offer(name)}, target=target)
    text = f"{name} is lost before the start: {_workers(less)} less"
    return state, [record(state, now, "grown", text, host=name, nonce=nonce, target=target, added=0)]


def strangers(state: State, now: float) -> set[str]:
    """Hosts that were asked for a member and have not been heard of since: an earlier coordinator knew them."""
    fleet = state.fleet
    asked = [(state.placed[worker], at) for worker, at in state.hired.items() if worker in state.placed]
    asked += [(fleet.placed[server], at) for server, at in fleet.hired.items() if server in fleet.placed]
    return {host for host, at in asked if host and host not in state.hosts and now - at > hosts.LOST_S}


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"

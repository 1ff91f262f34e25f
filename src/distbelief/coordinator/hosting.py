"""Hosts come with their agents, tell what runs there, and are lost. Pure."""

from __future__ import annotations

from dataclasses import replace

from distbelief.comm import messages as m
from distbelief.coordinator import hosts
from distbelief.coordinator.ending import Result, record, say
from distbelief.coordinator.hiring import free, hire, settle
from distbelief.coordinator.hosts import Host, Offer
from distbelief.coordinator.vocabulary import ENGINE, Output, Reply, Send, State

ASK_AGAIN_S = 5.0
"""An agent that has not started a worker after this long is asked again: the message may be lost."""
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
    facts = {"host": name, "nonce": event.nonce, "grows": event.grows}
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
    state = replace(state, offers={**state.offers, nonce: Offer(host)}, target=target)
    text = f"{host} adds {_workers(more)}" if more else f"{host} has the workers that were waited for"
    written = record(state, now, "grown", text, host=host, nonce=nonce, target=target)
    state, outputs = hire(state, now)
    return state, [written, *outputs]


def forgotten(state: State, name: str) -> State:
    """That host is lost: nothing is expected of it any more."""
    fleet = state.fleet
    return replace(
        state,
        hosts={known: host for known, host in state.hosts.items() if known != name},
        placed={worker: host for worker, host in state.placed.items() if host != name},
        fleet=replace(fleet, placed={server: host for server, host in fleet.placed.items() if host != name}),
    )


def strangers(state: State, now: float) -> set[str]:
    """Hosts that were asked for a member and have not been heard of since: an earlier coordinator knew them."""
    asked = [(state.placed[worker], at) for worker, at in state.hired.items() if worker in state.placed]
    return {host for host, at in asked if host and host not in state.hosts and now - at > hosts.LOST_S}


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"

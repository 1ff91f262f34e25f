"""Stand-ins: workers that were started elsewhere in the place of a lost host's, and what follows when it is back.

How it works:
- A host that is cut off, or dies, leaves a run with fewer workers than are wanted: other workers are started on
  hosts with room. If no host has room, they are started on the launching process's host, which has no limit.
- *The cut host is heard of again*: its workers join anew, and as many of the newest workers leave (`returned`).
- *Its machine has started again*, or another one has come instead: the agent is a new one. A host that is started by
  hand adds to the number of wanted workers, but what lost hosts had added counts as replaced first, and as many
  stand-ins leave (`grown`). Else each restart of a host would leave more workers on the launching process's host. If
  the new agent came before the loss of the old one was certain, that is made up for then (`succeeded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distbelief.coordinator.rules.ending import Result, record, with_worker
from distbelief.coordinator.rules.hosts import hire, launching, some_workers, workers_by_host
from distbelief.coordinator.rules.regroup import dismiss, regroup, start_when_complete
from distbelief.coordinator.rules.vocabulary import Offer, Output, State, Worker


def returned(state: State, worker: Worker, now: float) -> Result:
    """An estranged worker is heard of again."""
    state = with_worker(state, replace(worker, estranged=False, finished=None))
    if state.phase == "gathering":
        return start_when_complete(state, now)
    there = [one for one in state.workers.values() if one.counts]
    surplus = len(there) + len(state.hired) - state.target
    outputs: list[Output] = []
    if surplus > 0:
        others = [one for one in there if one.number != worker.number] + [Worker(number) for number in state.hired]
        others.sort(key=lambda one: (state.is_member(one.number), -one.number))
        state, outputs = _send_home(state, others[:surplus], f"{worker.name} is back", now)
    state, more = regroup(state, "join", f"{worker.name} is back", now)
    return state, outputs + more


def grown(state: State, host: str, now: float) -> Result:
    """A manually started host joined: raise the target by its spare slots, less what lost hosts had added."""
    nonce = next((nonce for nonce, offer in state.offers.items() if offer.host == host and offer.grows), None)
    if nonce is None or state.phase == "ended":
        return state, []
    room, has = state.hosts[host].room, workers_by_host(state)[host]
    lost = {one: offer for one, offer in state.offers.items() if offer.added and _is_lost(state, offer.host)}
    replaces, again = [], 0
    for one, offer in lost.items():
        if again < room:
            replaces.append(one)
            again = min(room, again + offer.added)
    more = max(0, room - max(has, again))
    replaced = {one: replace(state.offers[one], added=0) for one in replaces}
    offers = {**state.offers, **replaced, nonce: replace(state.offers[nonce], grows=False, added=more + again)}
    newest_lost = max((one.number for one in state.workers.values() if one.host in _names(lost, replaces)), default=-1)
    state = replace(state, offers=offers, target=state.target + more)
    text = f"{host} adds {some_workers(more)}" if more else f"{host} takes workers that the run still lacks"
    facts = {"host": host, "nonce": nonce, "target": state.target, "added": more + again, "replaces": replaces}
    outputs: list[Output] = [record(state, now, "grown", text, **facts)]
    # A stand-in is newer than the workers of the lost host, and is where there is no limit: it can start on this host.
    here = launching(state)
    stand_ins = [w for w in state.workers.values() if w.counts and w.host == here and w.number > newest_lost]
    stand_ins += [Worker(number) for number in state.hired if state.placed.get(number) == here]
    stand_ins.sort(key=lambda one: -one.number)
    surplus = stand_ins[: max(0, again - has)]
    if surplus:
        state, gone = _send_home(state, surplus, f"the host {host} has joined in the place of a lost one", now)
        outputs += gone
    state, hired = hire(state, now)
    return state, [*outputs, *hired]


def succeeded(state: State, name: str, now: float) -> Result:
    """A host is lost, and its agent was started again before that was certain: both have raised the target."""
    mine = next(((nonce, offer) for nonce, offer in state.offers.items() if offer.host == name and offer.added), None)
    if mine is None or state.phase != "training":
        return state, []
    nonce, offer = mine
    heirs = [heir for heir in _later(state, nonce) if heir.added]
    less = min(offer.added, sum(heir.added for heir in heirs), state.target - 1)
    if not less:
        return state, []
    target, added = state.target - less, offer.added - less
    state = replace(state, offers={**state.offers, nonce: replace(offer, added=added)}, target=target)
    text = f"{heirs[-1].host} has joined in the place of {name}, which is lost: {some_workers(less)} fewer"
    outputs: list[Output] = [record(state, now, "grown", text, host=name, nonce=nonce, target=target, added=added)]
    here = launching(state)
    there = [one for one in state.workers.values() if one.counts and one.host != name]
    starting = [Worker(number, state.placed.get(number, "")) for number in state.hired]
    surplus = len(there) + sum(1 for one in starting if one.host != name) - target
    stand_ins = sorted((one for one in [*there, *starting] if one.host == here), key=lambda one: -one.number)
    if surplus > 0 and stand_ins:
        state, gone = _send_home(state, stand_ins[:surplus], f"{name} is lost", now)
        outputs += gone
    return state, outputs


def without_one(state: State, host: str) -> State:
    """A worker of that host leaves for good, and the target with it: no later host takes its place."""
    nonce = next((nonce for nonce, offer in state.offers.items() if offer.host == host and offer.added), None)
    if nonce is None:
        return state
    offer = state.offers[nonce]
    return replace(state, offers={**state.offers, nonce: replace(offer, added=offer.added - 1)})


def _send_home(state: State, workers: Sequence[Worker], because: str, now: float) -> Result:
    one = len(workers) == 1
    text = f"{because}: {some_workers(len(workers))} started meanwhile {'leaves' if one else 'leave'}"
    return dismiss(state, workers, text, now)


def _later(state: State, nonce: str) -> list[Offer]:
    """The agents that the same machine started after this one."""
    nonces = list(state.offers)
    after = nonces[nonces.index(nonce) + 1 :]
    return [state.offers[one] for one in after if state.offers[one].asked == state.offers[nonce].asked]


def _is_lost(state: State, host: str) -> bool:
    """A coordinator that has just started has not heard of living hosts, but knows their workers."""
    return host not in state.hosts and not any(one.counts for one in state.workers.values() if one.host == host)


def _names(lost: dict[str, Offer], nonces: Sequence[str]) -> set[str]:
    return {lost[nonce].host for nonce in nonces}

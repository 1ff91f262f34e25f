"""The state of a run from its journal: every recorded decision is applied again, in order.

The journal holds decisions only. Commands that were not sent, and decisions that should have followed the last record,
are made up for by the rules for running runs as soon as agents and workers report.

Records of earlier releases are read too, so each kind keeps its name and its fields: tests/unit/coordinator/journals
has journals of earlier releases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from distbelief.control import messages as m
from distbelief.coordinator.rules.ending import with_worker
from distbelief.coordinator.rules.servers.fleet import Fleet, ServerProcess, retargeted
from distbelief.coordinator.rules.servers.roles import Placement
from distbelief.coordinator.rules.standins import without_one
from distbelief.coordinator.rules.vocabulary import Offer, State, Worker
from distbelief.errors import DistBeliefError

Entry = Mapping[str, Any]
_BESIDE_PACE = ("kind", "epoch", "at", "reason", "worker", "step")
"""The fields of a record `pace` that are no numbers of the pace. The strategy names those numbers."""


def replay(state: State, records: Iterable[Entry], now: float) -> State:
    """The state after these records. Raises DistBeliefError for a record that this version cannot read."""
    for number, entry in enumerate(records, start=1):
        try:
            state = _after(state, entry, now)
        except (KeyError, TypeError, ValueError) as error:  # msgspec's errors are ValueErrors
            problem = f"it lacks {error}" if isinstance(error, KeyError) else error
            kind = entry.get("kind")
            raise DistBeliefError(
                f"the journal's record {number}, of kind '{kind}', was written by another version: {problem}",
                hint="go on with the version of DistBelief that job.json in the run directory names, or start anew",
            ) from error
    return state


def _after(state: State, entry: Entry, now: float) -> State:
    """The state after one more record. Kinds that change nothing are ignored, and so are unknown kinds."""
    match entry.get("kind"):
        case "reference":
            facts = {name: entry[name] for name in ("worker", "job", "canary")}
            return replace(state, reference=msgspec.convert(facts, m.WorkerReady))
        case "generation":
            return _generation(state, entry)
        case "hired" | "placed":
            placed = dict(zip(entry["workers"], entry.get("hosts", []), strict=False))
            hired = {**state.hired, **dict.fromkeys(entry["workers"], now)}
            return _numbered(replace(state, hired=hired, placed={**state.placed, **placed}), entry["workers"])
        case "host":
            offer = Offer(entry["host"], entry["grows"], asked=entry.get("asked", entry["host"]))
            return replace(state, offers={**state.offers, entry["nonce"]: offer})
        case "declined":
            offers = {nonce: offer for nonce, offer in state.offers.items() if nonce != entry["nonce"]}
            return replace(state, offers=offers)
        case "grown":
            replaced = {nonce: replace(state.offers[nonce], added=0) for nonce in entry.get("replaces", [])}
            offer = replace(state.offers[entry["nonce"]], grows=False, added=entry["added"])
            offers = {**state.offers, **replaced, entry["nonce"]: offer}
            return replace(state, offers=offers, target=entry["target"])
        case "admitted":
            return _numbered(replace(state, arriving=state.arriving | {entry["worker"]}), [entry["worker"]])
        case "guest":
            state = replace(state, arriving=state.arriving - {entry["worker"]}, target=entry["target"])
            return _arrived(state, [entry["worker"]])
        case "spare":
            return _arrived(state, [entry["worker"]])
        case "refused":
            state = _with(_arrived(state, [entry["worker"]]), entry["worker"], refused=True)
            return replace(state, target=entry.get("target", state.target))
        case "lost" | "exited":
            worker = entry["worker"]
            lost = (*state.lost, worker) if state.is_member(worker) else state.lost
            return replace(_with(_arrived(state, [worker]), worker, exited=entry["status"]), lost=lost)
        case "estranged":
            return _with(state, entry["worker"], estranged=True)
        case "leaves" | "scaled":
            leaving = [entry["worker"]] if "worker" in entry else entry.get("leaving", [])
            state = _arrived(state, leaving)
            for worker in leaving:
                state = _with(state, worker, leaving=True)
            if entry["kind"] == "leaves" and entry["target"] < state.target:
                state = without_one(state, state.workers[entry["worker"]].host)
            return replace(state, target=entry["target"])
        case "checkpoint":
            return replace(state, saves=replace(state.saves, sealed=entry["step"], sealed_at=now))
        case "loaded":
            # It is the newest usable checkpoint: newer ones, if any, were found damaged.
            saves = replace(state.saves, loaded_by=entry["worker"], sealed=entry["step"], sealed_at=now)
            return replace(state, saves=saves)
        case "rolled_back":
            reexecuted = state.reexecuted + max(entry["reached"] - entry["step"], 0)
            progress = replace(state.progress, redone=max(state.progress.redone, entry["reached"]))
            return replace(state, rolled_back=entry["generation"], reexecuted=reexecuted, progress=progress)
        case "plan":
            return replace(state, plan=tuple(entry["lines"]))
        case "pace":
            pace = tuple(entry[name] for name in entry if name not in _BESIDE_PACE)
            paces = {**state.fleet.paces, entry["worker"]: pace}
            return replace(state, fleet=replace(state.fleet, paces=paces))
        case "servers":
            return replace(state, fleet=_fleet(state.fleet, entry, now))
        case "servers_hired":
            hired = {**state.fleet.hired, **dict.fromkeys(entry["servers"], now)}
            placed = {**state.fleet.placed, **dict(zip(entry["servers"], entry.get("hosts", []), strict=False))}
            next_server = max(state.fleet.next_server, *(number + 1 for number in entry["servers"]))
            return replace(state, fleet=replace(state.fleet, hired=hired, placed=placed, next_server=next_server))
        case "server_pause":
            fleet = state.fleet
            left = {server: at for server, at in fleet.lost_at.items() if server != entry["server"]}
            return replace(state, fleet=replace(fleet, lost_at=left, pauses=(*fleet.pauses, entry["pause_s"])))
        case "servers_scaled":
            return replace(state, fleet=retargeted(state.fleet, entry["target"], entry["dropped"]))
        case "damaged":  # the journal was damaged after the records before this one
            next_server = max(state.fleet.next_server, entry["next_server"])
            generation = max(state.generation, entry["generation"])
            state = replace(state, generation=generation, fleet=replace(state.fleet, next_server=next_server))
            return _numbered(state, [entry["next_worker"] - 1])
        case "resumed":
            return _resumed(state, entry, now)
        case "ended":
            return replace(state, phase="ended", outcome=m.EndRun(state.epoch, entry["status"], entry["reason"]))
    return state


def _fleet(fleet: Fleet, entry: Entry, now: float) -> Fleet:
    """The fleet as recorded. Agents report servers that have died since."""
    there = [msgspec.convert({**one, "heard_at": now}, ServerProcess) for one in entry["servers"]]
    placed = msgspec.convert(entry["placement"], Placement, strict=False)
    numbers = {one.number for one in there}
    on_their_way = fleet.hired.keys() - numbers - set(entry["gone"])  # some died before they were ready
    return replace(
        fleet,
        there={one.number: one for one in there},
        hired={number: fleet.hired[number] for number in sorted(on_their_way)},
        next_server=max(fleet.next_server, *(number + 1 for number in numbers)),
        gone=frozenset(entry["gone"]),
        slices=tuple(entry["slices"]),
        placement=placed,
        version=placed.map.version,
        life=entry["life"],
        sealed=entry["sealed"],
        target=entry["target"],
        kills=entry["kills"],
        lost_at={int(server): at for server, at in entry.get("lost_at", {}).items()},
    )


def _generation(state: State, entry: Entry) -> State:
    start = msgspec.convert({**entry, "epoch": state.epoch}, m.StartGeneration)
    seats = {member.worker: rank for rank, member in enumerate(start.members)}
    spares = entry.get("spares", [])
    for absent in state.seats.keys() - seats.keys() - set(spares):
        if not state.workers[absent].gone:
            state = _with(state, absent, left=True)  # a member is left out only once it does nothing more
    state = _arrived(state, [*seats, *spares])
    workers = state.workers
    for one in start.members:
        worker = replace(workers[one.worker], host=one.host, pid=one.pid, gpu=one.gpu, ready=True, estranged=False)
        workers = workers.set(one.worker, worker)
    return replace(
        state,
        workers=workers,
        phase="training",
        generation=start.generation,
        start=start,
        seats=seats,
        lost=(),
        recoveries=state.recoveries + bool(entry["lost"]),
        taken_over=start.generation - 1,
    )


def _resumed(state: State, entry: Entry, now: float) -> State:
    """All processes are gone, and the run goes on with new workers. Numbers keep rising; the reference stays."""
    reference = state.reference
    if reference:
        reference = msgspec.structs.replace(
            reference, job=msgspec.structs.replace(reference.job, strategy=entry["strategy"])
        )
    workers: list[int] = entry["workers"]
    return State(
        state.config,
        state.epoch,
        active_at=now,
        target=len(workers),
        next_worker=max(state.next_worker, *(worker + 1 for worker in workers)),
        generation=state.generation,
        taken_over=state.generation,
        reference=reference,
        # As if asked for long ago: an agent is asked to start them as soon as it reports.
        hired=dict.fromkeys(workers, -math.inf),
        recoveries=state.recoveries,
        rolled_back=state.rolled_back,
        reexecuted=state.reexecuted,
        fleet=_resumed_fleet(state.fleet, state.config.servers),
    )


def _resumed_fleet(fleet: Fleet, servers: int) -> Fleet:
    first = fleet.next_server
    return Fleet(
        servers,
        first + servers,
        hired=dict.fromkeys(range(first, first + servers), -math.inf),
        version=fleet.version,
        life=fleet.life,
        gone=frozenset(range(first)),
        kills=fleet.kills,
        pauses=fleet.pauses,
    )


def resumed(state: State, strategy: str, now: float) -> dict[str, Any]:
    """The record by which a run that is over, or whose members are all gone, goes on with new workers."""
    first = state.next_worker
    return {
        "kind": "resumed",
        "epoch": state.epoch,
        "at": now,
        "reason": f"the run was resumed with {state.config.workers} workers",
        "workers": list(range(first, first + state.config.workers)),
        "strategy": strategy,
    }


def _arrived(state: State, workers: Iterable[int]) -> State:
    """These workers are known, so they no longer count as starting."""
    there = state.workers
    for worker in (numbers := set(workers)):
        there = there if worker in there else there.set(worker, Worker(worker))
    hired = {worker: at for worker, at in state.hired.items() if worker not in numbers}
    return replace(_numbered(state, numbers), workers=there, hired=hired)


def _numbered(state: State, workers: Iterable[int]) -> State:
    return replace(state, next_worker=max(state.next_worker, *(worker + 1 for worker in workers), 0))


def _with(state: State, worker: int, **facts: Any) -> State:
    return with_worker(state, replace(state.workers.get(worker, Worker(worker)), **facts))

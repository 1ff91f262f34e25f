"""How a run ends (completed, failed, stopped), and the functions that make journal records and notices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from distbelief.control import messages as m
from distbelief.coordinator.rules import explain
from distbelief.coordinator.rules.progress import helped, notice, paces, workers_line
from distbelief.coordinator.rules.vocabulary import (
    ENGINE,
    EVERYBODY,
    Exit,
    Output,
    Record,
    Report,
    Send,
    SendServer,
    State,
    Status,
    Worker,
)

Result = tuple[State, list[Output]]


def end(state: State, status: Status, reason: str, now: float, **facts: Any) -> Result:
    outcome = m.EndRun(epoch=state.epoch, status=status, reason=reason)
    state = replace(state, phase="ended", outcome=outcome)
    alive = [worker.number for worker in state.workers.values() if worker.exited is None and not worker.refused]
    outputs: list[Output] = [record(state, now, "ended", reason, status=status, **facts)]
    outputs += [Send(worker, outcome) for worker in [*alive, ENGINE]]
    outputs += [SendServer(EVERYBODY, outcome)] if state.fleet.target else []
    return state, [*outputs, Exit(status)]


def complete(state: State, now: float) -> Result:
    """All members have finished: the run ends with their results, if their weights agree."""
    ends = [one for member in state.members if (one := state.workers[member.worker].finished)]
    first = ends[0]
    odd = [one.worker for one in ends if one.weights_sha256 not in ("", first.weights_sha256)]
    if odd:
        who = ", ".join(state.workers[worker].name for worker in odd)
        message = f"the weights of {who} differ from those of {state.workers[first.worker].name} at the end of the run"
        hint = "this must not happen in an exact strategy: please report it, with the run directory"
        return fail(state, m.WorkerFailed(odd[0], "", "internal", message, hint), now)
    result = {
        "steps": first.step,
        "loss": first.loss,
        "metrics": first.metrics,
        "weights_sha256": first.weights_sha256,
        "samples_per_s": first.samples_per_s,
        "workers": len(state.members),
        "recoveries": state.recoveries,
        "reexecuted": state.reexecuted,
    }
    if state.fleet.target:
        result |= {"servers": state.fleet.target, "servers_lost": state.fleet.kills}
    if state.fleet.pauses:
        result["server_pauses_s"] = list(state.fleet.pauses)
    if first.staleness:
        result["staleness"] = first.staleness
    if backups := helped(state.progress, state.members):
        result["helped"] = backups
    if pace := paces(state.progress, state.members, state.config.parsed_strategy.pace_names):
        result["pace"] = pace
    if first.plain_bytes:
        result["wire_ratio"] = first.wire_bytes / first.plain_bytes
    line = workers_line(state.progress, state.members, state.generation, now)
    state, outputs = end(state, "completed", f"all {len(ends)} members have finished", now, result=result)
    return state, [Report(line), *outputs]


def fail(state: State, failure: m.WorkerFailed, now: float) -> Result:
    exits = [
        f"{state.workers[worker].name} {explain.ending(state.workers[worker].exited or 0)}"
        for worker in sorted(state.pending)
        if worker != failure.worker
    ]
    return end(state, "failed", failure.message, now, failure=msgspec.to_builtins(failure), exits=exits)


def fail_without_culprit(state: State, kind: str, message: str, hint: str, now: float) -> Result:
    return fail(state, m.WorkerFailed(worker=-1, host="", kind=kind, message=message, hint=hint), now)


def record(state: State, now: float, kind: str, reason: str, **facts: Any) -> Record:
    return Record({"kind": kind, "epoch": state.epoch, "at": now, "reason": reason, **facts})


def say(text: str, now: float) -> Report:
    return Report(notice(text, now))


def with_worker(state: State, worker: Worker) -> State:
    return replace(state, workers=state.workers.set(worker.number, worker))

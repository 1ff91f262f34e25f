"""How a run ends, and how decisions are written down. Pure; the lowest of the files with the coordinator's rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from distbelief.comm import messages as m
from distbelief.coordinator import explain
from distbelief.coordinator.progress import notice
from distbelief.coordinator.vocabulary import ENGINE, Exit, Output, Record, Report, Send, State, Status, Worker

Result = tuple[State, list[Output]]


def end(state: State, status: Status, reason: str, now: float, **facts: Any) -> Result:
    outcome = m.EndRun(epoch=state.epoch, status=status, reason=reason)
    state = replace(state, phase="ended", outcome=outcome)
    alive = [worker.number for worker in state.workers.values() if worker.exited is None and not worker.refused]
    outputs: list[Output] = [record(state, now, "ended", reason, status=status, **facts)]
    outputs += [Send(worker, outcome) for worker in [*alive, ENGINE]]
    return state, [*outputs, Exit(status)]


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

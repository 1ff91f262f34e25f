"""How often workers that wait for nobody push and fetch, where they choose it themselves: on record when it changes.
Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distbelief.control.messages import Heartbeat
from distbelief.coordinator.rules.ending import Result, record, say
from distbelief.coordinator.rules.vocabulary import State


def heard(state: State, event: Heartbeat, now: float) -> Result:
    """A heartbeat says which pace the worker has. It begins with 1 and 1."""
    if len(event.timing.pace) != 2:
        return state, []
    pace = n_push, n_fetch = event.timing.pace[0], event.timing.pace[1]
    if pace == state.fleet.paces.get(event.worker, (1, 1)):
        return state, []
    state = replace(state, fleet=replace(state.fleet, paces={**state.fleet.paces, event.worker: pace}))
    text = f"worker {event.worker} pushes every {_many(n_push, 'batch', 'batches')}"
    text += f" and fetches every {_many(n_fetch, 'update', 'updates')} from step {event.step} on"
    facts: dict[str, Any] = {"worker": event.worker, "n_push": n_push, "n_fetch": n_fetch, "step": event.step}
    return state, [record(state, now, "pace", text, **facts), say(text, now)]


def _many(count: int, one: str, more: str) -> str:
    return one if count == 1 else f"{count} {more}"

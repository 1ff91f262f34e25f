"""Runs whose model is divided: the plan that members show, and steps that are executed again. Pure.

Where the only holder of a part has died, the members go back to the last state that is whole somewhere. What was done
since then is done again, and said. Results are equal within rounding only, so those steps are reported anew.
"""

from __future__ import annotations

from dataclasses import replace

from distbelief.control import messages as m
from distbelief.coordinator.rules.ending import Result, record, say
from distbelief.coordinator.rules.progress import forget
from distbelief.coordinator.rules.vocabulary import Report, State

SOURCES = {"snapshots": "snapshots in the memory of neighbours", "checkpoint": "a checkpoint"}


def rolled_back(state: State, event: m.RolledBack, now: float) -> Result:
    if event.generation <= state.rolled_back:
        return state, []  # told again to a coordinator that has taken over
    # It counts also if its generation is over by now: the next one went on from where it went back to.
    again = max(event.reached - event.step, 0)
    saves = replace(state.saves, open={})
    if event.source == "checkpoint":  # newer ones were found damaged, if it is not the newest
        saves = replace(saves, sealed=min(saves.sealed, event.step), sealed_at=now)
    state = replace(
        state,
        rolled_back=event.generation,
        reexecuted=state.reexecuted + again,
        progress=forget(state.progress, event.step, event.reached),
        saves=saves,
    )
    where = SOURCES.get(event.source, event.source)
    text = f"goes back from step {event.reached} to {event.step} ({where}): {_steps(again)} executed again"
    facts = {"generation": event.generation, "step": event.step, "reached": event.reached, "source": event.source}
    return state, [
        record(state, now, "rolled_back", text, **facts),
        Report({"kind": "rollback", **facts, "at": now}),
        say(text, now),
    ]


def _steps(count: int) -> str:
    return "1 step is" if count == 1 else f"{count} steps are"


def plan_shown(state: State, event: m.PlanShown, now: float) -> Result:
    """Said once: a generation with the same plan as the one before is no news."""
    if event.generation != state.generation or tuple(event.lines) == state.plan:
        return state, []
    state = replace(state, plan=tuple(event.lines))
    reason = f"the plan of generation {event.generation}"
    written = record(state, now, "plan", reason, generation=event.generation, lines=event.lines)
    return state, [written, *(say(line, now) for line in event.lines)]

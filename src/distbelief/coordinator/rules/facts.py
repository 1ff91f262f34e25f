"""What somebody outside is told of a run, who wants to compare a host with it. The run does not change by it."""

from __future__ import annotations

import platform

from distbelief.control import messages as m
from distbelief.coordinator.rules.ending import Result
from distbelief.coordinator.rules.vocabulary import Reply, State
from distbelief.version import __version__

_SOFTWARE = {"distbelief": __version__, "python": platform.python_version()}


def told(state: State, event: m.FactsAsked, now: float) -> Result:
    answer = m.RunFacts(
        epoch=state.epoch,
        number=event.number,
        now=now,
        phase=state.phase,
        strategy=state.config.strategy,
        step=state.progress.reported.complete,
        members={worker.number: worker.host for worker in state.workers.values() if worker.counts},
        software=_SOFTWARE,
        facts=state.reference.canary.facts if state.reference else {},
    )
    return state, [Reply(answer)]

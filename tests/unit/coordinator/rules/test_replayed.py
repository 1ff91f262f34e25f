"""What is said twice counts once, also by the state machine alone: a coordinator that was restarted knows no stamps of
earlier messages (docs/security.md has the reasons, message by message)."""

from __future__ import annotations

import pytest

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s
from distbelief.coordinator.rules.authorization import FROM_WORKERS
from tests.support.coordinator.play import CANARY, JOB, Run, failure, finished, heartbeat, report

WHOLE_RUN: list[m.Event] = [
    m.EngineAttached("here"),
    *(m.WorkerJoined(w, "here", 100 + w) for w in (0, 1, 2)),
    *(m.WorkerReady(w, JOB, CANARY) for w in (0, 1, 2)),
    heartbeat(0, 1, reports=[report(0)]),
    heartbeat(1, 1),
    m.PlanShown(0, 1, ["a line"]),
    m.CheckpointLoaded(0, 0, "folder"),
    m.ScaleRequested(3),
    m.PartSaved(1, 1, 5, m.WrittenPart(10, "00"), 0.1, 0.2),
    m.CheckpointSealed(0, 5),
    m.SaveMissed(1, 1),
    m.SaveFailed(1, 1, "no space"),
    m.PeerDied(1, 1, 2),
    m.WorkerExited(2, -9),
    m.WorkerLeft(0, 1),
    m.WorkerLeft(1, 1),
    m.CollectiveFailed(1, 1, "of an earlier generation"),
    m.StepTakenOver(0, 2, 1, 2),
    heartbeat(0, 2, generation=2, reports=[report(1, generation=2)]),
    m.LeaveRequested(1),
    m.ServersRequested(2),
    m.WorkerFailed(7, "here", "user", "of nobody"),
]


def told(run: Run, event: m.Event, now: float) -> list[s.Output]:
    try:
        return run.feed(event, now=now)
    except s.ProtocolError:
        return []


@pytest.mark.parametrize("last", [finished(0, 2), failure(0), m.StopRequested("enough", at_once=True)])
def test_every_message_twice_leads_to_the_same_decisions(last: m.Event) -> None:
    once, twice = Run(workers=3), Run(workers=3)
    for number, event in enumerate([*WHOLE_RUN, last]):
        now = 1.0 + 0.01 * number
        told(once, event, now)
        told(twice, event, now)
        for output in told(twice, event, now):
            assert not isinstance(output, s.Exit)
            if isinstance(output, s.Record):
                # A wish that is asked for again is on record again, with what it changes: nothing.
                assert output.entry["kind"] == "scaled", (event, output.entry)
                assert output.entry["target"] == 3
        assert twice.state.generation == once.state.generation, event
        assert twice.state.phase == once.state.phase, event
        assert twice.members == once.members, event
        assert twice.state.target == once.state.target, event
        assert twice.state.recoveries == once.state.recoveries, event
    assert once.state.generation > 1, "somebody has died on the way"
    said = {type(event) for event in WHOLE_RUN}
    assert len(said & set(FROM_WORKERS)) >= 12

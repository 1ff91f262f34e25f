"""Training and the end of a run, by plain calls."""

from __future__ import annotations

from typing import get_args

import pytest

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s
from tests.support.coordinator.play import Run, ended, failure, finished, heartbeat, lines, records, report, sends


def test_heartbeats_become_lines_and_no_records() -> None:
    run = Run().started(0, 1)
    evaluation = m.Evaluation(step=1, metrics={"loss": 0.1})
    outputs = run.feed(heartbeat(reports=[report(0)], evaluations=[evaluation]), now=5.0)
    assert [line["kind"] for line in lines(outputs)] == ["step", "evaluation", "workers"]
    assert records(outputs) == []
    assert lines(outputs, "workers")[0]["workers"][0]["comm_s"] == 0.3
    outputs = run.feed(heartbeat(reports=[report(0, "bb")]), now=5.1)
    assert [line["kind"] for line in lines(outputs)] == ["notice"]


def test_results_in_a_late_heartbeat_of_an_earlier_generation_are_recorded() -> None:
    run = Run(workers=3).started(0, 1, 2)
    run.kill(2)
    assert run.state.generation == 2
    outputs = run.feed(heartbeat(generation=1, reports=[report(0)]), now=5.0)
    assert [line["kind"] for line in lines(outputs)] == ["step"]
    assert s.Reply(run.state.start) in outputs, "and the worker is told of its generation"
    assert run.state.progress.reported.complete == 1
    assert run.state.progress.steps.get(0, 0) == 0, "the beat says nothing of the present generation"


@pytest.mark.parametrize(
    ("beat", "answer"),
    [
        ({"epoch": 6}, m.Introduce(epoch=7, reported=0)),
        ({"worker": 99}, m.Introduce(epoch=7, reported=0)),
        ({"generation": 0}, m.StartGeneration),
        ({"worker": 4, "generation": 0}, m.StartGeneration),
        ({"worker": 4}, None),
        ({"generation": 2}, None),
    ],
)
def test_nothing_is_counted_of_who_is_no_member_of_this_generation(beat: dict, answer: object) -> None:
    """Whoever does not know what it should is told again: the message may have been lost."""
    run = Run(workers=5).started(0, 1, 2, 3, 4)
    outputs = run.feed(heartbeat(**{**beat, "reports": [report(0)]}))
    assert lines(outputs) == []
    expected = run.state.start if answer is m.StartGeneration else answer
    assert outputs == ([s.Reply(expected)] if expected else [])
    assert run.state.progress.reported.complete == 0


def test_replicas_that_differ_at_the_end_fail_the_run() -> None:
    run = Run(workers=2).started(0, 1)
    other = m.WorkerFinished(worker=1, generation=1, step=10, weights_sha256="xyz")
    entry = ended(run.feed(finished(0), other))
    assert entry["status"] == "failed"
    assert "the weights of worker 1" in entry["failure"]["message"]


def test_replicas_that_agree_complete_it() -> None:
    run = Run(workers=2).started(0, 1)
    same = m.WorkerFinished(worker=1, generation=1, step=10, weights_sha256="abc")
    assert ended(run.feed(finished(0), same))["status"] == "completed"


def test_the_run_is_complete_when_all_members_have_finished() -> None:
    run = Run(workers=5).started(0, 1, 2, 3, 4)
    assert run.feed(finished(0), finished(0), finished(2), finished(1)) == []
    assert run.feed(finished(3, generation=0)) == []
    outputs = run.feed(finished(3))
    assert isinstance(outputs[0], s.Report)
    assert outputs[0].line["kind"] == "workers"
    entry = ended(outputs)
    assert entry["status"] == "completed"
    assert entry["result"] == {
        "steps": 10,
        "loss": 0.25,
        "metrics": {"accuracy": 0.98},
        "weights_sha256": "abc",
        "samples_per_s": 1e4,
        "workers": 4,
        "recoveries": 0,
        "reexecuted": 0,
    }
    assert [worker for worker, _ in sends(outputs)] == [0, 1, 2, 3, 4, s.ENGINE]


def test_a_newcomer_without_a_shard_to_compute_is_a_spare() -> None:
    run = Run(workers=4).started(0, 1, 2, 3)
    run.join(4)
    outputs = run.ready(4)
    assert sends(outputs) == [(4, run.state.start)]
    assert "worker 4" in lines(outputs, "notice")[0]["text"]
    assert run.state.generation == 1


def test_a_newcomer_that_does_not_fit_is_refused_and_the_run_goes_on() -> None:
    run = Run().started(0, 1)
    run.join(2)
    outputs = run.ready(2, canary=m.Canary(fingerprint="a1b2", facts={"threads": "1"}))
    ((worker, command),) = sends(outputs)
    assert worker == 2
    assert isinstance(command, m.Refuse)
    assert "computed other bits" in command.reason
    assert run.state.phase == "training"
    ((command),) = [output.command for output in run.ready(2) if isinstance(output, s.Reply)]
    assert isinstance(command, m.Refuse), "it has not heard it, so it is told again"
    assert run.feed(m.WorkerExited(worker=2, status=1)) == [], "it was told to go"


def test_a_newcomer_on_another_host_cannot_share_memory() -> None:
    run = Run(transport="shm").started(0, 1)
    run.feed(m.WorkerJoined(worker=2, host="there", pid=7))
    ((worker, command),) = sends(run.ready(2))
    assert worker == 2
    assert isinstance(command, m.Refuse)
    assert "another host than the members (here)" in command.reason
    assert run.state.phase == "training"


@pytest.mark.parametrize("training", [False, True])
def test_a_stop_is_a_clean_end(training: bool) -> None:
    run = Run()
    run.join(0, 1)
    if training:
        run.ready(0, 1)
    outputs = run.feed(m.StopRequested(reason="Ctrl-C"))
    entry = ended(outputs)
    assert (entry["status"], entry["reason"]) == ("stopped", "Ctrl-C")
    assert "failure" not in entry
    assert [worker for worker, _ in sends(outputs)] == [0, 1, s.ENGINE]


def test_whoever_comes_after_the_end_is_told() -> None:
    run = Run()
    run.join(0)
    run.feed(m.StopRequested(reason="Ctrl-C"))
    outcome = m.EndRun(epoch=7, status="stopped", reason="Ctrl-C")
    assert run.join(1) == [s.Reply(outcome)]
    assert run.feed(heartbeat(generation=0)) == [s.Reply(outcome)]
    assert run.ready(0) == []
    for request in (m.ScaleRequested(workers=3), m.JoinRequested(pid=1)):
        assert run.feed(request) == [s.Reply(m.Answer(epoch=7, ok=False, text="the run is over"))]
    restarted = run.restarted()
    attached = restarted.feed(m.EngineAttached(host="here"))
    assert attached == [s.Reply(m.EndRun(epoch=8, status="stopped", reason="Ctrl-C")), s.Exit("stopped")]


def test_a_coordinator_that_cannot_write_fails_the_run_even_at_its_end() -> None:
    run = Run().started(0, 1)
    run.feed(finished(0), finished(1))
    entry = ended(run.feed(s.CoordinatorFailed("disk full", "free some space")))
    assert (entry["status"], entry["reason"], entry["failure"]["hint"]) == ("failed", "disk full", "free some space")


def test_step_never_changes_the_state_it_was_given() -> None:
    run = Run().started(0, 1)
    before = run.state
    frozen = repr(before)
    for event in (heartbeat(reports=[report(0)]), m.WorkerExited(worker=1, status=1), failure(0), finished(0)):
        s.step(before, event, 50.0)
    assert repr(before) == frozen


def test_every_event_has_a_place_in_the_table() -> None:
    events = {*get_args(m.Event), s.Ticked, s.CoordinatorFailed}
    only_members = {m.WorkerFinished, m.StepTakenOver, m.PeerDied, m.CollectiveFailed, m.RolledBack, m.PlanShown}
    only_members |= {m.CheckpointLoaded, m.PartSaved, m.CheckpointSealed, m.SaveFailed, m.SaveMissed, m.SliceCopied}
    assert events - s.TRANSITIONS["gathering"].keys() == only_members
    assert events == s.TRANSITIONS["training"].keys() == s.TRANSITIONS["ended"].keys()

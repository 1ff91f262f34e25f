"""Runs whose model is divided: who has which place, what becomes of a death, and steps that are executed again."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s
from distbelief.coordinator.rules.saving import ASK_AGAIN_S
from distbelief.coordinator.runfiles import reported
from distbelief.errors import JobError
from tests.support.coordinator.play import Run, ended, finished, heartbeat, lines, records, report, starts, texts
from tests.support.coordinator.world import World


def mesh(strategy: str, workers: int, **config: object) -> Run:
    return Run(workers, strategy=strategy, exact=False, transport="gloo", **config)


def places(run: Run) -> list[tuple[int, str, tuple[int, int]]]:
    return [(member.worker, member.place, member.shards) for member in run.state.members]


# --- plans -----------------------------------------------------------------------------------------------------------


def test_the_members_form_the_mesh_that_the_strategy_asks_for() -> None:
    run = mesh("dp2.pp2", 4).started(0, 1, 2, 3)
    assert places(run) == [
        (0, "stage 1/2 · data 1/2", (0, 2)),
        (1, "stage 1/2 · data 2/2", (2, 4)),
        (2, "stage 2/2 · data 1/2", (0, 2)),
        (3, "stage 2/2 · data 2/2", (2, 4)),
    ]
    start = run.state.start
    assert start is not None
    assert (start.degrees, start.transport) == ([2, 2, 1, 1], "gloo")
    assert records(run.outputs, "generation")[0]["degrees"] == [2, 2, 1, 1]


def test_a_run_without_a_mesh_has_no_degrees() -> None:
    run = Run(2).started(0, 1)
    assert run.state.start is not None
    assert (run.state.start.degrees, [member.place for member in run.state.members]) == ([], ["", ""])
    with_name = Run(2, strategy="allreduce").started(0, 1)
    assert with_name.state.start == run.state.start


@pytest.mark.parametrize(
    ("strategy", "workers", "text"),
    [
        ("pipeline:2", 3, "pipeline:2 takes a multiple of 2 workers, not 3: use --workers 2 or 4, or pipeline:3"),
        ("sharded", 5, "sharded on 5 workers divides the data 5 ways, but a step has 4 shards"),
    ],
)
def test_a_run_that_cannot_be_as_it_was_asked_for_fails_at_its_start(strategy: str, workers: int, text: str) -> None:
    run = mesh(strategy, workers)
    run.join(*range(workers))
    entry = ended(run.ready(*range(workers)))
    assert entry["status"] == "failed"
    assert text in entry["reason"]


def test_when_somebody_leaves_before_the_start_the_best_is_made_of_the_others() -> None:
    run = mesh("pipeline:3", 3)
    run.arrive(0, 1)
    run.join(2)
    run.feed(m.LeaveRequested(2))
    assert [place for _, place, _ in places(run)] == ["stage 1/2", "stage 2/2"]


def test_a_strategy_that_there_is_not_is_no_configuration() -> None:
    with pytest.raises(JobError, match="unknown strategy 'pipelin:2'"):
        s.RunConfig(workers=2, strategy="pipelin:2")


# --- deaths and arrivals ---------------------------------------------------------------------------------------------


def test_after_a_death_the_others_go_on_with_other_degrees_and_say_so() -> None:
    run = mesh("pipeline:4", 4).started(0, 1, 2, 3)
    outputs = run.kill(2, now=2.0)
    assert places(run) == [(0, "stage 1/3", (0, 4)), (1, "stage 2/3", (0, 4)), (3, "stage 3/3", (0, 4))]
    assert "SIGKILL (out of memory?); the others go on as pp3 (was pp4)" in texts(outputs)
    start = starts(outputs)[0]
    assert (start.degrees, start.past[0].degrees) == ([3, 1, 1, 1], [4, 1, 1, 1])


def test_the_replacement_brings_the_degrees_back() -> None:
    run = mesh("pipeline:4", 4).started(0, 1, 2, 3)
    run.kill(2)
    outputs = run.arrive(4)
    assert run.state.degrees is not None
    assert str(run.state.degrees) == "pp4"
    assert "worker 4 (host here, pid 104) has joined; the members go on as pp4 (was pp3)" in texts(outputs)


def test_a_spare_takes_the_place_of_the_dead_and_nobody_else_moves() -> None:
    run = mesh("dp1.pp3", 3).started(0, 1, 2)
    run.feed(m.ScaleRequested(4))
    outputs = run.arrive(3)
    assert starts(outputs).keys() == {3}, "it is told of the generation in which it has no part"
    assert "it is a spare, since 4 workers make no more than pp3" in texts(outputs)
    outputs = run.kill(1)
    assert places(run) == [(0, "stage 1/3", (0, 4)), (3, "stage 2/3", (0, 4)), (2, "stage 3/3", (0, 4))]
    assert "; the others go on" in texts(outputs)
    assert " as pp3" not in texts(outputs)


def test_of_those_that_are_left_one_holder_of_every_part_keeps_a_seat() -> None:
    run = mesh("dp2.pp2", 4).started(0, 1, 2, 3)
    outputs = run.kill(2)
    assert places(run) == [(0, "stage 1/2", (0, 4)), (3, "stage 2/2", (0, 4))]
    assert starts(outputs).keys() == {0, 1, 3}, "a member that is a spare now is told, too"
    assert "3 workers for pp2: worker 1 is a spare" in texts(outputs)
    outputs = run.beat(1)
    assert outputs == [], "and may go on living"
    run.arrive(4)
    assert {worker: place for worker, place, _ in places(run)} == {
        0: "stage 1/2 · data 1/2",
        1: "stage 1/2 · data 2/2",
        3: "stage 2/2 · data 1/2",
        4: "stage 2/2 · data 2/2",
    }


def test_a_newcomer_that_makes_no_larger_mesh_is_a_spare_until_there_are_enough() -> None:
    run = mesh("pipeline:2", 2).started(0, 1)
    run.feed(m.ScaleRequested(4))
    assert records(run.arrive(2), "spare")[0]["worker"] == 2
    assert run.members == [0, 1]
    outputs = run.arrive(3)
    assert "the members go on as dp2.pp2 (was pp2)" in texts(outputs)
    assert len(run.members) == 4


def test_whole_copies_of_the_model_leave_so_that_one_is_left() -> None:
    run = mesh("pipeline:2", 4).started(0, 1, 2, 3)  # ranks 2 and 3 are both of the second stage
    run.feed(m.ScaleRequested(2))
    assert {worker.number for worker in run.state.workers.values() if worker.leaving} == {1, 3}
    run.feed(m.WorkerLeft(1, 1), m.WorkerLeft(3, 1))
    assert places(run) == [(0, "stage 1/2", (0, 4)), (2, "stage 2/2", (0, 4))]


def test_shards_are_not_moved_by_speed() -> None:
    run = mesh("pipeline:1", 2).started(0, 1)
    for second in range(1, 40):
        for worker, slow in ((0, 1.0), (1, 9.0)):
            timing = m.Timing(0.0, second * slow, 0.0, 8 * second)
            beat = m.Heartbeat(worker, 7, 1, second, timing)
            run.feed(beat, s.Ticked(), now=float(second))
    assert run.state.generation == 1
    assert Run(2).state.config.balances
    assert not run.state.config.balances


@pytest.mark.parametrize("after", range(12))
def test_whenever_the_coordinator_dies_the_mesh_trains_again(after: int) -> None:
    world = World(4, strategy="dp2.pp2", exact=False, transport="gloo")
    world.settle(3)
    world.crash(after, world.kill(2))
    world.settle()
    before = world.committed
    world.settle(3)
    assert world.committed > before
    assert world.coordinator.degrees is not None
    assert str(world.coordinator.degrees) == "dp2.pp2"
    parts = sorted(member.place for member in world.coordinator.members)
    assert parts == sorted({f"stage {p}/2 · data {d}/2" for p in (1, 2) for d in (1, 2)})


# --- steps that are executed again -----------------------------------------------------------------------------------


def went_on(run: Run, first: int, end: int, fingerprint: str = "aa") -> list[s.Output]:
    reports = [report(step, fingerprint) for step in range(first, end)]
    return run.beat(run.members[0], step=end, reports=reports)


def test_going_back_is_recorded_said_and_counted_and_the_steps_are_reported_again() -> None:
    run = mesh("pipeline:2", 2).started(0, 1)
    went_on(run, 0, 7)
    run.kill(1)
    back = m.RolledBack(0, 2, reached=7, step=5, source="snapshots")
    outputs = run.feed(back, now=3.0)
    text = "goes back from step 7 to 5 (snapshots in the memory of neighbours): 2 steps are executed again"
    assert texts(outputs) == text
    (entry,) = records(outputs, "rolled_back")
    assert (entry["reason"], entry["step"], entry["reached"], entry["source"]) == (text, 5, 7, "snapshots")
    assert lines(outputs, "rollback")[0]["step"] == 5
    assert run.feed(back, now=4.0) == [], "it is told again to a coordinator that asks"
    again = went_on(run, 5, 8, "bb")
    assert [line["step"] for line in lines(again, "step")] == [5, 6, 7]
    assert lines(again, "notice") == []
    result = ended(run.feed(finished(0, generation=2)))["result"]
    assert (result["reexecuted"], result["recoveries"]) == (2, 1)


def test_a_single_step_and_a_checkpoint() -> None:
    run = mesh("pipeline:2", 2).started(0, 1)
    outputs = run.feed(m.RolledBack(0, 1, reached=7, step=6, source="checkpoint"))
    assert texts(outputs) == "goes back from step 7 to 6 (a checkpoint): 1 step is executed again"


def test_a_rollback_of_a_generation_that_is_over_counts_once() -> None:
    run = mesh("pipeline:2", 2).started(0, 1)
    run.kill(1)
    run.feed(m.RolledBack(0, 1, reached=7, step=5, source="snapshots"))
    assert run.state.reexecuted == 2
    assert run.feed(m.RolledBack(0, 1, reached=7, step=5, source="snapshots")) == []


def test_the_next_coordinator_knows_what_was_executed_again() -> None:
    run = mesh("pipeline:2", 2).started(0, 1)
    went_on(run, 0, 7)
    run.kill(1)
    back = m.RolledBack(0, 2, reached=7, step=5, source="snapshots")
    run.feed(back, m.PlanShown(0, 2, ["one stage"]))
    other = run.restarted()
    for name in ("rolled_back", "reexecuted", "plan", "degrees", "members"):
        assert getattr(other.state, name) == getattr(run.state, name)
    assert other.state.progress.redone == 7
    assert other.feed(back, m.PlanShown(0, 2, ["one stage"])) == []


def test_a_member_that_dies_again_and_again_at_the_same_step_ends_the_run() -> None:
    """The steps that are executed again in between are no progress."""
    run = mesh("pipeline:2", 2).started(0, 1)
    went_on(run, 0, 7)
    number = 1
    for _ in range(40):
        run.kill(number)
        if run.state.phase == "ended":
            break
        number += 1
        run.arrive(number)
        run.feed(m.RolledBack(0, run.state.generation, reached=7, step=5, source="snapshots"))
        went_on(run, 5, 7)
    assert run.state.phase == "ended"
    assert "have died one after the other, without a step in between" in ended(run.outputs)["reason"]


def test_steps_beyond_are_progress_again() -> None:
    run = mesh("pipeline:2", 2).started(0, 1)
    went_on(run, 0, 7)
    run.kill(1)
    run.feed(m.RolledBack(0, 2, reached=7, step=5, source="snapshots"))
    went_on(run, 5, 7)
    assert run.state.troubles.losses == 1
    went_on(run, 7, 8)
    assert run.state.troubles.losses == 0


def test_a_checkpoint_that_was_being_written_is_written_anew() -> None:
    run = mesh("pipeline:2", 2, save_every="end").started(0, 1)
    part = m.WrittenPart(10, "ab")
    run.feed(m.PartSaved(0, 1, 6, part, 0.0, 0.0))
    run.kill(1)
    run.feed(m.RolledBack(0, 2, reached=7, step=5, source="snapshots"))
    assert run.state.saves.open == {}
    outputs = run.feed(m.PartSaved(0, 2, 6, part, 0.0, 0.0), now=1.0 + ASK_AGAIN_S)
    assert [type(one.command) for one in outputs if isinstance(one, s.Send)] == [m.SealCheckpoint]


def test_a_damaged_checkpoint_is_not_the_newest_any_more() -> None:
    run = mesh("pipeline:2", 2, save_every="end").started(0, 1)
    run.feed(m.CheckpointSealed(0, 6))
    run.feed(m.RolledBack(0, 1, reached=7, step=4, source="checkpoint"))
    assert run.state.saves.sealed == 4


def test_what_came_after_a_rollback_counts_for_a_coordinator_that_reads_the_metrics(tmp_path: Path) -> None:
    found = [
        *({"kind": "step", "step": step, "fingerprint": "aa"} for step in range(7)),
        {"kind": "evaluation", "step": 4},
        {"kind": "evaluation", "step": 6},
        {"kind": "rollback", "step": 5},
        {"kind": "step", "step": 5, "fingerprint": "bb"},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in found))
    steps, evaluations = reported(path)
    assert (steps.complete, steps.values[5]) == (6, "bb")
    assert list(evaluations.values) == [4]


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_a_plan_is_said_once() -> None:
    run = mesh("pipeline:2", 2).started(0, 1)
    shown = ["stage 1/2: embedding, blocks.0–2", "stage 2/2: blocks.3–5, head"]
    outputs = run.feed(m.PlanShown(0, 1, shown))
    assert texts(outputs) == "\n".join(shown)
    assert records(outputs, "plan")[0]["lines"] == shown
    assert run.feed(m.PlanShown(0, 1, shown)) == []
    run.kill(1)
    assert run.feed(m.PlanShown(0, 1, ["another"])) == [], "of an old generation"
    assert texts(run.feed(m.PlanShown(0, 2, ["another"]))) == "another"


def test_the_weights_of_a_mesh_are_those_that_rank_0_reports() -> None:
    run = mesh("pipeline:2", 2).started(0, 1)
    result = ended(run.feed(finished(1), finished(0)))["result"]
    assert (result["weights_sha256"], result["workers"]) == ("abc", 2)


def test_the_generations_record_has_all_that_members_are_told() -> None:
    run = mesh("dp2.pp2", 4).started(0, 1, 2, 3)
    run.kill(3)
    entry = records(run.outputs, "generation")[-1]
    told = msgspec.convert({**entry, "epoch": 7}, m.StartGeneration)
    assert run.state.start is not None
    assert told == msgspec.structs.replace(run.state.start, reported=0)


def test_heartbeats_of_a_member_that_became_a_spare_do_not_disturb() -> None:
    run = mesh("dp2.pp2", 4).started(0, 1, 2, 3)
    run.kill(2)
    (again,) = run.feed(heartbeat(1, generation=1))
    assert again == s.Reply(run.state.start), "it has not heard of the change: it is told again"

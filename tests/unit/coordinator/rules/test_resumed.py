"""A run that is over, or whose processes are all gone, goes on with new workers: the `resumed` record."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s
from distbelief.coordinator.rules.progress import Seen
from distbelief.coordinator.rules.replay import resumed as record_of
from tests.support.coordinator.play import (
    CANARY,
    JOB,
    Run,
    ended,
    hired,
    lines,
    records,
    replies,
    report,
    starts,
    texts,
)
from tests.support.coordinator.process import JOB as SMALL_JOB
from tests.support.coordinator.process import coordinator, engine_and_workers, finish, tell, told
from tests.support.coordinator.saves import part, saving_run, sealed
from tests.support.coordinator.world import World


def resumed(run: Run, workers: int = 2, strategy: str = "allreduce", **config: object) -> Run:
    """The run as the coordinator has it that was started to resume it."""
    other = Run.__new__(Run)
    epoch, seen = run.state.epoch + 1, run.state.progress.reported
    wanted = s.RunConfig(workers=workers, **{"save_every": "never", **config})
    records = [*run.journal, record_of(s.resume(wanted, epoch, 50.0, run.journal), strategy, 50.0)]
    other.state = s.resume(wanted, epoch, 50.0, records, seen)
    other.outputs = [s.Record(entry) for entry in records]
    return other


def stopped(*workers: int) -> Run:
    run = Run(workers=len(workers)).started(*workers)
    run.feed(m.StopRequested("Ctrl-C"))
    assert run.state.phase == "ended"
    return run


def trained(*workers: int) -> Run:
    """Nobody ended it: everything was killed at once."""
    run = Run(workers=len(workers)).started(*workers)
    run.kill(workers[-1])
    assert (run.state.phase, run.state.generation, run.state.next_worker) == ("training", 2, len(workers) + 1)
    return run


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [stopped(0, 1), trained(0, 1), Run(workers=2)], ids=["ended", "killed", "unborn"])
def test_a_resumed_run_gathers_again_and_no_number_is_used_twice(before: Run) -> None:
    run = resumed(before, workers=3)
    state = run.state
    first = min(state.hired)
    assert first >= before.state.next_worker
    assert (state.phase, state.outcome, state.members) == ("gathering", None, [])
    assert state.epoch == before.state.epoch + 1
    assert list(state.hired) == [first, first + 1, first + 2]
    assert (state.target, state.next_worker) == (3, first + 3)
    told_to = starts(run.arrive(*state.hired))
    assert {start.generation for start in told_to.values()} == {before.state.generation + 1}
    assert told_to.keys() == {first, first + 1, first + 2}


def test_the_engine_is_told_to_start_the_new_workers_as_soon_as_it_is_there() -> None:
    run = resumed(stopped(0, 1, 2), workers=2)
    assert hired(run.feed(m.EngineAttached("here"), now=50.0)) == [3, 4]
    assert hired(run.feed(m.EngineAttached("here"), now=51.0)) == [], "it was just asked for them"
    assert hired(run.feed(m.EngineAttached("here", running={3: 103}), now=60.0)) == [4], "that one was lost"


def test_the_new_generation_has_no_past_and_knows_which_steps_are_reported() -> None:
    """Nothing of the old generations is left in anybody's memory."""
    before = Run(workers=2).started(0, 1)
    before.beat(0, step=6, reports=[report(step) for step in range(6)])
    run = resumed(before)
    start = starts(run.arrive(2, 3))[2]
    assert (start.past, start.reported, start.sealed) == ([], 6, 0)
    assert start.generation == 2


def test_who_was_lost_or_leaving_or_hired_before_is_not_waited_for() -> None:
    before = Run(workers=3).started(0, 1, 2)
    before.feed(m.LeaveRequested(worker=1))
    before.kill(2)
    before.feed(m.JoinRequested(pid=1))
    run = resumed(before, workers=1)
    assert run.state.target == 1
    assert (run.state.lost, run.state.arriving) == ((), frozenset())
    assert len(run.state.hired) == 1
    (worker,) = run.state.hired
    assert starts(run.arrive(worker)).keys() == {worker}


def test_recoveries_are_counted_over_the_whole_life_of_a_run() -> None:
    before = trained(0, 1)
    run = resumed(before, workers=2)
    run.arrive(3, 4)
    assert run.state.recoveries == 1, "and a resume is none"
    run.kill(3)
    assert run.state.recoveries == 2


# --- what was agreed on stays ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "canary", "reason"),
    [
        (msgspec.structs.replace(JOB, global_batch=64), CANARY, "takes 64 samples per step, the run 32"),
        (msgspec.structs.replace(JOB, parameters=101), CANARY, "parameters"),
        (JOB, m.Canary("other", {"threads": "2"}), "threads"),
    ],
)
def test_a_worker_with_another_job_or_other_bits_than_the_run_had_is_refused_with_the_reason(
    job: m.JobFacts, canary: m.Canary, reason: str
) -> None:
    run = resumed(stopped(0, 1))
    run.join(2, 3)
    outputs = run.ready(2, job=job, canary=canary)
    entry = ended(outputs)
    assert (entry["status"], entry["failure"]["kind"]) == ("failed", "refused")
    assert reason in entry["reason"]
    assert records(run.outputs, "reference") == records(stopped(0, 1).outputs, "reference")


def test_the_strategy_may_be_another_one_and_then_all_workers_must_have_that_one() -> None:
    run = resumed(stopped(0, 1), strategy="allreduce:gloo")
    run.join(2, 3)
    run.ready(2, job=msgspec.structs.replace(JOB, strategy="allreduce:gloo"))
    assert run.state.phase == "gathering"
    assert "strategy" in ended(run.ready(3))["reason"]


def test_a_run_that_never_had_a_worker_takes_its_reference_from_the_first() -> None:
    run = resumed(Run(workers=2))
    run.join(2, 3)
    assert [entry["worker"] for entry in records(run.ready(3), "reference")] == [3]


# --- steps -----------------------------------------------------------------------------------------------------------


def test_steps_that_are_executed_again_are_compared_and_not_written_twice() -> None:
    before = Run(workers=2).started(0, 1)
    before.beat(0, step=6, reports=[report(step) for step in range(6)])
    run = resumed(before)
    run.arrive(2, 3)
    outputs = run.beat(2, step=8, now=60.0, reports=[report(step, generation=2) for step in range(4, 8)])
    assert [line["step"] for line in lines(outputs, "step")] == [6, 7]
    assert texts(outputs) == ""
    outputs = run.beat(2, step=8, now=60.1, reports=[report(5, "bb")])
    assert "step 5 was reported twice with different results: fingerprint aa first, then bb" in texts(outputs)


def test_checkpoints_of_before_count_for_nothing_until_one_is_loaded() -> None:
    before = saving_run(0, 1)
    before.feed(part(0, 8), part(1, 8), sealed(0, 8))
    run = resumed(before, save_every="end")
    run.arrive(2, 3)
    assert run.state.saves.sealed == 0
    damaged = [(8, "step-000000008/manifest.json is damaged: its checksum differs")]
    outputs = run.feed(m.CheckpointLoaded(2, 4, "/runs/a/checkpoints", damaged))
    assert isinstance(outputs[0], s.Record)
    assert records(outputs, "loaded")[0]["step"] == 4
    assert "skipped: step-000000008/manifest.json is damaged" in texts(outputs)
    assert "goes on from step 4 (/runs/a/checkpoints)" in texts(outputs)
    assert run.state.saves.sealed == 4
    run.feed(part(2, 8, 2), part(3, 8, 2), sealed(2, 8))
    assert [entry["step"] for entry in records(run.outputs, "checkpoint")] == [8, 8], "once in each life of the run"


def test_when_the_state_was_lost_with_all_members_a_later_worker_loads_it_again() -> None:
    """Over torch groups the state is in the members' own memory."""
    run = resumed(saving_run(0, 1), save_every="end")
    run.arrive(2, 3)
    run.feed(m.CheckpointLoaded(2, 2, "/c"), part(2, 6, 2), part(3, 6, 2), sealed(2, 6), part(2, 8, 2))
    outputs = run.feed(m.CheckpointLoaded(5, 2, "/c", [(6, "step-000000006 is torn")]))
    assert [entry["step"] for entry in records(outputs, "loaded")] == [2]
    assert (run.state.saves.sealed, run.state.saves.open) == (2, {})
    assert run.restarted().state.saves.sealed == 2


def test_where_there_is_no_checkpoint_it_is_said_that_the_run_starts_from_its_first_step() -> None:
    run = resumed(saving_run(0, 1), save_every="end")
    run.arrive(2, 3)
    outputs = run.feed(m.CheckpointLoaded(3, 0, "/c"))
    assert texts(outputs) == "there is no checkpoint in /c: the run starts from its first step"
    assert records(outputs, "loaded")[0]["step"] == 0


# --- a coordinator that dies after a resume --------------------------------------------------------------------------


def test_a_coordinator_that_restarts_after_a_resume_knows_the_same() -> None:
    run = resumed(stopped(0, 1, 2), workers=2, strategy="other")
    again = run.restarted(now=51.0)
    assert again.state.phase == "gathering"
    assert (again.state.hired.keys(), again.state.next_worker) == (run.state.hired.keys(), run.state.next_worker)
    assert (again.state.generation, again.state.target) == (run.state.generation, run.state.target)
    assert again.state.reference == run.state.reference
    assert again.state.reference.job.strategy == "other"
    assert hired(again.feed(m.EngineAttached("here", running={3: 103}), now=51.0)) == [4], "3 is loading"


def test_it_goes_on_with_the_generation_that_trains_and_with_what_was_loaded() -> None:
    run = resumed(saving_run(0, 1), save_every="end")
    run.arrive(2, 3)
    loaded = m.CheckpointLoaded(2, 4, "/c")
    run.feed(loaded, part(2, 6, 2), part(3, 6, 2), sealed(2, 6))
    again = run.restarted()
    assert (again.state.phase, again.state.generation, again.members) == ("training", 2, [2, 3])
    again.arrive(2, 3)
    assert again.feed(loaded) == [], "it is said again, and known"
    assert again.state.saves.sealed == 6


def test_an_end_after_a_resume_is_the_end() -> None:
    run = resumed(stopped(0, 1))
    run.arrive(2, 3)
    run.feed(m.StopRequested("Ctrl-C"))
    again = run.restarted()
    assert again.state.phase == "ended"
    assert resumed(again).state.phase == "gathering", "and it can be resumed once more"
    assert list(resumed(again).state.hired) == [4, 5]


ACTIONS = ["round", "kill", "leave", "scale", "by hand", "stop"]
stories = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(1, 7)), min_size=1, max_size=12)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
@given(stories, st.integers(1, 4))
def test_whatever_happened_before_a_resumed_run_comes_to_train_with_new_numbers(
    story: list[tuple[str, int]], workers: int
) -> None:
    world = World(workers=3)
    for action, number in story:
        happen(world, action, number)
    used = {*world.actors, *world.exited}
    generations = world.generations
    world.actors.clear()  # everything is killed
    world.exited.clear()
    world.config = s.RunConfig(workers=workers, save_every="never")
    before = s.resume(world.config, world.coordinator.epoch + 1, world.now, world.journal)
    world.journal.append(record_of(before, "allreduce", world.now))
    world.coordinator = s.resume(
        world.config, before.epoch, world.now, world.journal, Seen(dict.fromkeys(range(world.committed), "aa"))
    )
    world.settle(3)
    assert world.coordinator.phase == "training"
    if generations:  # those who were never given a seat are not on record
        assert not used & world.actors.keys()
    assert len(world.actors) == len(world.coordinator.members) == workers
    assert world.generations == [*generations, len(generations) + 1]


def happen(world: World, action: str, number: int) -> None:
    present = [worker for worker, actor in world.actors.items() if actor.loaded]
    few = world.coordinator.phase == "training" or len(world.exited) < 2  # of a third one the run ends, on purpose
    match action:
        case "kill" if present and few:
            world.tell(world.kill(present[number % len(present)]))
        case "leave" if present:
            worker = present[number % len(present)]
            world.tell(world.leave(worker), worker)
        case "scale":
            world.tell(m.ScaleRequested(number))
        case "by hand" if world.coordinator.phase == "training":
            world.tell(m.JoinRequested(4711))
        case "stop" if number == 1:
            world.tell(m.StopRequested("Ctrl-C"))
        case _:
            world.round()


# --- the real process ------------------------------------------------------------------------------------------------


def test_a_coordinator_that_is_told_to_resume_starts_new_workers_on_the_same_journal(tmp_path: Path) -> None:
    with coordinator(tmp_path) as first:
        _, workers = engine_and_workers(first)
        for socket in workers:
            assert isinstance(told(socket), m.StartGeneration)
        first.process.send_signal(signal.SIGTERM)
        assert first.wait() == 0
        assert first.records()[-1]["status"] == "stopped"
    with coordinator(tmp_path, order={"resume": "allreduce"}, workers=1) as second:
        assert second.answer["epoch"] == 2
        engine = second.dealer()
        tell(engine, m.EngineAttached(host="here"))
        commands = [told(engine), told(engine)]
        assert m.StartWorker(epoch=2, worker=2, host="here") in commands
        worker = second.dealer()
        tell(worker, m.WorkerJoined(worker=2, host="here", pid=1002))
        tell(worker, m.WorkerReady(worker=2, job=SMALL_JOB, canary=CANARY))
        start = told(worker)
        assert isinstance(start, m.StartGeneration)
        assert (start.generation, [one.worker for one in start.members]) == (2, [2])
        tell(worker, finish(2, generation=2))
        assert second.wait() == 0
        kinds = [entry["kind"] for entry in second.records()]
        assert kinds.index("resumed") > kinds.index("ended")
        assert second.records()[-1]["status"] == "completed"
        assert json.loads((tmp_path / "journal.jsonl").read_text().splitlines()[-1])["epoch"] == 2


def test_whoever_was_a_worker_before_is_not_known_to_a_resumed_run() -> None:
    run = resumed(stopped(0, 1))
    beat = m.Heartbeat(0, 7, 1, 3, m.Timing())
    assert replies(run.feed(beat)) == [m.Introduce(run.state.epoch, 0)]

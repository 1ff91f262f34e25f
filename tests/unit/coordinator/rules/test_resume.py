"""A coordinator that dies is replaced by one that knows what the journal says: no generation and no worker's number is
used twice, and what the dead one had decided but not carried out is carried out."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s
from distbelief.coordinator.rules.progress import Seen
from distbelief.strategies.rules.degrees import fit
from tests.support.coordinator.play import (
    Run,
    ended,
    finished,
    heartbeat,
    hired,
    records,
    replies,
    report,
    sends,
    starts,
)
from tests.support.coordinator.world import World

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=100)

# --- by plain calls --------------------------------------------------------------------------------------------------


def test_an_empty_journal_is_a_run_that_has_nobody() -> None:
    config = s.RunConfig(workers=3, save_every="never")
    assert s.resume(config, 1, 0.0, []).phase == "gathering"
    run = Run(workers=3)
    run.join(0, 1)
    run.ready(0)
    again = run.restarted()
    assert again.state.reference is not None
    assert again.state.phase == "gathering"
    again.arrive(1, 2)
    assert starts(again.arrive(0)).keys() == {0, 1, 2}


def test_the_next_coordinator_goes_on_with_the_generation_that_trains() -> None:
    run = Run(workers=3).started(0, 1, 2)
    run.kill(1)
    run.beat(0, step=5, reports=[report(step) for step in range(5)])
    again = run.restarted()
    assert again.state.epoch == 8
    assert (again.state.phase, again.state.generation) == ("training", 2)
    assert again.members == [0, 2]
    assert again.state.start == m.StartGeneration(8, 2, run.state.members, "shm", run.state.start.past)  # type: ignore[union-attr]
    assert again.state.recoveries == 1
    assert again.state.next_worker == 4
    assert again.state.progress.reported.complete == 5
    outputs = again.feed(heartbeat(worker=0, epoch=7, generation=2))
    assert outputs == [s.Reply(m.Introduce(epoch=8, reported=5))]
    assert again.feed(heartbeat(worker=0, epoch=8, generation=2, reports=[report(4)])) != outputs
    assert again.state.generation == 2, "no step is disturbed by it"


def test_members_say_again_what_the_dead_one_knew() -> None:
    run = Run(workers=2).started(0, 1)
    run.feed(finished(1))
    again = run.restarted()
    again.arrive(0, 1)
    assert again.members == [0, 1]
    assert again.state.generation == 1
    assert ended(again.feed(finished(1), finished(0)))["status"] == "completed"


def test_a_replacement_on_its_way_is_not_asked_for_twice() -> None:
    run = Run(workers=2).started(0, 1)
    assert hired(run.kill(1)) == [2]
    again = run.restarted(now=2.0)
    outputs = again.feed(m.EngineAttached("here", running={0: 100, 2: 102}, exited={1: -9}), now=2.0)
    assert hired(outputs) == []
    assert starts(again.arrive(2)).keys() == {0, 2}


def test_what_was_decided_but_not_told_is_told_when_it_is_asked_for() -> None:
    run = Run(workers=2).started(0, 1)
    run.kill(1)
    again = run.restarted()
    again.join(0)
    assert replies(again.feed(heartbeat(worker=0, epoch=8, generation=1))) == [again.state.start]


@pytest.mark.parametrize("kept", ["lost", "generation", "hired"])
def test_dying_between_the_records_of_a_death_loses_nothing_of_it(kept: str) -> None:
    run = Run(workers=3).started(0, 1, 2)
    run.kill(1)
    kinds = [entry["kind"] for entry in run.journal]
    again = run.restarted(run.journal[: kinds.index(kept, 2) + 1])
    again.feed(m.EngineAttached("here", running={0: 100, 2: 102}, exited={1: -9}))
    assert again.members == [0, 2]
    assert again.state.generation == 2
    assert [entry["lost"] for entry in records(again.outputs, "generation")] == [[], [1]]
    assert list(again.state.hired) == [3]
    again.arrive(3)
    assert again.members == [0, 2, 3]


def test_a_replacement_that_died_is_not_waited_for_after_a_restart() -> None:
    run = Run(workers=2).started(0, 1)
    run.kill(1)
    run.arrive(2)
    run.kill(2)
    run.arrive(3)
    again = run.restarted()
    again.feed(m.EngineAttached("here", running={0: 100, 3: 103}, exited={1: -9, 2: -9}))
    assert hired(again.kill(3)) == [4]


def test_who_was_to_leave_leaves_after_a_restart_too_and_once() -> None:
    run = Run(workers=3).started(0, 1, 2)
    run.feed(m.LeaveRequested(worker=1))
    again = run.restarted()
    assert again.state.target == 2
    again.join(1)
    assert again.feed(m.LeaveRequested(worker=1)) == [], "it says again that it was asked to go"
    assert again.state.target == 2
    assert replies(again.feed(heartbeat(worker=1, epoch=8))) == [m.Retire(epoch=8, generation=1)]
    outputs = again.feed(m.WorkerLeft(worker=1, generation=1))
    assert starts(outputs).keys() == {0, 2}
    assert hired(outputs) == []


def test_scaling_down_is_carried_out_after_a_restart() -> None:
    run = Run(workers=3).started(0, 1, 2)
    run.feed(m.ScaleRequested(workers=1))
    again = run.restarted()
    assert again.state.target == 1
    for worker in (1, 2):
        assert replies(again.feed(heartbeat(worker=worker, epoch=8))) == [m.Retire(epoch=8, generation=1)]
        again.feed(m.WorkerLeft(worker=worker, generation=1))
    assert again.members == [0]


def test_spares_are_known_to_be_there_after_a_restart() -> None:
    run = Run(workers=5).started(0, 1, 2, 3, 4)
    run.feed(m.ScaleRequested(workers=6))
    run.arrive(5)
    again = run.restarted()
    outputs = again.feed(m.EngineAttached("here", running={w: 100 + w for w in range(6)}))
    assert hired(outputs) == []
    assert again.state.next_worker == 6
    assert hired(again.kill(3)) == [6]
    assert again.members == [0, 1, 2] or 4 in again.members


def test_a_refused_newcomer_is_not_started_again_after_a_restart() -> None:
    run = Run(workers=2).started(0, 1)
    run.kill(1)
    run.join(2)
    run.ready(2, canary=m.Canary("other", {}))
    again = run.restarted()
    assert again.state.target == run.state.target == 1
    assert hired(again.feed(m.EngineAttached("here", running={0: 100}, exited={1: -9, 2: 0}))) == []


def test_an_end_that_was_decided_stays_the_end() -> None:
    run = Run().started(0, 1)
    run.feed(m.StopRequested(reason="Ctrl-C"))
    again = run.restarted()
    assert again.state.phase == "ended"
    told = replies(again.feed(heartbeat(epoch=7)))
    assert told == [m.EndRun(epoch=8, status="stopped", reason="Ctrl-C")]


def test_seen_steps_are_not_written_twice() -> None:
    run = Run().started(0, 1)
    again = s.resume(run.state.config, 8, 1.0, run.journal, Seen({0: "aa", 1: "aa"}))
    again, _ = s.step(again, m.WorkerJoined(0, "here", 100), 1.0)
    _, outputs = s.step(again, heartbeat(epoch=8, reports=[report(0), report(1), report(2)]), 1.0)
    assert [o.line["step"] for o in outputs if isinstance(o, s.Report) and o.line["kind"] == "step"] == [2]
    assert sends(outputs) == []


# --- any story -------------------------------------------------------------------------------------------------------

ACTIONS = ["round", "kill", "leave", "scale", "by hand", "attach"]
stories = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 7), st.none() | st.integers(0, 6)), min_size=1, max_size=14
)
Story = list[tuple[str, int, int | None]]
kinds = st.sampled_from(["", "pipeline:3", "tensor:3", "sharded", "dp1.fsdp3"])


def world_of(strategy: str) -> World:
    return World(3, strategy=strategy, exact=False, transport="gloo") if strategy else World(3)


def size(state: s.State, workers: int) -> int:
    """How many members so many workers make, of a job with 4 shards."""
    wish = state.config.wish
    return fit(wish, workers, 4).size if wish else min(workers, 4)


def happen(world: World, action: str, number: int, crash_after: int | None) -> None:
    """One thing happens; the coordinator may die in the middle of what it does about it."""
    present = [worker for worker, actor in world.actors.items() if actor.loaded]
    few = world.coordinator.phase == "training" or len(world.exited) < 2  # of a third one the run ends, on purpose
    event: s.Input
    sender = s.ENGINE
    match action:
        case "kill" if present and few:
            event = world.kill(present[number % len(present)])
        case "leave" if present:
            sender = present[number % len(present)]
            event = world.leave(sender)
        case "scale":
            event = m.ScaleRequested(1 + number)
        case "by hand" if world.coordinator.phase == "training":
            event = m.JoinRequested(4711)
        case "attach":
            event = m.EngineAttached("here", {w: 100 + w for w in world.actors}, dict(world.exited))
        case _:
            world.round()
            event = s.Ticked()
    if crash_after is None:
        world.tell(event, sender)
    else:
        world.crash(crash_after, event, sender)


@patient
@given(stories, kinds)
def test_the_journal_tells_what_the_living_coordinator_knows(story: Story, strategy: str) -> None:
    """Whatever happened: a restart changes none of the numbers, and no generation's number is used twice."""
    world = world_of(strategy)
    for action, number, _ in story:
        happen(world, action, number, None)
        live = world.coordinator
        found = s.resume(world.config, live.epoch + 1, world.now, world.journal)
        assert (found.phase, found.generation) == (live.phase, live.generation)
        assert (found.members, found.degrees) == (live.members, live.degrees)
        assert (found.target, found.next_worker) == (live.target, live.next_worker)
        assert found.recoveries == live.recoveries
        there = {worker.number for worker in live.workers.values() if worker.counts} | live.hired.keys()
        known = {worker.number for worker in found.workers.values() if worker.counts} | found.hired.keys()
        assert there == known - world.exited.keys()
        assert world.generations == list(range(1, live.generation + 1))


@patient
@given(stories, kinds)
def test_wherever_the_coordinator_dies_the_run_comes_to_the_number_that_was_wanted(story: Story, strategy: str) -> None:
    world = world_of(strategy)
    for action, number, crash_after in story:
        happen(world, action, number, crash_after)
        assert world.generations == list(range(1, len(world.generations) + 1)), "a generation's number is used once"
    world.settle()
    state = world.coordinator
    assert state.phase == "training"
    assert not state.paused
    # Who asked for a seat and was not answered, because the coordinator died, does not come.
    assert len(world.actors) + len(state.hired) == state.target
    assert {one.worker for one in state.members} <= world.actors.keys()
    assert len(state.members) == size(state, len(world.actors))
    assert {actor.state.generation for actor in world.actors.values()} == {state.generation}
    assert {actor.state.epoch for actor in world.actors.values()} == {state.epoch}
    before = world.committed
    world.settle(3)
    assert world.committed == before + 3, "and trains"

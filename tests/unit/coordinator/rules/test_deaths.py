"""Members die and the run goes on: the next generation, what it is told, replacements, and limits. By plain calls."""

from __future__ import annotations

import msgspec
import pytest

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s
from distbelief.coordinator.rules.faults import EXPLAINED_S, MOST_RETRIES
from distbelief.coordinator.rules.hosts import ASK_AGAIN_S
from distbelief.coordinator.rules.vocabulary import EXIT_GRACE_S
from tests.support.coordinator.play import (
    JOB,
    Run,
    ended,
    finished,
    heartbeat,
    hired,
    lines,
    records,
    replies,
    report,
    sends,
    starts,
    texts,
)


def test_after_a_death_the_survivors_start_a_generation_that_knows_the_one_before() -> None:
    run = Run(workers=3).started(0, 1, 2)
    first = run.state.start
    assert first is not None
    run.beat(0, step=3, reports=[report(0), report(1), report(2)])
    outputs = run.kill(1, now=2.0)
    told = starts(outputs)
    assert told.keys() == {0, 2}
    assert told[0] == told[2]
    assert told[0].generation == 2
    assert [(member.worker, member.shards) for member in told[0].members] == [(0, (0, 2)), (2, (2, 4))]
    assert told[0].past == [m.PastGeneration(1, first.members)]
    assert told[0].reported == 3, "they need not tell again what is known"
    (entry,) = records(outputs, "generation")
    assert (entry["generation"], entry["cause"], entry["lost"]) == (2, "death", [1])
    assert "worker 1 (host here, pid 101) was killed by SIGKILL (out of memory?)" in entry["reason"]
    assert run.state.recoveries == 1


def test_decisions_are_recorded_before_anybody_hears_of_them() -> None:
    run = Run(workers=3).started(0, 1, 2)
    outputs = run.kill(1)
    kinds = [o.entry["kind"] if isinstance(o, s.Record) else type(o.command).__name__ if isinstance(o, s.Send) else ""
             for o in outputs]  # fmt: skip
    order = [kind for kind in kinds if kind]
    assert order == ["lost", "generation", "StartGeneration", "StartGeneration", "hired", "StartWorker"]


@pytest.mark.parametrize(("status", "words"), [(1, "exited with status 1"), (0, "exited with status 0")])
def test_an_exit_without_a_signal_is_a_death_once_no_cause_was_told(status: int, words: str) -> None:
    run = Run().started(0, 1)
    assert run.feed(m.WorkerExited(worker=1, status=status), now=20.0) == []
    assert run.feed(s.Ticked(), now=20.0 + EXIT_GRACE_S / 2) == []
    outputs = run.feed(s.Ticked(), now=20.0 + EXIT_GRACE_S)
    assert starts(outputs).keys() == {0}
    assert words in records(outputs, "lost")[0]["reason"]


def test_the_replacement_is_seated_when_it_is_ready() -> None:
    run = Run(workers=3).started(0, 1, 2)
    assert hired(run.kill(1)) == [3]
    assert run.join(3) == []
    outputs = run.ready(3)
    told = starts(outputs)
    assert told.keys() == {0, 2, 3}
    assert [member.worker for member in told[0].members] == [0, 2, 3], "those that stay keep their places"
    assert [past.generation for past in told[0].past] == [2, 1]
    (entry,) = records(outputs, "generation")
    assert (entry["cause"], entry["lost"]) == ("join", [])
    assert "worker 3 (host here, pid 103) has joined" in texts(outputs)


def test_two_deaths_at_once_are_two_generations_and_two_replacements() -> None:
    run = Run(workers=4).started(0, 1, 2, 3)
    assert hired(run.kill(1, 2)) == [4, 5]
    assert run.state.generation == 3
    assert run.members == [0, 3]
    assert [[member.worker for member in past.members] for past in run.state.start.past] == [[0, 2, 3], [0, 1, 2, 3]]  # type: ignore[union-attr]
    assert [entry["lost"] for entry in records(run.outputs, "generation")] == [[], [1], [2]]


@pytest.mark.parametrize(("workers", "remembered"), [(4, 30), (40, 26), (300, 4)])
def test_the_past_is_bounded_by_generations_and_by_members(workers: int, remembered: int) -> None:
    run, job = Run(workers=workers), msgspec.structs.replace(JOB, shards=workers)
    run.join(*range(workers))
    run.ready(*range(workers), job=job)
    for worker in range(workers, workers + 15):
        run.kill(worker - 1)
        run.join(worker)
        run.ready(worker, job=job)
    assert run.state.start is not None
    generations = [past.generation for past in run.state.start.past]
    assert generations == list(range(run.state.generation - 1, run.state.generation - 1 - remembered, -1))


def test_of_the_past_before_a_step_was_committed_little_is_remembered() -> None:
    """What is older cannot be needed for the step that is under way; parts of checkpoints may still come from it."""
    run = Run(workers=4).started(0, 1, 2, 3)
    for worker in range(4, 10):
        run.kill(worker - 1)
        run.arrive(worker)
    assert run.state.start is not None
    assert len(run.state.start.past) == 12
    run.beat(0, reports=[report(0, generation=13)])
    run.kill(1)
    assert [past.generation for past in run.state.start.past] == [13, 12, 11, 10]
    for worker in range(10, 14):
        run.arrive(worker)
        run.kill(worker)
    assert [past.generation for past in run.state.start.past][-1] == 13


def test_the_last_member_may_die_too() -> None:
    run = Run(workers=1).started(0)
    outputs = run.kill(0)
    assert not starts(outputs)
    assert hired(outputs) == [1]
    assert "paused" in texts(outputs)
    outputs = run.arrive(1)
    assert starts(outputs).keys() == {1}
    assert records(outputs, "generation")[0]["lost"] == [0]
    assert [past.generation for past in starts(outputs)[1].past] == [1]


def test_a_spare_takes_the_place_of_a_dead_member_at_once() -> None:
    run = Run(workers=5).started(0, 1, 2, 3, 4)
    outputs = run.kill(2)
    assert [member.worker for member in starts(outputs)[4].members] == [0, 1, 3, 4]
    assert hired(outputs) == [5]


def test_a_death_among_those_that_have_finished_and_those_that_have_not() -> None:
    run = Run(workers=3).started(0, 1, 2)
    run.feed(finished(0), finished(2))
    outputs = run.kill(1)
    assert starts(outputs).keys() == {0, 2}
    assert run.state.finished == 0, "everybody says again that it has finished, in the new generation"
    run.feed(finished(0, generation=1))
    assert run.state.phase == "training", "what was said of the old generation does not count"
    assert ended(run.feed(finished(0, generation=2), finished(2, generation=2)))["result"]["recoveries"] == 1


# --- fewer than wanted -----------------------------------------------------------------------------------------------


def test_with_too_few_workers_the_run_pauses_visibly_and_goes_on_when_there_are_enough() -> None:
    run = Run(workers=3, min_workers=3).started(0, 1, 2)
    outputs = run.kill(1)
    assert not starts(outputs)
    (entry,) = records(outputs, "paused")
    assert "2 of at least 3 workers are there" in entry["reason"]
    assert "paused" in texts(outputs)
    assert run.state.paused
    assert hired(outputs) == [3]
    assert run.feed(s.Ticked(), now=900.0) == [], "those that wait are not taken for frozen"
    outputs = run.kill(2)
    assert records(outputs, "paused") == [], "said once"
    assert not starts(run.arrive(3))
    outputs = run.arrive(4)
    assert starts(outputs).keys() == {0, 3, 4}
    assert records(outputs, "generation")[0]["lost"] == [1, 2]
    assert not run.state.paused


# --- what cannot be mended by going on -------------------------------------------------------------------------------


def broken(worker: int, generation: int, *who: int, step: int = 4, shard: int = 1) -> m.StepTakenOver:
    return m.StepTakenOver(worker, generation, step, 2, [m.BrokenShard(dead, step, shard) for dead in who])


def test_a_takeover_is_told_once_per_generation() -> None:
    run = Run(workers=3).started(0, 1, 2)
    run.kill(1, now=5.0)
    takeover = m.StepTakenOver(worker=0, generation=2, step=4, recomputed=2)
    outputs = run.feed(takeover, takeover, now=5.5)
    assert outputs == [s.Report({"kind": "recovery", "generation": 2, "step": 4, "recomputed": 2, "at": 5.5})]


def test_replicas_that_train_again_from_the_last_outer_step_are_said() -> None:
    run = Run(workers=3, strategy="local_sgd:4").started(0, 1, 2)
    run.kill(1, now=5.0)
    takeover = m.StepTakenOver(worker=0, generation=2, step=4, recomputed=2)
    said = texts(run.feed(takeover, takeover, now=5.5))
    assert said == "goes back to the last outer step, after step 4: 2 of 4 replicas computed again from there"
    run.kill(2, now=6.0)
    assert texts(run.feed(m.StepTakenOver(worker=0, generation=3, step=4, recomputed=0), now=6.5)) == ""


def test_a_shard_that_kills_two_workers_ends_the_run_and_is_named() -> None:
    run = Run(workers=3).started(0, 1, 2)
    run.kill(1)
    run.feed(broken(0, 2, 1))
    assert run.state.phase == "training", "one may have been killed by anything"
    run.kill(2)
    entry = ended(run.feed(broken(0, 3, 1, 2)))
    assert entry["status"] == "failed"
    assert "shard 1 of step 4 has killed 2 workers (1, 2): every worker that computes it dies" in entry["reason"]
    assert (entry["failure"]["step"], entry["failure"]["shard"]) == (4, 1)
    assert "logs/worker-2.log" in entry["failure"]["hint"]


def test_the_same_dead_worker_told_twice_or_other_shards_end_nothing() -> None:
    run = Run(workers=3).started(0, 1, 2)
    run.kill(1)
    run.feed(broken(0, 2, 1))
    run.arrive(3)
    run.feed(broken(0, 3, 1))
    run.kill(2)
    run.feed(broken(0, 4, 2, shard=3), broken(0, 4, 2, step=5))
    assert run.state.phase == "training"


def test_a_committed_step_does_not_clear_a_shard_of_suspicion() -> None:
    """A step that is taken over is committed by somebody who survived it; another may still die of the same shard."""
    run = Run(workers=3).started(0, 1, 2)
    run.kill(1)
    run.feed(broken(0, 2, 1))
    run.beat(0, step=1, reports=[report(0)])
    assert run.state.troubles.losses == 0
    assert run.state.troubles.killers == {(4, 1): (1,)}


def test_deaths_one_after_the_other_without_a_step_end_the_run() -> None:
    run = Run(workers=2).started(0, 1)
    limit = 10 + 2 * 2
    last = 1
    for _ in range(limit - 1):
        run.kill(last)
        last += 1
        run.arrive(last)
    assert run.state.phase == "training"
    entry = ended(run.kill(last))
    assert f"{limit} workers have died one after the other, without a step in between" in entry["reason"]
    assert entry["failure"]["worker"] == last


def test_with_a_step_in_between_deaths_go_on_for_ever() -> None:
    run = Run(workers=2).started(0, 1)
    for worker in range(2, 40):
        run.beat(0, step=worker, reports=[report(worker)])
        run.kill(worker - 1)
        run.arrive(worker)
    assert run.state.phase == "training"
    assert run.state.recoveries == 38


# --- connections that break although nobody died ---------------------------------------------------------------------


def test_a_broken_connection_is_most_often_a_death_that_is_heard_of_a_moment_later() -> None:
    run = Run(workers=3).started(0, 1, 2)
    for worker in (0, 2):
        run.feed(m.CollectiveFailed(worker, 1, "reset by peer"), now=5.0)
    assert run.feed(s.Ticked(), now=5.0 + EXPLAINED_S / 2) == []
    run.kill(1, now=5.6)
    assert run.state.generation == 2
    run.feed(s.Ticked(), now=9.0)
    assert run.state.generation == 2, "the death explains it"


def test_without_a_death_the_same_members_meet_again() -> None:
    run = Run(workers=2).started(0, 1)
    run.feed(m.CollectiveFailed(1, 1, "reset by peer"), now=5.0)
    outputs = run.feed(s.Ticked(), now=5.1 + EXPLAINED_S)
    assert starts(outputs).keys() == {0, 1}
    assert "worker 1: reset by peer; all members are alive, and connect again" in texts(outputs)
    assert run.feed(m.CollectiveFailed(0, 1, "late"), s.Ticked(), now=9.0) == [], "of a generation that is over"


def test_connections_that_never_hold_end_the_run() -> None:
    run = Run(workers=2).started(0, 1)
    now = 5.0
    for _ in range(MOST_RETRIES):
        run.feed(m.CollectiveFailed(1, run.state.generation, "no route to host"), now=now)
        run.feed(s.Ticked(), now=now + 2 * EXPLAINED_S)
        now += 3 * EXPLAINED_S
    assert run.state.phase == "training"
    run.feed(m.CollectiveFailed(1, run.state.generation, "no route to host"), now=now)
    entry = ended(run.feed(s.Ticked(), now=now + 2 * EXPLAINED_S))
    assert "no route to host" in entry["reason"]
    assert entry["failure"]["kind"] == "network"


# --- messages that are lost are made good ----------------------------------------------------------------------------


def test_a_member_that_has_not_heard_of_the_generation_is_told_again() -> None:
    run = Run(workers=3).started(0, 1, 2)
    run.kill(1)
    assert replies(run.feed(heartbeat(worker=2, generation=1))) == [run.state.start]
    assert replies(run.feed(heartbeat(worker=2, generation=2))) == []


def test_an_exit_that_was_not_heard_of_is_heard_with_the_engines_next_message() -> None:
    run = Run(workers=3).started(0, 1, 2)
    outputs = run.feed(m.EngineAttached(host="here", running={0: 100, 2: 102}, exited={1: -9}))
    assert starts(outputs).keys() == {0, 2}
    again = run.feed(m.EngineAttached(host="here", running={0: 100, 2: 102}, exited={1: -9}))
    assert not starts(again)
    assert not hired(again)


def test_an_engine_is_asked_again_for_a_worker_that_it_does_not_start() -> None:
    run = Run().started(0, 1)
    assert hired(run.kill(1, now=10.0)) == [2]
    attached = m.EngineAttached(host="here", running={0: 100}, exited={1: -9})
    assert hired(run.feed(attached, now=10.0 + ASK_AGAIN_S / 2)) == []
    assert hired(run.feed(attached, now=10.1 + ASK_AGAIN_S)) == [2]
    assert hired(run.feed(attached, now=10.2 + ASK_AGAIN_S)) == []
    running = m.EngineAttached(host="here", running={0: 100, 2: 102}, exited={1: -9})
    for seconds in range(1, 60):
        assert hired(run.feed(running, now=16.0 + seconds)) == [], "it is loading"


def test_a_whole_life_of_deaths_loses_and_repeats_no_step_line() -> None:
    run = Run(workers=2).started(0, 1)
    run.beat(0, step=2, reports=[report(0), report(1)])
    run.kill(0)
    # The next to lead tells all that the dead one may not have told, and more.
    run.beat(1, step=4, reports=[report(step, generation=2) for step in (1, 2, 3)])
    assert [line["step"] for line in lines(run.outputs, "step")] == [0, 1, 2, 3]
    assert not lines(run.outputs, "notice") or "different" not in texts(run.outputs)
    assert sends(run.feed(s.Ticked(), now=1.1)) == []


def test_a_death_that_a_peer_sees_first_is_answered_at_once_and_explained_later() -> None:
    run = Run(workers=3).started(0, 1, 2)
    outputs = run.feed(m.PeerDied(worker=0, generation=1, dead=1))
    assert starts(outputs).keys() == {0, 2}
    assert records(outputs, "generation")[0]["lost"] == [1]
    assert kills(outputs) == [1]
    assert run.feed(m.PeerDied(worker=2, generation=1, dead=1)) == []
    explained = run.feed(m.WorkerExited(worker=1, status=-11))
    assert "SIGSEGV" in lines(explained, "notice")[0]["text"]
    assert not starts(explained)
    assert run.feed(m.WorkerExited(worker=1, status=-11)) == []


def test_a_living_worker_whose_death_a_peer_reports_is_killed_until_its_exit_is_certain() -> None:
    run = Run(workers=3).started(0, 1, 2)
    assert kills(run.feed(m.PeerDied(worker=0, generation=1, dead=1))) == [1]
    there = m.EngineAttached("here", running={0: 100, 1: 101, 2: 102})
    assert kills(run.feed(there)) == [1], "the first command was lost"
    assert not starts(run.beat(1, step=5)), "it does not come back"
    run.feed(m.WorkerExited(worker=1, status=-9))
    assert kills(run.feed(m.EngineAttached("here", running={0: 100, 2: 102}, exited={1: -9}))) == []


def kills(outputs: list[s.Output]) -> list[int]:
    return [command.worker for _, command in sends(outputs) if isinstance(command, m.KillWorker)]


def test_the_end_of_one_that_has_finished_or_leaves_is_no_death() -> None:
    run = Run(workers=2).started(0, 1)
    run.feed(finished(1))
    assert run.feed(m.PeerDied(worker=0, generation=1, dead=1)) == []
    leaving = Run(workers=2).started(0, 1)
    leaving.feed(m.LeaveRequested(worker=1))
    assert leaving.feed(m.PeerDied(worker=0, generation=1, dead=1)) == []

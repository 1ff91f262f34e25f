"""Frozen members, workers that leave, and other numbers of workers, by plain calls."""

from __future__ import annotations

import pytest

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s
from distbelief.coordinator.rules.balance import MIN_GAIN
from distbelief.coordinator.rules.detector import FLOOR_S
from tests.support.coordinator.play import (
    Run,
    heartbeat,
    hired,
    records,
    replies,
    report,
    sends,
    starts,
    texts,
)

LEFT = m.EndRun(epoch=7, status="left", reason="it has handed its work over")
NOT_NEEDED = m.EndRun(epoch=7, status="left", reason="it is not needed any more")


def kills(outputs: list[s.Output]) -> list[int]:
    return [c.worker for to, c in sends(outputs) if isinstance(c, m.KillWorker) and to == s.ENGINE]


# --- a frozen member -------------------------------------------------------------------------------------------------


def training_for_a_while(run: Run, *workers: int, until: float = 10.0, engine: bool = True) -> None:
    """Heartbeats every 0.2 s and a step with each of them, so that the usual times are known."""
    for tick in range(int(until / 0.2)):
        now = tick * 0.2
        if engine:
            run.feed(m.EngineAttached(host="here"), now=now)
        run.beat(*workers[1:], step=tick, now=now)
        run.beat(workers[0], step=tick, now=now, reports=[report(tick, at=now)])
        run.feed(s.Ticked(), now=now)


def freeze(run: Run, frozen: int, *others: int, since: float = 10.0, for_s: float = 5 * FLOOR_S) -> list[s.Output]:
    """Nothing is heard of one member, and so no step is committed; the others say that they wait."""
    outputs: list[s.Output] = []
    step = run.state.progress.steps[others[0]]
    for tick in range(int(for_s / 0.2)):
        if run.state.hosts:
            run.feed(m.EngineAttached(host="here"), now=since + tick * 0.2)
        outputs += run.beat(*others, step=step, waiting=True, now=since + tick * 0.2)
        outputs += run.feed(s.Ticked(), now=since + tick * 0.2)
    return outputs


def test_a_frozen_member_is_killed_and_nothing_is_changed_before_its_exit_is_certain() -> None:
    run = Run(workers=3).started(0, 1, 2)
    training_for_a_while(run, 0, 1, 2)
    outputs = freeze(run, 1, 0, 2)
    (fenced,) = records(outputs, "fenced")
    assert fenced["worker"] == 1
    assert "worker 1 is frozen" in fenced["reason"]
    assert kills(outputs) == [1], "once"
    assert outputs.index(next(o for o in outputs if isinstance(o, s.Record) and o.entry is fenced)) < outputs.index(
        next(o for o in outputs if isinstance(o, s.Send) and isinstance(o.command, m.KillWorker))
    )
    assert run.state.generation == 1, "it could wake up in the middle of a write"
    assert not starts(outputs)
    outputs = run.kill(1, now=16.0)
    assert starts(outputs).keys() == {0, 2}
    assert records(outputs, "generation")[0]["lost"] == [1]
    assert hired(outputs) == [3]


def test_a_shard_in_which_a_frozen_member_was_killed_ends_the_run_after_three_deaths_only() -> None:
    """The machine may have frozen it; then the shard has killed one worker, and that may be chance."""
    run = Run(workers=3).started(0, 1, 2)
    training_for_a_while(run, 0, 1, 2)
    freeze(run, 1, 0, 2)
    run.kill(1)
    run.feed(m.StepTakenOver(0, 2, 50, 2, [m.BrokenShard(1, 50, 1)]))
    run.kill(2)
    run.feed(m.StepTakenOver(0, 3, 50, 2, [m.BrokenShard(1, 50, 1), m.BrokenShard(2, 50, 1)]))
    assert run.state.phase == "training"
    outputs = run.feed(m.StepTakenOver(0, 4, 50, 2, [m.BrokenShard(3, 50, 1)]))
    (entry,) = records(outputs, "ended")
    assert "shard 1 of step 50 has killed 3 workers (1, 2, 3)" in entry["reason"]


def test_an_engine_that_still_runs_a_fenced_worker_is_asked_again_to_kill_it() -> None:
    run = Run(workers=3).started(0, 1, 2)
    training_for_a_while(run, 0, 1, 2)
    freeze(run, 1, 0, 2)
    running = m.EngineAttached(host="here", running={0: 100, 1: 101, 2: 102})
    assert kills(run.feed(running, now=15.0)) == [1]
    run.kill(1, now=15.1)
    assert kills(run.feed(m.EngineAttached(host="here", running={0: 100, 2: 102}, exited={1: -9}), now=16.0)) == []


def test_a_silent_member_is_left_alone_while_steps_are_committed() -> None:
    run = Run(workers=3).started(0, 1, 2)
    training_for_a_while(run, 0, 1, 2)
    for tick in range(100):
        now = 10.0 + tick * 0.2
        run.beat(0, 2, step=50 + tick, now=now, reports=[report(50 + tick, at=now)])
        assert kills(run.feed(s.Ticked(), now=now)) == []


def test_where_nobody_can_kill_it_the_others_go_on_and_it_joins_again_when_it_is_heard_of() -> None:
    """It has a replica of its own there, so a late write of it harms nobody."""
    run = Run(workers=3)
    run.join(0, 2)
    run.join(1, host="there")
    run.ready(0, 1, 2)
    training_for_a_while(run, 0, 1, 2)  # the engine is here, not there
    outputs = freeze(run, 1, 0, 2)
    (entry,) = records(outputs, "estranged")
    assert entry["worker"] == 1
    assert kills(outputs) == []
    assert starts(outputs).keys() == {0, 2}
    assert run.members == [0, 2]
    again = run.restarted()
    for one in (run, again):
        outputs = one.feed(heartbeat(worker=1, epoch=one.state.epoch, generation=1), now=20.0)
        assert starts(outputs).keys() == {0, 1, 2}, "also a coordinator that came after knows that it may come back"


def test_in_shared_memory_nobody_is_left_behind_alive_even_if_no_engine_is_known_yet() -> None:
    """So it is for a moment after the coordinator's restart."""
    run = Run(workers=3).started(0, 1, 2)
    training_for_a_while(run, 0, 1, 2, engine=False)
    outputs = freeze(run, 1, 0, 2)
    assert records(outputs, "fenced")
    assert run.state.generation == 1
    running = m.EngineAttached(host="here", running={0: 100, 1: 101, 2: 102})
    assert kills(run.feed(running, now=15.0)) == [1], "it is killed as soon as there is somebody to do it"


# --- a worker leaves -------------------------------------------------------------------------------------------------


def test_leaving_is_letting_go_first_and_then_the_others_go_on() -> None:
    run = Run(workers=3).started(0, 1, 2)
    outputs = run.feed(m.LeaveRequested(worker=1))
    assert (1, m.Retire(epoch=7, generation=1)) in sends(outputs)
    assert records(outputs, "leaves")[0]["target"] == 2
    assert not starts(outputs), "it still computes and writes"
    outputs = run.feed(m.WorkerLeft(worker=1, generation=1))
    told = starts(outputs)
    assert told.keys() == {0, 2}
    (entry,) = records(outputs, "generation")
    assert (entry["cause"], entry["lost"]) == ("leave", [])
    assert [past.generation for past in told[0].past] == [1], "what it has published is used"
    assert sends(outputs)[-1] == (1, LEFT)
    assert hired(run.outputs) == []
    assert run.feed(m.WorkerExited(worker=1, status=0)) == []
    assert run.state.recoveries == 0


def test_what_is_said_to_who_leaves_is_said_again_if_it_was_lost() -> None:
    run = Run(workers=3).started(0, 1, 2)
    run.feed(m.LeaveRequested(worker=1))
    assert replies(run.beat(1)) == [m.Retire(epoch=7, generation=1)]
    assert run.feed(m.LeaveRequested(worker=1)) == [], "asked again, it leaves once"
    assert run.state.target == 2
    run.feed(m.WorkerLeft(worker=1, generation=1))
    assert replies(run.feed(heartbeat(worker=1, generation=1))) == [LEFT]


def test_the_run_starts_without_the_last_worker_that_was_waited_for_if_that_leaves() -> None:
    run = Run(workers=3)
    run.join(0, 1, 2)
    run.ready(0, 1)
    outputs = run.feed(m.LeaveRequested(worker=2))
    assert [member.worker for member in starts(outputs)[0].members] == [0, 1]


def test_a_worker_that_was_to_leave_and_dies_is_no_loss() -> None:
    run = Run(workers=3).started(0, 1, 2)
    run.feed(m.LeaveRequested(worker=1))
    outputs = run.kill(1)
    assert starts(outputs).keys() == {0, 2}
    assert records(outputs, "generation")[0]["cause"] == "leave"
    assert hired(outputs) == []


def test_a_death_while_somebody_leaves_is_one_change_when_it_has_let_go() -> None:
    run = Run(workers=4).started(0, 1, 2, 3)
    run.feed(m.LeaveRequested(worker=1))
    outputs = run.kill(2)
    assert not starts(outputs), "the one that leaves may still write"
    assert hired(outputs) == [4]
    outputs = run.feed(m.WorkerLeft(worker=1, generation=1))
    assert starts(outputs).keys() == {0, 3}
    assert records(outputs, "generation")[0]["lost"] == [2]


def test_the_least_number_of_workers_is_kept_when_one_leaves() -> None:
    run = Run(workers=2, min_workers=2).started(0, 1)
    outputs = run.feed(m.LeaveRequested(worker=1))
    assert run.state.target == 2
    assert hired(outputs) == [2]
    run.feed(m.WorkerLeft(worker=1, generation=1))
    assert run.state.paused
    assert starts(run.arrive(2)).keys() == {0, 2}


def test_a_spare_that_leaves_goes_at_once_and_silently() -> None:
    run = Run(workers=5).started(0, 1, 2, 3, 4)
    outputs = run.feed(m.LeaveRequested(worker=4))
    assert sends(outputs) == [(4, NOT_NEEDED)]
    assert run.feed(m.WorkerExited(worker=4, status=0)) == []
    assert run.state.generation == 1
    assert run.state.target == 4


# --- another number of workers ---------------------------------------------------------------------------------------


def answer(outputs: list[s.Output]) -> m.Answer:
    (found,) = [command for command in replies(outputs) if isinstance(command, m.Answer)]
    return found


def test_growing_asks_the_engine_and_seats_each_when_it_is_ready() -> None:
    run = Run(workers=1).started(0)
    outputs = run.feed(m.ScaleRequested(workers=4))
    assert hired(outputs) == [1, 2, 3]
    assert answer(outputs) == m.Answer(epoch=7, ok=True, text="3 more workers are being started")
    assert records(outputs, "scaled")[0]["target"] == 4
    for number, worker in enumerate([2, 1, 3], start=2):
        assert len(starts(run.arrive(worker))) == number
    assert run.members == [0, 2, 1, 3] or sorted(run.members) == [0, 1, 2, 3]


def test_shrinking_lets_the_last_ranks_go() -> None:
    run = Run(workers=4).started(0, 1, 2, 3)
    outputs = run.feed(m.ScaleRequested(workers=2))
    assert [(to, type(c)) for to, c in sends(outputs)] == [(2, m.Retire), (3, m.Retire)]
    assert answer(outputs).text == "2 workers leave after the present step"
    assert not starts(run.feed(m.WorkerLeft(worker=3, generation=1))), "both must have let go"
    outputs = run.feed(m.WorkerLeft(worker=2, generation=1))
    assert starts(outputs).keys() == {0, 1}
    assert records(outputs, "generation")[0]["generation"] == 2, "one change for both"
    assert hired(run.outputs) == []


def test_spares_go_first() -> None:
    run = Run(workers=6).started(*range(6))
    outputs = run.feed(m.ScaleRequested(workers=3))
    assert [(to, type(c)) for to, c in sends(outputs)] == [(3, m.Retire), (4, m.EndRun), (5, m.EndRun)]


def test_one_to_four_to_two_to_three() -> None:
    run = Run(workers=1).started(0)
    run.feed(m.ScaleRequested(workers=4))
    run.arrive(1, 2, 3)
    assert run.members == [0, 1, 2, 3]
    run.feed(m.ScaleRequested(workers=2))
    run.feed(*(m.WorkerLeft(worker=w, generation=run.state.generation) for w in (2, 3)))
    assert run.members == [0, 1]
    assert hired(run.feed(m.ScaleRequested(workers=3))) == [4], "no number is used twice"
    run.arrive(4)
    assert run.members == [0, 1, 4]
    assert len({entry["generation"] for entry in records(run.outputs, "generation")}) == run.state.generation


def test_workers_on_their_way_are_not_needed_any_more_when_fewer_are_wanted() -> None:
    run = Run(workers=1).started(0)
    run.feed(m.ScaleRequested(workers=4))
    run.arrive(1)
    run.join(2)
    run.feed(m.ScaleRequested(workers=2))
    assert (2, NOT_NEEDED) in sends(run.ready(2))
    assert (3, NOT_NEEDED) in sends(run.arrive(3))
    assert run.members == [0, 1]
    assert run.feed(m.WorkerExited(worker=2, status=0), m.WorkerExited(worker=3, status=0)) == []
    assert hired(run.kill(1)) == [4]


@pytest.mark.parametrize(
    ("config", "workers", "words"),
    [
        ({}, 0, "1 to 100,000 workers, not 0"),
        ({}, -3, "1 to 100,000 workers, not -3"),
        ({}, 1_000_000, "1 to 100,000 workers"),
        ({"min_workers": 2}, 1, "--min-workers 2"),
    ],
)
def test_a_number_that_cannot_be_is_answered_and_changes_nothing(config: dict, workers: int, words: str) -> None:
    run = Run(workers=3, **config).started(0, 1, 2)
    before = run.state
    outputs = run.feed(m.ScaleRequested(workers=workers))
    assert not answer(outputs).ok
    assert words in answer(outputs).text
    assert run.state == before


def test_the_same_number_again_changes_nothing() -> None:
    run = Run(workers=3).started(0, 1, 2)
    outputs = run.feed(m.ScaleRequested(workers=3))
    assert answer(outputs) == m.Answer(epoch=7, ok=True, text="there are 3 workers already")
    assert sends(outputs) == []


def test_scaling_before_the_start_starts_with_the_new_number() -> None:
    run = Run(workers=2)
    run.arrive(0)
    assert hired(run.feed(m.ScaleRequested(workers=3))) == [2]
    assert not starts(run.arrive(1))
    assert starts(run.arrive(2)).keys() == {0, 1, 2}
    run = Run(workers=3)
    run.arrive(0, 1)
    assert starts(run.feed(m.ScaleRequested(workers=2))).keys() == {0, 1}


def test_a_worker_started_by_hand_gets_a_number_and_a_seat() -> None:
    run = Run(workers=2).started(0, 1)
    outputs = run.feed(m.JoinRequested(pid=4711))
    assert replies(outputs) == [m.Admit(epoch=7, worker=2)]
    assert records(outputs, "admitted")[0]["worker"] == 2
    assert run.state.target == 2  # it may never come
    assert starts(run.arrive(2)).keys() == {0, 1, 2}
    assert records(run.outputs, "guest")[0]["target"] == run.state.target == 3
    assert hired(run.outputs) == []


# --- shards move to where they are computed faster -------------------------------------------------------------------


def test_a_slow_member_is_given_fewer_shards() -> None:
    run = Run(workers=2).started(0, 1)
    assert [member.shards for member in run.state.members] == [(0, 2), (2, 4)]
    for tick in range(100):
        now = tick * 0.2
        for worker, shard_s in ((0, 0.01), (1, 0.03)):
            timing = m.Timing(data_s=0.0, compute_s=2 * tick * shard_s, comm_s=0.0, shards=2 * tick)
            run.feed(m.Heartbeat(worker, 7, run.state.generation, tick, timing), now=now)
        run.feed(s.Ticked(), now=now)
        if run.state.generation > 1:
            break
    assert [member.shards for member in run.state.members] == [(0, 3), (3, 4)]
    (entry,) = records(run.outputs, "generation")[1:]
    assert entry["cause"] == "balance"
    assert entry["lost"] == []
    assert MIN_GAIN < (2 * 0.03 - 3 * 0.01) / (2 * 0.03)
    assert texts(run.outputs)


def test_balance_can_be_switched_off() -> None:
    run = Run(workers=2, balance=False).started(0, 1)
    for tick in range(100):
        for worker, shard_s in ((0, 0.01), (1, 0.03)):
            timing = m.Timing(compute_s=2 * tick * shard_s, shards=2 * tick)
            run.feed(m.Heartbeat(worker, 7, 1, tick, timing), now=tick * 0.2)
        run.feed(s.Ticked(), now=tick * 0.2)
    assert run.state.generation == 1

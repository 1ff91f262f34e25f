"""A pace that a worker has chosen is on record when it changes, once."""

from __future__ import annotations

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s
from tests.support.coordinator.play import Run, records, texts


def beat(run: Run, worker: int, pace: list[int], step: int = 5) -> list[s.Output]:
    return run.feed(m.Heartbeat(worker, run.state.epoch, run.state.generation, step, m.Timing(pace=pace)))


def test_a_change_of_pace_is_written_down_and_said_once() -> None:
    run = Run(workers=2, strategy="ps:async:adaptive").started(0, 1)
    assert not records(beat(run, 0, [1, 1]), "pace")
    outputs = beat(run, 0, [4, 1])
    (entry,) = records(outputs, "pace")
    assert (entry["worker"], entry["n_push"], entry["n_fetch"], entry["step"]) == (0, 4, 1, 5)
    assert "worker 0 pushes every 4 batches and fetches every update from step 5 on" in texts(outputs)
    assert not records(beat(run, 0, [4, 1]), "pace")
    assert records(beat(run, 0, [1, 2]), "pace")
    assert not records(beat(run, 1, []), "pace")


def test_a_new_coordinator_knows_what_was_said() -> None:
    run = Run(workers=1, strategy="ps:async:adaptive").started(0)
    beat(run, 0, [8, 2])
    again = run.restarted()
    assert again.state.fleet.paces == {0: (8, 2)}


def test_the_result_has_every_members_pace() -> None:
    run = Run(workers=2, strategy="ps:async:adaptive").started(0, 1)
    beat(run, 0, [8, 2])
    beat(run, 1, [1, 1])
    outputs = run.feed(*(m.WorkerFinished(worker, run.state.generation, 9, "hash") for worker in (0, 1)))
    (entry,) = records(outputs, "ended")
    assert entry["result"]["pace"] == {"0": {"n_push": 8, "n_fetch": 2}, "1": {"n_push": 1, "n_fetch": 1}}


def test_a_strategy_whose_members_choose_no_pace() -> None:
    run = Run(workers=1).started(0)
    assert not records(beat(run, 0, [8, 2]), "pace")
    outputs = run.feed(m.WorkerFinished(0, run.state.generation, 9, "hash"))
    assert "pace" not in records(outputs, "ended")[0]["result"]

"""Checkpoints by plain calls: which step is named, whose parts make one, who seals it, and what is said and recorded.
(What a run waits for at its end is in test_saving_end.py.)"""

from __future__ import annotations

import pytest

from distbelief.control import messages as m
from distbelief.coordinator.rules import saving
from distbelief.coordinator.rules import state as s
from tests.support.coordinator.play import Run, ended, lines, records, replies, report, sends, starts, texts
from tests.support.coordinator.saves import LAST, asked, at_step, failed, part, saving_run, sealed, seals, tick

# --- parts and seals -------------------------------------------------------------------------------------------------


def test_where_steps_are_committed_together_a_checkpoint_is_asked_for_where_there_is_a_state() -> None:
    for step_s, named in ((1.0, 4), (0.1, 10)):  # a state is at least 0.3 s ahead: one round, or four of them
        run = at_step(saving_run(0, 1, strategy="local_sgd:2"), 2, step_s=step_s)
        assert asked(run.feed(m.CheckpointRequested())) == {0: named, 1: named}
    last = at_step(saving_run(0, 1, strategy="local_sgd:7"), 7, step_s=1.0)
    assert asked(last.feed(m.CheckpointRequested())) == {0: LAST, 1: LAST}


def test_when_all_parts_are_there_one_writer_is_asked_to_seal() -> None:
    run = saving_run(0, 1, 2)
    assert run.feed(part(1, 4), part(0, 4)) == []
    outputs = run.feed(part(2, 4))
    parts = [part(worker, 4).part for worker in (0, 1, 2)]
    assert sends(outputs) == [(0, m.SealCheckpoint(epoch=7, step=4, parts=parts))], "by the rank of their writers"
    assert records(outputs) == []


def test_a_sealed_checkpoint_is_recorded_before_anything_is_said_of_it() -> None:
    run = saving_run(0, 1)
    run.feed(part(0, 4, write_s=0.5), part(1, 4, write_s=2.0))
    outputs = run.feed(sealed(0, 4), now=9.0)
    facts = {"step": 4, "size_bytes": 201, "parts": 2, "pause_s": 0.02, "write_s": 2.0}
    assert isinstance(outputs[0], s.Record)
    assert records(outputs, "checkpoint")[0].items() >= facts.items()
    assert lines(outputs) == [{"kind": "checkpoint", **facts, "at": 9.0}]
    assert len(outputs) == 2
    assert (run.state.saves.sealed, run.state.saves.open) == (4, {})


def test_a_checkpoint_is_recorded_once_however_often_it_is_told() -> None:
    run = saving_run(0, 1)
    run.feed(part(0, 4), part(1, 4), part(1, 4), sealed(0, 4), sealed(1, 4), part(0, 4), part(1, 4), sealed(0, 4))
    run.feed(sealed(0, 2))
    assert [entry["step"] for entry in records(run.outputs, "checkpoint")] == [4]
    assert run.state.saves.open == {}


def test_when_the_sealer_dies_another_writer_is_asked() -> None:
    run = saving_run(0, 1, 2)
    assert seals(run.feed(part(0, 4), part(1, 4), part(2, 4))) == [(0, 4, 3)]
    run.kill(0)
    assert seals(tick(run, 1.1)) == [(1, 4, 3)]
    assert seals(tick(run, 1.2)) == []
    run.kill(1)
    assert seals(tick(run, 1.3)) == [(2, 4, 3)]
    run.feed(sealed(2, 4))
    assert run.state.saves.sealed == 4


def test_a_seal_that_nobody_hears_of_is_asked_of_the_next_writer_and_at_last_of_the_first_again() -> None:
    """What was lost may have been the request or the news that it is done: whoever finds it done says so."""
    run = saving_run(0, 1)
    run.feed(part(0, 4), part(1, 4), now=1.0)
    assert seals(tick(run, 1.0 + saving.SEAL_AGAIN_S)) == []
    assert seals(tick(run, 1.1 + saving.SEAL_AGAIN_S)) == [(1, 4, 2)]
    assert seals(tick(run, 1.2 + 2 * saving.SEAL_AGAIN_S)) == [(0, 4, 2)]


def test_a_writer_that_dies_before_its_part_is_there_makes_the_others_save_again_further_ahead() -> None:
    run = at_step(saving_run(0, 1, 2), 5)
    run.feed(part(0, 4), part(2, 4))
    run.kill(1)
    outputs = tick(run, 1.1)
    assert run.state.saves.open == {}
    assert asked(outputs).keys() == {0, 2}
    assert set(asked(outputs).values()) == {run.state.saves.asked}
    assert run.state.saves.asked > 5
    step = run.state.saves.asked
    assert seals(run.feed(part(0, step, generation=2), part(2, step, generation=2))) == [(0, step, 2)]


def test_a_step_that_is_asked_for_stays_when_an_older_one_is_lost() -> None:
    run = at_step(saving_run(0, 1, 2), 5)
    step = asked(run.feed(m.CheckpointRequested()))[0]
    run.feed(part(0, 4), part(2, 4))
    run.kill(1)
    assert asked(tick(run, 1.1)) == {}
    assert run.state.saves.asked == step


def test_while_the_run_is_paused_nobody_is_asked_to_save_again() -> None:
    run = at_step(saving_run(0, 1, min_workers=2), 5)
    run.feed(part(0, 4))
    run.kill(1)
    assert asked(tick(run, 1.1)) == {}
    assert run.state.saves.asked is None


def test_a_part_that_comes_after_its_checkpoint_was_given_up_makes_nobody_seal_half_of_it() -> None:
    run = saving_run(0, 1, 2)
    run.feed(part(0, 4), part(2, 4))
    run.kill(1)
    tick(run, 1.1)
    assert seals(run.feed(part(0, 4), part(2, 4))) == []
    tick(run, 1.2)
    assert run.state.saves.open == {}


def test_parts_of_the_generation_before_still_count_when_all_its_writers_live() -> None:
    """Somebody joined between the snapshot and the news of the parts."""
    run = saving_run(0, 1)
    run.arrive(2)
    assert run.state.generation == 2
    assert seals(run.feed(part(0, 4), part(1, 4))) == [(0, 4, 2)]
    assert run.feed(part(2, 4)) == [], "it was no member then"


def test_parts_of_a_newer_generation_take_the_place_of_an_older_ones() -> None:
    """A generation that begins at a step that is to be saved takes it anew; parts of two are never mixed."""
    run = saving_run(0, 1)
    run.feed(part(0, 4))
    run.arrive(2)
    run.feed(part(0, 4, generation=2), part(2, 4, generation=2))
    assert seals(run.feed(part(1, 4))) == [], "that one is of the old generation"
    outputs = run.feed(part(1, 4, generation=2))
    ((_, command),) = sends(outputs)
    assert isinstance(command, m.SealCheckpoint)
    assert [one.sha256 for one in command.parts] == ["4/2/0", "4/2/1", "4/2/2"]


def test_parts_of_a_forgotten_generation_do_not_count() -> None:
    run = saving_run(0, 1)
    for worker in range(2, 8):
        run.beat(0, reports=[report(worker, generation=run.state.generation)])
        run.arrive(worker)
        run.kill(worker)
    assert run.state.generation > 6
    assert run.feed(part(0, 4), part(1, 4)) == []
    assert run.state.saves.open == {}


def test_a_newer_checkpoint_makes_older_ones_in_the_making_pointless() -> None:
    run = saving_run(0, 1)
    run.feed(part(0, 2), part(0, 4), part(1, 4), part(0, 6), sealed(0, 4))
    assert list(run.state.saves.open) == [6]
    assert run.feed(part(1, 2)) == []


def test_the_next_generation_is_told_what_is_saved() -> None:
    run = saving_run(0, 1)
    run.feed(part(0, 4), part(1, 4), sealed(0, 4))
    assert {start.sealed for start in starts(run.kill(1)).values()} == {4}


# --- at some moment --------------------------------------------------------------------------------------------------


def test_on_demand_the_members_are_told_a_step_that_none_of_them_has_reached() -> None:
    run = at_step(saving_run(0, 1), 4, step_s=0.125)
    outputs = run.feed(m.CheckpointRequested())
    assert asked(outputs) == {0: 8, 1: 8}, "three steps for the 0.3 s; and one, since they are in the middle of it"
    assert replies(outputs) == [m.Answer(7, True, "a checkpoint of step 8 will be saved, or of one soon after", 8)]
    again = run.feed(m.CheckpointRequested())
    assert asked(again) == {}
    assert replies(again) == replies(outputs), "that one will do for whoever asks meanwhile"


def test_no_step_beyond_the_last_is_named() -> None:
    run = at_step(saving_run(0, 1), 9, step_s=0.001)
    assert asked(run.feed(m.CheckpointRequested())) == {0: LAST, 1: LAST}


def test_a_member_that_was_past_the_step_makes_it_a_later_one_further_ahead() -> None:
    run = at_step(saving_run(0, 1), 2, step_s=0.25)
    assert asked(run.feed(m.CheckpointRequested())) == {0: 5, 1: 5}
    assert asked(run.feed(m.SaveMissed(1, 5))) == {0: 6, 1: 6}
    assert run.feed(m.SaveMissed(0, 5)) == [], "it was about the step before"
    assert asked(run.feed(m.SaveMissed(0, 6))) == {0: 8, 1: 8}
    assert run.feed(m.SaveMissed(9, 8)) == [], "it is nobody"


def test_long_steps_are_saved_at_the_end_of_the_present_one() -> None:
    run = at_step(saving_run(0, 1), 2, step_s=70.0)
    assert asked(run.feed(m.CheckpointRequested())) == {0: 3, 1: 3}


def test_a_command_to_save_that_was_lost_is_given_again_to_those_whose_part_is_missing() -> None:
    run = at_step(saving_run(0, 1), 2)
    step = asked(run.feed(m.CheckpointRequested(), now=1.0))[0]
    run.feed(part(0, step), now=1.5)
    assert asked(tick(run, 1.0 + saving.ASK_AGAIN_S)) == {}
    assert asked(tick(run, 1.1 + saving.ASK_AGAIN_S)) == {1: step}
    run.feed(part(1, step), sealed(0, step), now=2.2)
    assert asked(tick(run, 9.0)) == {}


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (Run(workers=1).started(0), "without checkpoints"),
        (Run(workers=1, save_every="end"), "no member trains"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_with_the_reason(run: Run, why: str) -> None:
    ((answer),) = replies(run.feed(m.CheckpointRequested()))
    assert isinstance(answer, m.Answer)
    assert not answer.ok
    assert why in answer.text


def test_a_paused_run_has_nothing_to_save() -> None:
    run = saving_run(0, 1, min_workers=2)
    run.kill(1)
    assert run.state.paused
    ((answer),) = replies(run.feed(m.CheckpointRequested()))
    assert isinstance(answer, m.Answer)
    assert not answer.ok


def test_every_so_many_seconds_one_is_asked_for() -> None:
    run = at_step(saving_run(0, 1, save_every="60s"), 2)
    assert asked(tick(run, 10.0)) == {}
    assert asked(tick(run, 69.0)) == {}
    step = asked(tick(run, 70.0))[1]
    run.feed(part(0, step), part(1, step), sealed(0, step), now=75.0)
    assert asked(tick(run, 134.0)) == {}
    assert asked(tick(run, 135.0)).keys() == {0, 1}


def test_none_is_asked_for_by_the_clock_while_one_is_in_the_making() -> None:
    run = at_step(saving_run(0, 1, save_every="60s"), 2)
    tick(run, 10.0)
    step = asked(tick(run, 70.0))[0]
    run.feed(part(0, step), now=71.0)
    assert asked(tick(run, 500.0)) == {1: step}, "that one, again"
    run.feed(part(1, step), sealed(0, step), now=501.0)
    assert asked(tick(run, 560.0)) == {}
    assert asked(tick(run, 561.0)) != {}


def test_one_that_was_asked_for_by_the_clock_and_given_up_is_asked_for_again_an_interval_later() -> None:
    run = at_step(saving_run(0, 1, save_every="60s"), 2)
    tick(run, 10.0)
    step = asked(tick(run, 70.0))[0]
    run.feed(failed(1, step, gave_up=True), now=80.0)
    assert asked(tick(run, 139.0)) == {}
    assert asked(tick(run, 140.0)) != {}


def test_the_part_of_another_member_does_not_keep_one_that_was_given_up_open_for_ever() -> None:
    run = at_step(saving_run(0, 1, save_every="60s"), 2)
    tick(run, 10.0)
    step = asked(tick(run, 70.0))[0]
    run.feed(failed(1, step, gave_up=True), part(0, step), now=80.0)
    assert asked(tick(run, 140.0)) != {}


def test_a_run_without_checkpoints_asks_for_none() -> None:
    run = at_step(Run(workers=2).started(0, 1), 2)
    assert tick(run, 2.0) == []
    assert tick(run, 4.0) == []
    assert ended(run.feed(m.StopRequested("Ctrl-C")))["reason"] == "Ctrl-C", "at once"


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_failure_is_said_once_and_the_run_goes_on() -> None:
    run = saving_run(0, 1)
    outputs = run.feed(failed(1, 4))
    assert texts(outputs) == "step 4 is not saved: the disk is full; it is tried again (free some space)"
    assert run.feed(failed(1, 4), failed(0, 4), failed(1, 6)) == []
    assert "permission" in texts(run.feed(failed(1, 6, "no permission")))
    assert run.state.phase == "training"


def test_it_is_said_again_when_there_was_a_checkpoint_in_between() -> None:
    run = saving_run(0, 1)
    run.feed(failed(1, 4), part(0, 4), part(1, 4), sealed(0, 4))
    assert "the disk is full" in texts(run.feed(failed(1, 6)))


def test_a_checkpoint_that_a_member_gave_up_is_not_waited_for() -> None:
    run = saving_run(0, 1)
    run.feed(part(0, 4))
    outputs = run.feed(failed(1, 4, gave_up=True))
    assert texts(outputs) == "step 4 is not saved: the disk is full (free some space)"
    assert run.state.saves.open == {}
    assert seals(run.feed(part(0, 6), part(1, 6))) == [(0, 6, 2)]


def test_a_late_failure_of_a_step_that_is_saved_by_now_changes_nothing() -> None:
    run = saving_run(0, 1)
    run.feed(part(0, 4), part(1, 4), sealed(0, 4), part(0, 6))
    before = run.state.saves
    run.feed(failed(1, 4, gave_up=True), now=50.0)
    assert (run.state.saves.open, run.state.saves.sealed_at) == (before.open, before.sealed_at)


# --- what is left of it when the coordinator dies --------------------------------------------------------------------


def restarted(run: Run, *workers: int) -> Run:
    """Another coordinator, to whom these have said again who they are."""
    again = run.restarted()
    again.arrive(*workers)
    return again


def test_parts_that_the_dead_coordinator_knew_of_are_told_again_and_sealed() -> None:
    run = saving_run(0, 1)
    run.feed(part(0, 4), part(1, 4))
    again = restarted(run, 0, 1)
    assert seals(again.feed(part(0, 4), part(1, 4))) == [(0, 4, 2)]
    again.feed(sealed(0, 4))
    assert [entry["step"] for entry in records(again.outputs, "checkpoint")] == [4]


def test_a_checkpoint_on_record_is_not_recorded_again_by_the_next_coordinator() -> None:
    run = saving_run(0, 1)
    run.feed(part(0, 4), part(1, 4), sealed(0, 4))
    again = restarted(run, 0, 1)
    assert again.state.saves.sealed == 4
    assert again.feed(part(0, 4), part(1, 4), sealed(0, 4)) == []


def test_the_news_of_a_seal_that_the_dead_one_asked_for_counts() -> None:
    run = saving_run(0, 1)
    run.feed(part(0, 4), part(1, 4))
    again = restarted(run, 0, 1)
    again.feed(sealed(0, 4))
    assert again.state.saves.sealed == 4
    assert [entry["kind"] for entry in again.journal][-1] == "checkpoint"


def test_the_next_coordinator_does_not_know_how_far_the_members_are_and_learns_it_from_who_missed_it() -> None:
    run = at_step(saving_run(0, 1), 6)
    again = restarted(run, 0, 1)
    step = asked(again.feed(m.CheckpointRequested()))[0]
    at_step(again, 7, now=1.5)
    assert asked(again.feed(m.SaveMissed(0, step), now=1.5))[0] > 7


def test_the_wish_is_met_by_members_that_heard_it_from_the_dead_coordinator() -> None:
    run = at_step(saving_run(0, 1), 2)
    step = asked(run.feed(m.CheckpointRequested()))[0]
    again = restarted(run, 0, 1)
    again.feed(part(0, step), part(1, step), sealed(1, step))
    assert again.state.saves.sealed == step

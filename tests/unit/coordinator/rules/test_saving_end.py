"""The end of a run that saves checkpoints: what it waits for, for how long, and what it makes of deaths meanwhile."""

from __future__ import annotations

import pytest

from distbelief.control import messages as m
from distbelief.coordinator.rules import saving
from distbelief.coordinator.rules import state as s
from tests.support.coordinator.play import Run, ended, hired, records, sends, starts, texts
from tests.support.coordinator.saves import (
    LAST,
    all_finish,
    asked,
    at_step,
    failed,
    part,
    saving_run,
    sealed,
    seals,
    tick,
)

# --- stopping --------------------------------------------------------------------------------------------------------


def stopping(*workers: int, **config: object) -> tuple[Run, int]:
    """A run that was asked to stop, and the step that it saves for that."""
    run = at_step(saving_run(*workers, **config), 4)
    outputs = run.feed(m.StopRequested("Ctrl-C"))
    assert "Ctrl-C: the run stops when a checkpoint is saved" in texts(outputs)
    assert records(outputs) == []
    return run, asked(outputs)[workers[0]]


def test_a_stop_waits_for_a_checkpoint_and_then_ends_the_run_as_stopped() -> None:
    run, step = stopping(0, 1)
    assert step > 4
    again = run.feed(m.StopRequested("Ctrl-C"))
    assert [type(one) for one in again] == [s.Reply], "the engine repeats it, and is only answered"
    run.feed(part(0, step), part(1, step))
    outputs = run.feed(sealed(0, step))
    entry = ended(outputs)
    assert (entry["status"], entry["reason"]) == ("stopped", f"Ctrl-C; a checkpoint of step {step} is saved")
    assert [one["kind"] for one in records(outputs)] == ["checkpoint", "ended"]


def test_a_second_signal_is_offered_only_to_one_who_sends_signals() -> None:
    for reason, offered in (("SIGTERM received", True), ("distbelief stop received", False)):
        run = at_step(saving_run(0, 1), 4)
        said = texts(run.feed(m.StopRequested(reason)))
        assert f"{reason}: the run stops when a checkpoint is saved" in said
        assert ("second signal" in said) == offered


def test_a_regular_checkpoint_before_the_one_that_the_stop_waits_for_does_not_end_the_run() -> None:
    run, step = stopping(0, 1)
    run.feed(part(0, step - 1), part(1, step - 1), sealed(0, step - 1))
    assert run.state.phase == "training"
    run.feed(part(0, step), part(1, step))
    assert ended(run.feed(sealed(0, step)))["status"] == "stopped"


def test_a_later_one_will_do_as_well() -> None:
    run, step = stopping(0, 1)
    assert ended(run.feed(sealed(0, step + 1)))["reason"] == f"Ctrl-C; a checkpoint of step {step + 1} is saved"


def test_the_second_signal_does_not_wait() -> None:
    run, _ = stopping(0, 1)
    entry = ended(run.feed(m.StopRequested("Ctrl-C", at_once=True)))
    assert (entry["status"], entry["reason"]) == ("stopped", "Ctrl-C")


@pytest.mark.parametrize(
    "run", [Run(workers=2, save_every="end"), Run(workers=2).started(0, 1)], ids=["nobody trains", "no checkpoints"]
)
def test_where_nothing_can_be_saved_a_stop_does_not_wait(run: Run) -> None:
    outputs = run.feed(m.StopRequested("Ctrl-C"))
    assert ended(outputs)["status"] == "stopped"
    assert outputs[0] == s.Reply(m.Answer(run.state.epoch, True, "the run stops; it saves no checkpoint"))


def test_when_the_checkpoint_of_a_stop_is_given_up_a_later_one_is_asked_for() -> None:
    """Two others may be in the making: one that can be taken a little later is worth the wait."""
    run, step = stopping(0, 1)
    assert "the disk is full; it is tried again" in texts(run.feed(failed(1, step)))
    at_step(run, step)
    later = asked(run.feed(failed(1, step, gave_up=True)))
    assert later.keys() == {0, 1}
    assert later[0] > step
    run.feed(part(0, later[0]), part(1, later[0]))
    assert ended(run.feed(sealed(0, later[0])))["reason"] == f"Ctrl-C; a checkpoint of step {later[0]} is saved"


def test_when_saving_fails_until_patience_ends_the_run_stops_without_a_checkpoint_and_says_so() -> None:
    run, step = stopping(0, 1)
    run.feed(failed(1, step), failed(0, step), now=50.0)
    assert run.state.phase == "training"
    entry = ended(tick(run, 1.1 + saving.STOP_S))
    assert (entry["status"], entry["reason"]) == ("stopped", "Ctrl-C; no checkpoint could be saved within 120 s")


def test_an_older_one_that_fails_does_not_keep_a_stop_from_its_own() -> None:
    """A newer snapshot was taken for the stop, so the writer of the older one gave up."""
    run, step = stopping(0, 1)
    run.feed(failed(1, step - 1, gave_up=True))
    assert run.state.phase == "training"
    run.feed(part(0, step), part(1, step))
    assert ended(run.feed(sealed(0, step)))["reason"].endswith("is saved")


def test_a_death_while_the_run_waits_to_stop_names_another_step_for_those_who_are_left() -> None:
    run, step = stopping(0, 1, 2)
    run.feed(part(0, step), part(2, step))
    run.kill(1)
    later = asked(tick(run, 1.1))
    assert later.keys() == {0, 2}
    run.feed(part(0, later[0], 2), part(2, later[0], 2))
    assert ended(run.feed(sealed(0, later[0])))["status"] == "stopped"


def test_a_death_before_any_part_leaves_the_step_as_it_was_named() -> None:
    run, step = stopping(0, 1)
    run.kill(1)
    assert asked(tick(run, 1.1 + saving.ASK_AGAIN_S)) == {0: step}
    assert seals(run.feed(part(0, step, 2))) == [(0, step, 1)]
    assert ended(run.feed(sealed(0, step)))["status"] == "stopped"


def test_a_worker_that_is_told_to_go_while_the_run_stops_is_needed_until_the_end() -> None:
    """A batch system tells every process to go, not only the engine."""
    run, step = stopping(0, 1)
    assert run.feed(m.LeaveRequested(worker=1)) == []
    run.feed(part(0, step), part(1, step))
    assert ended(run.feed(sealed(0, step)))["status"] == "stopped"


def test_the_engine_tells_a_new_coordinator_to_stop_and_it_saves_first() -> None:
    run, _ = stopping(0, 1)
    again = run.restarted()
    again.arrive(0, 1)
    step = asked(again.feed(m.StopRequested("Ctrl-C")))[0]
    again.feed(part(0, step), part(1, step))
    assert ended(again.feed(sealed(0, step)))["status"] == "stopped"


def test_a_stop_when_all_steps_are_done_completes_the_run_with_its_last_checkpoint() -> None:
    run = saving_run(0, 1)
    all_finish(run, 0)
    assert asked(run.feed(m.StopRequested("Ctrl-C"))) == {}
    all_finish(run, 1)
    run.feed(part(0, LAST), part(1, LAST))
    assert ended(run.feed(sealed(0, LAST)))["status"] == "completed"


# --- the last checkpoint ---------------------------------------------------------------------------------------------


def test_a_run_is_complete_when_its_last_checkpoint_is_sealed() -> None:
    run = saving_run(0, 1)
    assert all_finish(run, 0, 1) == []
    run.feed(part(0, LAST), part(1, LAST))
    outputs = run.feed(sealed(0, LAST))
    entry = ended(outputs)
    assert (entry["status"], entry["result"]["weights_sha256"]) == ("completed", "abc")
    assert [one["kind"] for one in records(outputs)] == ["checkpoint", "ended"]


def test_it_does_not_matter_whether_the_last_checkpoint_or_the_last_member_comes_first() -> None:
    run = saving_run(0, 1)
    all_finish(run, 0)
    run.feed(part(0, LAST), part(1, LAST), sealed(0, LAST))
    assert run.state.phase == "training"
    assert ended(all_finish(run, 1))["status"] == "completed"


def test_an_earlier_checkpoint_is_not_the_last() -> None:
    run = saving_run(0, 1)
    all_finish(run, 0, 1)
    run.feed(part(0, LAST - 1), part(1, LAST - 1), sealed(0, LAST - 1))
    assert run.state.phase == "training"


def test_a_last_checkpoint_that_is_given_up_lets_the_run_complete_without_it() -> None:
    run = saving_run(0, 1)
    all_finish(run, 0)
    run.feed(part(0, LAST), failed(1, LAST))
    run.feed(failed(1, LAST, gave_up=True))
    assert run.state.phase == "training", "one of them is not done yet"
    assert ended(all_finish(run, 1))["status"] == "completed"


def test_a_last_part_that_nobody_heard_of_is_asked_for_again() -> None:
    """The snapshot of the last step needs no command; but the news of the part may be lost like any other."""
    run = saving_run(0, 1)
    all_finish(run, 0, 1, now=5.0)
    run.feed(part(0, LAST), now=5.0)
    assert asked(tick(run, 5.0 + saving.ASK_AGAIN_S)) == {}
    assert asked(tick(run, 5.1 + saving.ASK_AGAIN_S)) == {1: LAST}
    assert seals(run.feed(part(1, LAST), now=7.0)) == [(0, LAST, 2)]


def test_a_writer_that_has_finished_and_dies_makes_the_others_save_what_there_is() -> None:
    run = saving_run(0, 1)
    all_finish(run, 0, 1)
    run.feed(part(0, LAST))
    assert run.kill(1) == [], "it had finished"
    outputs = tick(run, 1.1)
    (entry,) = records(outputs, "generation")
    assert (entry["cause"], entry["generation"]) == ("save", 2)
    assert starts(outputs)[0].sealed == 0, "so it knows that it is to save the last step"
    all_finish(run, 0)
    assert seals(run.feed(part(0, LAST, 2))) == [(0, LAST, 1)]
    assert ended(run.feed(sealed(0, LAST)))["status"] == "completed"


def test_a_death_before_the_end_is_one_new_generation_and_not_two() -> None:
    """The generation that goes on without the dead one saves the last step itself."""
    run = saving_run(0, 1)
    all_finish(run, 0)
    run.feed(part(0, LAST))
    assert len(records(run.kill(1), "generation")) == 1
    assert records(tick(run, 1.1), "generation") == []
    assert seals(run.feed(part(0, LAST, 2))) == [(0, LAST, 1)]


def test_when_all_have_finished_and_died_a_new_worker_saves_what_there_is() -> None:
    run = saving_run(0)
    all_finish(run, 0)
    run.kill(0)
    assert hired(run.feed(m.EngineAttached("here", {}, {0: -9}))) == [1]
    assert starts(run.arrive(1)).keys() == {1}
    run.feed(part(1, LAST, 2), sealed(1, LAST))
    assert ended(all_finish(run, 1))["status"] == "completed"


def test_the_last_checkpoint_is_begun_anew_only_so_many_times() -> None:
    run = saving_run(0, 1)
    for turn in range(saving.FINAL_TRIES + 1):
        generation = run.state.generation
        newcomer = 2 + turn
        all_finish(run, *run.members)
        run.feed(part(0, LAST, generation))
        run.kill(run.members[1])
        outputs = tick(run, 1.1 + turn)
        if turn < saving.FINAL_TRIES:
            assert [one["cause"] for one in records(outputs, "generation")] == ["save"]
            run.arrive(newcomer)
    assert ended(outputs)["status"] == "completed"
    assert records(run.outputs, "checkpoint") == []


def test_the_last_checkpoint_is_not_waited_for_for_ever_and_that_is_said_once() -> None:
    run = saving_run(0, 1)
    all_finish(run, 0, 1, now=5.0)
    assert run.state.phase == "training"
    tick(run, 5.0 + saving.FINAL_S)
    assert run.state.phase == "training"
    outputs = tick(run, 5.1 + saving.FINAL_S)
    assert "not complete after 600 s: the run ends without it" in texts(outputs)
    assert ended(outputs)["status"] == "completed"


def test_a_generation_that_is_not_done_when_the_patience_ends_completes_when_it_is() -> None:
    run = saving_run(0, 1)
    all_finish(run, 0, 1, now=5.0)
    run.arrive(2, now=6.0)
    assert run.state.generation == 2
    late = 5.1 + saving.FINAL_S
    for worker in (0, 1, 2):
        run.beat(worker, step=LAST, now=late, waiting=True)
    assert "the run ends without it" in texts(tick(run, late))
    assert texts(tick(run, late + 0.1)) == ""
    assert ended(all_finish(run, 0, 1, 2, now=late + 0.2))["status"] == "completed"


def test_the_next_coordinator_waits_for_the_last_checkpoint_too() -> None:
    run = saving_run(0, 1)
    all_finish(run, 0, 1)
    run.feed(part(0, LAST), part(1, LAST))
    again = run.restarted()
    again.arrive(0, 1)
    all_finish(again, 0, 1)
    assert again.state.phase == "training"
    again.feed(part(0, LAST), part(1, LAST))
    assert ended(again.feed(sealed(0, LAST)))["status"] == "completed"


@pytest.mark.parametrize("kept", ["checkpoint", "ended"])
def test_dying_between_the_last_checkpoint_and_the_end_loses_neither(kept: str) -> None:
    run = saving_run(0, 1)
    all_finish(run, 0, 1)
    run.feed(part(0, LAST), part(1, LAST), sealed(0, LAST))
    kinds = [entry["kind"] for entry in run.journal]
    again = run.restarted(run.journal[: kinds.index(kept) + 1])
    if kept == "ended":
        assert again.feed(m.EngineAttached("here"))[-1] == s.Exit("completed")
        return
    again.arrive(0, 1)
    outputs = all_finish(again, 0, 1)
    assert ended(outputs)["status"] == "completed"
    assert records(again.outputs, "checkpoint") == records(run.outputs, "checkpoint")


def test_members_are_let_go_only_when_the_last_checkpoint_is_there() -> None:
    run = saving_run(0, 1)
    all_finish(run, 0, 1)
    run.feed(part(0, LAST), part(1, LAST))
    assert not [one for one in sends(run.outputs) if isinstance(one[1], m.EndRun)]
    assert {to for to, command in sends(run.feed(sealed(0, LAST))) if isinstance(command, m.EndRun)} == {0, 1, s.ENGINE}

"""The worker's control logic, by plain calls: what each command makes it do in each phase."""

from __future__ import annotations

import pytest

from distbelief.control.messages import (
    Admit,
    Answer,
    Command,
    EndRun,
    Introduce,
    KillWorker,
    Member,
    PastGeneration,
    Refuse,
    Retire,
    SaveAt,
    SealCheckpoint,
    StartGeneration,
    StartWorker,
    WrittenPart,
)
from distbelief.worker.rules.control import (
    AbortStep,
    Action,
    GenerationFinished,
    Leave,
    Phase,
    Save,
    Seal,
    StandDown,
    TellAgain,
    TrainGeneration,
    WorkerState,
    step,
)

MEMBERS = [Member(4, "here", (0, 3)), Member(1, "here", (3, 6)), Member(2, "there", (6, 8))]


def start(generation: int, epoch: int = 1, members: list[Member] = MEMBERS) -> StartGeneration:
    return StartGeneration(epoch, generation, members, "shm")


def after(*events: Command | GenerationFinished, worker: int = 1) -> tuple[WorkerState, list[Action]]:
    """The state after these events, and what the last of them caused."""
    state, actions = WorkerState(worker), []
    for event in events:
        state, actions = step(state, event)
    return state, actions


def test_a_new_worker_waits() -> None:
    assert WorkerState(3) == WorkerState(worker=3, phase="waiting", epoch=0, generation=0)


def test_a_worker_among_the_members_trains_with_the_rank_of_its_place() -> None:
    state, actions = after(start(1))
    assert actions == [TrainGeneration(1, 1, 1, tuple(MEMBERS), "shm")]
    assert isinstance(actions[0], TrainGeneration)
    assert actions[0].ranges == ((0, 3), (3, 6), (6, 8))
    assert state == WorkerState(1, "training", epoch=1, generation=1)


def test_a_worker_that_is_not_a_member_is_a_spare_and_waits() -> None:
    state, actions = after(start(1), worker=9)
    assert (state.phase, state.generation, actions) == ("waiting", 1, [])


def test_a_spare_trains_when_a_later_generation_has_it() -> None:
    state, actions = after(start(1), start(2, members=[Member(9, "here", (0, 8))]), worker=9)
    assert state.phase == "training"
    assert actions == [TrainGeneration(1, 2, 0, (Member(9, "here", (0, 8)),), "shm")]


def test_a_new_generation_aborts_the_step_in_flight_first() -> None:
    state, actions = after(start(1), start(2))
    assert [type(action) for action in actions] == [AbortStep, TrainGeneration]
    assert state.generation == 2


def test_a_member_that_is_left_out_aborts_and_waits() -> None:
    state, actions = after(start(1), start(2, members=MEMBERS[:1]))
    assert [type(action) for action in actions] == [AbortStep]
    assert state.phase == "waiting"


@pytest.mark.parametrize("generation", [1, 2])
def test_no_generation_is_started_twice_or_after_a_newer_one(generation: int) -> None:
    """A coordinator that restarts reissues what is outstanding; it must not disturb the training."""
    before, _ = after(start(2))
    state, actions = step(before, start(generation, epoch=2))
    assert actions == []
    assert (state.phase, state.generation, state.epoch) == ("training", 2, 2)


@pytest.mark.parametrize(
    "event", [start(7, epoch=2), EndRun(2, "failed"), Refuse(2, "no"), Retire(2, 1), Retire(2, 9), Introduce(2, 4)]
)
def test_a_lower_epoch_is_not_obeyed(event: Command) -> None:
    before, _ = after(start(1, epoch=3))
    assert step(before, event) == (before, [])


@pytest.mark.parametrize("epoch", [1, 4])
def test_the_same_or_a_higher_epoch_is_obeyed(epoch: int) -> None:
    state, actions = after(start(1), EndRun(epoch, "completed"))
    assert state.epoch == epoch
    assert actions[-1] == Leave("completed", "")


@pytest.mark.parametrize(
    ("event", "leave"),
    [
        (EndRun(1, "failed", "worker 2: ValueError"), Leave("failed", "worker 2: ValueError")),
        (EndRun(1, "stopped", "Ctrl-C"), Leave("stopped", "Ctrl-C")),
        (Refuse(1, "another thread count"), Leave("refused", "another thread count")),
    ],
)
def test_the_end_of_the_run_aborts_a_training_and_nothing_else(event: Command, leave: Leave) -> None:
    for events, expected in [
        ([], [leave]),
        ([start(1)], [AbortStep("the run ends"), leave]),
        ([start(1), GenerationFinished(1)], [leave]),
    ]:
        state, actions = after(*events, event)
        assert actions == expected
        assert state.phase == "ended"


def test_nothing_is_done_after_the_end() -> None:
    ended, _ = after(EndRun(1, "completed"))
    for event in (start(5, epoch=9), EndRun(9, "failed"), Refuse(9, "no"), GenerationFinished(0)):
        assert step(ended, event) == (ended, [])


@pytest.mark.parametrize(("finished", "phase"), [(1, "training"), (2, "finished"), (3, "training")])
def test_only_the_present_generation_can_finish(finished: int, phase: Phase) -> None:
    state, actions = after(start(1), start(2), GenerationFinished(finished))
    assert (state.phase, actions) == (phase, [])


def test_a_worker_that_waits_does_not_finish() -> None:
    state, _ = after(start(1), GenerationFinished(1), worker=9)
    assert state.phase == "waiting"


def test_a_finished_worker_trains_again_in_a_new_generation_without_an_abort() -> None:
    state, actions = after(start(1), GenerationFinished(1), start(2))
    assert [type(action) for action in actions] == [TrainGeneration]
    assert state.phase == "training"


# --- what is left of an earlier generation ---------------------------------------------------------------------------


def test_a_member_is_told_whose_step_it_may_have_to_take_over_and_what_is_known() -> None:
    past = [PastGeneration(1, MEMBERS)]
    _, actions = after(start(1), StartGeneration(1, 2, MEMBERS[1:], "shm", past, reported=17))
    assert actions[-1] == TrainGeneration(1, 2, 0, tuple(MEMBERS[1:]), "shm", tuple(past), 17)


# --- leaving ---------------------------------------------------------------------------------------------------------


def test_a_member_that_is_to_leave_aborts_lets_go_and_waits() -> None:
    state, actions = after(start(1), Retire(1, 1))
    assert [type(action) for action in actions] == [AbortStep, StandDown]
    assert actions[-1] == StandDown(1)
    assert state == WorkerState(1, "waiting", epoch=1, generation=1)
    assert step(state, start(1, epoch=2))[1] == [], "it does not come back into what it has let go of"


def test_told_again_to_leave_it_says_again_that_it_has_let_go() -> None:
    before, _ = after(start(1), Retire(1, 1))
    state, actions = step(before, Retire(2, 1))
    assert actions == [StandDown(1)]
    assert state.epoch == 2


def test_a_generation_that_it_never_heard_of_is_let_go_of_too() -> None:
    state, actions = after(start(1), Retire(1, 4))
    assert actions[-1] == StandDown(4)
    assert state.generation == 4
    assert step(state, start(3))[1] == []


def test_an_old_request_to_leave_does_not_disturb_a_newer_generation() -> None:
    before, _ = after(start(1), start(2))
    assert step(before, Retire(1, 1)) == (before, [])


def test_a_finished_member_leaves_without_an_abort() -> None:
    _, actions = after(start(1), GenerationFinished(1), Retire(1, 1))
    assert actions == [StandDown(1)]


def test_who_has_handed_over_is_let_go() -> None:
    state, actions = after(start(1), Retire(1, 1), EndRun(1, "left", "it has handed its work over"))
    assert actions == [Leave("left", "it has handed its work over")]
    assert state.phase == "ended"


# --- another coordinator ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("events", [[], [start(1)], [start(1), GenerationFinished(1)], [start(1), Retire(1, 1)]])
def test_a_coordinator_that_does_not_know_it_is_told_again_and_nothing_else_changes(events: list[Command]) -> None:
    before, _ = after(*events)
    state, actions = step(before, Introduce(5, reported=12))
    assert actions == [TellAgain(12)]
    assert (state.phase, state.generation) == (before.phase, before.generation)
    assert state.epoch == 5
    assert step(state, EndRun(4, "failed")) == (state, []), "from now on only the new one is obeyed"


@pytest.mark.parametrize("event", [StartWorker(1, 1), KillWorker(1, 1, "frozen"), Admit(1, 3), Answer(1, True, "yes")])
def test_what_is_meant_for_others_is_not_obeyed(event: Command) -> None:
    before, _ = after(start(1))
    assert step(before, event) == (before, [])


# --- checkpoints -----------------------------------------------------------------------------------------------------

PARTS = [WrittenPart(100, "aa"), WrittenPart(200, "bb")]


@pytest.mark.parametrize("events", [[], [start(1)], [start(1), GenerationFinished(1)], [start(1), Retire(1, 1)]])
def test_a_checkpoint_is_taken_and_sealed_in_any_phase_and_disturbs_nothing(events: list[Command]) -> None:
    """A snapshot is taken by whoever trains; but a part, and so a manifest, is written while other things go on."""
    before, _ = after(*events)
    state, actions = step(before, SaveAt(2, step=30))
    assert actions == [Save(30)]
    state, actions = step(state, SealCheckpoint(2, step=30, parts=PARTS))
    assert actions == [Seal(30, tuple(PARTS))]
    assert (state.phase, state.generation) == (before.phase, before.generation)


@pytest.mark.parametrize("event", [SaveAt(2, 30), SealCheckpoint(2, 30, PARTS)])
def test_no_checkpoint_is_taken_for_an_older_coordinator_or_after_the_end(event: Command) -> None:
    before, _ = after(start(1, epoch=3))
    assert step(before, event) == (before, [])
    ended, _ = after(EndRun(1, "completed"))
    assert step(ended, event) == (ended, [])


def test_a_member_is_told_what_is_saved_when_its_generation_starts() -> None:
    _, actions = after(StartGeneration(1, 1, MEMBERS, "shm", [], reported=40, sealed=30))
    assert isinstance(actions[-1], TrainGeneration)
    assert (actions[-1].reported, actions[-1].sealed) == (40, 30)

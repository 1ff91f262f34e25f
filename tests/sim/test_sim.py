"""A bounded number of seeds; and bugs that are planted on purpose, each of which must be noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

import msgspec
import pytest

from distbelief.control import messages as m
from distbelief.coordinator.rules import detector, faults, regroup, saving
from distbelief.coordinator.rules import state as s
from distbelief.coordinator.rules.ending import Result, with_worker
from distbelief.steadyclock import SteadyClock
from distbelief.worker.rules import control
from tests.sim import memory, training
from tests.sim.cluster import run
from tests.sim.coordinator_model import VirtualCoordinator
from tests.sim.faults import Kind
from tests.sim.run import report
from tests.sim.scale import measure
from tests.sim.seeds import again, parse_seeds, seeds_of, seeds_of_today
from tests.sim.storage import History

FEW = range(1, 201)
FIFTY_MEMBERS = range(1, 13)
MOST_SEEDS = 600
"""A planted bug must show within so many."""


def broken(seeds: range, members: int | None = None) -> list[str]:
    outcomes = (run(seed, members) for seed in seeds)
    return [report(outcome, members) for outcome in outcomes if outcome.broken]


def noticed(promise: str, only: Sequence[Kind] = ()) -> None:
    """Some seed says that this promise is broken. (A planted bug may break others before.)"""
    for seed in range(1, MOST_SEEDS + 1):
        if promise in run(seed, only=only).broken:
            return
    raise AssertionError(f"{MOST_SEEDS} seeds did not show the planted bug")


def test_small_clusters_keep_every_promise() -> None:
    assert not broken(FEW)


def test_todays_seeds_keep_every_promise() -> None:
    """Seeds that nobody chose, other ones each day. A report names the seed and the command that simulates it again."""
    seeds = seeds_of_today()
    assert not broken(seeds), again(seeds)


def test_a_day_has_seeds_of_its_own() -> None:
    today, tomorrow = (seeds_of(date(2026, 11, day)) for day in (19, 20))
    assert today == seeds_of(date(2026, 11, 19))
    assert not set(today) & set(tomorrow)
    assert not set(FEW) & set(today)


def test_fifty_members_keep_every_promise() -> None:
    assert not broken(FIFTY_MEMBERS, members=50)


def test_runs_that_are_stopped_or_killed_as_a_whole_and_resumed_keep_every_promise() -> None:
    """Every step is committed, with the fingerprint that it must have, from whichever checkpoint the run went on."""
    faults: list[Kind] = ["kill everything", "stop", "save", "bad disk", "kill", "kill coordinator while it decides"]
    outcomes = [run(seed, only=faults) for seed in FEW]
    assert not [report(outcome, None) for outcome in outcomes if outcome.broken]
    assert sum(outcome.faults["kill everything"] for outcome in outcomes) > 50


def test_a_seed_gives_the_same_run_again() -> None:
    assert run(7) == run(7)


def test_a_report_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "trusted", lambda ledger, rank, stamp: ledger.begun[rank] == stamp)
    outcome = next(outcome for seed in range(1, MOST_SEEDS) if (outcome := run(seed)).broken)
    text = report(outcome, None)
    assert f"make sim SEEDS={outcome.seed}" in text
    assert "fault: " in text
    assert run(outcome.seed).broken == outcome.broken


# --- planted bugs ----------------------------------------------------------------------------------------------------


def test_going_on_without_a_frozen_member_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fencing skipped: the member is taken for dead, but nobody has killed it; it wakes in the middle of a write."""

    def skip_fencing(state: s.State, suspects: list[detector.Suspect], now: float) -> Result:
        worker = replace(state.workers[suspects[0].worker], exited=-9)
        return faults._lost(with_worker(state, worker), worker, now)

    monkeypatch.setattr(faults, "_fence", skip_fencing)
    noticed("although generation", only=["freeze"])


def test_commands_before_their_record_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acknowledged before it is journaled: a coordinator that dies in between uses the number of a generation again."""
    real = s.step

    def acknowledge_first(state: s.State, event: s.Input, now: float) -> Result:
        state, outputs = real(state, event, now)
        return state, sorted(outputs, key=lambda output: isinstance(output, s.Record))

    monkeypatch.setattr(s, "step", acknowledge_first)
    noticed("was announced twice")


def test_half_published_partial_sums_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A takeover that trusts whoever has begun, instead of whoever has arrived."""
    monkeypatch.setattr(memory, "trusted", lambda ledger, rank, stamp: ledger.begun[rank] == stamp)
    noticed("step")


def test_a_place_that_is_used_again_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All members copy aside to one place: of two that die in a commit, one tile's old value is lost."""
    open_, close = memory.SharedMemory.open, memory.SharedMemory.close
    monkeypatch.setattr(memory.SharedMemory, "open", lambda self, tile, step, rank: open_(self, tile, step, 0))
    monkeypatch.setattr(
        memory.SharedMemory, "close", lambda self, tile, step, rank, *more: close(self, tile, step, 0, *more)
    )
    noticed("tile")


def test_saving_in_the_middle_of_a_step_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state that a generation finds is taken for whole, although some tiles have one step more behind them."""
    monkeypatch.setattr(memory.SharedMemory, "is_applied_in_part", property(lambda self: False))
    noticed("does not hold the state after", only=["kill everything", "save", "kill"])


def test_forgetting_who_made_a_step_certain_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regroup, "_remembered", lambda state, past: 1)
    noticed("what would finish it is gone")


def test_repeating_a_report_with_the_reporters_generation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator takes the step for one of this generation, and forgets who made the next one certain."""

    def recall_from(part: training.Generation, history: History, applied: Callable[[], int]) -> None:
        mine = {step: replace(one, generation=part.action.generation) for step, one in history.items()}
        recall(part, mine, applied)

    recall = training.Generation.recall_from
    monkeypatch.setattr(training.Generation, "recall_from", recall_from)
    noticed("what would finish it is gone", only=["kill at the next change"])


def test_obeying_a_lower_epoch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = control.step

    def obedient(state: control.WorkerState, event: Any) -> Any:
        return real(replace(state, epoch=min(state.epoch, getattr(event, "epoch", state.epoch))), event)

    monkeypatch.setattr(control, "step", obedient)
    noticed("epoch")


def test_not_waiting_for_a_member_that_leaves_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regrouping at once, while the one that was asked to leave still writes."""
    released = regroup.release

    def hasty(state: s.State, worker: s.Worker, now: float) -> Result:
        state, outputs = released(state, worker, now)
        if state.phase != "training" or not state.is_member(worker.number):
            return state, outputs
        gone = with_worker(state, replace(state.workers[worker.number], left=True))
        state, more = regroup.regroup(gone, "leave", "it is asked to leave", now)
        return state, outputs + more

    monkeypatch.setattr("distbelief.coordinator.rules.members.release", hasty)
    noticed("although generation", only=["scale", "leave"])


def test_sealing_with_a_part_missing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator does not wait for the slowest writer."""

    def hasty(state: s.State, event: m.PartSaved, now: float) -> Result:
        state, outputs = saving.part_saved(state, event, now)
        save = state.saves.open.get(event.step)
        if save and len(save.parts) == len(save.members) - 1:
            writers = tuple(worker for worker in save.members if worker in save.parts)
            return saving._seal(state, replace(save, members=writers), now)
        return state, outputs

    monkeypatch.setitem(s.TRANSITIONS["training"], m.PartSaved, hasty)  # type: ignore[arg-type]
    noticed("is to be sealed from parts", only=["kill"])


def test_parts_of_two_generations_in_one_checkpoint_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is a part, whoever were the members when it was taken."""

    def careless(state: s.State, event: m.PartSaved, now: float) -> Result:
        save = state.saves.open.get(event.step)
        if save and event.worker in save.members:
            event = msgspec.structs.replace(event, generation=save.generation)
        return saving.part_saved(state, event, now)

    monkeypatch.setitem(s.TRANSITIONS["training"], m.PartSaved, careless)  # type: ignore[arg-type]
    noticed("is to be sealed from parts")


def test_writing_to_a_tile_before_it_is_copied_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "finish_copies", lambda part: None)
    noticed("does not hold the state after")


def test_a_checkpoint_on_record_before_it_is_there_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def rash(state: s.State, save: Any, now: float) -> Result:
        return saving.sealed(state, m.CheckpointSealed(save.members[0], save.step), now)

    monkeypatch.setattr(saving, "_seal", rash)
    noticed("which was never sealed", only=["kill"])


def test_waiting_for_ever_for_the_part_of_a_dead_writer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_look_after", lambda state, save, now: (state, []))
    noticed("has not ended", only=["kill when it has finished"])


def test_a_decision_that_is_carried_out_without_room_for_its_record_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is taken for one that takes the record."""
    write = VirtualCoordinator._write
    monkeypatch.setattr(VirtualCoordinator, "_write", lambda self, entry: write(self, entry) or True)
    noticed("was announced twice", only=["full disk", "kill coordinator", "kill"])


def test_decisions_by_the_machines_clock_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody sets that clock by hours, and all are late at once."""

    def make(clock: SteadyClock, wall: Callable[[], float], monotonic: Callable[[], float]) -> None:
        real(clock, wall, monotonic)
        monkeypatch.setattr(clock, "now", wall)

    real = SteadyClock.__init__
    monkeypatch.setattr(SteadyClock, "__init__", make)
    noticed("never joined", only=["set clock"])


# --- around it -------------------------------------------------------------------------------------------------------


def test_seeds_are_read_as_they_are_written() -> None:
    assert parse_seeds("3") == [3]
    assert parse_seeds("1,4-6") == [1, 4, 5, 6]


def test_the_time_of_a_heartbeat_does_not_grow_with_the_members() -> None:
    few, many = measure(20)["a heartbeat"], measure(2000)["a heartbeat"]
    assert many < 10 * few  # a hundred times as many members; it was 1.2 times as long

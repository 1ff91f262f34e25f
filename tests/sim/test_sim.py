"""A bounded number of seeds; and bugs that are planted on purpose, each of which must be noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from distbelief.coordinator import detector, faults, regroup
from distbelief.coordinator import state as s
from distbelief.coordinator.ending import Result, with_worker
from distbelief.worker import control
from sim import memory
from sim.cluster import run
from sim.faults import Kind
from sim.run import parse_seeds, report
from sim.scale import measure

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


def test_fifty_members_keep_every_promise() -> None:
    assert not broken(FIFTY_MEMBERS, members=50)


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

    monkeypatch.setattr(faults, "release", hasty)
    monkeypatch.setattr("distbelief.coordinator.joining.release", hasty)
    noticed("although generation", only=["scale", "leave"])


# --- around it -------------------------------------------------------------------------------------------------------


def test_seeds_are_read_as_they_are_written() -> None:
    assert parse_seeds("3") == [3]
    assert parse_seeds("1,4-6") == [1, 4, 5, 6]


def test_the_time_of_a_heartbeat_does_not_grow_with_the_members() -> None:
    few, many = measure(20)["a heartbeat"], measure(2000)["a heartbeat"]
    assert many < 10 * few  # a hundred times as many members; it was 1.2 times as long

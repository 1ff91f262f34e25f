"""Somebody sets the machine's clock by hours while a run goes on: saving, detection and records do not change.

The clock of the run's processes is set, by libfaketime, not the machine's.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distbelief.chaos.falseclock import FalseClock, library
from tests.support.runs.command import JOBS, Outcome, Run
from tests.support.runs.reference import undisturbed
from tests.support.runs.watched import Watched

pytestmark = pytest.mark.skipif(library() is None, reason="libfaketime is not installed: `make launchers`, as root")

HOUR_S = 3600.0
SLOW = [JOBS / "small.py", "--set", "brake_s=0.1", "--set", "steps=400"]  # long, not costly: it sleeps


def test_a_clock_that_is_set_by_hours_changes_neither_saving_nor_detection_nor_the_order_of_records(
    start: Callable[..., Run], tmp_path: Path, wait_until: Callable[[Callable[[], object]], None]
) -> None:
    with FalseClock() as clock, clock.in_children():
        run = Watched(start, tmp_path, wait_until, *SLOW, "--workers", 2, "--save-every", "0.5s")
        run.after(4)
        clock.set(-3 * HOUR_S)
        two_more_are_saved(run)
        frozen = run.living()[1]
        run.signal(frozen, signal.SIGSTOP)
        run.wait_until(lambda: run.journal("fenced"))
        clock.set(100 * HOUR_S)
        run.wait_until(lambda: len(run.members()) == 2 and frozen not in run.members())
        run.has_members(2)  # one of them is a process that has known no other time
        two_more_are_saved(run)
        clock.set(-30 * HOUR_S)
        os.kill(run.coordinator(), signal.SIGKILL)
        run.wait_until(lambda: len(run.journal("epoch")) == 2)
        two_more_are_saved(run)
        result = run.result()
    assert result["weights_sha256"] == undisturbed(*SLOW)
    times = [entry["at"] for entry in run.journal("epoch", "generation", "checkpoint", "fenced", "lost", "ended")]
    assert times == sorted(times)
    assert times[-1] - times[0] < HOUR_S
    assert not [entry for entry in run.metrics("notice") if "refused" in entry["text"]]
    run.check_workers_lost(frozen=[frozen])


def two_more_are_saved(run: Watched) -> None:
    before = len(run.journal("checkpoint"))
    run.wait_until(lambda: len(run.journal("checkpoint")) >= before + 2)


def test_chaos_sets_the_clock(distbelief: Callable[..., Outcome]) -> None:
    faults = "set clock back 3h at step 10, kill worker at step 20, set clock forward 30h at step 30"
    job = [JOBS / "small.py", "--set", "steps=60", "--set", "nap_s=0.01"]
    shown: dict[str, Any] = distbelief("chaos", *job, "--workers", 2, "--faults", faults, "--json").json
    assert shown["weights_equal"]
    assert [fault["kind"] for fault in shown["faults"]] == ["set clock", "kill worker", "set clock"]

"""A run in one process: going back to a state that it had."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from distbelief.errors import DistBeliefError
from distbelief.replaying.rebuild import Rebuilt, loaded_here, nearest
from distbelief.replaying.records import read_run
from tests.support.replayed import recorded


def executed(rebuilt: Rebuilt, steps: range) -> list[str]:
    found = []
    for step in steps:
        rebuilt.replica.compute(step)
        found.append(rebuilt.replica.commit(step).fingerprint)
    return found


def test_back_to_a_kept_state_with_all_that_the_optimizer_knew(tmp_path: Path) -> None:
    run = read_run(recorded(tmp_path, save_at=(2,)))
    with loaded_here(run) as loaded:
        rebuilt = Rebuilt(loaded, nearest(run, 2).saved, until=7)
        assert rebuilt.replica.steps_applied() == 2
        executed(rebuilt, range(2, 3))
        rebuilt.keep()
        first = executed(rebuilt, range(3, 6))
        rebuilt.rewind()
        assert rebuilt.replica.steps_applied() == 3
        assert executed(rebuilt, range(3, 6)) == first == [run.recorded(step) for step in (3, 4, 5)]


def test_the_newest_checkpoint_that_suits(tmp_path: Path) -> None:
    run = read_run(recorded(tmp_path, save_at=(1, 3, 5)))
    assert nearest(run, 4).checkpoint == 3
    start = nearest(run, 7, suits=lambda saved: saved.step < 3)
    assert (start.checkpoint, start.skipped) == (1, ())
    assert nearest(run, 7, suits=lambda saved: False).saved is None


def test_steps_that_were_computed_on_a_device_and_applied_by_servers_are_not_done_again(tmp_path: Path) -> None:
    run = read_run(recorded(tmp_path))
    elsewhere = replace(run, launch=run.launch.with_options(device="cuda"), strategies=("ps:sync",))
    refused = pytest.raises(DistBeliefError, match="computed on cuda, and steps applied on processors")
    with refused, loaded_here(elsewhere):
        pass
    with loaded_here(replace(elsewhere, launch=run.launch)) as loaded:  # on a processor it is
        assert loaded.device.type == "cpu"

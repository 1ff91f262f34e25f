"""From what processes tell to one measurement."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.compare.launching import Ran
from bench.compare.records import measurement
from bench.compare.systems import SYSTEMS
from bench.running import DriverFailed
from bench.task import Task


def a_task(folder: Path, *, steps: int = 4, meet: bool = False) -> Task:
    task = Task("mlp", 2, steps, 2, 10, 7, {"kind": "sgd"}, str(folder), meet=meet, folder=str(folder))
    task.save(folder, np.arange(steps * 20).reshape(steps, 20))
    return task


def a_rank(folder: Path, rank: int, ends: list[float], losses: list[float | None]) -> None:
    told = {"ends": ends, "losses": losses, "evaluations": [[ends[-1], 4, 40 + rank, 50]], "peak_bytes": 100 + rank}
    (folder / f"rank{rank}.json").write_text(json.dumps(told))


def test_a_rank_gets_its_part_of_every_batch(tmp_path: Path) -> None:
    a_task(tmp_path)
    task = Task.load(str(tmp_path))
    assert task.batches(1).tolist()[0] == list(range(10, 20))
    assert np.concatenate([task.batches(0), task.batches(1)], axis=1).reshape(-1).tolist() == list(range(80))


def test_the_slowest_rank_counts_and_losses_are_means(tmp_path: Path) -> None:
    a_rank(tmp_path, 0, [11.0, 12.0, 13.0, 14.0], [4.0, 3.0, 2.0, 1.0])
    a_rank(tmp_path, 1, [11.5, 12.0, 13.0, 16.0], [2.0, None, 4.0, 3.0])
    ran = Ran(began=10.0, others=0.25, wire=[(10.0, 0), (12.0, 100), (16.0, 500), (17.0, 500)])
    found = measurement(SYSTEMS["ddp"], a_task(tmp_path), ran)
    assert found.samples_per_s == pytest.approx(2 * 20 / 4.0)
    assert found.losses == [3.0, 3.0, 3.0, 2.0]
    assert found.first_step_s == pytest.approx(1.5)
    assert found.peak_bytes == 101
    assert found.wire_bytes_per_step == pytest.approx(200.0)
    assert found.accuracy == [(6.0, pytest.approx(0.81))]
    assert found.others == 0.25


def test_speeds_of_processes_on_their_own_add_up(tmp_path: Path) -> None:
    a_rank(tmp_path, 0, [11.0, 12.0, 13.0, 14.0], [1.0] * 4)
    a_rank(tmp_path, 1, [11.0, 12.0, 13.0, 16.0], [1.0] * 4)
    found = measurement(SYSTEMS["ideal"], a_task(tmp_path, meet=True), Ran(began=10.0))
    assert found.samples_per_s == pytest.approx(20 / 2 + 20 / 4)
    assert found.wire_bytes_per_step is None


def test_our_updates_without_waiting_are_grouped_to_steps(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    steps = [{"kind": "step", "step": n, "loss": float(n), "at": 10.0 + n} for n in range(8)]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    (tmp_path / "output.txt").write_text('step 1\n{"weights_sha256": "abc"}\nbye\n')
    found = measurement(SYSTEMS["ps-async"], a_task(tmp_path), Ran(began=10.0, peak_bytes=5))
    assert found.losses == [0.5, 2.5, 4.5, 6.5]
    assert found.samples_per_s == pytest.approx(2 * 20 / 4.0)
    assert found.weights_sha256 == "abc"
    assert found.peak_bytes == 5
    with pytest.raises(DriverFailed, match="all steps once each"):
        measurement(SYSTEMS["allreduce"], a_task(tmp_path), Ran(began=10.0))


def test_a_run_that_stopped_short_has_failed(tmp_path: Path) -> None:
    with pytest.raises(DriverFailed, match="no rank"):
        measurement(SYSTEMS["ddp"], a_task(tmp_path), Ran(began=10.0))
    a_rank(tmp_path, 0, [11.0, 12.0], [1.0, 1.0])
    with pytest.raises(DriverFailed, match="2 of 4 steps"):
        measurement(SYSTEMS["ddp"], a_task(tmp_path), Ran(began=10.0))

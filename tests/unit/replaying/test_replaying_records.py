"""What is read of a run, and which step is chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from distbelief.control.messages import Canary, WorkerFailed
from distbelief.errors import DistBeliefError
from distbelief.launch.launch import Launch, keep_launch
from distbelief.options import RunOptions
from distbelief.replaying.records import JobFacts, canary_differs, chosen_step, read_run
from distbelief.worker.spec import JobSource
from tests.support.replayed import journalled

CANARY = Canary("c1", {"threads": "2", "torch": "2.6"})


def run_in(folder: Path, steps: int = 3, ended: dict[str, Any] | None = None, job_file: str = "job.py") -> Path:
    keep_launch(Launch(folder, RunOptions(2, "allreduce", threads=2), JobSource(job_file)))
    job = {"name": "x", "strategy": "allreduce", "canary": msgspec.to_builtins(CANARY), "seed": 0}
    (folder / "job.json").write_text(json.dumps(job))
    records = [{"kind": "step", "step": s, "fingerprint": f"f{s}", "generation": 1} for s in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [{"kind": "notice"}, *records]))
    journalled(folder, ended or {"status": "stopped"})
    return folder


def failed(step: int, kind: str = "loss") -> dict[str, Any]:
    failure = WorkerFailed(1, "here", kind, "the loss is nan", step=step, shard=2)
    return {"status": "failed", "failure": msgspec.to_builtins(failure)}


def test_a_run_that_was_stopped(tmp_path: Path) -> None:
    run = read_run(run_in(tmp_path))
    assert (run.launch.options.threads, run.failure, run.weights_sha256) == (2, None, "")
    assert [run.recorded(step) for step in (0, 2, 3)] == ["f0", "f2", None]
    assert [run.was_committed(step) for step in (0, 2, 3)] == [True, True, False]
    assert run.reached == 3, "the step that it was in"


def test_a_run_that_was_completed_has_no_step_after_its_last(tmp_path: Path) -> None:
    run = read_run(run_in(tmp_path, ended={"status": "completed", "result": {"weights_sha256": "ab"}}))
    assert (run.reached, run.weights_sha256) == (2, "ab")


def test_a_run_that_failed_and_lost_its_last_reports(tmp_path: Path) -> None:
    run = read_run(run_in(tmp_path, ended=failed(step=7)))
    assert (run.reached, chosen_step(run, None)) == (7, 7)
    assert [run.was_committed(step) for step in (2, 6, 7)] == [True, True, False]
    assert run.failure_at(6) is None
    assert run.failure_at(7) == run.failure


def test_a_failure_counts_only_until_the_run_is_resumed(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path, ended=failed(step=2))
    journalled(run_dir, {"kind": "resumed", "status": ""})
    assert read_run(run_dir).failure is None


@pytest.mark.parametrize("asked", [-1, 4, 100])
def test_steps_that_the_run_did_not_come_to(tmp_path: Path, asked: int) -> None:
    with pytest.raises(DistBeliefError, match=f"step {asked} is not among those of the run: it came to step 3") as info:
        chosen_step(read_run(run_in(tmp_path)), asked)
    assert "--step 0 … 3" in info.value.hint


def test_nobody_says_which_step(tmp_path: Path) -> None:
    with pytest.raises(DistBeliefError, match="did not fail"):
        chosen_step(read_run(run_in(tmp_path)), None)
    journalled(tmp_path, failed(step=-1, kind="timeout"))
    with pytest.raises(DistBeliefError, match="failed outside of any step: the loss is nan"):
        chosen_step(read_run(tmp_path), None)


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(DistBeliefError, match="there is no run directory"):
        read_run(tmp_path / "absent")
    with pytest.raises(DistBeliefError, match=r"there is no launch\.json in it"):
        read_run(tmp_path)


def test_a_run_that_never_began(tmp_path: Path) -> None:
    with pytest.raises(DistBeliefError, match="has not reached its first step"):
        read_run(run_in(tmp_path, steps=0))
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(DistBeliefError, match="has not reached its first step"):
        read_run(tmp_path)


def test_a_job_from_a_program(tmp_path: Path) -> None:
    with pytest.raises(DistBeliefError, match="came from a Python program") as info:
        read_run(run_in(tmp_path, job_file=""))
    assert "job file" in info.value.hint


def test_a_damaged_job_json(tmp_path: Path) -> None:
    (run_in(tmp_path) / "job.json").write_text('{"strategy":')
    with pytest.raises(DistBeliefError, match=r"job\.json is damaged"):
        read_run(tmp_path)


def test_the_canary_says_why_bits_may_differ(tmp_path: Path) -> None:
    run = read_run(run_in(tmp_path))
    assert canary_differs(run, Canary("c1", {})) == "", "the bits are the same, whatever else is not"
    why = canary_differs(run, Canary("c2", {"threads": "1", "torch": "2.6", "device": "cpu"}))
    assert why.endswith("device is cpu here and was unknown; threads is 1 here and was 2")
    data = replace(run, facts=JobFacts("allreduce", Canary("c1", {**CANARY.facts, "data": "0a"})))
    assert canary_differs(data, Canary("c1", {"data": "0a"})) == canary_differs(data, Canary("c1", {})) == ""
    assert "the job's data is not that of the run (checksum 0b, not 0a)" in canary_differs(
        data, Canary("c1", {"data": "0b"})
    )
    assert canary_differs(run, Canary("c2", dict(CANARY.facts))).endswith("the machine is another one")

"""Run directories that something happened to: a damaged journal, a launch that was ended before its first decision."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

from distbelief.coordinator.journal import read as read_journal
from tests.support.runs.command import JOBS, Outcome, Run
from tests.support.runs.reference import undisturbed
from tests.support.runs.saved import kill_everything, records, until

Start = Callable[..., Run]
Cli = Callable[..., Outcome]

JOB = [JOBS / "small.py", "--set", "steps=40", "--set", "hold_step=20"]


def test_a_damaged_journal_is_replaced_and_the_run_goes_on(start: Start, distbelief: Cli, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (tmp_path / "brake").touch()
    run = start("train", *JOB, "--workers", 2, "--save-every", 10, "--run-dir", "run")
    until(lambda: 20 in [one["step"] for one in records(run_dir, "checkpoint", "journal.jsonl")], run)
    kill_everything(run)
    run.wait()
    whole = (run_dir / "journal.jsonl").read_bytes()
    damaged = whole.replace(b'"kind":"generation"', b'"kind":"generatiON"')
    assert damaged != whole
    (run_dir / "journal.jsonl").write_bytes(damaged)
    (tmp_path / "brake").unlink()

    outcome = distbelief("resume", "run", "--workers", 3, "--json")
    assert outcome.json["weights_sha256"] == undisturbed(*JOB)
    assert "it is kept as journal-damaged-1.jsonl, and the run goes on from the checkpoint of step 20" in outcome.stderr
    assert (run_dir / "journal-damaged-1.jsonl").read_bytes() == damaged
    kept = read_journal(run_dir / "journal.jsonl")
    assert [one["kind"] for one in kept if one["kind"] in ("damaged", "loaded", "ended")] == [
        *("damaged", "loaded", "ended")
    ]
    generations = [one["generation"] for one in kept if one["kind"] == "generation"]
    before = max(map(int, re.findall(rb'"generation":(\d+)', damaged)))
    assert min(generations) > before, "no number is used again"


def test_without_a_sound_checkpoint_a_damaged_journal_is_an_error(distbelief: Cli, tmp_path: Path) -> None:
    assert distbelief("train", *JOB, "--workers", 1, "--save-every", "never", "--run-dir", "run").status == 0
    journal = tmp_path / "run" / "journal.jsonl"
    damaged = journal.read_bytes().replace(b'"kind":"generation"', b'"kind":"generatiON"')
    journal.write_bytes(damaged)
    outcome = distbelief("resume", "run")
    assert outcome.status == 1
    assert "the record is damaged" in outcome.stderr
    assert "there is no sound checkpoint to go on from" in outcome.stderr
    assert journal.read_bytes() == damaged


def test_a_run_that_was_refused_at_its_start_is_started_again_in_its_directory(distbelief: Cli, tmp_path: Path) -> None:
    where = ["--workers", 1, "--run-dir", "run", "--checkpoints", "safe"]
    refused = distbelief("train", *JOB, "--set", "no_such=1", *where)
    assert "no hyper-parameter `no_such`" in refused.stderr
    assert (tmp_path / "run" / "journal.jsonl").exists()
    outcome = distbelief("train", *JOB, *where, "--json")
    assert outcome.json["weights_sha256"] == undisturbed(*JOB)


def test_a_launch_that_was_ended_before_its_first_decision_is_started_again(
    start: Start, distbelief: Cli, tmp_path: Path
) -> None:
    """As by a batch system that puts a job back into its queue: by the same command, or by `resume`."""
    again = {"same": ["train", *JOB, "--workers", 2], "resumed": ["resume"]}
    for name, command in again.items():
        run = start("train", *JOB, "--workers", 2, "--run-dir", name)
        until((tmp_path / name / "launch.json").exists, run)
        run.signal(signal.SIGKILL)
        run.wait()
        assert run.leftovers() == []
        journal = tmp_path / name / "journal.jsonl"
        if journal.exists() and '"kind":"generation"' in journal.read_text():  # as if it had not come so far
            os.truncate(journal, 0)
            for later in ("metrics.jsonl", "coordinator.json"):
                (tmp_path / name / later).unlink(missing_ok=True)
        where = ["--run-dir", name] if command[0] == "train" else [name]
        outcome = distbelief(*command, *where, "--json")
        assert outcome.json["weights_sha256"] == undisturbed(*JOB)

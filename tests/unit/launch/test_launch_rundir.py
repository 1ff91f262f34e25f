"""A run directory: whether somebody runs it, how it was started, and what a stopped run is told to go on from."""

from __future__ import annotations

import contextlib
import io
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from distbelief.api import resume_run, run_file
from distbelief.coordinator.journal import Journal
from distbelief.errors import DistBeliefError, RunFailed, RunInterrupted
from distbelief.launch import rundir
from distbelief.launch.launch import Launch, keep_launch, read_launch
from distbelief.launch.pollloop import Signals
from distbelief.observe.view import open_view
from distbelief.options import RunOptions
from distbelief.worker.spec import JobSource


def launched(folder: Path, **options: object) -> Launch:
    return Launch(folder, RunOptions(2, "allreduce", **options))  # type: ignore[arg-type]


def test_a_run_is_idle_unless_somebody_has_its_journal_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "IDLE_S", 0.2)
    rundir.check_idle(tmp_path)  # it has never begun
    with Journal.open(tmp_path / "journal.jsonl"), pytest.raises(DistBeliefError, match="is running"):
        rundir.check_idle(tmp_path)
    rundir.check_idle(tmp_path)


def test_how_a_running_run_was_started_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "IDLE_S", 0.0)
    keep_launch(launched(tmp_path))
    before = (tmp_path / "launch.json").read_bytes()
    with Journal.open(tmp_path / "journal.jsonl"), pytest.raises(DistBeliefError):
        keep_launch(replace(launched(tmp_path, save_every="7"), resumed=True))
    assert (tmp_path / "launch.json").read_bytes() == before


@pytest.mark.parametrize("command", ["train", "resume"])
def test_a_second_command_changes_nothing_while_the_first_one_starts(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator locks its journal only when it has started."""
    monkeypatch.setattr(rundir, "IDLE_S", 0.2)
    run = tmp_path / "run"
    job = tmp_path / "job.py"
    job.write_text("job = None\n")
    with rundir.begun(run):
        keep_launch(replace(launched(run), job=JobSource(str(job), {"lr": "0.01"})))
        before = (run / "launch.json").read_bytes()
        with pytest.raises(DistBeliefError, match="is running") as caught:
            second_command(command, run, job)
        assert (run / "launch.json").read_bytes() == before
        assert f"distbelief stop {run}" in caught.value.hint
    with rundir.begun(run):  # the first one was ended before its first decision
        pass


def second_command(command: str, run: Path, job: Path) -> None:
    with contextlib.closing(open_view(io.StringIO())) as view:
        if command == "train":
            run_file(job, {"lr": "0.5"}, RunOptions(2, "allreduce"), run, view)
        else:
            resume_run(run, workers=3, strategy=None, view=view)


def test_a_resume_waits_until_the_process_that_led_the_run_has_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "IDLE_S", 0.0)
    with Journal.open(tmp_path / "journal.jsonl") as journal:
        journal.append({"kind": "ended", "status": "stopped", "reason": "SIGTERM received"})
    cleaned_up = threading.Event()
    with contextlib.ExitStack() as first:
        first.enter_context(rundir.led(tmp_path))
        second = threading.Thread(target=lambda: _lead_and_set(tmp_path, cleaned_up))
        second.start()
        second.join(0.3)
        assert not cleaned_up.is_set()
    second.join()
    assert cleaned_up.is_set()


def _lead_and_set(folder: Path, done: threading.Event) -> None:
    with rundir.led(folder):
        done.set()


def test_places_are_kept_for_a_resume_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    keep_launch(launched(run, checkpoints="saved", begin_from="s3://bucket/run"))
    monkeypatch.chdir("/")
    kept = read_launch(run)
    assert (kept.checkpoint_folder, kept.options.begin_from) == (str(tmp_path / "saved"), "s3://bucket/run")


def test_a_run_that_was_refused_does_not_take_its_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    rundir.make_run_dir(run)
    (run / "checkpoints").mkdir()
    (run / "logs" / rundir.COMMAND_LOG).write_text("error: unknown strategy\n")
    rundir.make_run_dir(run)  # nothing was started in it
    (run / "logs" / "coordinator.log").touch()
    with pytest.raises(DistBeliefError, match="is not empty"):
        rundir.make_run_dir(run)


def test_a_launch_that_was_ended_before_its_first_generation_is_taken_over(tmp_path: Path) -> None:
    """A batch system starts the same command again, or a user who has mended the job."""
    rundir.make_run_dir(tmp_path)
    keep_launch(launched(tmp_path))
    for name in ("logs/zygote.log", "journal.jsonl", "journal.jsonl.lock"):
        (tmp_path / name).touch()
    (tmp_path / "journal.jsonl").write_text('{"kind":"epo')
    rundir.make_run_dir(tmp_path)
    (tmp_path / "mine.txt").touch()
    with pytest.raises(DistBeliefError, match="is not empty"):
        rundir.make_run_dir(tmp_path)
    (tmp_path / "mine.txt").unlink()
    with Journal.open(tmp_path / "journal.jsonl") as journal:
        journal.append({"kind": "reference", "worker": 0})
        journal.append({"kind": "ended", "status": "failed", "reason": "the port is in use"})
    for name in ("metrics.jsonl", "coordinator.json", ".launch.json.123.draft", ".seen-by-ray", "code"):
        (tmp_path / name).touch()
    with rundir.begun(tmp_path):
        assert not (tmp_path / "journal.jsonl").exists(), "the next coordinator would replay the end"
        assert not (tmp_path / "metrics.jsonl").exists()
        assert (tmp_path / "launch.json").exists(), "it has the run's id"
    with Journal.open(tmp_path / "journal.jsonl") as journal:
        journal.append({"kind": "generation", "generation": 1})
    with pytest.raises(DistBeliefError, match="is not empty") as caught:
        rundir.make_run_dir(tmp_path)
    assert f"distbelief resume {tmp_path}" in caught.value.hint


def test_a_failed_start_is_left_alone_while_its_coordinator_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Ray the coordinator is on another machine, and may survive the process that has started it."""
    monkeypatch.setattr(rundir, "IDLE_S", 0.0)
    keep_launch(launched(tmp_path))
    with (
        Journal.open(tmp_path / "journal.jsonl"),
        pytest.raises(DistBeliefError, match="is running"),
        rundir.begun(tmp_path),
    ):
        pass
    assert (tmp_path / "journal.jsonl").exists()


def test_a_run_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(DistBeliefError, match="is a file"):
        rundir.make_run_dir(tmp_path / "run")


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([], "there is no checkpoint"),
        ([("checkpoint", 10), ("checkpoint", 20)], "the newest checkpoint is of step 20"),
        ([("checkpoint", 10), ("checkpoint", 20), ("loaded", 10)], "the newest checkpoint is of step 10"),
        ([("checkpoint", 10), ("loaded", 10), ("checkpoint", 15)], "the newest checkpoint is of step 15"),
    ],
)
def test_what_a_stopped_run_goes_on_from(tmp_path: Path, records: list[tuple[str, int]], said: str) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    with Journal.open(folder / "journal.jsonl") as journal:
        for kind, step in records:
            journal.append({"kind": kind, "step": step})
    with Signals() as signals:
        signals.received = signal.SIGTERM
        with pytest.raises(RunInterrupted) as caught:
            rundir.verdict(folder, signals)
    assert f"stopped by SIGTERM; {said}; nothing is left running" in caught.value.message
    assert caught.value.hint == f"go on with `distbelief resume '{folder}'`"
    assert caught.value.exit_code == 143


@pytest.mark.parametrize(
    ("reason", "error", "status", "said"),
    [
        ("SIGTERM received; a checkpoint of step 3 is saved", RunInterrupted, 143, "stopped by SIGTERM"),
        ("SIGHUP received", RunInterrupted, 129, "stopped by SIGHUP"),
        ("distbelief stop received; a checkpoint", RunInterrupted, 130, "stopped by distbelief stop"),
        ("the process that starts workers has died", RunFailed, 1, "the process that starts workers has died"),
    ],
)
def test_how_a_stopped_run_ended_for_a_reader(
    tmp_path: Path, reason: str, error: type[DistBeliefError], status: int, said: str
) -> None:
    with Journal.open(tmp_path / "journal.jsonl"):
        pass
    with pytest.raises(error, match=said) as caught:
        rundir.outcome({"kind": "ended", "status": "stopped", "reason": reason}, tmp_path)
    assert caught.value.exit_code == status

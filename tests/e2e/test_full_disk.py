"""A disk that is full for a while: nothing is corrupted, training goes on, and the weights are those of the twin."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

from distbelief.chaos.fulldisk import FullDisk
from distbelief.checkpoint.reading import verify
from distbelief.coordinator.journal import read as read_journal
from tests.support.runs.command import JOBS, Outcome, Run
from tests.support.runs.reference import undisturbed
from tests.support.runs.watched import Watched
from tests.support.smalldisk import small_disk

Start = Callable[..., Run]
Cli = Callable[..., Outcome]
Wait = Callable[[Callable[[], object]], None]

JOB = [JOBS / "small.py", "--set", "steps=60", "--set", "hold_step=20"]


class OnADisk(Watched):
    """A run whose directory is on a disk of its own; its output tells what it says while it can write nothing."""

    def __init__(self, start: Start, tmp_path: Path, wait_until: Wait, *arguments: object) -> None:
        self.folder = tmp_path / "disk" / "run"
        self._brake = tmp_path / "brake"
        self._brake.touch()
        self._said = tmp_path / "said"
        script = 'exec "$@" 2> "$0"'
        prefix = ["sh", "-c", script, str(self._said)]
        self.run = start("train", *arguments, "--run-dir", "disk/run", "--json", prefix=prefix)
        self._wait_until = wait_until

    def has_saved(self, step: int) -> None:
        """Nothing is under way then that would leave room on the disk when it fails."""
        self.wait_until(lambda: step in [one["step"] for one in self.journal("checkpoint")])

    def says(self, text: str) -> None:
        self.wait_until(lambda: text in self._said.read_text())

    def has_said(self, text: str) -> bool:
        return text in self._said.read_text()


def expect_whole(run: OnADisk, disk: FullDisk) -> None:
    """The weights are the twin's, every step is recorded once, and every file can be read."""
    assert run.result()["weights_sha256"] == undisturbed(*JOB)
    assert read_journal(run.folder / "journal.jsonl")[-1]["status"] == "completed"
    for line in (run.folder / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["kind"]
    for folder in (run.folder / "checkpoints").glob("step-*"):
        assert verify(str(folder.parent), int(folder.name.removeprefix("step-"))).step >= 0
    assert not [path for path in run.folder.rglob("*") if "draft" in path.name]
    disk.free()


def test_a_decision_waits_a_save_fails_and_all_goes_on_when_there_is_room(
    start: Start, tmp_path: Path, wait_until: Wait
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        run = OnADisk(start, tmp_path, wait_until, *JOB, "--workers", 3, "--save-every", 10)
        run.has_saved(20)
        disk.fill()
        # A page of the journal may have room for some more records: go on until one finds none.
        while not run.has_said("waits 1800 s for room"):
            run.wait_until(lambda: run.has_said("waits 1800 s for room") or len(run.living()) == 3)
            victim = run.living()[0]
            run.signal(victim, signal.SIGKILL)
            run.wait_until(lambda: run.has_said("waits 1800 s for room") or victim not in run.living())  # noqa: B023
        assert run.has_said("free some space")
        disk.free()
        run.says("the journal can be written again")
        expect_whole(run, disk)
        assert [one for one in run.metrics("notice") if "the journal can be written again" in one["text"]]


def test_members_train_on_save_again_and_wait_with_the_weights(start: Start, tmp_path: Path, wait_until: Wait) -> None:
    """The disk is full from step 20 beyond the last step: only the file of weights waits for room."""
    with small_disk(tmp_path / "disk") as disk:
        run = OnADisk(start, tmp_path, wait_until, *JOB, "--workers", 2, "--save-every", 10)
        run.has_saved(20)
        disk.fill()
        run.release()
        run.says("it waits 1800 s for room")
        assert run.has_said("weights.safetensors")
        assert run.has_said("No space left on device")
        run.says("is not saved")
        assert not run.has_ended()
        disk.free()
        expect_whole(run, disk)


def test_the_coordinator_is_killed_while_the_disk_is_full(start: Start, tmp_path: Path, wait_until: Wait) -> None:
    with small_disk(tmp_path / "disk") as disk:
        run = OnADisk(start, tmp_path, wait_until, *JOB, "--workers", 2)
        run.after(20)
        disk.fill()
        os.kill(run.coordinator(), signal.SIGKILL)
        run.says("waits 300 s for room")
        disk.free()
        expect_whole(run, disk)


def test_chaos_fills_a_disk(distbelief: Cli, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk"):
        faults = "fill disk at step 10 for 2s, kill worker at step 12, kill coordinator at step 30"
        job = [JOBS / "small.py", "--set", "steps=150", "--set", "nap_s=0.01"]
        outcome = distbelief("chaos", *job, "--faults", faults, "--workers", 3, "--run-dir", "disk/chaos", "--json")
        shown = outcome.json
        assert shown["weights_equal"], outcome.stderr
        assert (shown["steps_lost"], shown["exactly_once"], shown["not_carried_out"]) == (0, True, [])
        assert not list((tmp_path / "disk").rglob("filled-by-chaos"))


def test_chaos_fills_no_disk_that_others_use(distbelief: Cli) -> None:
    outcome = distbelief("chaos", *JOB, "--faults", "fill disk for 1s", "--run-dir", "chaos")
    assert outcome.status == 2
    assert "fills only a small disk that the run has for itself" in outcome.stderr
    assert "mount -t tmpfs" in outcome.stderr

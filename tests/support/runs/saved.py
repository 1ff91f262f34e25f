"""Runs that save checkpoints, as tests see them: what their files say, and how all of their processes are killed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from distbelief.checkpoint.reading import list_checkpoints
from tests.support.runs.command import JOBS, Run, processes_of
from tests.support.runs.watched import of_kinds, steps_of

JOB = JOBS / "stored.py"
SLOW = ["--set", "brake_s=0.02"]  # a shard, while there is a file `brake` in the folder in which the run was started
LARGE = ["--set", "wide=400000"]  # a checkpoint of 3 MB


def until(condition: Callable[[], object], run: Run, limit_s: float = 300) -> None:
    """Wait for it while that run goes on."""
    deadline = time.monotonic() + limit_s
    while True:
        ended = run.status() is not None  # looked at first: it may end right after the condition has come true
        if condition():
            return
        assert not ended, run.wait()
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def records(run_dir: Path, kind: str, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return list(of_kinds(run_dir / name, kind))


def step(run_dir: Path) -> int:
    """How many steps are reported."""
    return steps_of(run_dir)


def notices(run_dir: Path) -> list[str]:
    return [entry["text"] for entry in records(run_dir, "notice")]


def saved(run_dir: Path) -> list[int]:
    """The steps of all checkpoints that the run has ever had, as it says."""
    return [entry["step"] for entry in records(run_dir, "checkpoint")]


def sealed(run_dir: Path) -> list[int]:
    """The steps of the checkpoints that are there, newest first."""
    return list_checkpoints(run_dir / "checkpoints")


def unsealed(run_dir: Path) -> set[str]:
    """Folders of saves that are not finished."""
    return {path.name for path in run_dir.glob("checkpoints/step-*") if not (path / "manifest.json").exists()}


def damage(run_dir: Path, number: int) -> Path:
    """Flip a bit of a part of that checkpoint; which one."""
    part = sorted((run_dir / "checkpoints" / f"step-{number:09d}").glob("part-*"))[0]
    content = bytearray(part.read_bytes())
    content[-3] ^= 1
    part.write_bytes(content)
    return part


def kill_all(found: list[psutil.Process], chance: random.Random) -> None:
    """SIGKILL to each of them, in any order: each one may see others die before it."""
    for process in chance.sample(found, len(found)):
        try:
            process.kill()
        except psutil.NoSuchProcess:  # with its parent, a moment ago
            continue


def kill_everything(run: Run, chance: random.Random | None = None) -> None:
    """Engine, coordinator, zygote and workers."""
    kill_all(processes_of(run.mark), chance or random.Random(0))
    run.wait()
    assert run.leftovers() == []


def check_whole(run_dir: Path, result: dict[str, Any]) -> None:
    """However often it was interrupted, every step counts once, and those executed again gave the same bits."""
    assert sorted(entry["step"] for entry in records(run_dir, "step")) == list(range(result["steps"]))
    assert [text for text in notices(run_dir) if "different results" in text] == []
    assert records(run_dir, "ended", "journal.jsonl")[-1]["status"] == "completed"

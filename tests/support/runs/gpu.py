"""Commands of ours that the tests start on a machine with a CUDA device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from distbelief.coordinator.journal import read as read_journal

ROOT = Path(__file__).resolve().parents[3]
JOB = ROOT / "tests" / "gpu" / "jobs" / "small.py"


def steps_of(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return sum(1 for line in lines if line.endswith("\n") and json.loads(line)["kind"] == "step")


class Command:
    """A command of ours that runs."""

    def __init__(self, *words: str) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "distbelief.cli.main", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip

    def output(self, status: int = 0) -> str:
        out, errors = self.process.communicate(timeout=200)
        assert self.process.returncode == status, (self.process.args, out[-3000:], errors[-3000:])
        return out if status == 0 else out + errors

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.output().splitlines()[-1])
        return found

    def end(self) -> None:
        if self.process.poll() is None:
            for one in psutil.Process(self.process.pid).children(recursive=True):
                one.kill()
            self.process.kill()
            self.process.communicate()

    def wait_for(self, run_dir: Path, steps: int) -> None:
        """Until the run has applied so many steps."""
        deadline = time.monotonic() + 150
        while steps_of(run_dir) < steps:
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, "it does not come so far"
            time.sleep(0.01)


def kill_a_worker(run: Command, run_dir: Path, after: int) -> None:
    run.wait_for(run_dir, after)
    members = [r["members"] for r in read_journal(run_dir / "journal.jsonl") if r.get("members")][-1]
    victim = psutil.Process(members[-1]["pid"])
    assert run.process.pid in {parent.pid for parent in victim.parents()}
    victim.kill()


def most_members(run_dir: Path) -> int:
    journal = read_journal(run_dir / "journal.jsonl")
    return max((len(record["members"]) for record in journal if record.get("members")), default=0)

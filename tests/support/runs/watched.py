"""A run that tests watch and disturb while it goes on: what its files say, and signals to its members."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.support.runs.command import Run

Start = Callable[..., Run]
Wait = Callable[[Callable[[], object]], None]


class Watched:
    """A run and its files. It may be slow, if its job looks for a file `brake`, until its result is asked for."""

    def __init__(self, start: Start, tmp_path: Path, wait_until: Wait, *arguments: object) -> None:
        self.folder = tmp_path / "run"
        self._brake = tmp_path / "brake"
        self._brake.touch()
        self.run = start("train", *arguments, "--run-dir", "run", "--json")
        self.wait_until = wait_until

    def journal(self, kind: str) -> list[dict[str, Any]]:
        return self._lines("journal.jsonl", kind)

    def metrics(self, *kinds: str) -> list[dict[str, Any]]:
        return self._lines("metrics.jsonl", *kinds)

    def _lines(self, name: str, *kinds: str) -> list[dict[str, Any]]:
        return list(of_kinds(self.folder / name, *kinds))

    def step(self) -> int:
        return steps_of(self.folder)

    def after(self, steps: int) -> None:
        self.wait_until(lambda: self.step() >= steps or self.has_ended())
        assert self.step() >= steps, f"it has ended: {self.run.wait()}"

    def has_ended(self) -> bool:
        return self.run.status() is not None

    def members(self) -> dict[int, int]:
        """Worker -> process, of the newest generation."""
        found = self.journal("generation")
        return {member["worker"]: member["pid"] for member in found[-1]["members"]} if found else {}

    def living(self) -> list[int]:
        """Members that have not been killed: a generation without the last victim may not have been written yet."""
        return sorted(worker for worker, pid in self.members().items() if _lives(pid))

    def has_members(self, count: int) -> None:
        """That many, and they have committed a step together."""
        self.wait_until(lambda: len(self.members()) == count)
        self.wait_until(lambda: self.metrics("step")[-1]["generation"] == self.journal("generation")[-1]["generation"])

    def signal(self, worker: int, number: signal.Signals) -> None:
        pid = self.members()[worker]
        expect_ours(pid)
        os.kill(pid, number)

    def kill_all(self) -> None:
        self.kill(self.members())

    def kill(self, workers: Iterable[int]) -> None:
        """These members, in one moment: nobody has time to take over from the first before the last is gone."""
        members = self.members()
        pids = [members[worker] for worker in workers]
        for pid in pids:
            expect_ours(pid)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def coordinator(self) -> int:
        return int(json.loads((self.folder / "coordinator.json").read_text())["pid"])

    def lasting_steps(self) -> list[int]:
        """As they were reported, without those that were executed again after the members had said so."""
        steps: list[int] = []
        for entry in self.metrics("step", "rollback"):
            if entry["kind"] == "rollback":
                steps = [step for step in steps if step < entry["step"]]
            else:
                steps.append(entry["step"])
        return steps

    def release(self) -> None:
        """Let it be quick from now on."""
        self._brake.unlink()

    def result(self) -> dict[str, Any]:
        self.release()
        outcome = self.run.wait().json
        # Every step was committed and reported exactly once.
        assert sorted(self.lasting_steps()) == list(range(outcome["steps"]))
        assert outcome["reexecuted"] == sum(one["reached"] - one["step"] for one in self.metrics("rollback"))
        assert not [n for n in self.metrics("notice") if "different results" in n["text"]]
        return outcome


def of_kinds(path: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """The whole lines of a file, of these kinds. Asked for many times a second: other lines are not even parsed."""
    marks = [f'"{kind}"' for kind in kinds]
    for line in path.read_text().split("\n")[:-1] if path.exists() else []:
        if any(mark in line for mark in marks) and (entry := json.loads(line))["kind"] in kinds:
            yield entry


def steps_of(run_dir: Path) -> int:
    """How many steps are reported. Likewise."""
    path = run_dir / "metrics.jsonl"
    return path.read_text().rpartition("\n")[0].count('"kind":"step"') if path.exists() else 0


def expect_ours(pid: int) -> None:
    assert any("distbelief" in part for part in psutil.Process(pid).cmdline())


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

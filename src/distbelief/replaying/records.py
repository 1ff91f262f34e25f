"""Reads the records of a run that a replay needs: its launch, the fingerprint of every step, and its end. Chooses the
step to replay if the user names none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from distbelief.checkpoint.records import read_record
from distbelief.control.messages import Canary, WorkerFailed
from distbelief.coordinator.journal import read as read_journal
from distbelief.coordinator.metricsfile import (
    NAME,
    RECENT_BYTES,
    UNREADABLE,
    Record,
    Tail,
    blocks_of_lines,
    newest_part,
    open_part,
    parse,
    read_index,
)
from distbelief.errors import DistBeliefError
from distbelief.launch.launch import Launch, read_launch
from distbelief.launch.rundir import ended

_KEPT_STEPS = 10_000
_MOST_WINDOWS = 2
"""A replay asks for an old step and for the last ones by turns."""


@dataclass(frozen=True)
class _Window:
    """Some steps of a part as it was at some size, and which steps the part has."""

    size_bytes: int
    begin: int
    """The first step that was kept; `_KEPT_STEPS` numbers are."""
    found: dict[int, Record]


class Steps:
    """The records of single steps, in little memory. Made for steps that are asked for in rising order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._windows: dict[int, _Window] = {}
        """Part -> what was kept of it; the part that was read last comes last."""
        self._index = {number: (entry["first"], entry["last"]) for number, entry in read_index(path.parent).items()}
        self._ranges: dict[int, tuple[int, int, int]] = {}
        """Of a part that was read and is not in the index: its size, its first and its last step."""
        self.last = self._last()
        """The last step that was recorded; -1: none."""

    def get(self, step: int) -> Record | None:
        """The last record of this step: a step that was executed again has several."""
        while True:
            newest = newest_part(self._path.parent)
            for number in range(newest + 1, 0, -1):
                first, last = self._index.get(number, (step, step))
                if first <= step <= last and (found := self._in_part(number, number > newest, step)):
                    return found
            if newest_part(self._path.parent) == newest:  # otherwise the part that was present has got a number
                return None

    def _in_part(self, number: int, is_present: bool, step: int) -> Record | None:
        """None also for a part that cannot be read, as for one that a crash has lost."""
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            file = self._path.open("rb", buffering=0) if is_present else open_part(self._path.parent, number)
            if file is None:
                return None
            stack.enter_context(file)
            size_bytes = os.fstat(file.fileno()).st_size
            known, first, last = self._ranges.get(number, (-1, 0, 0))
            if known == size_bytes and not first <= step <= last:
                return None
            window = self._windows.pop(number, None)
            if window is None or window.size_bytes != size_bytes or not 0 <= step - window.begin < _KEPT_STEPS:
                found = {}
                first, last = -1, -1
                with contextlib.suppress(*UNREADABLE):
                    for lines in blocks_of_lines(file):
                        for record in map(parse, lines):
                            if record is None or record.get("kind") != "step":
                                continue
                            there = record["step"]
                            first, last = there if first < 0 else min(first, there), max(last, there)
                            if step <= there < step + _KEPT_STEPS:
                                found[there] = record
                self._ranges[number] = size_bytes, first, last
                window = _Window(size_bytes, step, found)
            self._windows[number] = window
            while len(self._windows) > _MOST_WINDOWS:
                del self._windows[next(iter(self._windows))]
            return window.found.get(step)
        return None

    def _last(self) -> int:
        last = max([_last_step(Tail(self._path, RECENT_BYTES)), *(last for _, last in self._index.values())])
        return last if last >= 0 else _last_step(Tail(self._path))


def _last_step(tail: Tail) -> int:
    last = -1
    while found := tail.read():
        last = max([last, *(one["step"] for one in found if one.get("kind") == "step")])
    return last


class JobFacts(msgspec.Struct, frozen=True):
    """Facts of the job on the workers, from job.json."""

    strategy: str
    canary: Canary


@dataclass(frozen=True)
class RecordedRun:
    run_dir: Path
    launch: Launch
    facts: JobFacts
    steps: Steps
    """The records of committed steps."""
    failure: WorkerFailed | None = None
    """The cause of the run's failure, if it failed."""
    weights_sha256: str = ""
    """The hash of the trained weights, if the run completed."""
    strategies: tuple[str, ...] = ()
    """All strategies of the run: it may have been resumed with another one."""

    @property
    def reached(self) -> int:
        """The last step that was begun: the step after the last commit, or the step of the failure."""
        failed = self.failure.step if self.failure else -1
        return max(failed, self.steps.last + (0 if self.weights_sha256 else 1))

    def recorded(self, step: int) -> str | None:
        """The step's fingerprint."""
        record = self.steps.get(step)
        return None if record is None else str(record["fingerprint"])

    def loss(self, step: int) -> float | None:
        """The step's loss; of a step that was executed again, the last one."""
        record = self.steps.get(step)
        return None if record is None or record.get("loss") is None else float(record["loss"])

    def was_committed(self, step: int) -> bool:
        """Whether the step was committed. The last reports of a failing run may be lost, so a step may be committed
        without a record."""
        failed = self.failure.step if self.failure else -1
        return step < failed or step <= self.steps.last

    def failure_at(self, step: int) -> WorkerFailed | None:
        return self.failure if self.failure and self.failure.step == step else None


def read_run(run_dir: Path) -> RecordedRun:
    """Read the records of a run, which may still be running."""
    if not run_dir.is_dir():
        raise DistBeliefError(f"there is no run directory {run_dir}", hint="give one as `train` printed it")
    launch = read_launch(run_dir)
    if not launch.job.file:
        raise DistBeliefError(
            f"the job of {run_dir} came from a Python program, not from a file: it cannot be made again",
            hint="put the job into a job file, and train that: `distbelief new job.py` writes one to start from",
        )
    end = ended(run_dir) or {}
    failure = msgspec.convert(end["failure"], WorkerFailed) if "failure" in end else None
    steps = Steps(run_dir / NAME)
    if steps.last < 0 and (failure is None or failure.step < 0):
        why = f": {failure.message}" if failure else ""
        raise DistBeliefError(f"the run {run_dir} has not reached its first step, so no step can be replayed{why}")
    facts = read_record(run_dir / "job.json", JobFacts)
    strategies = _strategies(run_dir, launch)
    return RecordedRun(run_dir, launch, facts, steps, failure, _weights_of(end), strategies)


def _strategies(run_dir: Path, launch: Launch) -> tuple[str, ...]:
    """The strategies of the first start and of each resumption."""
    records = read_journal(run_dir / "journal.jsonl")
    first = [record["job"]["strategy"] for record in records if record.get("kind") == "reference"]
    later = [record["strategy"] for record in records if record.get("kind") == "resumed" and "strategy" in record]
    return (*first, *later, launch.options.strategy)


def chosen_step(run: RecordedRun, asked: int | None) -> int:
    """The step to replay: the requested step, or the step at which the run failed."""
    if asked is None:
        if run.failure is None or run.failure.step < 0:
            what = f"failed outside of any step: {run.failure.message}" if run.failure else "did not fail"
            raise DistBeliefError(
                f"the run {run.run_dir} {what}", hint=f"say which step is to be replayed: --step 0 … {run.reached}"
            )
        return run.failure.step
    if not 0 <= asked <= run.reached:
        raise DistBeliefError(
            f"step {asked} is not among those of the run: it came to step {run.reached}",
            hint=f"steps are counted from 0: --step 0 … {run.reached}",
        )
    return asked


def canary_differs(run: RecordedRun, here: Canary) -> str:
    """The reason to expect other bits here than in the run; empty if the canaries agree.

    The canary is the first shard of step 0 with the initial weights, so it covers the job, its data and the machine.
    """
    there = run.facts.canary
    data = there.facts.get("data"), here.facts.get("data")
    if None not in data and data[0] != data[1]:
        other = f"the job's data is not that of the run (checksum {data[1]}, not {data[0]})"
        return f"the same bits cannot be expected: {other}"
    if there.fingerprint == here.fingerprint:
        return ""
    names = sorted((there.facts.keys() | here.facts.keys()) - {"data"})
    differences = [
        f"{name} is {here.facts.get(name, 'unknown')} here and was {there.facts.get(name, 'unknown')}"
        for name in names
        if there.facts.get(name) != here.facts.get(name)
    ]
    reason = "; ".join(differences) or "the job file, its data or the machine is another one"
    return f"the same bits cannot be expected: {reason}"


def _weights_of(end: Mapping[str, Any]) -> str:
    result = end.get("result") or {}
    return str(result.get("weights_sha256", ""))

"""Start a run, follow the files it writes, kill its workers, end it. Knows nothing of figures and goals.

Only processes that descend from what was started here are ever killed, and nothing of it is left at the end.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import psutil

from bench import running
from bench.recovery.figures import Commit, Kill, Observed, victims_generation, whole_again
from bench.running import DriverFailed
from distbelief.coordinator.journal import read as read_journal
from distbelief.coordinator.metricsfile import Tail

Answer = TypeVar("Answer")

POLL_S = 0.05
LAUNCH_LIMIT_S = 180.0
RECOVERY_LIMIT_S = 120.0
END_LIMIT_S = 30.0
RECENT_STEPS = 200
MOMENT_S = 0.25
"""The kill comes at a random moment within so long (or two steps, if that is longer) after the run has settled."""


@dataclass(frozen=True)
class Plan:
    workers: int
    kills: int
    seed: int


class Files(Protocol):
    """What a run writes while it trains."""

    commits: list[Commit]
    members: dict[int, list[int]]

    def poll(self) -> None:
        """Read what is new."""
        ...


class OurFiles:
    """A run directory of DistBelief."""

    def __init__(self, run_dir: Path) -> None:
        self.commits: list[Commit] = []
        self.members: dict[int, list[int]] = {}
        self.workers: dict[int, list[int]] = {}
        self.shards: dict[int, list[int]] = {}
        self.decided_at: dict[int, float] = {}
        self.recomputed: dict[int, int] = {}
        self._begins: dict[int, int] = {}
        self._busy: dict[tuple[int, int], tuple[float, int]] = {}
        self._journal = run_dir / "journal.jsonl"
        self._journal_bytes = 0
        self._tail = Tail(run_dir / "metrics.jsonl")

    def poll(self) -> None:
        for record in self._tail.read():
            if record["kind"] == "step":
                self.commits.append(Commit(record["step"], record["at"], record["generation"]))
            elif record["kind"] == "recovery":
                self.recomputed[record["generation"]] = record["recomputed"]
                self._begins[record["generation"]] = record["step"]
            elif record["kind"] == "workers":
                for worker in record["workers"]:
                    key = (record["generation"], worker["worker"])
                    self._busy[key] = (worker["data_s"] + worker["compute_s"], worker["shards"])
        with contextlib.suppress(FileNotFoundError):
            size_bytes = self._journal.stat().st_size
            if size_bytes != self._journal_bytes:
                self._journal_bytes = size_bytes
                self._read_journal()
        for place in range(max(0, len(self.commits) - RECENT_STEPS), len(self.commits)):
            self.commits[place] = self._rightly_placed(self.commits[place])

    def _rightly_placed(self, commit: Commit) -> Commit:
        """A step that was committed, but not yet told when its generation broke, is told by the next one, under the
        next one's number: its time is from before that one was decided, or its step before the first of that one."""
        generation = commit.generation
        while generation - 1 in self.members and (
            commit.at < self.decided_at[generation] or commit.step < self._begins.get(generation, 0)
        ):
            generation -= 1
        return replace(commit, generation=generation)

    def _read_journal(self) -> None:
        for record in read_journal(self._journal):
            if record["kind"] == "generation":
                number = record["generation"]
                self.members[number] = [member["pid"] for member in record["members"]]
                self.workers[number] = [member["worker"] for member in record["members"]]
                self.shards[number] = [member["shards"][1] - member["shards"][0] for member in record["members"]]
                self.decided_at[number] = record["at"]

    def shard_s(self) -> float | None:
        """Seconds that a worker needed for a shard, by the workers' own clocks, over all generations. (Its part of the
        update is in it: the workers do not tell them apart.)"""
        busy_s = sum(seconds for seconds, shards in self._busy.values() if shards)
        shards = sum(shards for _, shards in self._busy.values())
        return busy_s / shards if shards else None

    def busy(self, generation: int) -> list[tuple[float, int]]:
        """By rank: the seconds that a member of this generation has worked on shards, and how many they were."""
        return [self._busy.get((generation, worker), (0.0, 0)) for worker in self.workers[generation]]

    def problems(self) -> list[str]:
        """Each step exactly once and in order, whatever was killed: that is the promise that makes the times mean
        something."""
        steps = [commit.step for commit in self.commits]
        if steps != list(range(len(steps))):
            return ["metrics.jsonl does not hold every step once, in order"]
        return []


class PeerFiles:
    """The folder that a peer's processes write to: one file per process, one line per step it has applied."""

    def __init__(self, folder: Path) -> None:
        self.commits: list[Commit] = []
        self.members: dict[int, list[int]] = {}
        self._folder = folder
        self._tails: dict[int, Tail] = {}
        self._first: dict[tuple[int, int], float] = {}

    def poll(self) -> None:
        for path in self._folder.glob("*.jsonl"):
            self._tails.setdefault(int(path.stem), Tail(path))
        before = len(self._first)
        for pid, tail in self._tails.items():
            for record in tail.read():
                self._take(pid, record)
        if len(self._first) != before:
            self.commits = sorted(
                (Commit(step, at, generation) for (generation, step), at in self._first.items()),
                key=lambda commit: commit.at,
            )

    def _take(self, pid: int, record: dict[str, Any]) -> None:
        generation, step, at = record["generation"], record["step"], record["at"]
        pids = self.members.setdefault(generation, [])
        if pid not in pids:
            pids.append(pid)
        # A step is committed when the first process has applied it, whichever that is.
        self._first[generation, step] = min(at, self._first.get((generation, step), at))


@contextlib.contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], stop: signal.Signals = signal.SIGINT
) -> Iterator[subprocess.Popen[bytes]]:
    """A run that is ended, with all its processes, when the block is left."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            env={**running.environment(), **environment},
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
        )
        try:
            yield process
        except EndedEarly as error:
            raise DriverFailed(f"{' '.join(command)}\n{error}:\n{_last_words(errors)}") from error
        finally:
            _end(process, stop)


class EndedEarly(Exception):
    """The run ended, or stood still, before all was measured."""


def _last_words(errors: IO[bytes]) -> str:
    errors.seek(0)
    return errors.read().decode(errors="replace")[-4000:]


def _end(process: subprocess.Popen[bytes], stop: signal.Signals) -> None:
    left: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        left = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        process.send_signal(stop)
        try:
            process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _, stubborn = psutil.wait_procs(left, timeout=3)
    for one in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(stubborn, timeout=3)


def wait_for(process: subprocess.Popen[bytes], found: Callable[[], Answer | None], limit_s: float, what: str) -> Answer:
    """Ask until there is an answer."""
    deadline = time.monotonic() + limit_s
    while (answer := found()) is None:
        if process.poll() is not None:
            raise EndedEarly(f"ended with {process.returncode} while waiting for {what}")
        if time.monotonic() > deadline:
            raise EndedEarly(f"{what}: not within {limit_s:.0f} s")
        time.sleep(POLL_S)
    return answer


def kill_workers(process: subprocess.Popen[bytes], files: Files, plan: Plan, done: list[Kill]) -> None:
    """Kill random members at random moments, each time when all workers are there again and have committed steps.
    `done` grows with each kill that the run has recovered from."""
    dice = random.Random(plan.seed)
    old, highest = -1, -1

    def settled() -> Commit | None:
        files.poll()
        return whole_again(plan.workers, files.commits, files.members, after=old, beyond=highest)

    wait_for(process, settled, LAUNCH_LIMIT_S, "the first steps")
    for number in range(1, plan.kills + 1):
        time.sleep(dice.uniform(0, max(MOMENT_S, 2 * (files.commits[-1].at - files.commits[-2].at))))
        files.poll()
        kill = _kill(process, dice.choice(sorted(files.members[max(files.members)])))

        def recovered(kill: Kill = kill) -> Commit | None:
            nonlocal old, highest
            files.poll()
            # Found anew each time: the files may tell of its last generation, and its last steps, after the kill.
            old = victims_generation(files.members, kill.pid)
            highest = max(commit.step for commit in files.commits if commit.generation <= old)
            return settled()

        wait_for(process, recovered, RECOVERY_LIMIT_S, f"all {plan.workers} workers after kill {number}")
        done.append(kill)


def _kill(process: subprocess.Popen[bytes], pid: int) -> Kill:
    try:
        ours = process.pid in {parent.pid for parent in psutil.Process(pid).parents()}
    except psutil.NoSuchProcess as error:
        raise EndedEarly(f"worker process {pid} was gone before it was killed") from error
    if not ours:
        raise EndedEarly(f"process {pid} does not descend from the run that was started, so it is not killed")
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    return Kill(pid, at)


def observed(files: Files, workers: int, kills: Sequence[Kill]) -> Observed:
    if isinstance(files, OurFiles):
        return Observed(
            workers, kills, files.commits, files.members, files.decided_at, files.recomputed, files.shard_s()
        )
    return Observed(workers, kills, files.commits, files.members)

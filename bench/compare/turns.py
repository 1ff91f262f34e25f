"""Systems side by side in time: all are started, and one runs while the others are stopped, in turns of some seconds.

A machine that others use too changes its speed within minutes by more than what is to be told apart. Whole runs, one
after the other, see different machines; two turns that follow each other see nearly the same one.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.compare import isolation
from bench.compare.launching import OUTPUT, started, tail
from bench.compare.plan import rotated
from bench.compare.system import Start, System
from bench.running import TIMEOUT_S, DriverFailed, environment
from bench.task import VARIABLE, Task

SETTLING_S = 0.3
"""After a pause caches are cold."""
FEWEST_STEPS = 3
LOOK_S = 0.05


@dataclass(frozen=True)
class Turn:
    began: float
    ended: float


class Runner:
    """A system's processes on a task, which can be stopped and go on."""

    def __init__(self, system: System, start: Start) -> None:
        self.system = system
        self.task = Task.load(str(start.folder))
        self.turns: list[Turn] = []
        variables = {**environment(), VARIABLE: str(start.folder), **system.variables}
        self._folder = start.folder
        with (start.folder / OUTPUT).open("w") as output:
            self._processes = started(system.commands(start), variables, start.folder, output)

    def warm_up(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not self._is_warm():
            if self.has_ended or time.monotonic() > deadline:
                raise DriverFailed(f"{self.system.title} did not come to its first steps:\n{tail(self._folder)}")
            time.sleep(LOOK_S)

    def _is_warm(self) -> bool:
        counts = [len(ends) for ends in self.ends()]
        return bool(counts) and min(counts) >= self.task.warm_up

    @property
    def has_ended(self) -> bool:
        return any(process.poll() is not None for process in self._processes)

    def take_turn(self, seconds: float) -> None:
        self.send(signal.SIGCONT)
        began = time.time()
        time.sleep(seconds)
        self.turns.append(Turn(began, time.time()))
        self.send(signal.SIGSTOP)

    def send(self, number: signal.Signals) -> None:
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                there = psutil.Process(process.pid)
                for one in (there, *there.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.send_signal(number)

    def ends(self) -> list[list[float]]:
        """Of the steps so far, by rank."""
        if self.system.kind == "ours":
            records = [json.loads(line) for line in _lines(self._folder / "run" / "metrics.jsonl")]
            return [[record["at"] for record in records if record["kind"] == "step"]]
        found = [[float(line) for line in _lines(file)] for file in sorted(self._folder.glob("rank*.ends"))]
        return found if len(found) == self.task.workers else []

    def speeds(self) -> list[float | None]:
        """Samples/s in each turn."""
        ends = self.ends()
        if self.system.ends_with_all:  # on their own: speeds add up
            by_rank = [[steps_per_s(one, turn) for one in ends] for turn in self.turns]
            return [None if None in some else self.task.batch_per_worker * sum(filter(None, some)) for some in by_rank]
        found = [steps_per_s(ends[0], turn) for turn in self.turns]
        return [None if one is None else self.task.global_batch * one for one in found]

    def wait(self) -> None:
        for process in self._processes:
            process.wait()


def _lines(file: Path) -> list[str]:
    """The whole ones, of a file that is being written."""
    text = file.read_text() if file.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def steps_per_s(ends: Sequence[float], turn: Turn) -> float | None:
    """From the first to the last step that ended in a turn; None if there were too few.

    >>> steps_per_s([1.0, 2.5, 3.0, 3.5, 4.0, 9.0], Turn(2.0, 5.0))
    2.0
    """
    inside = [end for end in ends if turn.began + SETTLING_S < end < turn.ended]
    return (len(inside) - 1) / (inside[-1] - inside[0]) if len(inside) > FEWEST_STEPS else None


def take_turns(runs: Sequence[tuple[System, Start]], seconds: float, rounds: int) -> dict[str, list[float | None]]:
    """System -> its samples/s in each round."""
    with _ended([]) as runners:
        for system, start in runs:
            runners.append(Runner(system, start))
            runners[-1].warm_up()
            runners[-1].send(signal.SIGSTOP)
        for number in range(rounds):
            for runner in rotated(runners, number):
                runner.take_turn(seconds)
            if any(runner.has_ended for runner in runners):
                break
        return {runner.system.name: runner.speeds() for runner in runners}


@contextlib.contextmanager
def _ended(runners: list[Runner]) -> Iterator[list[Runner]]:
    """Whatever happens, nothing is left standing still."""
    try:
        yield runners
    finally:
        for runner in runners:
            runner.send(signal.SIGCONT)
            runner.send(signal.SIGTERM)
        isolation.end_descendants()
        for runner in runners:
            runner.wait()

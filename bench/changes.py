"""What changes cost those who train on: a coordinator that dies again and again, and workers that join.

    .venv/bin/python -m bench.changes [--workers 1] [--times 20] [--joins 10] [--strategy allreduce] [--json FILE]

Workers with one thread each train the MLP of the data-parallel benchmark. First the coordinator is killed, again
and again: the step rate while there is none is set against the rate just before, and nobody may be started again, nor a
step be missing or be there twice. Then one more worker comes and goes (`distbelief scale`): the pause is the time
between the last commit without it and the first with it, less a step. One worker by default: with as many as there are
cores, what is measured is mostly how they share those with the process that starts. The exit status is 1 when a promise
was broken, 2 when something could not be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import machine
from bench import tables as report
from bench.machine import Bystanders
from bench.recovery.figures import Commit
from bench.recovery.watch import LAUNCH_LIMIT_S, RECOVERY_LIMIT_S, OurFiles, started, wait_for
from bench.running import BENCH, Command, DriverFailed
from distbelief.coordinator.journal import read as read_journal

SHARDS = 6
STEPS = 10_000_000
SETTLED_STEPS = 40
TIMES, JOINS = 20, 10
SEED = 3


def main() -> int:
    args = _arguments()
    console = Console(width=None if sys.stdout.isatty() else 130, highlight=False)
    content: dict[str, Any] = {
        "program": "bench.changes",
        "arguments": sys.argv[1:],
        "machine": machine.facts(),
        "settings": {"workers": args.workers, "threads": 1, "shards": SHARDS, "strategy": args.strategy},
        "load": {"before": machine.load()},
    }
    report.show_machine(
        console, content["machine"], content["load"]["before"], f"Workers: {args.workers}, one thread each."
    )
    try:
        content["coordinator"] = _measured(args, lambda run: coordinator_killed(run, args.times))
        content["joins"] = _measured(args, lambda run: workers_joined(run, args.workers, args.joins))
    except DriverFailed as error:
        console.print(str(error), markup=False)
        return 2
    show(console, content)
    content["load"]["after"] = machine.load()
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    return 1 if content["coordinator"]["problems"] or content["joins"]["problems"] else 0


class Run:
    """A run that trains, and its files."""

    def __init__(self, run_dir: Path, process: subprocess.Popen[bytes]) -> None:
        self.run_dir = run_dir
        self.files = OurFiles(run_dir)
        self._process = process

    def wait(self, found: Callable[[], bool], what: str) -> None:
        def look() -> bool | None:
            self.files.poll()
            return found() or None

        wait_for(self._process, look, RECOVERY_LIMIT_S if self.files.commits else LAUNCH_LIMIT_S, what)

    def settle(self) -> None:
        """Wait for steps of the newest generation."""
        there = len(self.files.commits) + SETTLED_STEPS
        self.wait(
            lambda: len(self.files.commits) >= there and self.files.commits[-1].generation == max(self.files.members),
            f"{SETTLED_STEPS} more steps",
        )

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in read_journal(self.run_dir / "journal.jsonl") if record["kind"] == kind]


def _measured(args: argparse.Namespace, measure: Callable[[Run], dict[str, Any]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run_dir, bystanders = Path(folder) / "run", Bystanders()
        with started(_command(run_dir, args), {}) as process:
            run = Run(run_dir, process)
            run.settle()
            found = measure(run)
        others = bystanders.share()
        run.files.poll()
    steps = sorted(commit.step for commit in run.files.commits)
    missing = [] if steps == list(range(len(steps))) else ["not every step was committed and reported exactly once"]
    return {**found, "problems": [*found["problems"], *missing], "others_cpu_share": others}


def _command(run_dir: Path, args: argparse.Namespace) -> Command:
    return [
        sys.executable, "-m", "distbelief.cli.main", "train", str(BENCH / "workload_job.py"),
        "--workers", str(args.workers), "--threads", "1", "--run-dir", str(run_dir), "--json", "--no-balance",
        "--strategy", args.strategy,
        "--set", "workload=mlp", "--set", f"steps={STEPS}", "--set", f"shards={SHARDS}",
    ]  # fmt: skip


def coordinator_killed(run: Run, times: int) -> dict[str, Any]:
    dice = random.Random(SEED)
    absences: list[tuple[float, float]] = []
    for number in range(1, times + 1):
        time.sleep(dice.uniform(0.0, 0.5))
        pid = json.loads((run.run_dir / "coordinator.json").read_text())["pid"]
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        run.wait(lambda number=number: len(run.records("epoch")) > number, "the next coordinator")  # type: ignore[misc]
        absences.append((killed_at, run.records("epoch")[-1]["at"]))
        run.settle()
    # What was committed meanwhile is told after the first news: not in order.
    commits = sorted(run.files.commits, key=lambda commit: commit.at)
    during = [_rate(commits, begin, end) for begin, end in absences]
    before = [_rate(commits, begin - (end - begin), begin) for begin, end in absences]
    problems = [] if len(run.records("generation")) == 1 else ["the members changed when the coordinator died"]
    return {
        "times": times,
        "absence_s": _figures([end - begin for begin, end in absences]),
        "steps_per_s_during": _figures(during),
        "steps_per_s_before": _figures(before),
        "ratio": _figures([d / b for d, b in zip(during, before, strict=True)]),
        "ratio_of_totals": sum(during) / sum(before),
        "problems": problems,
    }


def _rate(commits: Sequence[Commit], begin: float, end: float) -> float:
    """Steps per second between two times, from the commits next to them: whole steps, whatever the borders cut."""
    inside = [commit.at for commit in commits if begin <= commit.at <= end]
    earlier = [commit.at for commit in commits if commit.at < begin]
    inside = earlier[-1:] + inside
    return (len(inside) - 1) / (inside[-1] - inside[0])


def workers_joined(run: Run, workers: int, joins: int) -> dict[str, Any]:
    pauses, steps, loading = [], [], []
    for _ in range(joins):
        old = max(run.files.members)
        asked_at = time.time()
        _scale(run, workers + 1)
        run.wait(lambda old=old: max(run.files.members) > old, "the new worker")  # type: ignore[misc]
        run.settle()
        commits, new = run.files.commits, max(run.files.members)
        loading.append(run.files.decided_at[new] - asked_at)
        last = max(commit.at for commit in commits if commit.generation == old)
        first = min(commit.at for commit in commits if commit.generation == new)
        quiet = [commit.at for commit in commits if commit.generation == old and commit.at < asked_at][-SETTLED_STEPS:]
        steps.append(statistics.median(later - earlier for earlier, later in pairwise(quiet)))
        pauses.append(first - last - steps[-1])
        _scale(run, workers)
        run.wait(lambda new=new: max(run.files.members) > new, "the worker that goes")  # type: ignore[misc]
        run.settle()
    return {
        "joins": joins,
        "step_s": _figures(steps),
        "pause_s": _figures(pauses),
        "pause_in_steps": _figures([pause / step for pause, step in zip(pauses, steps, strict=True)]),
        "from_asking_to_the_switch_s": _figures(loading),
        "problems": [],
    }


def _scale(run: Run, workers: int) -> None:
    command = [sys.executable, "-m", "distbelief.cli.main", "scale", str(run.run_dir), str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DriverFailed(f"{' '.join(command)}: {done.stderr}")


def _figures(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "values": list(values)}


def show(console: Console, content: dict[str, Any]) -> None:
    killed, joined = content["coordinator"], content["joins"]
    rows = {
        "without a coordinator, ms": _row(killed["absence_s"], 1000),
        "steps/s before": _row(killed["steps_per_s_before"]),
        "steps/s meanwhile": _row(killed["steps_per_s_during"]),
        "meanwhile / before": _row(killed["ratio"]),
        "a step, ms": _row(joined["step_s"], 1000),
        "pause when a worker joins, ms": _row(joined["pause_s"], 1000),
        "the same in steps": _row(joined["pause_in_steps"]),
        "from asking to the switch, ms": _row(joined["from_asking_to_the_switch_s"], 1000),
    }
    title = f"\nThe coordinator killed {killed['times']} times, then {joined['joins']} joins"
    report.show_figures(console, title, ["median", "lowest", "highest"], rows)
    for name, part in (("coordinator", killed), ("joins", joined)):
        console.print(f"{name}: others' CPU time {part['others_cpu_share']:.0%}")
        for problem in part["problems"]:
            console.print(f"[red]broken promise:[/] {problem}")


def _row(figures: dict[str, Any], factor: float = 1.0) -> list[str]:
    return [f"{figures[name] * factor:,.2f}" for name in ("median", "low", "high")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What changes cost those who train on.")
    parser.add_argument("--workers", type=int, default=1, help="to begin with")
    parser.add_argument("--times", type=int, default=TIMES, help="how often the coordinator is killed")
    parser.add_argument("--joins", type=int, default=JOINS, help="how often a worker joins")
    parser.add_argument("--strategy", default="allreduce", help="allreduce (shared memory) or allreduce:gloo")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

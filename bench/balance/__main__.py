"""One worker is slow: samples per second with load balancing and without, against the sum of the workers' speeds.

    .venv/bin/python -m bench.balance [--json FILE] [--quick] [--only sleep,limit] [--repetitions N]

- sleep: 4 workers, 16 shards whose cost is a sleep (balance/job.py), one worker slowed 3 times while they train. The
  sum of speeds is what one worker alone does, 3 times, and what a slowed one does alone. Goal: at least 90 % of it.
- limit: a real job (the CNN of the data-parallel benchmark, 16 shards) on 2 workers, one of which may run for a third
  of the time only (stopped and continued every few milliseconds). The sum of speeds is taken alone too, without anybody
  who competes for memory or processor, so that reaching it is not expected.

The slow worker begins to be slow when the run has settled. What is measured begins when assignments have stopped
changing for a while: the figure is the speed after balancing, and the time until the first change is told beside it.
All four kinds of run are repeated, another one first each time; ratios are taken within a repetition. Where balancing
moved nothing, a difference between the two runs is chance: that is said, and listed under "problems" in the JSON.
The exit status is 2 when something could not be measured, else 0, whether the goal is met or not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import machine, options
from bench import spreads as figures
from bench import tables as report
from bench.balance import job as balance_job
from bench.balance.speed import FACTOR, Size, Slower, Speed, limited, speed
from bench.running import BENCH, Command, DriverFailed
from bench.workloads import WORKLOADS

PARTS = ("sleep", "limit")
STEPS = 10_000_000
GOAL = 0.9

BALANCED, UNBALANCED = "with balancing", "without balancing"
ALONE, ALONE_SLOW = "one worker alone", "the slowed worker alone"


FULL = Size(repetitions=3, window_s=12.0, adapt_s=15.0, still_s=5.0)
QUICK = Size(repetitions=1, window_s=3.0, adapt_s=12.0, still_s=3.0)


@dataclass(frozen=True)
class Case:
    name: str
    job: list[str]
    workers: int
    batch: int
    slower: Slower
    goal: float | None = None


def main() -> int:
    args = _arguments()
    size = QUICK if args.quick else FULL
    size = replace(size, repetitions=args.repetitions or size.repetitions)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    before = machine.load()
    content: dict[str, Any] = {
        "program": "bench.balance",
        "arguments": sys.argv[1:],
        "machine": machine.facts(),
        "settings": {"slowed": FACTOR, **asdict(size), "threads": 1, "quick": args.quick},
        "load": {"before": before},
        "problems": [],
    }
    report.show_machine(console, content["machine"], before, "One thread each.")
    began = time.monotonic()
    try:
        for part in args.only:
            found = content[part] = MEASURES[part](console, size)
            content["problems"] += [f"{part}: {problem}" for problem in found["problems"]]
    except DriverFailed as error:
        console.print(f"a run failed: {error}", markup=False)
        return 2
    content["took_s"] = round(time.monotonic() - began, 1)
    content["load"]["after"] = machine.load()
    for problem in content["problems"]:
        console.print(f"[red]not due to balancing:[/] {problem}")
    console.print(f"load after: {content['load']['after']}, took {content['took_s']:.0f} s")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0


def measure_sleep(console: Console, size: Size) -> dict[str, Any]:
    workers = 4
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "slow"
        job = [str(BENCH / "balance" / "job.py"), "--set", f"slow_file={file}", "--set", f"factor={FACTOR}"]

        @contextlib.contextmanager
        def slower(pid: int) -> Iterator[None]:
            draft = file.with_suffix(".draft")
            draft.write_text(str(pid))
            draft.rename(file)  # a worker that reads it sees all of it or nothing
            try:
                yield
            finally:
                file.unlink()

        return compare(console, Case("sleep", job, workers, balance_job.BATCH, slower, GOAL), size)


def measure_limit(console: Console, size: Size) -> dict[str, Any]:
    job = [str(BENCH / "workload_job.py"), "--set", "workload=cnn", "--set", f"shards={balance_job.SHARDS}"]
    return compare(console, Case("limit", job, 2, WORKLOADS["cnn"].global_batch(), limited), size)


MEASURES = {"sleep": measure_sleep, "limit": measure_limit}


def compare(console: Console, case: Case, size: Size) -> dict[str, Any]:
    """The same job with balancing and without, and each kind of worker alone."""
    commands = {
        BALANCED: _command(case.job, case.workers, balance=True),
        UNBALANCED: _command(case.job, case.workers, balance=False),
        ALONE: _command(case.job, 1, balance=False),
        ALONE_SLOW: _command(case.job, 1, balance=False),
    }
    runs: dict[str, list[Speed]] = {name: [] for name in commands}
    problems = []
    for repetition in range(size.repetitions):
        names = list(commands)
        for name in names[repetition % 4 :] + names[: repetition % 4]:
            report.show_progress(console, f"{case.name}, repetition {repetition + 1} of {size.repetitions}: {name}")
            runs[name].append(speed(commands[name], case.batch, None if name == ALONE else case.slower, size))
        if not runs[BALANCED][-1].changes:
            problems.append(f"repetition {repetition + 1}: no shard was moved, so the gain is chance")
    sums = [
        (case.workers - 1) * alone.samples_per_s + slow.samples_per_s
        for alone, slow in zip(runs[ALONE], runs[ALONE_SLOW], strict=True)
    ]
    speeds = {name: [one.samples_per_s for one in found] for name, found in runs.items()}
    ratios = [
        figures.ratio("with balancing / sum of the workers' speeds", speeds[BALANCED], sums, case.goal),
        figures.ratio("without balancing / sum of the workers' speeds", speeds[UNBALANCED], sums),
        figures.ratio("with balancing / without", speeds[BALANCED], speeds[UNBALANCED]),
    ]
    for repetition in range(size.repetitions):
        title = f"\n{case.name}: {case.workers} workers, one {FACTOR} times slower; repetition {repetition + 1}"
        show(console, title, {name: found[repetition] for name, found in runs.items()}, sums[repetition])
    report.show_ratios(console, f"{case.name}: ratios of speeds (repetitions: {size.repetitions})", ratios)
    return {
        "workers": case.workers,
        "runs": {name: [asdict(one) for one in found] for name, found in runs.items()},
        "sum_of_speeds": sums,
        "ratios": [one.as_json() for one in ratios],
        "problems": problems,
        "commands": {name: " ".join(command) for name, command in commands.items()},
    }


def _command(job: list[str], workers: int, *, balance: bool) -> Command:
    train = [sys.executable, "-m", "distbelief.cli.main", "train", *job, "--set", f"steps={STEPS}", "--json"]
    return [*train, "--workers", str(workers), "--threads", "1", "--balance" if balance else "--no-balance"]


def show(console: Console, title: str, found: Mapping[str, Speed], whole: float) -> None:
    rows = {}
    for name, one in found.items():
        shards = ", ".join(str(count) for count in one.shards)
        each_ms = ", ".join("–" if ms is None else f"{ms:.1f}" for ms in one.shard_ms)
        first = "" if one.first_change_s is None else f"{one.first_change_s:.1f} s"
        rows[name] = [f"{one.samples_per_s:,.1f}", shards, each_ms, first, f"{one.others:.0%}"]
    rows["sum of the workers' speeds"] = [f"{whole:,.1f}", "", "", "", ""]
    columns = ["samples/s", "shards", "ms per shard", "first change", "others' CPU"]
    report.show_figures(console, title, columns, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Load balancing with one slow worker.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--quick", action="store_true", help="a smoke test: the figures mean little")
    parser.add_argument(
        "--only", type=options.some_of("part", PARTS), default=list(PARTS), help=f"some of {','.join(PARTS)}"
    )
    parser.add_argument(
        "--repetitions", type=options.count, help=f"default {FULL.repetitions}; {QUICK.repetitions} if quick"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

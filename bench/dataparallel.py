"""Data-parallel training side by side with its peers, in one run.

    .venv/bin/python bench/dataparallel.py [--json FILE] [--quick] [--only mlp,cnn,gpt,reduce,launch] [--repetitions N]

Two workers with one thread each. In every repetition DistBelief (a whole run through its command line, exact mode,
atomic commit), torchrun with DDP on gloo, and two independent processes (the ideal) train the same model on the same
samples, one driver after the other, another one first each time. Ratios are taken within a repetition, so that a busy
machine slows both sides of a ratio; their median is what is held against the goals. A measurement during which other
processes had much of the machine is taken again while there is time for it; the least disturbed one counts, whoever's
it is. The exit status is 1 when the losses show that the drivers did not do the same work, whatever the speeds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import drivers
import figures
import machine
import options
import reduce
import report
from drivers import IMPLEMENTATIONS, DriverFailed, Measured, Task
from figures import DDP, IDEAL, INEXACT, MANY, OURS
from machine import Patience
from workloads import WORKERS, WORKLOADS

PARTS = ("mlp", "cnn", "gpt", "reduce", "launch")
MANY_SHARDS = 4 * WORKERS
GOALS = {
    "mlp": {DDP: 1.35, IDEAL: 0.92},
    "cnn": {DDP: 1.05, IDEAL: 0.92},
    "gpt": {DDP: 1.1, IDEAL: 0.92},
}
REDUCE_GOAL = 5.0
LAUNCH_GOAL = 1.0
TORCHRUN, PLAIN = "torchrun", "one plain process"


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    repetitions: int
    tasks: dict[str, Task]
    reduce_mb: list[int]
    reduce_repetitions: int
    patience_s: float
    """For each workload, and for the launches."""


def _tasks(**steps: tuple[int, int]) -> dict[str, Task]:
    return {name: Task(name, warm_up + timed, warm_up) for name, (warm_up, timed) in steps.items()}


FULL = Size(4, _tasks(mlp=(10, 120), cnn=(5, 60), gpt=(2, 8), launch=(1, 1)), [1, 25, 100], 15, 40.0)
QUICK = Size(1, _tasks(mlp=(3, 20), cnn=(2, 8), gpt=(1, 2), launch=(1, 1)), [1, 25, 100], 3, 0.0)
LAUNCH_WORKLOAD = "mlp"


def main() -> int:
    args = _arguments()
    size = QUICK if args.quick else FULL
    repetitions = args.repetitions or size.repetitions
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    before = machine.load()
    content: dict[str, Any] = {
        "program": "bench/dataparallel.py",
        "arguments": sys.argv[1:],
        "machine": machine.facts(),
        "settings": {"workers": WORKERS, "threads": 1, "repetitions": repetitions, "quick": args.quick},
        "commands": _commands(size),
        "load": {"before": before},
    }
    report.show_machine(console, content["machine"], before)
    started = time.monotonic()
    problems: list[str] = []
    try:
        for part in args.only:
            if part == "reduce":
                content[part] = measure_reduce(console, size)
            elif part == "launch":
                content[part] = measure_launch(console, size, repetitions)
            else:
                patience = Patience(size.patience_s)
                found = compare(console, size.tasks[part], repetitions, patience, problems)
                content.setdefault("workloads", {})[part] = found
    except DriverFailed as error:
        console.print(f"[red]a driver failed[/]: {error}", markup=True)
        return 2
    content["load"]["after"] = machine.load()
    content["took_s"] = round(time.monotonic() - started, 1)
    content["problems"] = problems
    report.show_problems(console, problems)
    console.print(f"load after: {content['load']['after']}, took {content['took_s']:.0f} s")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    return 1 if problems else 0


def compare(console: Console, task: Task, repetitions: int, patience: Patience, problems: list[str]) -> dict[str, Any]:
    """One workload with all drivers."""
    runs: dict[str, list[Measured]] = {OURS: [], MANY: [], INEXACT: []}
    runs |= {figures.key(peer, one): [] for peer in (DDP, IDEAL) for one in IMPLEMENTATIONS}
    optimizers = list(IMPLEMENTATIONS)
    actors: dict[str, Callable[[], dict[str, Measured]]] = {
        OURS: lambda: {OURS: drivers.ours(task)},
        DDP: lambda: figures.named(DDP, drivers.ddp(task, optimizers)),
        IDEAL: lambda: figures.named(IDEAL, drivers.ideal(task, optimizers)),
        MANY: lambda: {MANY: drivers.ours(task, MANY_SHARDS)},
        INEXACT: lambda: {INEXACT: drivers.ours(task, MANY_SHARDS, "allreduce:inexact")},
    }
    before = machine.load()
    for repetition in range(repetitions):
        optimizers[:] = _rotated(IMPLEMENTATIONS, repetition)
        for driver in _rotated(tuple(actors), repetition):
            report.show_progress(console, f"{task.workload}, repetition {repetition + 1} of {repetitions}: {driver}")
            for name, measured in least_disturbed(actors[driver], patience).items():
                runs[name].append(measured)
    workload = WORKLOADS[task.workload]
    speeds = figures.speeds(runs)
    losses = {name: measured[0].losses[-1] for name, measured in runs.items()}
    ratios = figures.workload_ratios(runs, GOALS[task.workload])
    others = {name: figures.spread([one.others for one in measured]) for name, measured in runs.items()}
    differences = figures.loss_problems(runs)
    problems += [f"{task.workload}: {problem}" for problem in differences]
    timed = task.steps - task.warm_up
    title = f"{workload.title}; {workload.batch_per_worker} samples per worker and step"
    report.show_speeds(console, f"\n{title}\n{timed} steps after {task.warm_up} of warm-up", speeds, losses, others)
    report.show_ratios(console, f"{task.workload}: ratios of speeds (repetitions: {repetitions})", ratios)
    return {
        "title": workload.title,
        "batch_per_worker": workload.batch_per_worker,
        "warm_up_steps": task.warm_up,
        "timed_steps": timed,
        "load": {"before": before, "after": machine.load()},
        "samples_per_s": {name: asdict(one) for name, one in speeds.items()},
        "ratios": [one.as_json() for one in ratios],
        "first_loss": {name: measured[0].losses[0] for name, measured in runs.items()},
        "final_loss": losses,
        "losses_agree": not differences,
        "others_cpu_share": {name: asdict(one) for name, one in others.items()},
        "measurements_taken_again": patience.retaken,
        "weights_sha256": runs[OURS][0].weights_sha256,
    }


def least_disturbed(measure: Callable[[], dict[str, Measured]], patience: Patience) -> dict[str, Measured]:
    """Measure, and again while others disturb and patience lasts; what was disturbed least."""
    taken: list[tuple[float, dict[str, Measured]]] = []
    while True:
        started = time.monotonic()
        found = measure()
        taken.append((max(one.others for one in found.values()), found))
        if not patience.again(taken[-1][0], time.monotonic() - started):
            return min(taken, key=lambda one: one[0])[1]


def measure_reduce(console: Console, size: Size) -> dict[str, Any]:
    report.show_progress(console, "reduce")
    seconds = reduce.measure(size.reduce_mb, size.reduce_repetitions)
    bandwidths = {
        mb: {method: figures.spread([mb / 1000 / took for took in times]) for method, times in found.items()}
        for mb, found in seconds.items()
    }
    ratios = [
        figures.ratio(f"{mb} MB: {ours} / {other}", found[other], found[ours], goal)
        for mb, found in seconds.items()
        for ours, other, goal in (
            ("shared", "gloo", REDUCE_GOAL),
            ("shared, whole", "gloo", None),
            ("shared", "memcpy", None),
        )
    ]
    report.show_reduce(console, bandwidths)
    report.show_ratios(console, f"reduce: ratios of GB/s (repetitions: {size.reduce_repetitions})", ratios)
    return {
        "gb_per_s": {
            str(mb): {method: asdict(one) for method, one in found.items()} for mb, found in bandwidths.items()
        },
        "ratios": [one.as_json() for one in ratios],
    }


def measure_launch(console: Console, size: Size, repetitions: int) -> dict[str, Any]:
    task = _launch_task(size)
    starters: dict[str, Callable[[], dict[str, Measured]]] = {
        OURS: lambda: {OURS: drivers.ours(task)},
        TORCHRUN: lambda: drivers.ddp(task, IMPLEMENTATIONS[:1]),
        PLAIN: lambda: {PLAIN: drivers.alone(task)},
    }
    patience = Patience(size.patience_s)
    seconds: dict[str, list[float]] = {name: [] for name in starters}
    others: dict[str, list[float]] = {name: [] for name in starters}
    for repetition in range(repetitions):
        for name in _rotated(tuple(starters), repetition):
            report.show_progress(console, f"launch, repetition {repetition + 1} of {repetitions}: {name}")
            (found,) = least_disturbed(starters[name], patience).values()
            seconds[name].append(found.launch_s)
            others[name].append(found.others)
    spreads = {name: figures.spread(values) for name, values in seconds.items()}
    ratios = [
        figures.ratio("torchrun's time / ours", seconds[TORCHRUN], seconds[OURS], LAUNCH_GOAL),
        figures.ratio("one plain process's time / ours", seconds[PLAIN], seconds[OURS]),
    ]
    report.show_launch(console, spreads)
    report.show_ratios(console, f"launch: ratios of times (repetitions: {repetitions})", ratios)
    return {
        "seconds": {name: asdict(one) for name, one in spreads.items()},
        "ratios": [one.as_json() for one in ratios],
        "others_cpu_share": {name: asdict(figures.spread(values)) for name, values in others.items()},
        "measurements_taken_again": patience.retaken,
    }


def _launch_task(size: Size) -> Task:
    return Task(LAUNCH_WORKLOAD, size.tasks["launch"].steps, size.tasks["launch"].warm_up)


def _rotated(names: Sequence[str], by: int) -> list[str]:
    shift = by % len(names)
    return [*names[shift:], *names[:shift]]


def _commands(size: Size) -> dict[str, str]:
    """How each driver is started, for the record."""
    task, folder = size.tasks["mlp"], Path("DIR")
    return {
        OURS: " ".join(drivers.ours_command(task, folder)),
        MANY: " ".join(drivers.ours_command(task, folder, MANY_SHARDS)),
        INEXACT: " ".join(drivers.ours_command(task, folder, MANY_SHARDS, "allreduce:inexact")),
        DDP: " ".join(drivers.ddp_command(task, folder, IMPLEMENTATIONS)),
        IDEAL: " ".join(drivers.single_command(task, folder, IMPLEMENTATIONS, 0, in_step=True)),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="DistBelief against DDP and against two independent processes.")
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

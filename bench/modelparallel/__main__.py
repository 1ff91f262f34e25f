"""Divided models: our time for a step over that of the same schedule written with bare torch, in one run.

    .venv/bin/python -m bench.modelparallel [--json FILE] [--quick] [--only 1f1b,sharded] [--repetitions N]

Two members with one thread each, on gloo. Per way of dividing the model: DistBelief (a whole run through its command
line, with the snapshots that it takes by default) and torchrun with a loop of bare torch (modelparallel/peer.py) train
the same model, cut at the same places, on the same samples in the same micro-batches. They do so in turn, another one
first in each repetition. The first steps warm up and do not count, for either.

Ratios are taken within a repetition, of all the time after the warm-up, and their median is held against the goal. The
ratio of the median steps, which does not see what happens in a few steps only (our snapshots; the machine's moods), is
told too. A measurement during which other processes had much of the machine is taken again while there is time for it.
The exit status is 1 when the losses show that the two did not do the same work, 2 when something failed; speeds do not
matter to it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import machine, options
from bench import tables as report
from bench.machine import Bystanders, Patience
from bench.modelparallel import figures
from bench.modelparallel.figures import Measured
from bench.modelparallel.job import BATCH, SHARDS, TITLE
from bench.modelparallel.systems import MEMBERS, SYSTEMS
from bench.running import BENCH, TIMEOUT_S, Command, DriverFailed, environment
from bench.spreads import spread
from distbelief.coordinator.journal import read as read_journal

OURS, PEER = "ours", "bare torch"


@dataclass(frozen=True)
class Size:
    repetitions: int
    warm_up: int
    """Steps that do not count."""
    timed: int
    patience_s: float
    """For each system."""


FULL = Size(repetitions=5, warm_up=12, timed=60, patience_s=60.0)
QUICK = Size(repetitions=1, warm_up=2, timed=4, patience_s=0.0)


def main() -> int:
    args = _arguments()
    size = QUICK if args.quick else FULL
    size = replace(size, **{name: value for name in asdict(size) if (value := getattr(args, name, None))})
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    content: dict[str, Any] = {
        "program": "bench.modelparallel",
        "arguments": sys.argv[1:],
        "machine": machine.facts(),
        "settings": {
            **asdict(size), "members": MEMBERS, "threads": 1, "model": TITLE, "batch": BATCH, "shards": SHARDS,
            "snapshots": args.snapshots,
        },
        "load": {"before": machine.load()},
        "systems": {},
        "failed": {},
        "problems": [],
    }  # fmt: skip
    about = f"{TITLE}; {BATCH} samples in {SHARDS} micro-batches. Two members, one thread each."
    report.show_machine(console, content["machine"], content["load"]["before"], about)
    began = time.monotonic()
    for name in args.only:
        try:
            found = content["systems"][name] = compare(console, name, size, args.snapshots)
        except DriverFailed as error:
            content["failed"][name] = str(error)
            console.print(f"[red]{name} failed:[/] ", end="")
            console.print(str(error), markup=False)
            continue
        content["problems"] += [f"{name}: {problem}" for problem in found["problems"]]
    _show(console, content["systems"], size)
    report.show_problems(console, content["problems"])
    content["load"]["after"] = machine.load()
    content["took_s"] = round(time.monotonic() - began, 1)
    console.print(f"load after: {content['load']['after']}, took {content['took_s']:.0f} s")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    return 2 if content["failed"] else 1 if content["problems"] else 0


def compare(console: Console, name: str, size: Size, snapshots: int | None) -> dict[str, Any]:
    """One way of dividing the model, by us and by its peer."""
    plan: list[str] = []

    def by_us() -> Measured:
        measured, lines = ours(name, size, snapshots)
        plan[:] = lines
        return measured

    drivers: dict[str, Callable[[], Measured]] = {OURS: by_us, PEER: lambda: peer(name, size)}
    runs: dict[str, list[Measured]] = {driver: [] for driver in drivers}
    patience = Patience(size.patience_s)
    before = machine.load()
    for repetition in range(size.repetitions):
        for driver in list(drivers)[:: -1 if repetition % 2 else 1]:
            report.show_progress(console, f"{name}, repetition {repetition + 1} of {size.repetitions}: {driver}")
            runs[driver].append(_least_disturbed(drivers[driver], patience))
    folder = Path("DIR")
    return {
        "strategy": _strategy(name, snapshots),
        "peer": SYSTEMS[name].peer,
        "plan": plan,
        "commands": {
            OURS: " ".join(ours_command(name, size, snapshots, folder)),
            PEER: " ".join(peer_command(name, size, folder)),
        },
        "load": {"before": before, "after": machine.load()},
        "mean_step_s": {driver: asdict(spread([one.mean_s for one in found])) for driver, found in runs.items()},
        "median_step_s": {driver: asdict(spread([one.median_s for one in found])) for driver, found in runs.items()},
        "ratios": [
            {**one.ratio.as_json(), "at_most": one.at_most, "verdict": one.verdict}
            for one in figures.ratios(runs[OURS], runs[PEER])
        ],
        "first_loss": {driver: found[0].losses[0] for driver, found in runs.items()},
        "last_loss": {driver: found[0].losses[-1] for driver, found in runs.items()},
        "problems": figures.loss_problems(runs[OURS], runs[PEER]),
        "others_cpu_share": {driver: asdict(spread([one.others for one in found])) for driver, found in runs.items()},
        "measurements_taken_again": patience.retaken,
    }


def ours_command(name: str, size: Size, snapshots: int | None, run_dir: Path) -> Command:
    return [
        sys.executable, "-m", "distbelief.cli.main", "train", str(BENCH / "modelparallel" / "job.py"),
        "--workers", str(MEMBERS), "--strategy", _strategy(name, snapshots), "--threads", "1",
        "--save-every", "never", "--run-dir", str(run_dir), "--json",
        "--set", f"steps={size.warm_up + size.timed}", "--set", f"stages={SYSTEMS[name].stages}",
    ]  # fmt: skip


def ours(name: str, size: Size, snapshots: int | None) -> tuple[Measured, list[str]]:
    """A whole run of DistBelief, and its plan. Times are those of the committed steps in its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir, bystanders = Path(folder) / "run", Bystanders()
        _run(ours_command(name, size, snapshots, run_dir))
        others = bystanders.share()
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        journal = read_journal(run_dir / "journal.jsonl")
    steps = [record for record in records if record["kind"] == "step"]
    if [record["step"] for record in steps] != list(range(size.warm_up + size.timed)):
        raise DriverFailed("metrics.jsonl does not hold all steps once each, in order")
    ends, losses = [record["at"] for record in steps], [record["loss"] for record in steps]
    plans = [list(record["lines"]) for record in journal if record["kind"] == "plan"]
    return figures.measured(ends, size.warm_up, losses, others), plans[-1] if plans else []


def peer_command(name: str, size: Size, out: Path) -> Command:
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        "--nproc-per-node", str(MEMBERS), str(BENCH / "modelparallel" / "peer.py"), name,
        "--steps", str(size.warm_up + size.timed), "--out", str(out),
    ]  # fmt: skip


def peer(name: str, size: Size) -> Measured:
    """A step has ended when it has on every rank; a loss is the mean of those of the ranks that have one."""
    with tempfile.TemporaryDirectory() as folder:
        bystanders = Bystanders()
        _run(peer_command(name, size, Path(folder)))
        others = bystanders.share()
        told = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(MEMBERS)]
    ends = [max(at) for at in zip(*(one["ends"] for one in told), strict=True)]
    losses = []
    for of_ranks in zip(*(one["losses"] for one in told), strict=True):
        there = [value for value in of_ranks if value is not None]
        losses.append(sum(there) / len(there))
    return figures.measured(ends, size.warm_up, losses, others)


def _strategy(name: str, snapshots: int | None) -> str:
    return SYSTEMS[name].strategy + ("" if snapshots is None else f":snapshots={snapshots}")


def _run(command: Command) -> None:
    with tempfile.TemporaryFile("w+") as output:
        try:
            done = subprocess.run(
                command, env=environment(), stdout=output, stderr=output, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise DriverFailed(f"{' '.join(command)}\ndid not end within {error.timeout:.0f} s") from error
        if done.returncode:
            output.seek(0)
            raise DriverFailed(f"{' '.join(command)}\nended with {done.returncode}:\n{output.read()[-4000:]}")


def _least_disturbed(measure: Callable[[], Measured], patience: Patience) -> Measured:
    """Measure, and again while others disturb and patience lasts; what was disturbed least."""
    taken: list[Measured] = []
    while True:
        started = time.monotonic()
        taken.append(measure())
        if not patience.again(taken[-1].others, time.monotonic() - started):
            return min(taken, key=lambda one: one.others)


def _show(console: Console, systems: dict[str, dict[str, Any]], size: Size) -> None:
    rows = {}
    for found in systems.values():
        goal, median = found["ratios"]
        others = max(one["high"] for one in found["others_cpu_share"].values())
        rows[found["strategy"]] = [
            *(f"{1000 * found['mean_step_s'][driver]['median']:.0f}" for driver in (OURS, PEER)),
            *(f"{goal[name]:.3f}" for name in ("median", "low", "high")),
            f"[{report.STYLE[goal['verdict']]}]{goal['verdict']}",
            f"{median['median']:.3f}",
            f"{others:.0%}",
        ]
    columns = [
        "ours, ms",
        "torch, ms",
        "ratio",
        "lowest",
        "highest",
        f"≤ {figures.GOAL:g}",
        "median step",
        "others' CPU",
    ]
    title = (
        f"\nA step: medians of {size.repetitions} repetitions; {size.timed} steps after {size.warm_up} of warm-up. "
        "Ratio: ours over bare torch"
    )
    report.show_figures(console, title, columns, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="DistBelief's divided models against the same in bare torch.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--quick", action="store_true", help="a smoke test: the figures mean little")
    parser.add_argument(
        "--only", type=options.some_of("system", list(SYSTEMS)), default=list(SYSTEMS),
        help=f"some of {','.join(SYSTEMS)}",
    )  # fmt: skip
    parser.add_argument("--repetitions", type=options.count, help=f"default {FULL.repetitions}")
    parser.add_argument("--timed", type=options.count, help=f"steps that count; default {FULL.timed}")
    parser.add_argument("--warm-up", type=options.count, help=f"steps that do not; default {FULL.warm_up}")
    parser.add_argument("--snapshots", type=int, help="steps between two of ours, 0 for none; default: by their cost")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

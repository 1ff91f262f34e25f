"""What saving costs those who train: DistBelief, torch.save and torch.distributed.checkpoint.async_save, in one run.

    .venv/bin/python -m bench.checkpoint [--json FILE] [--quick] [--only ours,torch.save] [--folder DIR]

One process (or `--workers`) with one thread each trains a model of 100 million parameters with AdamW, 1.2 GB of state,
and saves every 16 steps. All are measured in turn, another one first in each repetition. The first saves of a process
warm up and do not count for anybody: memory that is touched for the first time is slow.

- stall: how long training is blocked per save, by the clock of who saves (ours: `pause_s` of the run's records). To
  wait for the save before belongs to it. "Seen" is the same from outside: the step with the save less a quiet step.
- in all: from a save to the next one, less what as many quiet steps take. Slower steps while it writes are in it.
- written: from the step before the save to when the checkpoint is whole and synced.
- to resume: torch: a new process loads model and optimizer, the model made before; ours: from the start of the command
  to the first committed step, less the same of a run from scratch. The files are in the page cache, for all.

torch.save syncs its file, as the others do; the time without that is told too. async_save is held against us with that
one of its settings (checkpoint/savers.py) that has the lowest stall. The exit status is 2 when something could not be
measured, else 0, whether goals are met or not.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import machine, options
from bench import tables as report
from bench.checkpoint import ours as checkpoint_ours
from bench.checkpoint import report as checkpoint_report
from bench.checkpoint.figures import Costs, NotMeasurable, Save, Trace, costs, pooled, ratio_of_medians
from bench.checkpoint.job import LAYERS, WIDTH
from bench.checkpoint.savers import SAVERS, SYNCHRONOUS
from bench.goals import Goal
from bench.machine import Bystanders
from bench.running import BENCH, TIMEOUT_S, Command, DriverFailed, environment
from bench.spreads import Ratio, spread

OURS = "ours"
SYSTEMS = (OURS, *SAVERS)
WARM_UP = 3
"""Saves: ours has two copies in turn, and either must have been used once."""
STALL_GOAL, ASYNC_GOAL = 0.1, 1.0


@dataclass(frozen=True)
class Size:
    width: int
    repetitions: int
    saves: int
    """That count, of each process."""
    every: int
    workers: int = 1


FULL = Size(width=WIDTH, repetitions=3, saves=4, every=16)
QUICK = Size(width=384, repetitions=1, saves=1, every=200)


@dataclass(frozen=True)
class Measured:
    costs: Costs
    resume_s: float
    others: float
    """The share of the machine's processor time that others had."""
    details: dict[str, float]


def main() -> int:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with what was started, and the gigabytes that were saved
    size = QUICK if args.quick else FULL
    size = replace(size, **{name: value for name in asdict(size) if (value := getattr(args, name, None))})
    console = Console(width=None if sys.stdout.isatty() else 130, highlight=False)
    content: dict[str, Any] = {
        "program": "bench.checkpoint",
        "arguments": sys.argv[1:],
        "machine": machine.facts(),
        "settings": {**asdict(size), "parameters": _parameters(size.width), "warm_up": WARM_UP, "threads": 1},
        "load": {"before": machine.load()},
        "failed": {},
    }
    about = f"{_parameters(size.width) / 1e6:.1f} M parameters, AdamW; workers: {size.workers}, one thread each."
    report.show_machine(console, content["machine"], content["load"]["before"], about)
    began = time.monotonic()
    runs = measure_all(args.only, size, args.folder, content["failed"])
    content["commands"] = _commands(args.only, size)
    content["systems"] = {name: _as_json(found) for name, found in runs.items()}
    ratios = compare(runs)
    goals = _goals(ratios)
    content |= {"ratios": {name: found.as_json() for name, found in ratios.items()}}
    content["goals"] = [goal.as_json() for goal in goals]
    content["took_s"] = round(time.monotonic() - began, 1)
    content["load"]["after"] = machine.load()
    console.print(f"\nA save every {size.every} steps; repetitions: {size.repetitions}, saves in each: {size.saves}")
    checkpoint_report.show(console, content["systems"])
    if ratios:
        report.show_ratios(console, f"Ratios (repetitions: {size.repetitions})", list(ratios.values()))
        report.show_goals(console, goals)
    for name, reason in content["failed"].items():
        console.print(f"{name} could not be measured: {reason}", markup=False)
    console.print(f"load after: {content['load']['after']}, took {content['took_s']:.0f} s")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    return 2 if content["failed"] else 0


def measure_all(
    systems: Sequence[str], size: Size, folder: Path | None, failed: dict[str, str]
) -> dict[str, list[Measured]]:
    """All systems in turn. One that fails is not tried again, and what was measured of it before is not used."""
    progress = Console(stderr=True, highlight=False)
    runs: dict[str, list[Measured]] = {name: [] for name in systems}
    for repetition in range(size.repetitions):
        first = repetition % len(systems)
        for name in [*systems[first:], *systems[:first]]:
            if name in failed:
                continue
            report.show_progress(progress, f"repetition {repetition + 1} of {size.repetitions}: {name}")
            with tempfile.TemporaryDirectory(dir=folder, prefix="distbelief-bench-") as place:
                try:
                    runs[name].append(ours(size, Path(place)) if name == OURS else peer(name, size, Path(place)))
                except (DriverFailed, NotMeasurable) as error:
                    failed[name] = str(error)
    return {name: found for name, found in runs.items() if name not in failed}


def ours(size: Size, folder: Path) -> Measured:
    run_dir, bystanders = folder / "run", Bystanders()
    train = checkpoint_ours.command(run_dir, size.workers, size.every, size.width)
    trace, resumed = checkpoint_ours.measure(train, run_dir, size.every, WARM_UP + size.saves)
    return Measured(
        costs(trace, size.every, WARM_UP),
        resumed.resumed_s - resumed.from_scratch_s,
        bystanders.share(),
        asdict(resumed),
    )


def peer(name: str, size: Size, folder: Path) -> Measured:
    bystanders = Bystanders()
    said = _answer(_peer_command("train", name, size, folder), folder)
    trace = Trace(said["commits"], [Save(**save) for save in said["saves"]])
    loaded = _answer(_peer_command("load", name, size, folder), folder)
    return Measured(costs(trace, size.every, WARM_UP), loaded["load_s"], bystanders.share(), {})


def _peer_command(mode: str, name: str, size: Size, folder: Path) -> Command:
    launcher = [sys.executable]
    if size.workers > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        launcher += ["--nproc-per-node", str(size.workers)]
    return [
        *launcher, str(BENCH / "checkpoint" / "peer.py"), mode, name,
        "--folder", str(folder), "--out", str(folder / "out.json"), "--width", str(size.width),
        "--every", str(size.every), "--saves", str(WARM_UP + size.saves),
    ]  # fmt: skip


def _answer(command: Command, folder: Path) -> dict[str, Any]:
    """What a peer has written when it has ended."""
    with tempfile.TemporaryFile("w+") as output:
        try:
            done = subprocess.run(
                command, env=environment(), stdout=output, stderr=output, timeout=3 * TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise DriverFailed(f"{' '.join(command)}\ndid not end within {error.timeout:.0f} s") from error
        if done.returncode:
            output.seek(0)
            raise DriverFailed(f"{' '.join(command)}\nended with {done.returncode}:\n{output.read()[-4000:]}")
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def compare(runs: Mapping[str, Sequence[Measured]]) -> dict[str, Ratio]:
    """Of us to torch.save, and to async_save with the setting that stalls it least."""
    if OURS not in runs:
        return {}
    all_costs = {name: [one.costs for one in found] for name, found in runs.items()}
    mine = all_costs[OURS]
    found = {}
    if SYNCHRONOUS in runs:
        theirs = all_costs[SYNCHRONOUS]
        found["torch.save"] = ratio_of_medians("stall: ours / torch.save", mine, theirs, "stall_s")
        found["unsynced"] = ratio_of_medians("stall: ours / torch.save, not synced", mine, theirs, "without_sync_s")
    others = [name for name in all_costs if name not in (OURS, SYNCHRONOUS)]
    if others:
        best = min(others, key=lambda name: pooled(all_costs[name], "stall_s").median)
        found["async_save"] = ratio_of_medians(f"stall: ours / {best} (its best)", mine, all_costs[best], "stall_s")
    return found


def _goals(ratios: Mapping[str, Ratio]) -> list[Goal]:
    limits = {"torch.save": STALL_GOAL, "async_save": ASYNC_GOAL}
    return [Goal(ratios[name].what, ratios[name].spread.median, limits[name], "") for name in limits if name in ratios]


def _as_json(found: Sequence[Measured]) -> dict[str, Any]:
    each = [one.costs for one in found]
    figures = {
        name: asdict(pooled(each, name))
        for name in ("stall_s", "without_sync_s", "seen_s", "extra_s", "write_s")
        if getattr(each[0], name)
    }
    return {
        "step_s": asdict(spread([one.step_s for one in each])),
        **figures,
        "resume_s": asdict(spread([one.resume_s for one in found])),
        "size_bytes": each[-1].size_bytes,
        "repetitions": [asdict(one) for one in found],
    }


def _parameters(width: int) -> int:
    return LAYERS * (width * width + width)


def _commands(systems: Sequence[str], size: Size) -> dict[str, str]:
    """How each system is started, for the record."""
    folder = Path("DIR")
    return {
        name: " ".join(
            checkpoint_ours.command(folder / "run", size.workers, size.every, size.width)
            if name == OURS
            else _peer_command("train", name, size, folder)
        )
        for name in systems
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What saving a checkpoint costs: DistBelief and its peers.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--quick", action="store_true", help="a smoke test, a small model: the figures mean little")
    parser.add_argument(
        "--only", type=options.some_of("system", SYSTEMS), default=list(SYSTEMS), help=f"some of {','.join(SYSTEMS)}"
    )
    parser.add_argument("--folder", type=Path, help="save below this folder; by default where temporary files go")
    parser.add_argument("--workers", type=options.count, help=f"default {FULL.workers}; peers with more use DDP")
    parser.add_argument("--every", type=options.count, help=f"steps from save to save; default {FULL.every}")
    parser.add_argument("--saves", type=options.count, help=f"of each process that count; default {FULL.saves}")
    parser.add_argument(
        "--repetitions", type=options.count, help=f"default {FULL.repetitions}; {QUICK.repetitions} if quick"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

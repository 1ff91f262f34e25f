"""From SIGKILL of a worker to the survivors' next committed step, side by side with peers, in one run.

    .venv/bin/python -m bench.recovery [--kills 30] [--quick] [--json FILE] [--peers ours,torchrun,ray,torchft]

Three workers with one thread each train the MLP of the data-parallel benchmark (and, ours only, the GPT, with a third
of the kills; peers are killed ten times at most). A random worker is killed at a random moment, again and again; the
next kill waits until all workers are there again and have committed steps. recovery/figures.py says what each figure
is. Peers are extras of the benchmark: one that is not installed is reported as skipped, with the reason. Of fewer than
100 kills the 99th percentile is the highest value. The exit status is 0 whether goals are met or not, 2 when something
could not be measured, and 1 when DistBelief's own files show that a step was lost or done twice.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import machine, options
from bench import tables as report
from bench.goals import Goal
from bench.machine import Bystanders
from bench.recovery import figures as recovery_figures
from bench.recovery.figures import Kill, NotRecovered
from bench.recovery.peers import PEERS
from bench.recovery.watch import OurFiles, PeerFiles, Plan, kill_workers, observed, started
from bench.running import BENCH, Command, DriverFailed
from bench.workloads import WORKLOADS

WORKERS = 3
SHARDS = 6
"""Of ours: two per worker, and three for each of two survivors, so that both memberships share the work evenly."""
STEPS = 10_000_000
"""More than will ever be done: the run is ended when the kills are."""
SEED = 20
KILLS, QUICK_KILLS = 30, 3
MOST_PEER_KILLS = 10
"""Of each peer: one takes up to a quarter of a minute."""
OURS = "ours"
SYSTEMS = (OURS, *PEERS)

MEDIAN_GOAL_S, P99_GOAL_S, LOST_GOAL_STEPS = 0.1, 0.3, 2.0


def main() -> int:
    args = _arguments()
    kills = args.kills or (QUICK_KILLS if args.quick else KILLS)
    workloads = ["mlp"] if args.quick else ["mlp", "gpt"]
    console = Console(width=None if sys.stdout.isatty() else 130, highlight=False)
    before = machine.load()
    content: dict[str, Any] = {
        "program": "bench.recovery",
        "arguments": sys.argv[1:],
        "machine": machine.facts(),
        "settings": {"workers": WORKERS, "threads": 1, "shards": SHARDS, "kills": kills, "quick": args.quick},
        "commands": _commands(args.peers),
        "load": {"before": before},
        "workloads": {},
        "skipped": {},
        "failed": {},
    }
    report.show_machine(console, content["machine"], before, "Three workers, one thread each.")
    began = time.monotonic()
    problems: list[str] = []
    for workload in workloads:
        systems = args.peers if workload == "mlp" else [name for name in args.peers if name == OURS]
        found = content["workloads"][workload] = {}
        for name in systems:
            count = kills if workload == "mlp" else max(1, kills // 3)
            plan = Plan(WORKERS, count if name == OURS else min(count, MOST_PEER_KILLS), SEED)
            if name != OURS and (reason := PEERS[name].skipped()):
                content["skipped"][name] = reason
                continue
            report.show_progress(console, f"{workload}: {name}, {plan.kills} kills")
            try:
                found[name] = ours(workload, plan, problems) if name == OURS else peer(name, workload, plan)
            except (DriverFailed, NotRecovered) as error:
                content["failed"][f"{workload}: {name}"] = str(error)
        show(console, workload, found)
    goals = _goals(content["workloads"].get("mlp", {}).get(OURS))
    content |= {"goals": [goal.as_json() for goal in goals], "problems": problems}
    content["load"]["after"] = machine.load()
    content["took_s"] = round(time.monotonic() - began, 1)
    if goals:
        report.show_goals(console, goals)
    _show_rest(console, content)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    return 2 if content["failed"] else 1 if problems else 0


def ours_command(workload: str, run_dir: Path) -> Command:
    return [
        sys.executable, "-m", "distbelief.cli.main", "train", str(BENCH / "workload_job.py"),
        "--workers", str(WORKERS), "--threads", "1", "--run-dir", str(run_dir), "--json",
        "--set", f"workload={workload}", "--set", f"steps={STEPS}", "--set", f"shards={SHARDS}",
    ]  # fmt: skip


def ours(workload: str, plan: Plan, problems: list[str]) -> dict[str, Any]:
    kills: list[Kill] = []
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        files, bystanders = OurFiles(run_dir), Bystanders()
        with started(ours_command(workload, run_dir), {}) as process:
            kill_workers(process, files, plan, kills)
        others = bystanders.share()
        files.poll()
    problems += [f"{workload}: {problem}" for problem in files.problems()]
    return {**recovery_figures.summary(observed(files, plan.workers, kills)), "others_cpu_share": others}


def peer(name: str, workload: str, plan: Plan) -> dict[str, Any]:
    """A peer that stops recovering keeps what was measured until then, with a note."""
    chosen, kills, note = PEERS[name], list[Kill](), ""
    with tempfile.TemporaryDirectory() as folder:
        files, bystanders = PeerFiles(Path(folder)), Bystanders()
        try:
            with started(
                chosen.command(workload, Path(folder), plan.workers), chosen.environment, chosen.stop
            ) as process:
                kill_workers(process, files, plan, kills)
        except DriverFailed as error:
            if not kills:
                raise
            note = f"ended after {len(kills)} of {plan.kills} kills: {error}"
        others = bystanders.share()
        files.poll()
    figures = recovery_figures.summary(observed(files, plan.workers, kills))
    return {"title": chosen.title, **figures, "others_cpu_share": others, "note": note}


def show(console: Console, workload: str, found: dict[str, Any]) -> None:
    if not found:
        return
    times = {
        _title(name): [
            str(one["kills"]),
            _ms(one["step_s"]),
            *_row(one["next_commit_s"], _ms),
            *_row(one["overhead_s"], _ms)[:2],
            *_row(one["decided_s"], _ms)[:1],
        ]
        for name, one in found.items()
    }
    costs = {
        _title(name): [
            *_row(one["lost_steps"], _number)[:2],
            *_row(one["lost_until_whole_steps"], _number)[:2],
            *_row(one["redone_steps"], _number)[:2],
            *_row(one["recomputed_shards"], _number)[:2],
        ]
        for name, one in found.items()
    }
    title = WORKLOADS[workload].title
    report.show_figures(
        console,
        f"\n{title}: from SIGKILL to the next committed step, ms",
        ["kills", "a step", "median", "99th pct.", "lowest", "highest", "overhead", "99th pct.", "decided"],
        times,
    )
    report.show_figures(
        console,
        f"{workload}: what a kill costs (medians, and 99th percentiles)",
        ["steps lost", "99th", "until whole", "99th", "steps redone", "99th", "shards again", "99th"],
        costs,
    )


def _title(name: str) -> str:
    return name if name == OURS else PEERS[name].title


def _row(figures: dict[str, Any] | None, form: Callable[[float], str]) -> list[str]:
    if figures is None:
        return ["–"] * 4
    return [form(figures[name]) for name in ("median", "p99", "low", "high")]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f}" if seconds >= 0.1 else f"{seconds * 1000:,.1f}"


def _number(value: float) -> str:
    return f"{value:,.1f}"


def _goals(mlp: dict[str, Any] | None) -> list[Goal]:
    if mlp is None:
        return []
    next_s, lost = mlp["next_commit_s"], mlp["lost_steps"]
    percentile = f"99th percentile{' (the highest)' if mlp['kills'] < 100 else ''}"
    return [
        Goal("mlp: SIGKILL to the next commit, median", next_s["median"], below=MEDIAN_GOAL_S, unit="s"),
        Goal(f"mlp: SIGKILL to the next commit, {percentile}", next_s["p99"], below=P99_GOAL_S, unit="s"),
        Goal("mlp: time lost per kill, median", lost["median"], below=LOST_GOAL_STEPS, unit="steps"),
    ]


def _show_rest(console: Console, content: dict[str, Any]) -> None:
    for name, reason in content["skipped"].items():
        console.print(f"{name} skipped: {reason}", markup=False)
    for name, reason in content["failed"].items():
        console.print(f"{name} could not be measured: {reason}", markup=False)
    for one in content["workloads"].get("mlp", {}).values():
        if one.get("note"):
            console.print(f"{one['title']}: {one['note']}", markup=False)
    for problem in content["problems"]:
        console.print(f"[red]broken promise:[/] {problem}")
    console.print(f"load after: {content['load']['after']}, took {content['took_s']:.0f} s")


def _commands(systems: list[str]) -> dict[str, str]:
    """How each system is started, for the record."""
    folder = Path("DIR")
    found = {}
    for name in [one for one in systems if one == OURS or not PEERS[one].skipped()]:
        command = ours_command("mlp", folder) if name == OURS else PEERS[name].command("mlp", folder, WORKERS)
        extra = {} if name == OURS else PEERS[name].environment
        found[name] = " ".join([*(f"{key}={value}" for key, value in extra.items()), *command])
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="From SIGKILL to the next committed step: DistBelief and its peers.")
    parser.add_argument("--kills", type=options.count, help=f"default {KILLS}; {QUICK_KILLS} if quick")
    parser.add_argument("--quick", action="store_true", help="a smoke test, without the GPT: the figures mean little")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--peers", type=options.some_of("system", SYSTEMS), default=list(SYSTEMS), help=f"some of {','.join(SYSTEMS)}"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

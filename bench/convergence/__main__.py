"""Strategies that wait for each other and those that do not: loss against samples and against time, as a figure.

    python -m bench.convergence [--json FILE] [--draw docs/convergence.png] [--only ps:sync,ps:async] [--quick]
    python -m bench.convergence --from FILE --draw docs/convergence.png          # draw again, without any run

Every strategy trains the same job (bench/convergence/job.py) twice on three workers: undisturbed, and with one worker
that gets a quarter of its time from the first step on. Balancing is left on, as users have it: with it even strategies
that wait give the slow worker less to do. `ps:sync --no-balance` shows what it is worth.

Samples are exact on a busy machine; times are good as ratios within one run only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import machine
from bench.convergence.figure import draw
from bench.options import count, some_of
from bench.running import BENCH
from distbelief.chaos.inject import Throttle, Victim, catch
from distbelief.coordinator.metricsfile import records as metrics_of

DATA = "/usr/share/datasets/fashion-mnist"
FIXED = "ps:sync, no balancing"
STRATEGIES: dict[str, list[str]] = {
    "allreduce": ["--strategy", "allreduce"],
    "ps:sync": ["--strategy", "ps:sync"],
    FIXED: ["--strategy", "ps:sync", "--no-balance"],
    "ps:ssp": ["--strategy", "ps:ssp:staleness=8"],
    "ps:async": ["--strategy", "ps:async"],
    "local_sgd": ["--strategy", "local_sgd:8"],
    "sandblaster": ["--strategy", "sandblaster"],
}
WORKERS = 3
FACTOR = 4.0
PATIENCE_S = 300.0


def main() -> int:
    args = _arguments()
    if args.source:
        content = json.loads(args.source.read_text())
    else:
        content = measure(args)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(content, indent=1) + "\n")
    if args.draw:
        draw(content, args.draw)
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    content: dict[str, Any] = {
        "program": "bench.convergence", "arguments": sys.argv[1:], "machine": machine.facts(),
        "workers": WORKERS, "slowed_by": FACTOR, "load": {"before": machine.load()}, "runs": {},
    }  # fmt: skip
    sets = ["limit=2000", "epochs=1"] if args.quick else [f"epochs={args.epochs}"]
    for slowed in (False, True):  # neighbours in time are compared with each other
        for name in args.only:
            iterations = [f"iterations={4 if args.quick else args.iterations}"] if name == "sandblaster" else []
            others = machine.Bystanders()
            found = train(STRATEGIES[name], [f"folder={args.folder}", *sets, *iterations], slowed)
            found["others"] = others.share()
            content["runs"].setdefault(name, {})["slowed" if slowed else "undisturbed"] = found
            console.print(f"{name}{', one worker slowed' if slowed else ''}: {found['seconds']:.1f} s")
    content["load"]["after"] = machine.load()
    console.print(_table(content))
    return content


def train(options: Sequence[str], sets: Sequence[str], slowed: bool) -> dict[str, Any]:
    """One run, and its curve: after so many samples and seconds, this loss and accuracy on images never trained on."""
    command = [sys.executable, "-m", "distbelief.cli.main", "train", str(BENCH / "convergence" / "job.py")]
    settings = [part for one in sets for part in ("--set", one)]
    usual = ["--workers", str(WORKERS), "--save-every", "never", "--threads", "1", "--run-dir", "run", "--json"]
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w+") as log:
        run_dir = Path(folder) / "run"
        process = subprocess.Popen(
            [*command, *settings, *options, *usual], cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True
        )
        throttle = _slow_down(run_dir, process) if slowed else None
        output, _ = process.communicate(timeout=PATIENCE_S)
        if throttle:
            throttle[1].end()
            throttle[0].close()
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"a run failed: {' '.join(options)}\n{log.read()}")
        records = list(metrics_of(run_dir / "metrics.jsonl"))
    result = json.loads(output.strip().splitlines()[-1])
    steps = [one for one in records if one["kind"] == "step"]
    began, samples, curve = steps[0]["at"], 0, []
    passed = {0: 0}
    for one in steps:
        samples += one["samples"]
        passed[one["step"] + 1] = samples
    for one in records:
        if one["kind"] == "evaluation":
            point = {"samples": passed[one["step"]], "seconds": one["at"] - began}
            curve.append({**point, "loss": one["metrics"]["loss"], "accuracy": one["metrics"]["accuracy"]})
    return {
        "curve": curve, "seconds": steps[-1]["at"] - began, "samples": samples,
        "accuracy": result["metrics"]["accuracy"], "loss": result["metrics"]["loss"], "staleness": result["staleness"],
    }  # fmt: skip


def _slow_down(run_dir: Path, process: subprocess.Popen[str]) -> tuple[Victim, Throttle]:
    """Slow worker 1 down as soon as the first generation has begun."""

    def members() -> list[dict[str, Any]]:
        path = run_dir / "journal.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        found = [entry for line in lines if (entry := json.loads(line))["kind"] == "generation"]
        return list(found[0]["members"]) if found else []

    _until(lambda: bool(members()), process)
    victim = catch(next(one["pid"] for one in members() if one["worker"] == 1))
    if victim is None:
        raise SystemExit("worker 1 is gone before it could be slowed down")
    return victim, Throttle(victim, FACTOR)


def _until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the run ended, or did not begin")
        time.sleep(0.02)


def _table(content: dict[str, Any]) -> Table:
    table = Table("strategy", "accuracy", "loss", "seconds", "slowed: accuracy", "seconds", "longer by", "staleness")
    for name, runs in content["runs"].items():
        plain, slowed = runs["undisturbed"], runs["slowed"]
        table.add_row(
            name, f"{plain['accuracy']:.2%}", f"{plain['loss']:.3f}", f"{plain['seconds']:.1f}",
            f"{slowed['accuracy']:.2%}", f"{slowed['seconds']:.1f}", f"{slowed['seconds'] / plain['seconds']:.2f}",
            ", ".join(f"{k}: {v}" for k, v in list((plain["staleness"] or {}).items())[:6]),
        )  # fmt: skip
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=DATA, help="where the files of Fashion-MNIST are")
    parser.add_argument("--only", type=some_of("strategy", list(STRATEGIES)), default=list(STRATEGIES))
    parser.add_argument("--epochs", type=count, default=4)
    parser.add_argument("--iterations", type=count, default=40, help="of sandblaster")
    parser.add_argument("--quick", action="store_true", help="a tenth of the images, once: only to see that it works")
    parser.add_argument("--json", type=Path, help="write curves and figures to this file")
    parser.add_argument("--from", dest="source", type=Path, help="take them from this file instead of running")
    parser.add_argument("--draw", type=Path, help="draw them into this file (.png or .svg; needs matplotlib)")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())

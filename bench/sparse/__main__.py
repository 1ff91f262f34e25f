"""Sparse tables on parameter servers: memory by rows touched, latency of pull and push, and scaling with workers.

    .venv/bin/python -m bench.sparse [--json FILE] [--quick] [--only rows,scaling] [--repetitions N]

Whole runs through the command line. `rows`: a table of 50 million × 16 numbers, Adagrad, 4,096 rows of it per batch,
one worker (bench/sparse/job.py): what the model waits for its rows; what passes from the gradient to the next batch
(push, until every part and its backup has it, and the lease of the next batch); and the memory of the servers before
the first step and at the end. `scaling`: examples/recommend.py with 50 million users under ps:async on 1, 2 and 4
workers, one thread each; with fewer cores than processes that are busy, more workers cannot be faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from bench import machine, options
from bench import running as drivers
from bench import tables as report
from bench.running import BENCH, DriverFailed

PARTS = ("rows", "scaling")
WARM_UP = 10
"""Updates that are not timed."""
EXAMPLE = BENCH.parent / "examples" / "recommend.py"


def main() -> int:
    args = _arguments()
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    before = machine.load()
    content: dict[str, Any] = {
        "program": "bench.sparse",
        "arguments": sys.argv[1:],
        "machine": machine.facts(),
        "load": {"before": before},
    }
    report.show_machine(console, content["machine"], before, about="One thread per process; medians.")
    repetitions = args.repetitions or (1 if args.quick else 3)
    try:
        if "rows" in args.only:
            content["rows"] = rows(console, 40 if args.quick else 400, repetitions)
        if "scaling" in args.only:
            content["scaling"] = scaling(console, 30 if args.quick else 200, repetitions)
    except DriverFailed as error:
        console.print(f"[red]a run failed[/]: {error}", markup=True)
        return 2
    content["load"]["after"] = machine.load()
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0


# --- one worker, random rows -----------------------------------------------------------------------------------------


def rows(console: Console, steps: int, repetitions: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    table = Table("50 million × 16, 4,096 rows a batch", "pull, ms", "p95", "push, ms", "p95", "rows", "bytes per row")
    for strategy in ("ps:async:servers=1", "ps:async:servers=2"):
        runs = [_rows(strategy, steps) for _ in range(repetitions)]
        found[strategy] = runs
        pulls, pushes = ([x for run in runs for x in run[name]] for name in ("pull_ms", "push_ms"))
        per_row = statistics.median(run["memory_bytes"] / run["resident_rows"] for run in runs)
        cells = [f"{number:.2f}" for some in (pulls, pushes) for number in (statistics.median(some), _p95(some))]
        table.add_row(strategy, *cells, f"{runs[0]['resident_rows']:,}", f"{per_row:.0f}")
    console.print(table)
    console.print("bytes per row: what all servers together grew by; with two, every row is there twice")
    return found


def _rows(strategy: str, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        times, run_dir = Path(folder) / "times", Path(folder) / "run"
        settings = ["--set", f"steps={steps}", "--set", f"out={times}"]
        command = _command(BENCH / "sparse" / "job.py", strategy, 1, run_dir, settings)
        began, ended = 0, 0
        with _running(command, Path(folder)) as process:
            while process.poll() is None:
                servers = _servers(run_dir)
                if servers and not began and times.exists():
                    began = _memory(servers)
                ended = max(ended, _memory(servers))
                time.sleep(0.05)
        lines = [[1000 * float(word) for word in line.split()] for line in times.read_text().splitlines()]
        with safe_open(run_dir / "weights.safetensors", "pt") as weights:
            resident = weights.get_slice("table.rows").get_shape()[0]
    # The first line is the canary's, which has no servers yet.
    timed = lines[1 + WARM_UP :]
    return {
        "steps": steps,
        "pull_ms": [pull for pull, _ in timed],
        "push_ms": [push for _, push in timed],
        "resident_rows": resident,
        "memory_before_bytes": began,
        "memory_bytes": ended - began,
    }


def _servers(run_dir: Path) -> list[int]:
    journal = run_dir / "journal.jsonl"
    lines = journal.read_text().split("\n")[:-1] if journal.exists() else []
    maps = [entry for entry in map(json.loads, filter(None, lines)) if entry["kind"] == "servers"]
    return [one["pid"] for one in maps[-1]["servers"]] if maps else []


def _memory(pids: list[int]) -> int:
    """What these processes have for themselves."""
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_full_info().uss
        except psutil.Error:  # it has just ended
            return 0
    return total


# --- more workers ----------------------------------------------------------------------------------------------------


def scaling(console: Console, steps: int, repetitions: int) -> dict[str, Any]:
    found: dict[str, Any] = {str(workers): [] for workers in (1, 2, 4)}
    for repetition in range(repetitions):
        order = (1, 2, 4) if repetition % 2 == 0 else (4, 2, 1)
        for workers in order:
            found[str(workers)].append(_recommend(workers, steps))
    table = Table("recommend, 50 million users, ps:async", "steps/s", "over 1 worker", "range", "others' CPU time")
    for name, runs in found.items():
        speeds = [run["steps_per_s"] for run in runs]
        ratios = [mine / run["steps_per_s"] for mine, run in zip(speeds, found["1"], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        others = statistics.median(run["others"] for run in runs)
        median = statistics.median(speeds), statistics.median(ratios)
        table.add_row(f"{name} workers", f"{median[0]:.1f}", f"{median[1]:.2f}", spread, f"{others:.0%}")
    console.print(table)
    console.print(f"{psutil.cpu_count()} cores; two servers are busy, too")
    return found


def _recommend(workers: int, steps: int) -> dict[str, float]:
    batch = 2048
    settings = ["--set", "users=50000000", "--set", f"steps={steps}", "--set", f"samples={steps * batch}"]
    with tempfile.TemporaryDirectory() as folder:
        run_dir, bystanders = Path(folder) / "run", machine.Bystanders()
        with _running(_command(EXAMPLE, "ps:async", workers, run_dir, settings), Path(folder)) as process:
            process.wait(drivers.TIMEOUT_S)
        others = bystanders.share()
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    times = [line["at"] for line in lines if line["kind"] == "step"]
    return {"steps_per_s": (len(times) - WARM_UP) / (times[-1] - times[WARM_UP - 1]), "others": others}


# --- a run -----------------------------------------------------------------------------------------------------------


def _command(job: Path, strategy: str, workers: int, run_dir: Path, settings: list[str]) -> list[str]:
    command = [sys.executable, "-m", "distbelief.cli.main", "train", str(job), "--strategy", strategy]
    return [*command, "--workers", str(workers), "--run-dir", str(run_dir), "--threads", "1", "--plain", *settings]


@contextmanager
def _running(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=drivers.environment())
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()
    if process.returncode:
        raise DriverFailed(log.read_text()[-2000:])


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument("--quick", action="store_true", help="few steps, once: to see that it works")
    parser.add_argument("--only", type=options.some_of("part", PARTS), default=list(PARTS))
    parser.add_argument("--repetitions", type=options.count, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

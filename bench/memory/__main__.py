"""The peak of memory of a worker under every way of dividing a model, measured, against one process.

    .venv/bin/python -m bench.memory [--json FILE] [--quick] [--only sharded,dp2.pp2] [--width N]

Four workers train a GPT of 79 million parameters with AdamW (parameters, gradients and the optimizer's state: 1.26 GB)
for a few steps through DistBelief's command line; one process trains it with a plain loop over the same shards. What
counts is the most memory that a worker has had in its life, as the kernel keeps it (VmHWM of /proc/PID/status): to
build its part, activations, messages and writing the weights at the end are all in it.

The interpreter, torch and the other libraries do not count: from each peak that of the same run with a tiny model of as
many layers is taken off, worker by worker. Memory that glibc keeps after it was freed does count, on both sides.
Checkpoints are not taken (`--save-every never`). With snapshots, a worker also keeps a copy of its own state and one of
its neighbour's: 1.5 times its share of state and gradients again, which is why there is a column for it.

The exit status is 2 when a run failed, else 0, whether goals are met or not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import machine, options
from bench import tables as report
from bench.memory.job import BATCH, LAYERS, SHARDS, WIDTH, parameters
from bench.memory.watch import LIMIT_S, Lives, watch
from bench.recovery.watch import EndedEarly, started
from bench.running import BENCH, TIMEOUT_S, Command, DriverFailed, environment

WORKERS = 4
TINY_WIDTH = 16
STEPS = 3
LAYOUTS = (
    "pipeline:4:gpipe", "pipeline:4:1f1b", "pipeline:4:interleaved", "pipeline:4:zbv", "sharded", "tensor:4",
    "dp2.pp2", "dp2.tp2", "tp2.pp2", "dp2.fsdp2",
)  # fmt: skip
GOAL = 0.30
"""Near a quarter: the peak of the largest worker over that of one process, where all of the state is divided by 4 and
no layer need ever be whole in one place."""
HELD_TO_GOAL = tuple(layout for layout in LAYOUTS if layout.startswith(("pipeline", "sharded")))
WITHOUT, WITH = "without snapshots", "with snapshots"
EVERY = {WITHOUT: 0, WITH: 2}
"""Steps between two snapshots."""


@dataclass(frozen=True)
class Peaks:
    """In bytes, by rank, without what the same run with a tiny model has."""

    workers: list[int]
    start: int
    """The largest worker until the first step is committed, by looks from outside (which may miss a short peak)."""
    steps: int
    """While the other steps are done."""
    end: int
    """After that: it writes the weights."""

    @property
    def largest(self) -> int:
        return max(self.workers)


def main() -> int:
    args = _arguments()
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    count = parameters(args.width)
    content: dict[str, Any] = {
        "program": "bench.memory",
        "arguments": sys.argv[1:],
        "machine": machine.facts(),
        "settings": {
            "workers": WORKERS, "threads": 1, "layers": LAYERS, "width": args.width, "parameters": count,
            "batch": BATCH, "shards": SHARDS, "steps": STEPS, "tiny_width": TINY_WIDTH, "snapshots_every": EVERY[WITH],
        },
        "load": {"before": machine.load()},
        "layouts": {},
        "failed": {},
    }  # fmt: skip
    about = f"{count / 1e6:.1f} M parameters, AdamW: {16 * count / 1e6:,.0f} MB of state and gradients."
    report.show_machine(console, content["machine"], content["load"]["before"], about)
    began = time.monotonic()
    try:
        one = content["one_process_bytes"] = one_process(args.width) - one_process(TINY_WIDTH)
    except DriverFailed as error:  # there is nothing to compare with
        console.print(str(error), markup=False)
        return 2
    for layout in args.only:
        found: dict[str, Any] = {}
        for name in args.snapshots:
            report.show_progress(console, f"{layout}, {name}")
            try:
                found[name] = _as_json(measure(layout, EVERY[name], args.width), one)
            except DriverFailed as error:
                content["failed"][f"{layout}, {name}"] = str(error)
        content["layouts"][layout] = found
    content["took_s"] = round(time.monotonic() - began, 1)
    content["load"]["after"] = machine.load()
    _show(console, one, content["layouts"])
    for name, reason in content["failed"].items():
        console.print(f"{name} failed: {reason}", markup=False)
    console.print(f"load after: {content['load']['after']}, took {content['took_s']:.0f} s")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    return 2 if content["failed"] else 0


def one_process(width: int) -> int:
    command = [sys.executable, str(BENCH / "memory" / "job.py"), "--width", str(width), "--steps", str(STEPS)]
    try:
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise DriverFailed(
            f"one process of width {width} did not end within {TIMEOUT_S} s: is the machine busy?"
        ) from None
    if done.returncode:
        raise DriverFailed(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-4000:]}")
    return int(done.stdout.split()[-1])


def measure(layout: str, snapshots: int, width: int) -> Peaks:
    large, tiny = run(layout, snapshots, width), run(layout, snapshots, TINY_WIDTH)
    libraries = [life.peak_bytes for life in tiny.workers]
    own = [life.peak_bytes - less for life, less in zip(large.workers, libraries, strict=True)]
    edges = [0.0, large.commits[0], large.commits[-1], float("inf")]
    spans = [
        max(life.highest(first, end) - less for life, less in zip(large.workers, libraries, strict=True))
        for first, end in pairwise(edges)
    ]
    return Peaks(own, *(max(0, span) for span in spans))


def command(layout: str, snapshots: int, width: int, run_dir: Path) -> Command:
    return [
        sys.executable, "-m", "distbelief.cli.main", "train", str(BENCH / "memory" / "job.py"),
        "--workers", str(WORKERS), "--strategy", f"{layout}:snapshots={snapshots}", "--threads", "1",
        "--save-every", "never", "--run-dir", str(run_dir), "--json",
        "--set", f"width={width}", "--set", f"steps={STEPS}",
    ]  # fmt: skip


def run(layout: str, snapshots: int, width: int) -> Lives:
    """A whole run, watched."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        with started(command(layout, snapshots, width, run_dir), {}) as process:
            lives = watch(process, run_dir)
            if process.poll() is None:
                raise EndedEarly(f"did not end within {LIMIT_S:.0f} s")
            if process.returncode:
                raise EndedEarly(f"ended with {process.returncode}")
    if len(lives.workers) != WORKERS or len(lives.commits) != STEPS:
        raise DriverFailed(f"{layout}: {len(lives.workers)} workers and {len(lives.commits)} steps were seen")
    return lives


def _as_json(peaks: Peaks, one: int) -> dict[str, Any]:
    return {**asdict(peaks), "largest": peaks.largest, "share": peaks.largest / one}


def _show(console: Console, one: int, layouts: dict[str, dict[str, Any]]) -> None:
    rows = {"one process": [_mb(one), "1.00", *[""] * 7]}
    for layout, found in layouts.items():
        row: list[str] = []
        if WITHOUT in found:
            plain = found[WITHOUT]
            verdict = ""
            if layout in HELD_TO_GOAL:
                verdict = "[green]met" if plain["share"] <= GOAL else "[red]not met"
            row += [_mb(plain["largest"]), f"{plain['share']:.2f}", verdict, _mb(sum(plain["workers"]) // WORKERS)]
            row += [_mb(plain[name]) for name in ("start", "steps", "end")]
        else:
            row += [""] * 7
        row += [_mb(found[WITH]["largest"]), f"{found[WITH]['share']:.2f}"] if WITH in found else ["", ""]
        rows[layout] = row
    names = ["largest", "share", f"≤ {GOAL:g}", "mean", "start", "steps", "end", "snapshots", "share"]
    title = f"\nPeak memory of a worker of {WORKERS}, MB, without interpreter and libraries"
    report.show_figures(console, title, names, rows)
    console.print("start, steps, end: the largest worker in these parts of the run, by looks every 20 ms.")


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Peak memory per worker, for every way of dividing a model.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--quick", action="store_true", help="a smoke test, a small model: the figures mean little")
    parser.add_argument(
        "--only", type=options.some_of("layout", LAYOUTS), default=list(LAYOUTS), help=f"some of {','.join(LAYOUTS)}"
    )
    parser.add_argument(
        "--no-snapshots", action="store_const", const=[WITHOUT], default=list(EVERY), dest="snapshots",
        help="leave out the runs with snapshots: half of the time",
    )  # fmt: skip
    parser.add_argument("--width", type=options.count, help=f"of the model; default {WIDTH}, 128 if quick")
    args = parser.parse_args()
    args.width = args.width or (128 if args.quick else WIDTH)
    return args


if __name__ == "__main__":
    sys.exit(main())

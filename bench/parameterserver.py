"""Parameter servers side by side with a peer, in one run: two workers, one server, the same model and samples.

    .venv/bin/python bench/parameterserver.py [--json FILE] [--quick] [--only mlp,cnn,wide,wide8,bandwidth]
        [--repetitions N] [--tensorflow /path/to/python]

Ours are whole runs through the command line: `ps:sync` with its bytes in shared memory and over TCP. The peer is a
parameter server on torch.distributed (gloo, point to point, one flat buffer each way; bench/parameterserver_peer.py).
TensorFlow's ParameterServerStrategy has no synchronous mode: it stands beside our `ps:async`, on the dense workloads,
where `--tensorflow` names a Python that has it. Drivers take turns within a repetition, and ratios are taken within it.
The part `bandwidth` is push and pull in GB/s beside memcpy and raw sockets (bench/parameterserver_bandwidth.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import drivers
import machine
import options
import parameterserver_bandwidth as bandwidth
import parameterserver_tensorflow as tensorflow
import report
from drivers import BENCH, DriverFailed, Measured, Task
from workloads import WORKERS, WORKLOADS

OURS, TCP, PEER, IDEAL = "ps:sync", "ps:sync over TCP", "gloo p2p server", "independent processes"
ASYNC, TENSORFLOW = "ps:async", "TensorFlow (async)"
PARTS = ("mlp", "cnn", "wide", "wide8", "bandwidth")
GOAL = 2.0
"""Steps per second over the best peer's."""


def main() -> int:
    args = _arguments()
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    before = machine.load()
    content: dict[str, Any] = {
        "program": "bench/parameterserver.py",
        "arguments": sys.argv[1:],
        "machine": machine.facts(),
        "tensorflow": tensorflow.has_tensorflow(args.tensorflow),
        "load": {"before": before},
        "workloads": {},
    }
    report.show_machine(console, content["machine"], before)
    try:
        if "bandwidth" in args.only:
            content["bandwidth"] = bandwidth.measure(console, args.repetitions or (1 if args.quick else 9))
        for name in [one for one in args.only if one in WORKLOADS]:
            steps, warm_up = (20, 3) if args.quick else (120, 10) if name == "mlp" else (60, 5)
            task = Task(name, steps + warm_up, warm_up)
            peer = args.tensorflow if content["tensorflow"] and name in tensorflow.DENSE else ""
            content["workloads"][name] = compare(console, task, args.repetitions or (1 if args.quick else 4), peer)
    except DriverFailed as error:
        console.print(f"[red]a driver failed[/]: {error}", markup=True)
        return 2
    content["load"]["after"] = machine.load()
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0


def compare(console: Console, task: Task, repetitions: int, python: str) -> dict[str, Any]:
    """`python`: one that has TensorFlow; empty: it is left out."""
    actors: dict[str, Callable[[], Measured]] = {
        OURS: lambda: drivers.ours(task, strategy="ps:sync:servers=1"),
        TCP: lambda: drivers.ours(task, strategy="ps:sync:servers=1:tcp"),
        PEER: lambda: _peer(task),
        IDEAL: lambda: drivers.ideal(task, ["fused"])["fused"],
        ASYNC: lambda: drivers.ours_freely(task, "ps:async:servers=1"),
    }
    if python:
        actors[TENSORFLOW] = lambda: tensorflow.measure(task, python)
    runs: dict[str, list[Measured]] = {name: [] for name in actors}
    for repetition in range(repetitions):
        names = list(actors)
        for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
            runs[name].append(actors[name]())
    batch = WORKLOADS[task.workload].global_batch
    found: dict[str, Any] = {}
    table = Table(
        "", "steps/s", "over the peer", "range", "losses differ by", "last loss", title=WORKLOADS[task.workload].title
    )
    for name, measured in runs.items():
        ratios = [a.samples_per_s / b.samples_per_s for a, b in zip(measured, runs[PEER], strict=True)]
        apart = None
        if name not in (ASYNC, TENSORFLOW):  # which go their own ways
            apart = max(abs(a - b) for a, b in zip(measured[0].losses, runs[PEER][0].losses, strict=True))
        last = statistics.fmean(measured[0].losses[-10:])
        found[name] = {
            "steps_per_s": [one.samples_per_s / batch for one in measured],
            "over_peer": ratios,
            "losses_apart": apart,
            "last_loss": last,
            "others": [one.others for one in measured],
        }
        steps = statistics.median(found[name]["steps_per_s"])
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        differ = "" if apart is None else f"{apart:.1e}"
        table.add_row(name, f"{steps:.1f}", f"{statistics.median(ratios):.2f}", spread, differ, f"{last:.3f}")
    console.print(table)
    best = statistics.median(found[OURS]["over_peer"])
    console.print(f"ps:sync has {best:.2f} times the gloo server's steps per second (goal: {GOAL} of the best peer's)")
    return found


def _peer(task: Task) -> Measured:
    def run(out: Path) -> None:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command = [sys.executable, *launcher, "--nproc-per-node", str(WORKERS + 1)]
        command += [str(BENCH / "parameterserver_peer.py"), task.workload, "--steps", str(task.steps)]
        drivers.run([[*command, "--warm-up", str(task.warm_up), "--out", str(out)]])

    return drivers.peer_figures(task, ["default"], drivers.slowest, run)["default"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument("--quick", action="store_true", help="few steps, once: to see that it works")
    parser.add_argument("--only", type=options.some_of("workload", PARTS), default=list(PARTS))
    parser.add_argument("--tensorflow", default=sys.executable, help="a Python that has TensorFlow")
    parser.add_argument("--repetitions", type=options.count, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

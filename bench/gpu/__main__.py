"""One accelerator: ours beside a bare loop and its other peers, workers that share the device, and kernels.

    python -m bench.gpu [--json FILE] [--only speed,sharing,kernels] [--repetitions N] [--quick]

GPT of 124 million parameters, bf16, compiled. Every system is a process of its own; repetitions are interleaved,
another system first each time; ratios are taken within a repetition. The model is compiled in the first step; the
first ten steps are not timed. It needs nothing but torch and DistBelief's core dependencies; peers that are not
installed are skipped. The exit status is 1 when losses or weights show that the systems did not do the same work.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.gpu import job, kernels, running
from bench.gpu.running import EXACT, INEXACT, Run

PEAK_TFLOPS = {"NVIDIA H200": 989.0, "NVIDIA H100 80GB HBM3": 989.0, "NVIDIA A100-SXM4-80GB": 312.0}
"""Dense bf16, by the maker's data sheets."""
PARTS = ("speed", "sharing", "kernels")
GOAL = 0.98
CHECKED_STEPS, LOSS_TOLERANCE = 10, 0.02
"""Relative, at each of the first steps: compiled bf16 kernels round differently from system to system. Later, where the
loss falls by a tenth in a step, a little of it is a lot."""


def main() -> int:
    args = _arguments()
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    if not torch.cuda.is_available():
        console.print("there is no CUDA device here: this benchmark is for a machine that has one")
        return 2
    steps, warm_up = (12, 6) if args.quick else (30, 10)
    content: dict[str, Any] = {"program": "bench.gpu", "arguments": sys.argv[1:], "machine": running.machine()}
    console.print(f"{content['machine']['gpu']}, torch {torch.__version__}")
    problems: list[str] = []
    began = time.monotonic()
    if "speed" in args.only:
        content["speed"] = speed(console, Run(steps, warm_up), args.repetitions, problems)
    if "sharing" in args.only:
        content["sharing"] = sharing(console, Run(12, 4), problems)
    if "kernels" in args.only:
        content["kernels"] = kernels.measure()
        _show_kernels(console, content["kernels"])
    content["took_s"] = round(time.monotonic() - began, 1)
    content["problems"] = problems
    for problem in problems:
        console.print(f"[red]{problem}[/]")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    return 1 if problems else 0


def speed(console: Console, run: Run, repetitions: int, problems: list[str]) -> dict[str, Any]:
    systems = ["bare", INEXACT, EXACT]
    systems += [name for name, module in running.PEERS.items() if importlib.util.find_spec(module)]
    found: dict[str, list[running.Measured]] = {name: [] for name in systems}
    for repetition in range(repetitions):
        turn = repetition % len(systems)
        for name in systems[turn:] + systems[:turn]:
            found[name].append(running.measure(name, run))
            console.print(f"  {repetition + 1}/{repetitions} {name}: {found[name][-1].symbols_per_s:,.0f} symbols/s")
    parameters = sum(p.numel() for p in job.GPT().parameters())
    peak = PEAK_TFLOPS.get(torch.cuda.get_device_name(), 0.0)
    expected = found["bare"][0].losses[:CHECKED_STEPS]
    results = {}
    for name, runs in found.items():
        ratios = [one.symbols_per_s / bare.symbols_per_s for one, bare in zip(runs, found["bare"], strict=True)]
        rate = statistics.median(one.symbols_per_s for one in runs)
        step_ms = job.BATCH * job.LENGTH / rate * 1e3
        results[name] = {
            "symbols_per_s": rate,
            "spread": [min(one.symbols_per_s for one in runs), max(one.symbols_per_s for one in runs)],
            "to_bare": statistics.median(ratios),
            "to_bare_spread": [min(ratios), max(ratios)],
            "step_ms": step_ms,
            "utilisation": rate * job.flops_per_symbol(parameters) / (peak * 1e12) if peak else None,
            "memory_gib": max(one.memory_gib for one in runs),
            "first_step_s": min(one.first_step_s for one in runs),  # the first repetition compiles for the others
            "losses": runs[-1].losses,
        }
        off = max(abs(a / b - 1) for a, b in zip(runs[-1].losses, expected, strict=False))
        if not off <= LOSS_TOLERANCE:  # so that no NaN is within it
            problems.append(f"{name}: the first losses are up to {off:.1%} off those of the bare loop")
    _show_speed(console, results)
    return {"parameters": parameters, "batch": job.BATCH, "length": job.LENGTH, "steps": run.steps,
            "warm_up": run.warm_up, "repetitions": repetitions, "peak_tflops": peak, "goal": GOAL,
            "systems": results}  # fmt: skip


def sharing(console: Console, run: Run, problems: list[str]) -> list[dict[str, Any]]:
    """Workers that share the device, in exact mode: the same weights, also when one of them is killed."""
    results = []
    for workers, kill in ((1, False), (2, False), (4, False), (2, True), (4, True)):
        one = running.ours(run, EXACT, workers, kill=kill)
        results.append({"workers": workers, "killed": kill, "symbols_per_s": one.symbols_per_s,
                        "memory_gib": one.memory_gib, "recoveries": one.recoveries,
                        "weights_sha256": one.weights_sha256})  # fmt: skip
        console.print(
            f"  {workers} workers{', one killed' if kill else ''}: {one.symbols_per_s:,.0f} symbols/s, "
            f"{one.memory_gib:.1f} GiB, weights {one.weights_sha256[:16]}"
        )
        if kill and not one.recoveries:
            problems.append(f"of {workers} workers one was killed, and nobody noticed")
    if len({one["weights_sha256"] for one in results}) > 1:
        problems.append("the weights depend on the workers, or on their deaths")
    return results


def _show_speed(console: Console, results: dict[str, Any]) -> None:
    table = Table("system", "symbols/s", "over bare", "spread", "step ms", "utilisation", "GiB", "first step s")
    for name, one in results.items():
        low, high = one["to_bare_spread"]
        used = f"{one['utilisation']:.1%}" if one["utilisation"] else "?"
        table.add_row(
            name, f"{one['symbols_per_s']:,.0f}", f"{one['to_bare']:.3f}", f"{low:.3f}–{high:.3f}",
            f"{one['step_ms']:.1f}", used, f"{one['memory_gib']:.1f}", f"{one['first_step_s']:.1f}",
        )  # fmt: skip
    console.print(table)


def _show_kernels(console: Console, results: list[dict[str, Any]]) -> None:
    table = Table("kernel", "MB", "GB/s of gradients", "of a copy's", "times fewer bytes")
    for one in results:
        fewer = f"{one['fewer_bytes']:.1f}" if "fewer_bytes" in one else ""
        speeds = f"{one['gb_per_s']:.0f}", f"{one['of_copy']:.2f}"
        table.add_row(one["kernel"], f"{one['size_mb']:.0f}", *speeds, fewer)
    console.print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    unknown = set(args.only) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    return args


if __name__ == "__main__":
    sys.exit(main())

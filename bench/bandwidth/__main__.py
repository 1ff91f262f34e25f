"""Bytes per second: adding up gradients, and push and pull through parameter servers, each beside memcpy.

python -m bench.bandwidth [--json FILE] [--quick] [--repetitions N] [--only reduce,servers]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import machine, options, tables
from bench.bandwidth import reduce, servers
from bench.running import DriverFailed
from bench.spreads import ratio, spread

PARTS = ("reduce", "servers")
SIZES_MB = [1, 25, 100]
GOAL = 5.0
"""GB/s of the shared-memory reduce over gloo's, at least."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--repetitions", type=options.count, help="default 15 (reduce) and 9 (servers); 3 if quick")
    parser.add_argument("--only", type=options.some_of("part", PARTS), default=list(PARTS))
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    content: dict[str, Any] = {
        "program": "bench.bandwidth",
        "arguments": sys.argv[1:],
        "machine": machine.facts(),
        "load": {"before": machine.load()},
    }
    tables.show_machine(console, content["machine"], content["load"]["before"])
    try:
        if "reduce" in args.only:
            content["reduce"] = measure_reduce(console, args.repetitions or (3 if args.quick else 15))
        if "servers" in args.only:
            content["servers"] = servers.measure(console, args.repetitions or (3 if args.quick else 9))
    except DriverFailed as error:
        console.print(str(error), markup=False)
        return 2
    content["load"]["after"] = machine.load()
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0


def measure_reduce(console: Console, repetitions: int) -> dict[str, Any]:
    seconds = reduce.measure(SIZES_MB, repetitions)
    bandwidths = {
        mb: {method: spread([mb / 1000 / took for took in times]) for method, times in found.items()}
        for mb, found in seconds.items()
    }
    ratios = [
        ratio(f"{mb} MB: {ours} / {other}", found[other], found[ours], goal)
        for mb, found in seconds.items()
        for ours, other, goal in (
            ("shared", "gloo", GOAL),
            ("shared, whole", "gloo", None),
            ("shared", "memcpy", None),
        )
    ]
    tables.show_reduce(console, bandwidths)
    tables.show_ratios(console, f"reduce: ratios of GB/s (repetitions: {repetitions})", ratios)
    return {
        "gb_per_s": {
            str(mb): {method: asdict(one) for method, one in found.items()} for mb, found in bandwidths.items()
        },
        "ratios": [one.as_json() for one in ratios],
    }


if __name__ == "__main__":
    sys.exit(main())

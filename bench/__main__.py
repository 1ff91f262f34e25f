"""DistBelief side by side with its peers: measured, shown as a table, drawn, and written to docs/benchmarks.md.

    python -m bench                     everything (hours); --resume goes on where it was broken off
    python -m bench --quick             a look at most of it, under ten minutes
    python -m bench speed --workloads mlp,cnn --systems allreduce,ddp,ideal
    python -m bench report              tables, figures and the page again, from the results that are there

One thread per worker. Systems take turns, another one first in each repetition, and ratios are taken within one; a
measurement during which others had much of the machine is taken again while there is time for it. All begin with the
same weights and train on the same batches in the same order. Losses are held against those of one process: who did
not do the work is not compared. What goals are about is measured once more, in turns of seconds: all are there at
once, and one of them runs (`turns`). The exit status is 1 when that happens to us, 2 when something of ours failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import machine, options, tables
from bench.compare import environments, isolation, others, page, plan, shown, summary
from bench.compare.comparing import Comparison
from bench.compare.plan import PARTS, Cell
from bench.compare.results import Results
from bench.compare.systems import SYSTEMS
from bench.recovery import peers as recovery
from bench.running import BENCH, DriverFailed
from bench.workloads import WORKLOADS

PATIENCE_S = 40.0
"""For each cell: to measure again what was disturbed."""

FILES = {name: BENCH / "results" / f"{name}.json" for name in ("quick", "full")}


def main() -> int:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    size = plan.QUICK if args.quick else plan.FULL
    if args.steps:
        size = replace(size, steps=dict.fromkeys(WORKLOADS, (1, args.steps - 1)))
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    cells = plan.cells(size, args.parts, args.workloads, args.systems, args.repetitions)
    only_report = args.parts == ["report"]
    file: Path = args.json or (_newest() if only_report else FILES["quick" if args.quick else "full"])
    if only_report and not file.exists():
        console.print(f"there are no results in {file}: measure first, for example `make bench-quick`", markup=False)
        return 2
    results = Results.read(file) if only_report else _measured(args, console, file, cells)
    shown.show(console, results.content)
    if "report" in args.parts:
        for written in page.write(results.content, file):
            console.print(f"written: {written}", markup=False)
    problems = summary.problems_of_ours(results.content)
    tables.show_problems(console, problems)
    ours_failed = any(summary.kind(name) == "ours" for failed in results.content["failed"].values() for name in failed)
    return 2 if ours_failed else 1 if problems else 0


def _measured(args: argparse.Namespace, console: Console, file: Path, cells: list[Cell]) -> Results:
    facts = {
        "program": "python -m bench",
        "arguments": sys.argv[1:],
        "machine": machine.facts(),
        "settings": {"quick": args.quick, "threads": 1, "steps": args.steps},
        "load": {"before": machine.load()},
    }
    results = Results.begin(file, facts, resume=args.resume)
    tables.show_machine(console, results.content["machine"], machine.load(), "One thread per worker.")
    _measure(args, console, results, cells)
    return results


def _newest() -> Path:
    """The file of results with the latest measurements."""
    there = [file for file in FILES.values() if file.exists()]
    return max(there, key=lambda file: json.loads(file.read_text())["machine"]["date"], default=FILES["full"])


def _measure(args: argparse.Namespace, console: Console, results: Results, cells: list[Cell]) -> None:
    began = time.monotonic()
    content = results.content
    total = len(cells) + sum(part in args.parts for part in plan.OTHERS)
    done = 0

    def tell(text: str) -> None:
        passed = time.monotonic() - began
        line = f"[{done + 1}/{total}, {passed / 60:.0f} min] {text}"
        if console.is_terminal:
            tables.show_progress(console, line)
        else:
            console.print(line, markup=False)

    needed = {name for cell in cells for name in cell.systems}
    if "recovery" in args.parts and not args.quick:
        needed |= {peer.system for peer in recovery.PEERS.values()} & set(SYSTEMS)
    pythons = _interpreters(sorted(needed), content, tell)
    isolation.adopt_orphans()
    isolation.own_shared_memory()
    content["wire"] = isolation.own_loopback()
    try:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            comparison = Comparison(results, Path(folder), pythons, not content["wire"], tell)
            for cell in cells:
                comparison.measure(cell, 0.0 if args.quick else PATIENCE_S)
                done += 1
            for part in [one for one in plan.OTHERS if one in args.parts]:
                if part not in content["others"]:
                    tell(part)
                    try:
                        content["others"][part] = others.measure(part, Path(folder), args.quick)
                    except DriverFailed as error:
                        results.fail(part, "allreduce", str(error))
                    results.write()
                done += 1
    finally:
        isolation.end_descendants()
        content["load"]["after"] = machine.load()
        content["took_s"] = round(content["took_s"] + time.monotonic() - began, 1)
        results.write()


def _interpreters(names: list[str], content: dict[str, Any], tell: Any) -> dict[str, str]:
    """Of the systems that can be run; why the others cannot goes into the results. Made while there is a network."""
    found = {}
    content.setdefault("versions", {})
    for name in names:
        system = SYSTEMS[name]
        if system.requirements:
            tell(f"the environment of {system.title}")
        try:
            found[name] = environments.python_for(system)
        except environments.Unavailable as error:
            content["skipped"][name] = str(error)
            continue
        content["versions"] |= environments.versions(found[name], environments.packages(system))
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=(__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", type=_part, metavar="PART", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="fewer systems, workloads and repetitions")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep what the file of results has, and do the rest; without it the file is begun anew",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the file of results; default in bench/results")
    parser.add_argument("--repetitions", type=options.count, help="of every system in every cell; rounds of turns")
    parser.add_argument("--steps", type=_steps, help="of every run, the first one to warm up")
    for name, known in (("workload", list(WORKLOADS)), ("system", list(SYSTEMS))):
        kinds = options.some_of(name, known)
        parser.add_argument(
            f"--{name}s", type=kinds, default=[], help=f"instead of the plan's; some of {','.join(known)}"
        )
    args = parser.parse_args()
    args.parts = [part for part in PARTS if part in args.parts or not args.parts]
    if "accuracy" in args.parts and not _has_fashion():
        args.parts = [part for part in args.parts if part != "accuracy"]
        print("no accuracy part: apt-get install -y dataset-fashion-mnist brings the images", file=sys.stderr)
    return args


def _part(text: str) -> str:
    if text not in PARTS:
        raise argparse.ArgumentTypeError(f"no such part: {text}; choose from {', '.join(PARTS)}")
    return text


def _steps(text: str) -> int:
    if (steps := options.count(text)) < 2:
        raise argparse.ArgumentTypeError("at least 2: one to warm up, one to be timed")
    return steps


def _has_fashion() -> bool:
    from bench.workloads.dense import FASHION

    return FASHION.is_dir()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nbroken off; what was measured is kept, and --resume goes on from there", file=sys.stderr)
        sys.exit(130)

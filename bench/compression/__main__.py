"""Compressed gradients: bytes on the wire, accuracy after equally many steps, and time to an accuracy on a slow link.

    python -m bench.compression --folder /usr/share/datasets/fashion-mnist
    python -m bench.compression --of local_sgd --methods none,int8 --results local.json

Bytes and accuracies are reliable on a busy machine; times are only good as ratios within one run. It needs root, for
network namespaces; --only accuracy does without.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import machine
from bench.compression.link import Cable, train
from bench.options import count, some_of
from bench.running import BENCH, ROOT

PLAIN = "none"
METHODS = (PLAIN, "bf16", "int8", "topk=0.1", "topk=0.01", "powersgd=8", "powersgd=4")
PARTS = ("link", "accuracy")
DATA = "/usr/share/datasets/fashion-mnist"


STRATEGIES = {
    "allreduce": ("allreduce:inexact:gloo", "allreduce:{}:always"),
    "local_sgd": ("local_sgd:8:replicas=2:gloo:nocopies", "local_sgd:8:replicas=2:{}:gloo"),
    "ps:sync": ("ps:sync:servers=2:tcp", "ps:sync:servers=2:{}:always:tcp"),
}
"""Without and with compression; everything goes over the network."""


def strategy(of: str, method: str) -> str:
    plain, compressed = STRATEGIES[of]
    return plain if method == PLAIN else compressed.format(method)


def accuracy(how: str, settings: Sequence[str]) -> dict[str, Any]:
    """examples/fashion on two workers of this host."""
    sets = [part for setting in settings for part in ("--set", setting)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "distbelief.cli.main", "train", str(ROOT / "examples" / "fashion.py")]
        options = ["--workers", "2", "--strategy", how, "--save-every", "never", "--no-balance", "--json"]
        found = subprocess.run([*command, *sets, *options], cwd=folder, capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(found.stderr)
    result = json.loads(found.stdout.strip().splitlines()[-1])
    return {"accuracy": result["metrics"]["accuracy"], "steps": result["steps"], "wire_ratio": result["wire_ratio"]}


def link(how: str, mbit: float, settings: Sequence[str], goal: float) -> dict[str, Any]:
    sets = [part for setting in settings for part in ("--set", setting)]
    with tempfile.TemporaryDirectory() as folder, Cable(mbit) as cable:
        job = [str(BENCH / "compression" / "job.py"), *sets]
        return asdict(train(cable, Path(folder), how, job, goal))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--folder", default=DATA, help="where the IDX files of Fashion-MNIST are")
    options.add_argument("--of", choices=list(STRATEGIES), default="allreduce", help="the strategy")
    options.add_argument("--methods", type=some_of("method", METHODS), default=list(METHODS))
    options.add_argument("--only", type=some_of("part", PARTS), default=list(PARTS))
    options.add_argument("--mbit", type=float, default=100.0, help="megabits per second of the link, each way")
    options.add_argument("--goal", type=float, default=0.85, help="accuracy to reach on the link")
    options.add_argument("--steps", type=count, default=300, help="most steps on the link")
    options.add_argument("--set", action="append", default=[], help="of examples/fashion.py, for the accuracies")
    options.add_argument("--results", type=Path, default=BENCH / "results" / "compression.json")
    given = options.parse_args()
    console, folder = Console(), f"folder={Path(given.folder).resolve()}"
    facts = {"machine": machine.facts(), "load_before": machine.load(), "mbit": given.mbit, "goal": given.goal}
    found: dict[str, Any] = {**facts, "of": given.of, "settings": given.set, "link": {}, "accuracy": {}}
    for part in given.only:
        for method in given.methods:
            if part == "link":
                figures = link(strategy(given.of, method), given.mbit, [folder, f"steps={given.steps}"], given.goal)
                found["link"][method] = {**figures, "most_steps": given.steps}
            else:
                found["accuracy"][method] = accuracy(strategy(given.of, method), [folder, *given.set])
            console.print(part, method, found[part][method])
            found["load_after"] = machine.load()
            given.results.write_text(json.dumps(found, indent=2) + "\n")
    show(console, found)


def show(console: Console, found: dict[str, Any]) -> None:
    for part, of in ((part, found[part]) for part in PARTS if found[part]):
        columns = list(next(iter(of.values())))
        table = Table("method", *columns, title=part)
        for method, values in of.items():
            table.add_row(method, *("" if values[c] is None else f"{values[c]:,.4g}" for c in columns))
        console.print(table)


if __name__ == "__main__":
    main()

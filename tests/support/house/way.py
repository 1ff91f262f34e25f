"""Which files a step, and a worker's death, pass through: measured by running them.

    python -m tests.support.house.way [--root CHECKOUT] [--list]

A step: `allreduce` in shared memory, two workers with one shard each; every file of the package in which the training
thread of rank 0 enters a function from the loss of one step to the loss of the next one, and the loop itself.
A death: three workers, one is killed; the files that the leading process, the coordinator and the surviving workers
enter a function of from the kill to the replacement's first steps, which they do not enter while a run just trains.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.house.tree import ROOT

TRACED = Path(__file__).parent / "traced"
PATIENCE_S = 120


def files_of_a_step(root: Path) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        traced = _Traced(root, Path(folder), ["--workers", "2", "--set", "traced_step=true"], watched=False)
        traced.process.wait(PATIENCE_S)
        seen = traced.seen("step")
        return sorted({file for file, _ in max(seen.values(), key=len)})


def files_of_a_death(root: Path) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        more = ["--workers", "3", "--set", "steps=1000000", "--set", "shards=3"]
        traced = _Traced(root, Path(folder), more, watched=True)
        try:
            members = traced.await_generation(lambda one: len(one["members"]) == 3)
            traced.enter("quiet", seconds=5)
            traced.enter("death")
            victim = members["members"][1]["pid"]
            os.kill(victim, signal.SIGKILL)
            traced.await_generation(
                lambda one: one["generation"] > members["generation"] + 1
            )  # the replacement has a seat
            time.sleep(1)
            traced.enter("")
        finally:
            traced.process.send_signal(signal.SIGINT)
            traced.process.wait(PATIENCE_S)
        quiet, death = traced.seen("quiet"), traced.seen("death")
        found: set[str] = set()
        for process, functions in death.items():
            if process in quiet:  # the replacement is not: it loads the job, which has nothing to do with the death
                found |= {file for file, _ in functions - quiet[process]}
        return sorted(found)


class _Traced:
    """A run whose processes write down which files they enter."""

    def __init__(self, root: Path, folder: Path, options: list[str], watched: bool) -> None:
        self.log, self.phase, self.run = folder / "log", folder / "phase", folder / "run"
        self.log.touch()
        self.package = root / "src" / "distbelief"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TRACED), str(root / "src")]),
            "WAY_LOG": str(self.log),
            "WAY_PHASE": str(self.phase) if watched else "",
            "WAY_PACKAGE": str(self.package),
        }
        train = [sys.executable, "-m", "distbelief", "train", str(TRACED / "job.py"), "--run-dir", str(self.run)]
        self.process = subprocess.Popen(
            [*train, "--plain", *options], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def enter(self, phase: str, seconds: float = 0.2) -> None:
        self.phase.write_text(phase)
        time.sleep(seconds)

    def seen(self, phase: str) -> dict[int, set[tuple[str, str]]]:
        """Process -> the functions that it entered in that phase, each with its file."""
        found: dict[int, set[tuple[str, str]]] = {}
        for line in self.log.read_text().splitlines():
            process, where, file, function = line.split("\t")
            if where == phase:
                found.setdefault(int(process), set()).add((file, function))
        return found

    def await_generation(self, fits: Callable[[dict], bool]) -> dict:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until and self.process.poll() is None:
            journal = self.run / "journal.jsonl"
            for line in journal.read_text().splitlines() if journal.exists() else []:
                try:
                    record = json.loads(line)
                except ValueError:  # being written
                    continue
                if record["kind"] == "generation" and fits(record):
                    return record
            time.sleep(0.05)
        raise SystemExit(f"the run did not get there; see {self.run}")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    for what, measure in (("a step", files_of_a_step), ("a worker's death", files_of_a_death)):
        files = measure(options.root.resolve())
        print(f"{len(files):6}  files on the way of {what}", flush=True)
        if options.list:
            print(*(f"          {file}" for file in files), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Run the tests that start processes many times, under load: `make test-repeat N=20 [ONLY=tests/e2e/test_hosts.py]`.

One busy loop per core competes with the tests. Every run of a test file is one line of the log, which also says what is
done already: started again, this goes on where it was. A failure sets the count of its file back to zero, so that a
complete log shows N passed runs of each file after its last failure. The log is made to be committed.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.selection import starts_processes

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / "tests" / "repeat.log"
LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"
LINE = re.compile(r"\S+ (?P<file>\S+): (?P<said>passed|FAILED) ")


def chosen(only: Sequence[str]) -> list[str]:
    """What to run, one pytest argument each: the end-to-end tests, and all others that start processes."""
    if only:
        return [file for one in only for file in _files(one)]
    folders = ("tests/e2e", "tests/contract", "tests/fuzz", "tests/unit")
    files = [file for folder in folders for file in _files(folder)]
    return [file for file in files if starts_processes(ROOT / file)]


def _files(argument: str) -> list[str]:
    folder = ROOT / argument
    if not folder.is_dir():
        return [argument]
    return sorted(str(path.relative_to(ROOT)) for path in folder.rglob("test_*.py"))


def passed(log: Path) -> collections.Counter[str]:
    """How often each file has passed since it last failed."""
    counts: collections.Counter[str] = collections.Counter()
    for line in log.read_text().splitlines() if log.exists() else []:
        if found := LINE.match(line):
            counts[found["file"]] = counts[found["file"]] + 1 if found["said"] == "passed" else 0
    return counts


class Repetition:
    def __init__(self, log: Path, times: int) -> None:
        self._log, self._times = log, times
        self._counts = passed(log)
        self._lock = threading.Lock()
        self.failed = False

    def due(self, files: Sequence[str]) -> list[str]:
        """File by file, then all of them again."""
        rounds = range(1, self._times + 1)
        return [file for number in rounds for file in files if self._counts[file] < number]

    def run(self, file: str) -> None:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.xml")
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", f"--junitxml={report}"]
            done = subprocess.run(
                [*command, *file.split(" ")], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True
            )
            failures, tests, skipped = _outcomes(report)
        took_s = time.monotonic() - began
        if done.returncode == pytest.ExitCode.INTERRUPTED:
            return  # by Ctrl-C: it says nothing about the tests
        if done.returncode and not failures:
            failures = [f"pytest ended with {done.returncode}"]
        with self._lock:
            if failures:
                self.failed = True
                self._counts[file] = 0
                said = f"FAILED in {took_s:.0f} s: {', '.join(failures)}"
                print(done.stdout[-20_000:], done.stderr[-2_000:], flush=True)
            else:
                self._counts[file] += 1
                aside = f", {skipped} skipped" if skipped else ""
                said = f"passed in {took_s:.0f} s ({tests} tests{aside}), {self._counts[file]} of {self._times}"
            now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            with self._log.open("a") as log:
                print(now, f"{file}: {said}", file=log, flush=True)
            print(now, f"{file}: {said}", flush=True)


def _outcomes(report: Path) -> tuple[list[str], int, int]:
    """The names of the tests that failed, and how many have run and were skipped."""
    if not report.exists():
        return [], 0, 0
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failures = [str(one.get("name")) for one in cases if {"failure", "error"} & {child.tag for child in one}]
    skipped = sum(any(child.tag == "skipped" for child in one) for one in cases)
    return failures, len(cases) - skipped, skipped


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.repeat", description=__doc__)
    parser.add_argument("-n", "--times", type=int, default=20)
    parser.add_argument("-j", "--jobs", type=int, default=2, help="how many files at a time")
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--idle", action="store_true", help="without busy loops")
    parser.add_argument("only", nargs="*", help="files, folders or single tests; default: all that start processes")
    options = parser.parse_args()
    files = chosen(options.only)
    repetition = Repetition(options.log, options.times)
    due = repetition.due(files)
    print(f"{len(files)} files {options.times} times: {len(due)} runs are left; log: {options.log}", flush=True)
    loops = [] if options.idle else [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(os.cpu_count() or 1)]
    try:
        with ThreadPoolExecutor(options.jobs) as pool:
            try:
                list(pool.map(repetition.run, due))
            except BaseException:  # Ctrl-C: the files under way end, which the terminal has interrupted too
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    left = len(repetition.due(files))
    print("all passed" if not left else f"{left} runs are left", flush=True)
    return 1 if repetition.failed or left else 0


if __name__ == "__main__":
    sys.exit(main())

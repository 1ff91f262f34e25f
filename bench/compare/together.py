"""Starts the workers of a system that has no launcher of its own: they end together.

    python -m bench.compare.together --- COMMAND … --- COMMAND …

It ends well when all have; when one fails, the others are ended, and its status is the whole's. Runs in any system's
environment, so nothing but the standard library is needed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import groupby

SEPARATOR = "---"
LOOK_EVERY_S = 0.02
PATIENCE_S = 5.0


def split(words: Sequence[str]) -> list[list[str]]:
    """
    >>> split(["---", "sleep", "1", "---", "true"])
    [['sleep', '1'], ['true']]
    """
    return [list(some) for between, some in groupby(words, lambda word: word == SEPARATOR) if not between]


def run(commands: Sequence[Sequence[str]]) -> int:
    processes = [subprocess.Popen(command) for command in commands]
    try:
        while True:
            states = [process.poll() for process in processes]
            failed = [state for state in states if state]
            if failed or None not in states:
                return abs(failed[0]) if failed else 0
            time.sleep(LOOK_EVERY_S)
    finally:
        _end(processes)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + PATIENCE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(run(split(sys.argv[1:])))

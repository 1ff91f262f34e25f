"""Which signals stop a run, and which stay ignored. Each case is a process of its own: dispositions belong to one."""

from __future__ import annotations

import subprocess
import sys

import pytest

HANG_UP = """
import os, signal
from distbelief.launch.pollloop import Signals
with Signals() as signals:
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
        os.kill(os.getpid(), number)
        print(signals.count, int(signals.received), flush=True)
"""


@pytest.mark.parametrize(
    ("at_the_start", "heard"),
    [("default", ["1 1", "1 1", "1 1", "1 1", "2 1"]), ("ignore", ["0 0", "0 0", "1 15", "1 15", "2 15"])],
)
def test_a_lost_terminal_never_ends_a_run_at_once(at_the_start: str, heard: list[str]) -> None:
    """It sends several signals. Under `nohup` SIGHUP stays ignored; SIGTERM twice ends a run at once."""
    done = subprocess.run(
        ["env", f"--{at_the_start}-signal=HUP", sys.executable, "-c", HANG_UP],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == heard


PROGRAM = """
import os, signal, sys
from distbelief.launch.pollloop import Signals
signal.signal(signal.SIGINT, signal.SIG_IGN if sys.argv[1] == "ignored" else signal.SIG_DFL)
with Signals() as signals:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
        print(signals.count, int(signals.received), flush=True)
print(signal.getsignal(signal.SIGINT) is (signal.SIG_IGN if sys.argv[1] == "ignored" else signal.SIG_DFL))
"""


@pytest.mark.parametrize(
    ("at_the_start", "heard"),
    [("usual", ["1 2", "2 2", "True"]), ("ignored", ["0 0", "1 15", "True"])],  # SIGINT is 2, SIGTERM 15
)
def test_an_interrupt_that_is_ignored_at_the_start_stays_ignored(at_the_start: str, heard: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, at_the_start], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == heard

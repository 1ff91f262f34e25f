"""Systems that hang, fail or leave something behind: the program goes on, and knows why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

# In a process of its own: what is ended are all of its descendants.
PROGRAM = """
import pathlib, sys, psutil
from bench.compare import isolation
from bench.compare.launching import run
from bench.compare.system import Start, System
from bench.running import DriverFailed

folder = pathlib.Path(sys.argv[1])
start = Start(sys.executable, folder, folder, 1, lambda count: [])
isolation.adopt_orphans()

def attempt(*commands):
    try:
        run(System("x", "X", "x.py", lambda start: [["sh", "-c", one] for one in commands]), start, False, limit_s=2.0)
        said = "fine"
    except DriverFailed as error:
        said = str(error).replace(chr(10), " | ")
    print(said, len(psutil.Process().children(recursive=True)), flush=True)

attempt("true", "sleep 100")
attempt("setsid sh -c 'trap \\"\\" TERM; sleep 0.1; sleep 100' & exit 0")
attempt("sleep 100")
attempt("echo 'ValueError: too small'; for i in $(seq 400); do echo launcher noise; done; exit 3")
"""


def test_nothing_is_left_and_the_reason_is_told(tmp_path: Path) -> None:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables, check=True)
    helper, orphan, hung, failed = done.stdout.splitlines()
    assert helper == "fine 0"
    assert orphan == "fine 0"
    assert hung.startswith("not done after 2 s")
    assert hung.endswith(" 0")
    assert "ended with 3: | ValueError: too small" in failed
    assert failed.endswith(" 0")

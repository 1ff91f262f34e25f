"""Systems that take turns: while one runs, the others stand still; and nothing is left of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

STEPPING = """
import sys, time
from bench.task import Task
task = Task.load()
record = task.record(int(sys.argv[1]))
while True:
    time.sleep(0.005)
    record.step(None)
"""

# In a process of its own: what is ended are all of its descendants.
PROGRAM = """
import json, pathlib, sys, psutil
from bench.compare import isolation, turns
from bench.compare.system import Start, System
from bench.running import DriverFailed
from bench.task import Task
import numpy as np

folder = pathlib.Path(sys.argv[1])
isolation.adopt_orphans()
seen, runner = [], turns.Runner

def made(system, start):
    seen.append(runner(system, start))
    return seen[-1]

turns.Runner = made

def run(name, alone, command):
    task = Task("mlp", 2, 9, 3, 4, 7, {}, "", broken_off=True, folder=str(folder / name))
    task.save(folder / name, np.zeros((9, 8)))
    start = Start(sys.executable, folder / "stepping.py", folder / name, 2, lambda count: [])
    commands = [[sys.executable, *command, str(rank)] for rank in range(2)]
    return System(name, name, "", lambda start: commands, ends_with_all=alone), start

stepping = [str(folder / "stepping.py")]
found = turns.take_turns([run("one", False, stepping), run("other", True, stepping)], 0.6, 3)
told = [[[one.began, one.ended] for one in each.turns] for each in seen]
print(json.dumps([found, told, [each.ends() for each in seen], len(psutil.Process().children(recursive=True))]))
try:
    turns.take_turns([run("broken", False, ["-c", "raise ValueError('too small')"])], 0.6, 3)
except DriverFailed as error:
    print(json.dumps(str(error)))
"""


def test_one_runs_at_a_time_and_nothing_is_left(tmp_path: Path) -> None:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    (tmp_path / "stepping.py").write_text(STEPPING)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=variables, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (speeds, turns, ends, left), broken = (json.loads(line) for line in done.stdout.splitlines())
    assert left == 0
    assert "too small" in broken  # both ranks say so, perhaps in the middle of each other
    assert [len(some) for some in speeds.values()] == [3, 3]
    assert all(speed > 0 for some in speeds.values() for speed in some)
    for mine, others in ((0, 1), (1, 0)):
        first = min(began for began, _ in turns[mine] + turns[others])
        for began, ended in turns[others]:
            # A process that was told to stop may write one line more.
            assert sum(began + 0.1 < end < ended for rank in ends[mine] for end in rank if end > first) == 0

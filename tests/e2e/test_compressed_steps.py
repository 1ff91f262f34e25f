"""ps:sync with compressed pushes: the weights, and what is owed, say how many gradients were applied."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from distbelief.worker.origin import saved_at
from tests.support.runs.command import JOBS, Outcome, Run
from tests.support.runs.watched import Watched

Start = Callable[..., Run]
Cli = Callable[..., Outcome]
Wait = Callable[[Callable[[], object]], None]

# A quarter of the gradient is sent at a time, and the rest is owed.
STRATEGY = "ps:sync:servers=2:topk=0.25:always:tcp"
SAMPLES = 8  # of a step: partial sums are sums over samples, and servers apply their mean


def counted(folder: Path, step: int) -> set[float]:
    """How many gradients of ones were applied or are owed, by element."""
    tensors = saved_at(folder / "checkpoints", step).tensors
    owed = sum(tensor for name, tensor in tensors.items() if name.startswith("compression/residual/"))
    assert owed.count_nonzero() > 0
    return set((owed / SAMPLES - tensors["model/count"]).tolist())


def test_a_servers_death_and_a_resume_lose_nothing_and_apply_nothing_twice(
    start: Start, tmp_path: Path, wait_until: Wait
) -> None:
    job = [JOBS / "counter.py", "--set", "steps=150", "--set", "brake_s=0.1"]
    run = Watched(start, tmp_path, wait_until, *job, "--strategy", STRATEGY, "--workers", 2, "--save-every", 20)
    run.after(8)
    run.signal_server(min(run.servers()), signal.SIGKILL)
    run.after(30)
    run.run.signal(signal.SIGINT)
    assert run.run.wait().status == 130
    saved = [entry["step"] for entry in run.journal("checkpoint")]
    assert counted(run.folder, saved[-1]) == {float(saved[-1])}
    run.release()
    again = start("resume", "run", "--workers", 1, "--json").wait().json
    assert again["steps"] == 150
    assert counted(run.folder, 150) == {150.0}
    assert 0.4 < again["wire_ratio"] < 0.6


def test_a_workers_death_loses_what_it_owed_at_most(start: Start, tmp_path: Path, wait_until: Wait) -> None:
    job = [JOBS / "counter.py", "--set", "steps=60", "--set", "brake_s=0.1"]
    run = Watched(start, tmp_path, wait_until, *job, "--strategy", STRATEGY, "--workers", 3, "--save-every", 60)
    run.after(10)
    run.has_members(3)
    victim = run.living()[1]
    run.signal(victim, signal.SIGKILL)
    run.after(25)
    result = run.result()
    assert result["steps"] == 60
    run.check_workers_lost(killed=[victim])
    found = counted(run.folder, 60)
    # It sent every element at least every fourth time, and had up to half of a step's samples.
    assert 60 - 1.5 * len(run.journal("lost")) <= min(found) < 60
    assert max(found) <= 60


def test_in_shared_memory_it_is_off_and_says_so(distbelief: Cli, tmp_path: Path) -> None:
    job = [JOBS / "counter.py", "--set", "steps=10", "--workers", 2, "--run-dir", "run"]
    outcome = distbelief("train", *job, "--strategy", "ps:sync:servers=1:int8")
    assert outcome.status == 0, outcome
    assert "gradients stay in shared memory, so int8 is off" in outcome.stdout

"""`distbelief replay`: one process executes any step of a run on several workers, with kills in it, to the same bits.
And it finds what made a run fail."""

from __future__ import annotations

import json
import random
import runpy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.command import JOBS, Outcome, Run
from tests.support.runs.watched import Watched

Cli = Callable[..., Outcome]
Wait = Callable[[Callable[[], object]], None]

STEP, SHARD = 37, 2  # where jobs/planted.py is to plant it


def records(run_dir: Path, name: str, kind: str) -> list[dict[str, Any]]:
    path = run_dir / name
    whole = path.read_text().split("\n")[:-1] if path.exists() else []
    return [record for record in map(json.loads, filter(None, whole)) if record["kind"] == kind]


def checkpoints(run_dir: Path) -> list[int]:
    return [int(file.parent.name[5:]) for file in run_dir.glob("checkpoints/*/manifest.json")]


def marked_sample() -> int:
    return int(runpy.run_path(str(JOBS / "planted.py"))["marked_sample"](STEP))


def test_any_step_of_a_run_with_kills(
    start: Callable[..., Run], distbelief: Cli, tmp_path: Path, wait_until: Wait
) -> None:
    """With everything in the job that makes exactness hard."""
    run_dir = tmp_path / "run"
    saving = ["--save-every", 8, "--keep-last", 100]
    job = [JOBS / "everything.py", "--set", "epochs=8", "--set", "brake_s=0.05", "--set", "hold_step=26"]
    run = Watched(start, tmp_path, wait_until, *job, "--workers", 4, *saving)
    for steps in (6, 15, 24):
        run.after(steps)
        run.signal(random.choice(run.living()), signal.SIGKILL)
    result = run.result()
    assert result["recoveries"] >= 2
    saved = checkpoints(run_dir)
    assert len(saved) > 1, "a kill may have prevented some"
    for step in (random.randrange(result["steps"]), result["steps"] - 1):
        found = distbelief("replay", run_dir, "--step", step, "--json").json
        assert (found["step"], found["verdict"], found["update"]) == (step, "matched", "matched"), found
        assert found["fingerprint"] == found["recorded"]
        assert (found["from_checkpoint"] or 0) == max(one for one in (0, *saved) if one <= step)
        assert (found["differs_from"], found["other_bits"], found["non_finite"]) == (None, None, [])
        assert len({index for shard in found["shards"] for index in shard["indices"]}) in (25, 7)


@pytest.mark.parametrize(("where", "failed_at"), [("forward", STEP), ("backward", STEP + 1)])
def test_a_planted_nan_is_found(distbelief: Cli, tmp_path: Path, where: str, failed_at: int) -> None:
    """In one sample of one shard. If it is in the backward pass only, the run goes on for one more step."""
    planted = [JOBS / "planted.py", "--set", f"where={where}", "--set", f"at={STEP}"]
    outcome = distbelief("train", *planted, "--workers", 3, "--save-every", 10, "--run-dir", "run")
    assert outcome.status == 1
    assert f"the loss is nan at step {failed_at}" in outcome.stderr
    found = distbelief("replay", "run", "--json").json
    assert (found["step"], found["failed_at"]) == (STEP, failed_at)
    # A checkpoint is written while training goes on: the last one may not have been sealed when the run failed.
    assert found["from_checkpoint"] == max(checkpoints(tmp_path / "run"), default=None)
    (origin,) = [one for one in found["non_finite"] if one["origin"]]
    assert (origin["shard"], origin["layer"]) == (SHARD, "fragile")
    assert [one["shard"] for one in found["shards"] if not one["finite"]] == [SHARD]
    sample = marked_sample()
    assert sample in found["shards"][SHARD]["indices"]
    if where == "forward":
        assert (origin["where"], origin["samples"]) == ("output", [sample])
    else:
        assert (origin["where"], origin["name"]) == ("gradient", "SqrtBackward0")
    assert found["differs_from"] is None, "the steps on the way are those of the run"


def test_what_differs_and_the_debugger(distbelief: Cli, start: Callable[..., Run], tmp_path: Path) -> None:
    result = distbelief("train", JOBS / "small.py", "--workers", 2, "--run-dir", "run", "--json").json
    metrics = tmp_path / "run" / "metrics.jsonl"
    right = records(tmp_path / "run", "metrics.jsonl", "step")[5]["fingerprint"]
    metrics.write_text(metrics.read_text().replace(right, "0" * 16))
    outcome = distbelief("replay", "run", "--step", 5)
    assert outcome.status == 1
    assert f"differs: fingerprint {right} here, {'0' * 16} in the run" in outcome.stdout
    assert "update: matched" in outcome.stdout
    outcome = distbelief("replay", "run", "--step", 3, "--debug")  # nobody is at its stdin
    assert outcome.status == 0, outcome.stderr
    assert "-> output = model(*args, **kwargs)" in outcome.stdout
    assert "left the debugger" in outcome.stdout
    too_late = distbelief("replay", "run", "--step", result["steps"])
    assert (too_late.status, "is not among those of the run" in too_late.stderr) == (1, True)
    assert (tmp_path / "run" / "weights.safetensors").exists()

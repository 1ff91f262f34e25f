"""`distbelief chaos` on real runs: every kind of fault, and each leaves the weights as they are without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.runs.command import JOBS, Outcome

Cli = Callable[..., Outcome]

NAP_S = 0.01
STEPS = 120  # of about 20 ms: long enough for a replacement to come in, short enough for a test


def small(steps: int = STEPS, nap_s: float = NAP_S) -> list[object]:
    return [JOBS / "small.py", "--set", f"steps={steps}", "--set", f"nap_s={nap_s}"]


def expect_sound(outcome: Outcome, kinds: list[str]) -> dict[str, Any]:
    """The promises held, and these faults were carried out."""
    shown = outcome.json
    context = f"{json.dumps(shown, indent=1)}\n{outcome.stderr}"
    assert shown["weights_equal"], context
    assert shown["steps_lost"] == 0, context
    assert shown["exactly_once"], context
    assert shown["goodput"] > 0, context
    assert sorted(fault["kind"] for fault in shown["faults"]) == sorted(kinds), context
    assert shown["not_carried_out"] == [], context
    for fault in shown["faults"]:
        assert set(fault) == {"kind", "at_step", "noticed_ms", "next_commit_ms", "shards_recomputed"}
        for value in (fault["noticed_ms"], fault["next_commit_ms"], fault["shards_recomputed"]):
            assert value is None or value >= 0, context
    return shown


def chaos(distbelief: Cli, job: list[object], faults: str, kinds: list[str], *more: object) -> dict[str, Any]:
    return expect_sound(distbelief("chaos", *job, "--faults", faults, "--workers", 3, "--json", *more), kinds)


def test_every_kind_in_one_run(distbelief: Cli, tmp_path: Path) -> None:
    """Of a job with batch statistics, dropout, momentum, tied and frozen weights."""
    faults = (
        "slow worker 1 by 3x at step 5 for 2s, kill worker at step 20, freeze worker 2 at step 40 for 1s, "
        "kill coordinator at step 60, join at step 80, cut worker 0 at step 90 for 500ms, leave worker 1 at step 120, "
        "scale to 3 at step 140, freeze worker at step 160"
    )
    kinds = [
        "slow worker",
        "kill worker",
        "freeze worker",
        "kill coordinator",
        "join",
        "cut worker",
        "leave worker",
        "scale",
        "freeze worker",
    ]
    (tmp_path / "brake").touch()
    job = [JOBS / "stored.py", "--set", "steps=300", "--set", "brake_s=0.02", "--set", "evaluate_every=50"]
    shown = chaos(distbelief, job, faults, kinds, "--run-dir", "both")
    (killed,) = [fault for fault in shown["faults"] if fault["kind"] == "kill worker"]
    assert killed["at_step"] >= 20
    assert killed["noticed_ms"] is not None
    assert killed["next_commit_ms"] is not None
    assert killed["shards_recomputed"] is not None
    frozen = max((fault for fault in shown["faults"] if fault["kind"] == "freeze worker"), key=lambda f: f["at_step"])
    assert frozen["at_step"] >= 160  # for good
    assert frozen["noticed_ms"] is not None  # nobody can go on without its shards
    assert frozen["next_commit_ms"] >= frozen["noticed_ms"]
    assert shown["runs"] == {"twin": "both/twin", "faults": ["both/faults"]}
    for name in ("twin", "faults"):
        assert (tmp_path / "both" / name / "weights.safetensors").exists()
    twin, faulty = ((tmp_path / "both" / name / "weights.safetensors").read_bytes() for name in ("twin", "faults"))
    assert twin == faulty


def test_killed_parameter_servers(distbelief: Cli) -> None:
    faults = "kill server 0 at step 15, kill server at step 30"
    job = small(200, nap_s=0.05)  # the second one's successor has all copies before the end, also on a busy machine
    shown = chaos(distbelief, job, faults, ["kill server", "kill server"], "--strategy", "ps:sync")
    assert all(fault["noticed_ms"] is not None and fault["next_commit_ms"] is not None for fault in shown["faults"])


def test_a_run_that_loses_its_terminal_is_resumed(distbelief: Cli) -> None:
    faults = "drop terminal at step 20, kill worker at step 40"
    shown = chaos(distbelief, small(200), faults, ["drop terminal", "kill worker"])
    (dropped,) = [fault for fault in shown["faults"] if fault["kind"] == "drop terminal"]
    assert dropped["at_step"] >= 20
    assert 0 < dropped["noticed_ms"] < dropped["next_commit_ms"], "it ended, and was resumed"


def test_random_schedules(distbelief: Cli) -> None:
    outcome = distbelief("chaos", *small(), "--random", 1, "--seed", 7, "--workers", 3, "--json")
    shown = outcome.json
    assert len(shown["schedules"]) == 1
    assert all(one["weights_equal"] and one["steps_lost"] == 0 for one in shown["schedules"])
    assert len(shown["runs"]["faults"]) == 1


def test_an_inexact_strategy_the_table_for_people_and_a_fault_that_comes_to_nothing(distbelief: Cli) -> None:
    """It is not held to equal weights. For the table of an exact one see unit/chaos."""
    faults = ["--faults", "kill worker 0 at step 5, join at step 9000"]
    outcome = distbelief("chaos", *small(200, nap_s=0.03), *faults, "--workers", 2, "--strategy", "allreduce:inexact")
    assert outcome.status == 0, outcome.stderr
    lines = outcome.stdout.splitlines()
    assert any(line.startswith("fault: kill worker 0 at step 5 (worker 0, process ") for line in lines)
    assert "steps lost: 0" in lines
    assert "not carried out: join at step 9000 (the run ended before)" in lines
    assert lines[-1].startswith("After 1 fault the run came to")


def test_a_run_that_fails_under_faults_says_what_was_done_to_it(distbelief: Cli, tmp_path: Path) -> None:
    job = tmp_path / "fragile.py"
    marker = tmp_path / "twin-is-done"
    # It fails in the second run only, so that the twin is whole.
    job.write_text(
        (JOBS / "small.py").read_text()
        + f"""
import pathlib
whole = job
def job(steps: int = 60):
    inner = whole(steps=steps, nap_s=0.01)
    marker = pathlib.Path({str(marker)!r})
    before = marker.exists()
    calls = 0
    base = inner.loss
    def loss(output, target):
        nonlocal calls
        calls += 1
        marker.touch()
        if before and calls > 30:
            raise RuntimeError("I am fragile")
        return base(output, target)
    import dataclasses
    return dataclasses.replace(inner, loss=loss)
"""
    )
    outcome = distbelief("chaos", job, "--faults", "slow worker 0 by 2x", "--workers", 1)
    assert outcome.status == 1
    assert "the run under faults did not complete" in outcome.stderr
    assert "slow worker 0 by 2x" in outcome.stderr
    assert "I am fragile" in outcome.stderr

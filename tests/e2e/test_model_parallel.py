"""A model divided among workers, through the command line: equal to one process within rounding, whatever happens.

Every layout and schedule is in tests/unit/strategies/mesh/run/test_replica.py; here are whole runs of some of them.
"""

from __future__ import annotations

import importlib.util
import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distbelief.checkpoint.weights import save_weights
from tests.support.runs.command import JOBS, Outcome, Run
from tests.support.runs.reference import undisturbed_model
from tests.support.runs.saved import records, sealed
from tests.support.runs.watched import Watched

Start = Callable[..., Run]
Cli = Callable[..., Outcome]
Wait = Callable[[Callable[[], object]], None]

DIVISIBLE = [JOBS / "divisible.py", "--set", "blocks=2"]
INDIVISIBLE = JOBS / "indivisible.py"
TOLERANCE = 1e-4
STEPS = 16  # of runs that are compared with the undisturbed one
STEPS_SCALED = 48  # of the run that grows and shrinks, for which its braked steps must leave time
SEED = int(os.environ.get("DISTBELIEF_SEED", "0")) or secrets.randbelow(1 << 32)

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="the Transformers library is not installed"
)


def braked(brake_s: float, steps: int = STEPS) -> list[object]:
    """A shard takes so long while there is a brake."""
    return [*DIVISIBLE, "--set", f"steps={steps}", "--set", f"brake_s={brake_s}"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of one plain process."""
    return plain_weights(tmp_path_factory.mktemp("undisturbed"), STEPS)


def plain_weights(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    path = folder / "weights.safetensors"
    save_weights(undisturbed_model(*DIVISIBLE, "--set", f"steps={steps}"), path)
    return load_file(path)


def expect_close(run_dir: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(run_dir / "weights.safetensors")
    assert found.keys() == expected.keys()
    apart = {name: float((found[name] - one).abs().max() / one.abs().max()) for name, one in expected.items()}
    assert max(apart.values()) < TOLERANCE, apart


# --- equal to one process --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "workers", "steps"),
    [("pipeline:2:zbv", 2, 5), ("tp2.pp2", 4, 2)],
)
def test_a_divided_model_learns_what_one_process_learns(
    distbelief: Cli, strategy: str, workers: int, steps: int
) -> None:
    found = distbelief(
        "verify", *DIVISIBLE, "--strategy", strategy, "--workers", workers, "--steps", steps, "--json"
    ).json
    assert (found["verdict"], found["steps"], found["workers"]) == ("equal", steps, workers)
    assert 0 < found["max_difference"] < TOLERANCE  # in other bits: it was not one process that did it


@needs_transformers
def test_a_model_of_the_transformers_library(distbelief: Cli) -> None:
    """Another one, and sharded, is in tests/unit/strategies/mesh/run/test_replica.py."""
    job = [JOBS / "transformer.py", "--set", "kind=gpt2"]
    found = distbelief("verify", *job, "--strategy", "pipeline:2", "--workers", 2, "--steps", 2, "--json").json
    assert (found["verdict"], found["steps"]) == ("equal", 2)


# --- a member dies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "workers"), [("pipeline:3", 3), ("sharded", 3), ("dp2.pp2", 4), ("tensor:2", 2)])
def test_a_member_is_killed_at_any_moment(
    start: Start,
    tmp_path: Path,
    wait_until: Wait,
    undisturbed: dict[str, torch.Tensor],
    strategy: str,
    workers: int,
) -> None:
    """DISTBELIEF_SEED repeats one that failed."""
    print(f"DISTBELIEF_SEED={SEED}")
    chance = random.Random(f"{SEED} {strategy}")
    job = [*braked(0.1), "--set", "hold_step=12"]  # it does not end before the kill
    run = Watched(start, tmp_path, wait_until, *job, "--strategy", strategy, "--workers", workers)
    run.after(chance.randint(2, 8))
    time.sleep(chance.uniform(0, 0.4))
    (first,) = run.journal("generation")
    victim = chance.choice(run.living())
    run.signal(victim, signal.SIGKILL)
    wait_until(lambda: len(run.journal("generation")) > 1)
    result = run.result()
    expect_close(run.folder, undisturbed)
    second = run.journal("generation")[1]
    assert second["lost"] == [victim]
    assert second["degrees"] != first["degrees"]  # one less makes another plan
    assert victim not in [member["worker"] for member in second["members"]]
    assert result["recoveries"] >= 1
    if strategy == "dp2.pp2":
        assert result["reexecuted"] == 0  # the other pipeline has all of it


def test_chaos_knows_that_members_may_go_back(distbelief: Cli, tmp_path: Path) -> None:
    """With one snapshot at the start only, so that there is something to execute again."""
    (tmp_path / "brake").touch()
    strategy = ["--strategy", "pipeline:2:snapshots=1000", "--workers", 2]
    found = distbelief("chaos", *braked(0.02, 40), *strategy, "--faults", "kill worker 1 at step 4", "--json").json
    assert found["weights_equal"], found
    assert (found["steps_lost"], found["exactly_once"]) == (0, True), found
    assert 0 <= found["difference"] < TOLERANCE  # 0: a new worker was there before one step without it
    (fault,) = found["faults"]
    assert fault["at_step"] >= 4
    assert found["reexecuted"] >= 4


# --- other numbers of workers, and what is done with a run afterwards ------------------------------------------------


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A pipeline of two that had four workers for a while: its folder and its result."""
    folder = tmp_path_factory.mktemp("scaled")
    started: list[Run] = []

    def start(*arguments: object) -> Run:
        started.append(Run(folder, *arguments))
        return started[-1]

    def wait_until(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.02)

    try:
        saving = ["--save-every", 4, "--keep-last", 100]
        job = braked(0.4, STEPS_SCALED)
        run = Watched(start, folder, wait_until, *job, "--strategy", "pipeline:2", "--workers", 2, *saving)
        run.after(2)
        for wanted in (4, 2):
            assert start("scale", "run", wanted, "--json").wait().json["workers"] == wanted
            run.has_members(wanted)
        yield folder, run.result()
        assert [left for one in started for left in one.leftovers()] == []
    finally:
        for one in started:
            one.kill()


def test_a_pipeline_grows_and_shrinks(scaled: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, result = scaled
    expect_close(folder / "run", plain_weights(tmp_path, STEPS_SCALED))
    assert result["workers"] == 2
    plans = [entry["degrees"] for entry in records(folder / "run", "generation", "journal.jsonl")]
    assert plans[0] == plans[-1]
    assert sum(plan != plans[0] for plan in plans) >= 1


def test_a_step_of_a_pipeline_is_replayed_by_one_process(scaled: tuple[Path, dict[str, Any]], distbelief: Cli) -> None:
    run_dir = scaled[0] / "run"
    recorded = {entry["step"]: entry["loss"] for entry in records(run_dir, "step")}
    step = sealed(run_dir)[-1] + 2  # after the first checkpoint, through steps that other plans may have executed
    found = distbelief("replay", run_dir, "--step", step, "--json").json
    assert found["error"] is None
    assert (found["verdict"], found["update"]) == ("equal", "equal")
    assert found["loss"] == pytest.approx(recorded[step], rel=TOLERANCE)
    assert found["from_checkpoint"] is not None


def test_a_pipeline_is_exported(scaled: tuple[Path, dict[str, Any]], distbelief: Cli, tmp_path: Path) -> None:
    run_dir = scaled[0] / "run"
    found = distbelief("export", run_dir, "--to", "model.pt2", "--json").json
    assert (found["format"], found["max_difference"]) == ("program", 0)
    whole = torch.export.load(tmp_path / "model.pt2").module()
    assert whole(torch.randint(0, 50, (3, 8))).shape == (3, 8, 50)


def test_a_pipeline_goes_on_as_a_sharded_run(
    start: Start, distbelief: Cli, tmp_path: Path, wait_until: Wait, undisturbed: dict[str, torch.Tensor]
) -> None:
    saving = ["--save-every", 4]
    run = Watched(start, tmp_path, wait_until, *braked(0.1), "--strategy", "pipeline:2", "--workers", 2, *saving)
    wait_until(lambda: sealed(run.folder))
    run.run.signal(signal.SIGINT)
    assert run.run.wait().status == 130
    (tmp_path / "brake").unlink()
    result = distbelief("resume", "run", "--strategy", "sharded", "--workers", 3, "--json").json
    assert (result["steps"], result["workers"]) == (STEPS, 3)
    expect_close(run.folder, undisturbed)


# --- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ([*DIVISIBLE, "--strategy", "pipeline:2", "--workers", 3], ["not 3", "--workers 2 or 4"]),
        (
            [INDIVISIBLE, "--strategy", "pipeline:2", "--workers", 2],
            ["cannot be followed", "indivisible.py", "if x.sum() > 0", "Job(split="],
        ),
        ([*DIVISIBLE, "--strategy", "pipeline:2:fast", "--workers", 2], ["unknown option 'fast'", "1f1b"]),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    distbelief: Cli, tmp_path: Path, arguments: list[object], texts: list[str]
) -> None:
    """By a worker, and before there is one; all reasons are in tests/unit/strategies."""
    outcome = distbelief("train", *arguments, "--run-dir", "run")
    said = outcome.stdout + outcome.stderr
    assert outcome.status in (1, 2), said
    for text in texts:
        assert text in said, said
    assert said.count("error:") == 1, said
    assert "Traceback" not in said
    assert not (tmp_path / "run" / "weights.safetensors").exists()

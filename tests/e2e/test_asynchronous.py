"""ps:async and ps:ssp: every batch counts once, whoever dies; and what was promised of staleness."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from distbelief.worker.origin import saved_at
from tests.support.runs.command import JOBS, Outcome, Run
from tests.support.runs.watched import Watched, check_servers_lost

Cli = Callable[..., Outcome]
Start = Callable[..., Run]
Wait = Callable[[Callable[[], object]], None]


def counted(folder: Path) -> set[float]:
    """How many updates every weight says were applied to it."""
    return {-value for value in load_file(folder / "weights.safetensors")["count"].tolist()}


def journal_result(run: Watched) -> dict[str, Any]:
    result: dict[str, Any] = run.journal("ended")[-1]["result"]
    return result


def test_servers_and_workers_die_and_every_batch_counts_once(start: Start, tmp_path: Path, wait_until: Wait) -> None:
    job = [JOBS / "counter.py", "--set", "steps=400", "--set", "width=70000", "--set", "brake_s=0.1"]
    run = Watched(start, tmp_path, wait_until, *job, "--strategy", "ps:async:servers=2", "--workers", 2)
    killed: list[int] = []
    for round_ in range(3):
        run.after(8 * (round_ + 1))
        run.servers_are_whole(without=killed)
        killed.append(min(run.servers()))
        run.signal_server(killed[-1], signal.SIGKILL)
    run.wait_until(lambda: killed[-1] not in run.servers())
    run.signal(run.living()[0], signal.SIGKILL)
    result = run.result()
    assert result["steps"] == 400
    assert counted(run.folder) == {400.0}
    check_servers_lost(run.folder, result, killed=killed)
    assert 3 <= len(result["server_pauses_s"]) <= result["servers_lost"]
    assert all(pause_s > 0 for pause_s in result["server_pauses_s"])


def test_no_update_is_staler_than_the_bound(start: Start, tmp_path: Path, wait_until: Wait) -> None:
    """One of three workers stands still for a while: the others may not leave it behind."""
    job = [JOBS / "counter.py", "--set", "steps=300", "--set", "brake_s=0.05"]
    run = Watched(start, tmp_path, wait_until, *job, "--strategy", "ps:ssp:servers=1:staleness=2:tcp", "--workers", 3)
    run.after(10)
    slow = run.living()[1]
    run.signal(slow, signal.SIGSTOP)
    stopped_at = run.step()
    run.signal(slow, signal.SIGCONT)
    run.after(stopped_at + 5)
    run.result()
    assert counted(run.folder) == {300.0}
    staleness = {int(key): value for key, value in journal_result(run)["staleness"].items()}
    assert sum(staleness.values()) == 300
    assert max(staleness) <= 2
    assert len(staleness) > 1  # it was asynchronous at all


def test_one_worker_alone_learns_what_one_process_does(distbelief: Cli) -> None:
    """Nothing is late then, so there is nothing to compensate for."""
    arguments = [JOBS / "small.py", "--strategy", "ps:async:servers=1:dc=0.5", "--workers", 1, "--json"]
    found = distbelief("verify", *arguments).json
    assert found["verdict"] == "equal", found


def test_a_stopped_run_goes_on_from_its_checkpoint_without_a_batch_lost_or_counted_twice(
    start: Start, tmp_path: Path, wait_until: Wait
) -> None:
    job = [JOBS / "counter.py", "--set", "steps=300", "--set", "brake_s=0.05"]
    # A quarter of the gradient is sent at a time, and the rest is owed: also by a worker that is not there any more.
    strategy = ["--strategy", "ps:async:servers=2:n_push=2:topk=0.25:always", "--workers", 2, "--save-every", 20]
    run = Watched(start, tmp_path, wait_until, *job, *strategy)
    run.after(30)
    run.run.signal(signal.SIGINT)
    stopped = run.run.wait()
    assert stopped.status == 130, stopped
    saved = [entry["step"] for entry in run.journal("checkpoint")]
    assert saved
    assert saved[0] == 20
    assert all(step % 2 == 0 for step in saved)
    (tmp_path / "brake").unlink()
    again = start("resume", "run", "--workers", 1, "--json").wait().json
    assert again["steps"] == 300
    assert 0.4 < again["wire_ratio"] < 0.6
    last = saved_at(run.folder / "checkpoints", 300).tensors
    owed, applied = last["compression/residual/0/count"], last["model/count"]
    assert owed.count_nonzero() > 0
    assert set((owed - applied).tolist()) == {150.0}  # updates of two batches each


def test_strange_options_are_refused(distbelief: Cli) -> None:
    for strategy, word in (
        ("ps:ssp", "staleness"),
        ("ps:async:staleness=2", "staleness"),
        ("ps:sync:n_push=2", "n_push"),
        ("ps:async:servers=0", "servers"),
        ("ps:async:fast", "fast"),
    ):
        outcome = distbelief("train", JOBS / "counter.py", "--strategy", strategy)
        assert outcome.status == 2, outcome
        assert word in outcome.stderr, outcome
        assert "Traceback" not in outcome.stderr


def test_results_are_machine_readable(distbelief: Cli, tmp_path: Path) -> None:
    strategy = ["--strategy", "ps:async:servers=1:int8", "--workers", 2, "--run-dir", "run"]
    result = distbelief("train", JOBS / "counter.py", "--set", "steps=20", *strategy, "--json").json
    assert result["servers"] == 1
    assert sum(result["staleness"].values()) == 20
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(20))
    assert result["wire_ratio"] is None
    assert any("gradients stay in shared memory" in line["text"] for line in lines if line["kind"] == "notice")


def test_the_pace_adapts_itself_and_every_batch_counts_once(start: Start, tmp_path: Path, wait_until: Wait) -> None:
    """A model that costs nothing to compute and much to send: batches are pushed together soon, and a worker dies."""
    job = [JOBS / "counter.py", "--set", "steps=400", "--set", "width=300000"]
    job += ["--set", "brake_s=0.0005", "--set", "hold_after=400"]  # 100 batches of each worker: half of all
    strategy = ["--strategy", "ps:async:servers=1:adaptive:tcp", "--workers", 2, "--save-every", 150]
    run = Watched(start, tmp_path, wait_until, *job, *strategy)
    run.wait_until(lambda: any(entry["n_push"] > 1 for entry in run.journal("pace")))
    run.wait_until(lambda: run.journal("checkpoint"))  # of step 150: in the middle of a save a death would end that
    run.signal(run.living()[1], signal.SIGKILL)
    result = run.result()
    updates = sum(journal_result(run)["staleness"].values())
    assert counted(run.folder) == {float(updates)}
    assert updates < 400
    # The batches that the dead one had leased are done by another one, after those that others had by then.
    assert sorted(line["step"] for line in run.metrics("step")) == list(range(400))
    assert [entry["step"] for entry in run.journal("checkpoint")] == [150, 300, 400]  # gates fall on steps
    assert max(pace["n_push"] for pace in result["pace"].values()) > 1
    assert "worker" in run.journal("pace")[0]["reason"]

"""Parameter servers, local_sgd and sandblaster on one CUDA device that workers share: whole runs. Shards are computed
there; what is kept of a run is in the host's memory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runs.gpu import Command, kill_a_worker, most_members, steps_of

Train = Callable[..., Command]

ROWS = Path(__file__).parent / "jobs" / "rows.py"
LOCAL = "local_sgd:4:replicas=3:nesterov"
AT_FIRST = 2.1
"""About the loss of a model that knows nothing: ln 9 is 2.2."""


def losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [loss for _, loss in sorted((line["step"], line["loss"]) for line in lines if line["kind"] == "step")]


@pytest.mark.parametrize(
    ("strategy", "otherwise", "kind"),
    [
        ("ps:sync", "ps:sync:servers=3:tcp", "usual"),
        (LOCAL, f"{LOCAL}:gloo", "usual"),
        ("sandblaster", "sandblaster:servers=3:tcp", "steady"),
    ],
)
def test_the_weights_do_not_depend_on_the_workers_or_on_how_sums_travel(
    train: Train, strategy: str, otherwise: str, kind: str
) -> None:
    given = ["--set", f"kind={kind}", "--strategy"]
    runs = [train(f"{workers}", workers, *given, strategy) for workers in (1, 2, 3)]
    runs.append(train("otherwise", 2, *given, otherwise))
    found = [run.result() for run in runs]
    assert len({one["weights_sha256"] for one in found}) == 1, found
    assert len({one["loss"] for one in found}) == 1
    assert found[0]["metrics"] == found[2]["metrics"]
    assert found[0]["loss"] < AT_FIRST


@pytest.mark.parametrize("strategy", ["ps:sync", LOCAL])
def test_a_worker_that_is_killed_changes_no_bit(train: Train, tmp_path: Path, strategy: str) -> None:
    quick = ["--set", "steps=40", "--strategy", strategy]
    undisturbed = train("undisturbed", 1, *quick)
    disturbed = train("disturbed", 2, *quick, "--set", "pause_s=0.02")
    kill_a_worker(disturbed, tmp_path / "disturbed", after=8)
    found = [run.result() for run in (undisturbed, disturbed)]
    assert len({one["weights_sha256"] for one in found}) == 1
    assert [one["recoveries"] > 0 for one in found] == [False, True]


@pytest.mark.parametrize("strategy", ["ps:sync", LOCAL])
def test_a_run_is_resumed(train: Train, start: Callable[..., Command], tmp_path: Path, strategy: str) -> None:
    given = ["--save-every", "8", "--set", "steps=24", "--strategy", strategy]
    whole = train("whole", 1, *given)
    part = train("part", 2, *given, "--set", "pause_s=0.02")
    part.wait_for(tmp_path / "part", 9)
    part.end()
    resumed = start("resume", str(tmp_path / "part"), "--json")
    assert resumed.result()["weights_sha256"] == whole.result()["weights_sha256"]


def test_servers_learn_what_allreduce_learns_on_the_device(train: Train, tmp_path: Path) -> None:
    """Gradients have the same bits; updates are rounded otherwise by a processor than by the device."""
    runs = {name: train(name, 2, "--strategy", name) for name in ("allreduce", "ps:sync")}
    ended = {name: run.result() for name, run in runs.items()}
    ours, reference = losses(tmp_path / "ps:sync"), losses(tmp_path / "allreduce")
    assert len(ours) == len(reference) == 20
    assert ours[0] == reference[0], "the first step begins from the same weights"
    assert ours[:8] == pytest.approx(reference[:8], rel=1e-3)
    assert ended["ps:sync"]["loss"] == pytest.approx(ended["allreduce"]["loss"], rel=0.1)


@pytest.mark.parametrize(
    "strategy",
    [
        "ps:async", "ps:ssp:staleness=2:tcp", "ps:async:n_push=2:dc=0.04", "ps:async:int8:always",
        "ps:sync:int8:always", "ps:sync:backups=1",
    ],
)  # fmt: skip
def test_it_comes_to_a_sensible_loss(train: Train, strategy: str) -> None:
    ended = train("run", 2, "--set", "steps=60", "--strategy", strategy).result()
    assert ended["steps"] == 60
    assert ended["metrics"]["loss"] < AT_FIRST


def test_rows_of_tables_come_to_the_device_and_go_back(start: Callable[..., Command], tmp_path: Path) -> None:
    def run(workers: int, strategy: str) -> Command:
        where = str(tmp_path / f"{workers} {strategy}")
        given = ["--workers", str(workers), "--device", "cuda", "--run-dir", where, "--json", "--strategy", strategy]
        return start("train", str(ROWS), *given)

    one, two, free = run(1, "ps:sync"), run(2, "ps:sync"), run(2, "ps:async")
    assert one.result()["weights_sha256"] == two.result()["weights_sha256"]
    found = losses(tmp_path / "1 ps:sync")
    assert found[-1] < 0.8 * found[0]
    free.result()
    found = losses(tmp_path / "2 ps:async")
    assert sum(found[-4:]) < 0.9 * sum(found[:4])


@pytest.mark.parametrize(("mine", "guests"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_worker_on_another_kind_of_device_takes_part_where_nobody_waits(
    train: Train, start: Callable[..., Command], tmp_path: Path, mine: str, guests: str
) -> None:
    given = ["--strategy", "ps:async", "--set", "steps=100000", "--set", "pause_s=0.03"]
    run = train("free", 1, *given, device=mine)
    run.wait_for(tmp_path / "free", 2)
    start("worker", "--join", str(tmp_path / "free"), "--device", guests)
    deadline = time.monotonic() + 120
    while most_members(tmp_path / "free") < 2:
        assert time.monotonic() < deadline, "the guest is not taken in"
        time.sleep(0.1)
    run.wait_for(tmp_path / "free", steps_of(tmp_path / "free") + 20)
    run.end()


def test_a_step_that_servers_applied_is_not_replayed_on_the_device(
    train: Train, start: Callable[..., Command], tmp_path: Path
) -> None:
    train("run", 1, "--strategy", "ps:sync", "--save-every", "7").result()
    told = start("replay", str(tmp_path / "run"), "--step", "12").output(status=1)
    assert "applied on processors" in " ".join(told.split())

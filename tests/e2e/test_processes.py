"""Signals, deaths and neighbours: whatever ends a run, nothing of it stays; runs do not disturb each other."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

import distbelief as distbelief_package
from distbelief.errors import RunFailed
from distbelief.launch.launch import Launch
from distbelief.launch.lead import lead
from distbelief.launch.rundir import make_run_dir
from distbelief.options import RunOptions
from distbelief.worker.spec import JobSource
from tests.support.runs.command import JOBS, Outcome, Run, processes_of

Start = Callable[..., Run]
Cli = Callable[..., Outcome]
Wait = Callable[[Callable[[], object]], None]


def slow_run(start: Start, tmp_path: Path) -> tuple[Run, Callable[[], bool]]:
    run = start(
        "train", JOBS / "small.py", "--set", "steps=5000", "--set", "nap_s=0.02", "--run-dir", "run", "--workers", 3
    )

    def is_training() -> bool:
        metrics = tmp_path / "run" / "metrics.jsonl"
        return metrics.exists() and '"step"' in metrics.read_text()

    return run, is_training


def test_a_signal_ends_a_run_cleanly(start: Start, tmp_path: Path, wait_until: Wait) -> None:
    """SIGINT; for SIGTERM see test_checkpoints.py."""
    run, is_training = slow_run(start, tmp_path)
    wait_until(is_training)
    run.signal(signal.SIGINT)
    outcome = run.wait()
    assert outcome.status == 130
    assert "stopped by SIGINT" in outcome.stderr
    assert json.loads((tmp_path / "run" / "journal.jsonl").read_text().splitlines()[-1])["status"] == "stopped"


def test_a_signal_before_the_first_step(start: Start, tmp_path: Path) -> None:
    (tmp_path / "brake").touch()
    run = start("train", JOBS / "small.py", "--set", "brake_s=0.5", "--run-dir", "run", "--workers", 3)
    while len(processes_of(run.mark)) < 2:
        pass
    run.signal(signal.SIGINT)
    assert run.wait().status == 130


def test_killing_the_command_ends_everything(start: Start, tmp_path: Path, wait_until: Wait) -> None:
    run, is_training = slow_run(start, tmp_path)
    wait_until(is_training)
    assert len(processes_of(run.mark)) >= 5  # command, coordinator, zygote, three workers
    run.signal(signal.SIGKILL)
    assert run.wait().status == -signal.SIGKILL


def test_two_runs_at_once(start: Start) -> None:
    together = [start("train", JOBS / "small.py", "--workers", 2, "--json") for _ in range(2)]
    results = [run.wait().json for run in together]
    assert len({r["weights_sha256"] for r in results}) == 1
    assert len({r["run_dir"] for r in results}) == 2


def test_another_thread_count_is_refused_with_the_reason(tmp_path: Path) -> None:
    make_run_dir(tmp_path / "run")
    launch = Launch(
        run_dir=tmp_path / "run",
        options=RunOptions(workers=2, strategy="allreduce"),
        job=JobSource(str(JOBS / "small.py")),
        adjust=lambda spec: structs.replace(spec, options=structs.replace(spec.options, threads=1 + spec.worker)),
    )

    class Silent:
        def started(self, run_dir: Path, workers: int) -> None: ...

        def log(self, source: str, line: str) -> None: ...

        def refresh(self) -> None: ...

    with pytest.raises(RunFailed, match="thread"):
        lead(launch, Silent())


def test_training_from_a_script_without_a_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from distbelief import Job, train\n"
        "x = torch.ones(32, 3)\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(3, 1)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x)\n"
        "job = Job(model=Net, loss=torch.nn.functional.mse_loss, data=(x, x.sum(1, keepdim=True)),\n"
        "          optimizer=lambda p: torch.optim.SGD(p, lr=0.01), global_batch=8, steps=6)\n"
        "result = train(job, workers=2, quiet=True)\n"
        "net = Net()\n"
        "net.load_state_dict(result.state_dict())\n"
        "print('once', result.steps)\n"
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["once 6"]


def test_logs_of_workers_are_kept_and_merged(distbelief: Cli, tmp_path: Path) -> None:
    job = tmp_path / "talks.py"
    job.write_text((JOBS / "small.py").read_text() + "\nprint('hello from the job', flush=True)\n")
    outcome = distbelief("train", "talks.py", "--workers", 2, "--run-dir", "run")
    assert outcome.status == 0
    for worker in (0, 1):
        assert f"[worker {worker}] hello from the job" in outcome.stdout
        assert "hello from the job" in (tmp_path / "run" / "logs" / f"worker-{worker}.log").read_text()


def test_an_unwritable_place(distbelief: Cli, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        (tmp_path / "file").write_text("")
        place = tmp_path / "file" / "run"  # root may write anywhere, but not below a file
    else:
        (tmp_path / "locked").mkdir(mode=0o500)
        place = tmp_path / "locked" / "run"
    outcome = distbelief("train", JOBS / "small.py", "--run-dir", place)
    assert outcome.status == 1
    assert "cannot write to the run directory" in outcome.stderr


def test_python_warns_of_nothing_in_our_code(distbelief: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `python -W`, in every process of a run. Warnings of other packages depend on their versions; those
    of open files and sockets depend on when garbage is collected."""
    monkeypatch.setenv("PYTHONWARNINGS", "always")
    trained = distbelief("train", JOBS / "small.py", "--workers", 2, "--run-dir", "run")
    replayed = distbelief("replay", "run", "--step", 3)
    assert (trained.status, replayed.status) == (0, 0)
    logs = [file.read_text() for file in (tmp_path / "run" / "logs").iterdir()]
    printed = "\n".join([trained.stdout, trained.stderr, replayed.stdout, replayed.stderr, *logs])
    ours = str(Path(distbelief_package.__file__).parent)
    assert re.findall(rf"{re.escape(ours)}\S*:\d+: (?!Resource)\w*Warning: .*", printed) == []

"""Starts one system on the accelerator and reads what it did."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.gpu import job
from bench.running import ROOT, TIMEOUT_S, DriverFailed, environment
from distbelief.coordinator.journal import read as read_journal

INEXACT, EXACT = "ours, inexact", "ours, exact"
PEERS = {"accelerate": "accelerate", "lightning": "pytorch_lightning"}


@dataclass(frozen=True)
class Run:
    steps: int
    warm_up: int
    """So many of the steps are not timed."""

    @property
    def timed_symbols(self) -> int:
        return (self.steps - self.warm_up) * job.BATCH * job.LENGTH


@dataclass(frozen=True)
class Measured:
    symbols_per_s: float
    losses: list[float]
    first_step_s: float
    memory_gib: float
    """The most that was taken of the device's memory, by all processes together."""
    weights_sha256: str = ""
    recoveries: int = 0


def machine() -> dict[str, Any]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }


def measure(system: str, run: Run) -> Measured:
    return ours(run, system) if system in (INEXACT, EXACT) else peer(run, system)


def peer(run: Run, system: str) -> Measured:
    with tempfile.TemporaryDirectory() as folder, _Memory() as memory:
        file = Path(folder) / "found.json"
        began = time.time()
        options = ["--steps", str(run.steps), "--warm-up", str(run.warm_up), "--batch", str(job.BATCH)]
        _finish(_start([sys.executable, "-m", "bench.gpu.loops", system, str(file), *options]))
        found = json.loads(file.read_text())
    rate = run.timed_symbols / found["seconds"]
    return Measured(rate, found["losses"], found["first_step_at"] - began, memory.peak_gib)


def ours(run: Run, how: str, workers: int = 1, *, kill: bool = False) -> Measured:
    with tempfile.TemporaryDirectory() as folder, _Memory() as memory:
        run_dir = Path(folder) / "run"
        began = time.time()
        strategy = "allreduce:inexact" if how == INEXACT else "allreduce"
        process = _start([
            sys.executable, "-m", "distbelief.cli.main", "train", str(ROOT / "bench/gpu/job.py"), "--json",
            "--workers", str(workers), "--device", "cuda", "--strategy", strategy, "--run-dir", str(run_dir),
            "--set", f"steps={run.steps}", "--save-every", "never",
        ])  # fmt: skip
        if kill:
            _kill_one(process, run_dir, run.steps // 2)
        result = json.loads(_finish(process).splitlines()[-1])
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["step"] for record in steps] == list(range(run.steps)), "every step once, in order"
    at = [record["at"] for record in steps]
    rate = run.timed_symbols / (at[-1] - at[run.warm_up - 1])
    losses = [record["loss"] for record in steps]
    digest, recoveries = result["weights_sha256"], result["recoveries"]
    return Measured(rate, losses, at[0] - began, memory.peak_gib, digest, recoveries)


def _kill_one(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    """The last of the workers, when the run has come so far."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if _steps_of(run_dir) >= step:
            break
        time.sleep(0.02)
    members = [r["members"] for r in read_journal(run_dir / "journal.jsonl") if r.get("members")][-1]
    victim = psutil.Process(members[-1]["pid"])
    assert process.pid in {parent.pid for parent in victim.parents()}, "only what was started here is killed"
    victim.kill()


def _steps_of(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return sum(1 for line in lines if line.endswith("\n") and json.loads(line)["kind"] == "step")


def _start(command: list[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment(), stdout=pipe, stderr=pipe, text=True)


def _finish(process: subprocess.Popen[str]) -> str:
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode:
        raise DriverFailed(f"{process.args!r} ended with {process.returncode}:\n{output[-2000:]}\n{errors[-4000:]}")
    return output


class _Memory:
    """Looks at the device's memory while others use it."""

    def __enter__(self) -> _Memory:
        self._before = self._used()
        self._peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.05):
            self._peak = max(self._peak, self._used() - self._before)

    def _used(self) -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    @property
    def peak_gib(self) -> float:
        return self._peak / 2**30

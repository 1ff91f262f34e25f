"""Who trains: DistBelief through its command line, torchrun with DDP, and single processes that share nothing.

Each driver starts real processes, waits for their end, and returns what was measured. A speed is samples per second
over both workers, after the warm-up steps, by the workers' own clocks; starting and ending do not count in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from machine import Bystanders
from workloads import WORKERS, WORKLOADS

BENCH = Path(__file__).resolve().parent
TIMEOUT_S = 300
IMPLEMENTATIONS = ("default", "fused")

Command = list[str]


class DriverFailed(Exception):
    """A process of a driver failed; the message holds the end of what it printed."""


@dataclass(frozen=True)
class Task:
    workload: str
    steps: int
    warm_up: int
    """So many of the steps are not timed."""

    @property
    def timed_samples(self) -> int:
        return WORKLOADS[self.workload].global_batch * (self.steps - self.warm_up)


@dataclass(frozen=True)
class Measured:
    samples_per_s: float
    losses: list[float]
    """Of every step, over the whole batch (for independent processes: the mean of theirs)."""
    launch_s: float
    """From the start of the first process to the end of the first step."""
    others: float
    """The share of the machine's processor time that others had while this was measured."""
    weights_sha256: str = ""


def environment() -> dict[str, str]:
    """One thread everywhere, and gloo on loopback, for all drivers alike."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def ours_command(
    task: Task, run_dir: Path, shards: int = WORKERS, strategy: str = "allreduce", batch: int = 0
) -> Command:
    return [
        sys.executable, "-m", "distbelief.cli.main", "train", str(BENCH / "workloads.py"),
        "--workers", str(WORKERS), "--strategy", strategy, "--threads", "1", "--run-dir", str(run_dir), "--json",
        "--set", f"workload={task.workload}", "--set", f"steps={task.steps}", "--set", f"shards={shards}",
        "--set", f"batch={batch}",
    ]  # fmt: skip


def ours_freely(task: Task, strategy: str) -> Measured:
    """Where nobody waits: an update is one worker's batch, so a step of the others is as many of them as workers."""
    each = Task(task.workload, task.steps * WORKERS, task.warm_up * WORKERS)
    found = ours(each, WORKERS, strategy, WORKLOADS[task.workload].batch_per_worker)
    return replace(found, samples_per_s=found.samples_per_s / WORKERS)


def ours(task: Task, shards: int = WORKERS, strategy: str = "allreduce", batch: int = 0) -> Measured:
    """A whole run of DistBelief. Times are those of the committed steps in its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        began, bystanders = time.time(), Bystanders()
        (output,) = run([ours_command(task, run_dir, shards, strategy, batch)])
        others = bystanders.share()
        result = json.loads(output.splitlines()[-1])
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    if [record["step"] for record in steps] != list(range(task.steps)):
        raise DriverFailed(f"metrics.jsonl does not hold the steps 0 to {task.steps - 1} once each, in order")
    at = [record["at"] for record in steps]
    return Measured(
        samples_per_s=task.timed_samples / (at[-1] - at[task.warm_up - 1]),
        losses=[record["loss"] for record in steps],
        launch_s=at[0] - began,
        others=others,
        weights_sha256=result["weights_sha256"],
    )


def ddp_command(task: Task, out: Path, optimizers: Sequence[str]) -> Command:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    launcher += ["--nproc-per-node", str(WORKERS)]
    return [sys.executable, *launcher, *_peer(task, out, optimizers)]


def ddp(task: Task, optimizers: Sequence[str] = IMPLEMENTATIONS) -> dict[str, Measured]:
    """One torchrun; the implementations of the optimizer one after the other, each with a new model."""
    return peer_figures(task, optimizers, slowest, lambda out: run([ddp_command(task, out, optimizers)]))


def single_command(task: Task, out: Path, optimizers: Sequence[str], rank: int, *, in_step: bool) -> Command:
    return [sys.executable, *_peer(task, out, optimizers), "--rank", str(rank), *(["--in-step"] if in_step else [])]


def ideal(task: Task, optimizers: Sequence[str] = IMPLEMENTATIONS) -> dict[str, Measured]:
    """Two independent processes at the same time, each with its half of every batch: the sum of their speeds."""

    def both(out: Path) -> None:
        commands = [single_command(task, out, optimizers, rank, in_step=True) for rank in range(WORKERS)]
        run(commands, meetings=len(optimizers))

    return peer_figures(task, optimizers, _sum_of_speeds, both)


def alone(task: Task) -> Measured:
    """One plain process, nothing beside it."""
    optimizers = IMPLEMENTATIONS[:1]

    def one(out: Path) -> None:
        run([single_command(task, out, optimizers, 0, in_step=False)])

    return peer_figures(task, optimizers, _sum_of_speeds, one, ranks=1)[optimizers[0]]


def _peer(task: Task, out: Path, optimizers: Sequence[str]) -> Command:
    steps = ["--steps", str(task.steps), "--warm-up", str(task.warm_up)]
    return [str(BENCH / "peer.py"), task.workload, *steps, "--out", str(out), "--optimizers", ",".join(optimizers)]


def slowest(seconds: Sequence[float], samples: int) -> float:
    return samples / max(seconds)


def _sum_of_speeds(seconds: Sequence[float], samples: int) -> float:
    return sum(samples / WORKERS / own for own in seconds)


def peer_figures(
    task: Task,
    optimizers: Sequence[str],
    speed: Callable[[Sequence[float], int], float],
    measure: Callable[[Path], object],
    ranks: int = WORKERS,
) -> dict[str, Measured]:
    """Run peers that write what they measured into a folder, and read it."""
    with tempfile.TemporaryDirectory() as folder:
        began, bystanders = time.time(), Bystanders()
        measure(Path(folder))
        others = bystanders.share()
        said = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    first_step_at = max(rank[optimizers[0]]["first_step_at"] for rank in said)
    found = {}
    for optimizer in optimizers:
        each: list[dict[str, Any]] = [rank[optimizer] for rank in said]
        losses = [sum(parts) / ranks for parts in zip(*(rank["losses"] for rank in each), strict=True)]
        samples_per_s = speed([rank["seconds"] for rank in each], task.timed_samples)
        found[optimizer] = Measured(samples_per_s, losses, first_step_at - began, others)
    return found


def run(commands: Sequence[Command], meetings: int = 0) -> list[str]:
    """Run commands at the same time to their end and return their stdout. At a meeting each of them says 'ready' on
    its stdout, and goes on when all have said so."""
    with tempfile.TemporaryFile("w+") as errors:
        processes = [
            subprocess.Popen(
                command, env=environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
            for command in commands
        ]
        try:
            for _ in range(meetings):
                _meet(processes)
            outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        for command, process in zip(commands, processes, strict=True):
            if process.returncode:
                errors.seek(0)
                raise DriverFailed(f"{' '.join(command)}\nended with {process.returncode}:\n{errors.read()[-4000:]}")
    return outputs


def _meet(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()  # an empty line: it has ended, and its exit status tells why
    for process in processes:
        assert process.stdin is not None
        if process.poll() is None:
            process.stdin.write("go\n")
            process.stdin.flush()

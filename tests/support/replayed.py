"""Run directories of small runs, made in the test's own process: one replica trains the job and saves real checkpoints;
the records are written as a coordinator writes them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from distbelief.checkpoint.saving import seal, write_part
from distbelief.control.messages import WorkerFailed
from distbelief.coordinator.journal import Journal
from distbelief.coordinator.metricsfile import NAME
from distbelief.errors import NonFiniteLoss
from distbelief.launch.launch import Launch, keep_launch
from distbelief.options import RunOptions
from distbelief.replaying.rebuild import Rebuilt, loaded_here
from distbelief.replaying.records import JobFacts, RecordedRun, Steps
from distbelief.strategies.base import Replica
from distbelief.transport.shm.segment import Segment
from distbelief.worker.loading import Loaded
from distbelief.worker.spec import JobSource

STEPS, SHARDS = 8, 4
BAD_STEP, BAD_SHARD, BAD_SAMPLE = 5, 1, 43

JOB = """
import torch
from torch import nn
from distbelief import Job

torch.manual_seed(4)
X, Y = torch.randn(64, 5), torch.randint(0, 3, (64,))
X[43, 0] = 99.0  # in the second place of shard 1 of step 5


class Body(nn.Module):
    def __init__(self, bad):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mask", torch.full((2, 2), -torch.inf))
        self.bad = bad

    def forward(self, h, mark):
        bad = (mark == 99.0)[:, None]
        if self.bad == "output":
            h = torch.where(bad, torch.nan, h)
        if self.bad == "root":  # the root of 0 is 0, and its slope is infinite
            h = h + 1e-3 * torch.sqrt((99.0 - mark) * self.scale)[:, None]
        if self.bad == "exception" and self.training and bad.any():
            raise ValueError("what is that?")
        return h


class Net(nn.Module):
    def __init__(self, bad):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.body = Body(bad)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        h = self.norm(self.first(x.clamp(-2, 2)))
        return self.head(nn.functional.dropout(self.body(h, x[:, 0]), 0.2, self.training))


def job(bad: str = "", clip: float | None = None) -> Job:
    return Job(
        model=lambda: Net(bad),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        data=(X, Y),
        global_batch=8,
        shards=4,
        steps=8,
        shuffle=False,
        clip_norm=clip,
    )
"""


def recorded(folder: Path, save_at: Collection[int] = (), **settings: str) -> Path:
    """Train the job until it ends or fails. Checkpoints are kept after these numbers of steps."""
    run_dir = folder / "run"
    run_dir.mkdir()
    (folder / "job.py").write_text(JOB)
    launch = Launch(run_dir, RunOptions(1, "allreduce"), JobSource(str(folder / "job.py"), settings))
    keep_launch(launch)
    ended: dict[str, Any] = {"status": "completed", "result": {}}
    with loaded_here(_unrecorded(run_dir, launch)) as loaded, (run_dir / "metrics.jsonl").open("w") as metrics:
        canary = msgspec.to_builtins(loaded.canary)
        (run_dir / "job.json").write_text(json.dumps({"strategy": "allreduce", "canary": canary, "name": "job"}))
        replica = Rebuilt(loaded, None, until=STEPS).replica
        for step in range(STEPS):
            if step in save_at:
                _save(launch.checkpoint_folder, loaded, replica, step)
            try:
                replica.compute(step)
                result = replica.commit(step)
            except Exception as error:
                ended = {"status": "failed", "failure": _failure(error, step)}
                break
            line = {"kind": "step", "step": step, "loss": result.loss, "samples": result.samples}
            print(json.dumps({**line, "fingerprint": result.fingerprint, "generation": 1, "at": 0.0}), file=metrics)
    journalled(run_dir, ended)
    return run_dir


def journalled(run_dir: Path, ended: Mapping[str, Any]) -> None:
    with Journal.open(run_dir / "journal.jsonl") as journal:
        journal.append({"kind": "ended", "epoch": 1, "at": 0.0, "reason": "", **ended})


def _unrecorded(run_dir: Path, launch: Launch) -> RecordedRun:
    canary: Any = None  # nothing is compared with it
    return RecordedRun(run_dir, launch, JobFacts("allreduce", canary), Steps(run_dir / NAME))


def _failure(error: Exception, step: int) -> dict[str, Any]:
    bad = isinstance(error, NonFiniteLoss)
    shard = error.shard if isinstance(error, NonFiniteLoss) else BAD_SHARD
    failure = WorkerFailed(0, "here", "loss" if bad else "user", str(error), step=step, shard=shard)
    told: dict[str, Any] = msgspec.to_builtins(failure)
    return told


def _save(folder: str, loaded: Loaded, replica: Replica, step: int) -> None:
    portion = replica.portions()[0]
    memory = Segment.private(portion.size_bytes)
    copying = replica.copy_portion(step, memory)
    copying.finish()
    outside = copying.outside
    record = write_part(folder, step, 1, 1, portion.slices(memory, outside))
    facts = msgspec.structs.replace(loaded.checkpoint_facts, data={"next_step": step})
    seal(folder, step, facts, [record])

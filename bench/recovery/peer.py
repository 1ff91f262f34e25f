"""What a careful user of plain PyTorch writes so that a killed worker does not lose the training: DDP on gloo, and a
checkpoint every few steps that every restart begins from.

    PYTHONPATH=. torchrun --standalone --nproc-per-node 3 --max-restarts 30 bench/recovery/peer.py mlp --out DIR

Ray Train runs the same loop (with_ray.py), with Ray's own way of saving. It goes on until it is ended; each process
writes DIR/<pid>.jsonl, a line per step. It takes the samples that DistBelief's run takes, in the same order.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.workloads import SEED, WORKLOADS, Data, Workload
from distbelief.data.rules.order import positions_to_samples
from distbelief.shards import Schedule

CHECKPOINT_EVERY_STEPS = 20

State = dict[str, Any]


class StepLog:
    """The steps that this process has applied, each written at once: it may be killed at any moment."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def applied(self, step: int, generation: int) -> None:
        line = json.dumps({"step": step, "generation": generation, "at": time.time()})
        os.write(self._fd, line.encode() + b"\n")


class Batches:
    """One member's part of each step's batch."""

    def __init__(self, workload: Workload, data: Data) -> None:
        self._batch = workload.global_batch()
        self._x, self._y = data

    def part(self, step: int, rank: int, ranks: int) -> Data:
        samples = len(self._x)
        epoch, first, end = Schedule(samples, self._batch, ranks).shard(step, rank)
        numbers = positions_to_samples(np.arange(first, end, dtype=np.int64), samples, SEED, epoch, shuffle=True)
        index = torch.from_numpy(numbers)
        return self._x.index_select(0, index), self._y.index_select(0, index)


def train(workload: Workload, log: StepLog, load: Callable[[], State | None], save: Callable[[State], None]) -> None:
    """Train from the last checkpoint on, until the process is ended. `save` is called by every rank."""
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generation = _start_number()
    torch.manual_seed(SEED)
    model = DistributedDataParallel(workload.model(), gradient_as_bucket_view=True)
    optimizer = workload.optimizer(model.parameters())
    batches = Batches(workload, workload.data())
    state = load()
    if state is not None:
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in itertools.count(0 if state is None else state["steps"]):
        x, y = batches.part(step, rank, ranks)
        optimizer.zero_grad(set_to_none=True)
        workload.loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        log.applied(step, generation)
        if (step + 1) % CHECKPOINT_EVERY_STEPS == 0:
            save({"steps": step + 1, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()})


def _start_number() -> int:
    """The same on all ranks, and higher with each restart."""
    now_ms = torch.tensor([time.time_ns() // 1_000_000])
    dist.broadcast(now_ms, 0)
    return int(now_ms)


class CheckpointFile:
    """Written by rank 0, whole or not at all."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = rank

    def load(self) -> State | None:
        if not self._path.exists():
            return None
        state: State = torch.load(self._path, weights_only=True)
        return state

    def save(self, state: State) -> None:
        if self._rank == 0:
            draft = self._path.with_suffix(".draft")
            torch.save(state, draft)
            draft.rename(self._path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    file = CheckpointFile(args.out / "checkpoint.pt", dist.get_rank())
    train(WORKLOADS[args.workload], StepLog(args.out), file.load, file.save)


if __name__ == "__main__":
    main()

"""The loop that a careful user of plain PyTorch writes: alone, or under torchrun with DistributedDataParallel.

    python -m torch.distributed.run --standalone --nproc-per-node 2 bench/peer.py mlp --steps 50 --warm-up 5 --out DIR
    python bench/peer.py mlp --steps 50 --warm-up 5 --out DIR [--rank 1] [--in-step]

It trains on the samples that DistBelief's run has, in the same order and from the same initial weights, so that the
losses can be compared. The order is laid out before the clock starts, which costs the peer less than making it would.
What it measured goes to DIR/rank<R>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from distbelief.data.order import positions_to_samples
from distbelief.shards import Schedule
from workloads import SEED, WORKERS, WORKLOADS, Workload

OPTIONS: dict[str, dict[str, Any]] = {"default": {}, "fused": {"fused": True}}
"""The implementations of the optimizer that are measured: what torch chooses by itself, and its fused one."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--optimizers", default="default")
    parser.add_argument("--rank", type=int, default=0, help="whose half of each batch, when run alone")
    parser.add_argument("--in-step", action="store_true", help="print 'ready', and wait for a line before the clock")
    args = parser.parse_args()
    torch.set_num_threads(1)
    together = "TORCHELASTIC_RUN_ID" in os.environ
    if together:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if together else args.rank
    meet = dist.barrier if together else _meet_by_pipe if args.in_step else lambda: None
    workload = WORKLOADS[args.workload]
    x, y = workload.data()
    batches = my_batches(workload, len(x), args.steps, rank)
    measured = {}
    for implementation in args.optimizers.split(","):
        torch.manual_seed(SEED)
        model: torch.nn.Module = workload.model()
        if together:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = workload.optimizer(model.parameters(), **OPTIONS[implementation])
        measured[implementation] = train(workload, model, optimizer, (x, y), batches, args.warm_up, meet)
    (args.out / f"rank{rank}.json").write_text(json.dumps(measured))
    if together:
        dist.destroy_process_group()


def my_batches(workload: Workload, samples: int, steps: int, rank: int) -> list[torch.Tensor]:
    """Sample numbers of this rank's half of each step's batch, as DistBelief would take them."""
    schedule = Schedule(samples, workload.global_batch, WORKERS)
    batches = []
    for step in range(steps):
        epoch, first, end = schedule.shard(step, rank)
        numbers = positions_to_samples(np.arange(first, end, dtype=np.int64), samples, SEED, epoch, shuffle=True)
        batches.append(torch.from_numpy(numbers))
    return batches


def train(
    workload: Workload,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[torch.Tensor, torch.Tensor],
    batches: list[torch.Tensor],
    warm_up: int,
    meet: Callable[[], Any],
) -> dict[str, Any]:
    """Train, and time the steps after the first `warm_up` ones."""
    x, y = data
    losses = []
    started = first_step_at = 0.0
    for step, batch in enumerate(batches):
        if step == warm_up:
            meet()
            started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = workload.loss(model(x.index_select(0, batch)), y.index_select(0, batch))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
        if step == 0:
            first_step_at = time.time()
    return {
        "seconds": time.perf_counter() - started,
        "first_step_at": first_step_at,
        "losses": [float(loss) for loss in losses],
    }


def _meet_by_pipe() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()

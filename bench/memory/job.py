"""A language model whose state is large and whose steps are short, for looking at memory. Also a job file.

    PYTHONPATH=. distbelief train bench/memory/job.py --workers 4 --strategy sharded --set width=640

Without DistBelief it trains in one process, with a plain loop over the same shards, and prints its own peak:

    PYTHONPATH=. python bench/memory/job.py --width 640 --steps 3 [--shards 1]
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from bench.modelparallel.job import CLIP_NORM, GPT, data, loss, optimizer
from bench.task import peak_bytes
from bench.workloads import SEED
from distbelief import Job

LAYERS, WIDTH = 16, 640
BATCH = SHARDS = 4


def parameters(width: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(LAYERS, width).parameters())


def job(width: int = WIDTH, steps: int = 3) -> Job:
    return Job(
        name="memory",
        model=lambda: GPT(LAYERS, width),
        loss=loss,
        optimizer=optimizer,
        clip_norm=CLIP_NORM,
        data=data(),
        global_batch=BATCH,
        steps=steps,
        shards=SHARDS,
        seed=SEED,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--shards", type=int, default=SHARDS, help="1: the whole batch in one pass")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    x, y = data()
    model = GPT(LAYERS, args.width)
    updates = optimizer(list(model.parameters()))
    for step in range(args.steps):
        batch = slice(step * BATCH, (step + 1) * BATCH)
        for inputs, targets in zip(x[batch].chunk(args.shards), y[batch].chunk(args.shards), strict=True):
            (loss(model(inputs), targets) / args.shards).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        updates.step()
        updates.zero_grad()
    print(peak_bytes())


if __name__ == "__main__":
    main()

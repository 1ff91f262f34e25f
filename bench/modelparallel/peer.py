"""The loops that a careful user of bare torch writes for a divided model, one per way of dividing it.

    PYTHONPATH=. torchrun --standalone --nproc-per-node 2 bench/modelparallel/peer.py 1f1b --steps 20 --out DIR

Pipelines are torch.distributed.pipelining's own schedules with stages made by hand; `sharded` is FSDP2 around every
block and the model; `tensor` is parallelize_module with the plan that DistBelief finds by itself. Each trains on the
samples of DistBelief's run, in the same order, in as many micro-batches, from the same initial weights, clipped alike,
with the optimizer that DistBelief runs (torch's fused one). The times at which steps ended go to DIR/rank<R>.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from bench.modelparallel.job import BATCH, CLIP_NORM, GPT, SHARDS, boundaries, data, loss, optimizer
from bench.modelparallel.systems import SYSTEMS
from bench.workloads import SEED
from distbelief.data.rules.order import positions_to_samples
from distbelief.shards import Schedule

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]
"""One step on a whole batch; the mean loss of what this rank has seen of it, None where there is none."""

SCHEDULES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zbv": schedules.ScheduleZBVZeroBubble,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    makers = {"sharded": sharded, "tensor": tensor}
    torch.manual_seed(SEED)
    step = makers[args.system](GPT()) if args.system in makers else pipeline(GPT(), args.system)
    x, y = data()
    batches = [(x.index_select(0, numbers), y.index_select(0, numbers)) for numbers in order(len(x), args.steps)]
    ends, losses = [], []
    dist.barrier()
    for inputs, targets in batches:
        losses.append(step(inputs, targets))
        ends.append(time.time())
    told = {"ends": ends, "losses": [None if found is None else float(found) for found in losses]}
    (args.out / f"rank{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def order(samples: int, steps: int) -> list[torch.Tensor]:
    """The sample numbers of each step's batch, as DistBelief takes them: one shard after the other."""
    schedule = Schedule(samples, BATCH, SHARDS)
    batches = []
    for step in range(steps):
        epoch, first, _ = schedule.shard(step, 0)
        positions = np.arange(first, first + BATCH, dtype=np.int64)
        batches.append(torch.from_numpy(positions_to_samples(positions, samples, SEED, epoch, shuffle=True)))
    return batches


class Stage(nn.Module):
    """A run of blocks, with the embeddings before the first and the head behind the last."""

    def __init__(self, model: GPT, first: int, end: int) -> None:
        super().__init__()
        self.symbols = model.symbols if first == 0 else None
        self.places = model.places if first == 0 else None
        self.blocks = model.blocks[first:end]
        last = end == len(model.blocks)
        self.norm = model.norm if last else None
        self.head = model.head if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.symbols is not None and self.places is not None:
            x = self.symbols(x) + self.places.weight
        x = self.blocks(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def pipeline(model: GPT, name: str) -> Step:
    rank, world = dist.get_rank(), dist.get_world_size()
    count = SYSTEMS[name].stages
    edges = [0, *boundaries(count), len(model.blocks)]
    mine = {1: [rank], 2: [rank, 2 * world - 1 - rank] if name == "zbv" else [rank, rank + world]}[count // world]
    modules = [Stage(model, edges[number], edges[number + 1]) for number in mine]
    stages = [PipelineStage(m, n, count, torch.device("cpu")) for m, n in zip(modules, mine, strict=True)]
    schedule = SCHEDULES[name](stages[0] if len(stages) == 1 else stages, SHARDS, loss_fn=loss)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    updates = optimizer(parameters)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        given = (inputs,) if 0 in mine else ()
        wanted: dict[str, Any] = {"target": targets, "losses": losses} if count - 1 in mine else {}
        schedule.step(*given, **wanted)
        square = nn.utils.get_total_norm(gradients(parameters)) ** 2
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(parameters, CLIP_NORM, square.sqrt())
        updates.step()
        updates.zero_grad()
        return torch.stack(losses).mean().detach() if losses else None

    return step


def sharded(model: GPT) -> Step:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    updates = optimizer(list(model.parameters()))

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mine = slice(rank * SHARDS // world, (rank + 1) * SHARDS // world)
        found = passes(model, inputs.chunk(SHARDS)[mine], targets.chunk(SHARDS)[mine])
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        updates.step()
        updates.zero_grad()
        return found

    return step


def tensor(model: GPT) -> Step:
    plan: dict[str, ParallelStyle] = {
        "symbols": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for number in range(len(model.blocks)):
        plan |= {f"blocks.{number}.{name}": ColwiseParallel() for name in ("query", "key", "value", "mlp.0")}
        plan |= {f"blocks.{number}.{name}": RowwiseParallel() for name in ("out", "mlp.2")}
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    divided = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    whole = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    updates = [optimizer(parameters) for parameters in (divided, whole)]  # torch's fused one takes no mixture

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = passes(model, inputs.chunk(SHARDS), targets.chunk(SHARDS))
        of_divided: Any = nn.utils.get_total_norm(gradients(divided))
        norm = torch.hypot(of_divided.full_tensor(), nn.utils.get_total_norm(gradients(whole)))
        for parameters in (divided, whole):
            nn.utils.clip_grads_with_norm_(parameters, CLIP_NORM, norm)
        for one in updates:
            one.step()
            one.zero_grad()
        return found

    return step


def passes(model: nn.Module, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """Forward and backward of one micro-batch after the other."""
    losses = []
    for x, y in zip(inputs, targets, strict=True):
        found = loss(model(x), y)
        (found / len(inputs)).backward()  # type: ignore[no-untyped-call]
        losses.append(found.detach())
    return torch.stack(losses).mean()


def gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


if __name__ == "__main__":
    main()

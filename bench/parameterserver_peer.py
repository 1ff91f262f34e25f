"""A parameter server as a careful user writes it on torch.distributed: gloo, point to point, one flat buffer.

    python -m torch.distributed.run --standalone --nproc-per-node 3 bench/parameterserver_peer.py mlp --steps 50 \\
        --warm-up 5 --out DIR [--mode sync|async]

The last rank is the server. Workers send their gradients and receive parameters, each as one message. `sync`: it adds
the gradients of all workers, then steps. `async`: it steps with each as it comes. What the workers measured goes to
DIR/rank<R>.json, in the form of peer.py.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from peer import my_batches
from workloads import SEED, WORKERS, WORKLOADS, Workload

SERVER = WORKERS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = WORKLOADS[args.workload]
    torch.manual_seed(SEED)
    model = workload.model()
    values, gradients = flat(model)
    if dist.get_rank() == SERVER:
        serve(workload, model, values, gradients, args.steps, args.warm_up, args.mode)
    else:
        rank = dist.get_rank()
        measured = work(workload, model, values, gradients, args.steps, args.warm_up, rank)
        (args.out / f"rank{rank}.json").write_text(json.dumps({"default": measured}))
    dist.barrier()
    dist.destroy_process_group()


def flat(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """All parameters in one buffer, all gradients in another; the model's own are views of them."""
    parameters = list(model.parameters())
    values = torch.cat([p.detach().reshape(-1) for p in parameters])
    gradients = torch.zeros_like(values)
    at = 0
    for parameter in parameters:
        part = slice(at, at + parameter.numel())
        parameter.data = values[part].view(parameter.shape)
        parameter.grad = gradients[part].view(parameter.shape)
        at += parameter.numel()
    return values, gradients


def serve(
    workload: Workload, model: torch.nn.Module, values: torch.Tensor, gradients: torch.Tensor, steps: int,
    warm_up: int, mode: str,
) -> None:  # fmt: skip
    optimizer = workload.optimizer(model.parameters(), fused=True)
    received = [torch.empty_like(values) for _ in range(WORKERS)]
    if mode == "sync":
        for step in range(steps):
            if step == warm_up:
                dist.barrier()
            for one in [dist.irecv(received[rank], rank) for rank in range(WORKERS)]:
                one.wait()
            torch.add(received[0], received[1], out=gradients).mul_(1 / WORKERS)
            optimizer.step()
            for one in [dist.isend(values, rank) for rank in range(WORKERS)]:
                one.wait()
        return
    left, met = [steps] * WORKERS, False
    waiting = [dist.irecv(received[rank], rank) for rank in range(WORKERS)]
    while any(left):
        for rank in range(WORKERS):
            if not left[rank] or not waiting[rank].is_completed():
                continue
            gradients.copy_(received[rank])
            optimizer.step()
            dist.send(values, rank)
            left[rank] -= 1
            if left[rank]:
                waiting[rank] = dist.irecv(received[rank], rank)
            if not met and max(left) <= steps - warm_up:
                met = True
                dist.barrier()


def work(
    workload: Workload, model: torch.nn.Module, values: torch.Tensor, gradients: torch.Tensor, steps: int,
    warm_up: int, rank: int,
) -> dict[str, Any]:  # fmt: skip
    x, y = workload.data()
    batches = my_batches(workload, len(x), steps, rank)
    losses = []
    started = first_step_at = 0.0
    for step, batch in enumerate(batches):
        if step == warm_up:
            dist.barrier()
            started = time.perf_counter()
        gradients.zero_()
        loss = workload.loss(model(x.index_select(0, batch)), y.index_select(0, batch))
        loss.backward()  # type: ignore[no-untyped-call]
        dist.send(gradients, SERVER)
        dist.recv(values, SERVER)
        losses.append(float(loss.detach()))
        if step == 0:
            first_step_at = time.time()
    return {"seconds": time.perf_counter() - started, "first_step_at": first_step_at, "losses": losses}


if __name__ == "__main__":
    main()

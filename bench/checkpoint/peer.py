"""The loop of a careful user of plain PyTorch that saves every so many steps, and the loading of what it saved.

    PYTHONPATH=. python bench/checkpoint/peer.py train torch.save --folder DIR --out FILE --every 20 --saves 6
    PYTHONPATH=. python bench/checkpoint/peer.py load  torch.save --folder DIR --out FILE

Under torchrun it trains with DistributedDataParallel. The clock is stopped while it removes old checkpoints and while
it looks at what it has saved, which no figure is to contain. Two checkpoints at most lie on the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.checkpoint import job
from bench.checkpoint.figures import Save, Trace
from bench.checkpoint.savers import SAVERS

KEPT = 2


class Clock:
    """Time without what the benchmark does for itself."""

    def __init__(self) -> None:
        self._outside_s = 0.0

    def now(self) -> float:
        return time.perf_counter() - self._outside_s

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._outside_s += time.perf_counter() - began


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch.manual_seed(job.SEED)
    model = job.model(args.width, args.layers)
    optimizer = job.optimizer(list(model.parameters()), fused=True)
    found = train(args, model, optimizer) if args.mode == "train" else load(args, model, optimizer)
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def train(args: argparse.Namespace, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if dist.get_world_size() > 1 else model
    x, y = job.data(args.width)
    share = job.BATCH // dist.get_world_size()
    clock, saver = Clock(), SAVERS[args.how]()
    commits: list[float] = []
    saves: list[dict[str, Any]] = []
    last = args.saves * args.every
    for step in range(last + args.every):
        path = args.folder / f"step-{step:09d}"
        if step and step % args.every == 0:
            with clock.stopped():
                if dist.get_rank() == 0:
                    _remove_old(args.folder)
                    if step == last:
                        (args.folder / "sum.txt").write_text(_sum(model, optimizer))
                dist.barrier()
            # The state of a wrapped model has other names; the model's own are what a user wants to load.
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            began = clock.now()
            saves.append(save := {"step": step})
            save["without_sync_s"] = saver.save(state, path, _noting(save, clock))
            save["stall_s"] = clock.now() - began
        first = (step * job.BATCH + dist.get_rank() * share) % job.SAMPLES
        optimizer.zero_grad(set_to_none=False)  # the gradients' memory stays: new pages are slow
        job.loss(wrapped(x[first : first + share]), y[first : first + share]).backward()
        if saves and saves[-1]["step"] == step:
            began = clock.now()
            saver.before_update()
            saves[-1]["stall_s"] += clock.now() - began
        optimizer.step()
        commits.append(clock.now())
    saver.close()
    dist.barrier()
    size_bytes = sum(file.stat().st_size for file in _newest(args.folder).rglob("*") if file.is_file())
    return dataclasses.asdict(Trace(commits, [Save(size_bytes=size_bytes, **save) for save in saves]))


def _noting(save: dict[str, Any], clock: Clock) -> Callable[[], None]:
    def done() -> None:
        save["done_at"] = clock.now()

    return done


def load(args: argparse.Namespace, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    began = time.perf_counter()
    SAVERS[args.how].load(_newest(args.folder), model, optimizer)
    took_s = time.perf_counter() - began
    if _sum(model, optimizer) != (args.folder / "sum.txt").read_text():
        raise SystemExit("what was loaded is not what was saved")
    return {"load_s": took_s}


def _newest(folder: Path) -> Path:
    return max(folder.glob("step-*"))


def _remove_old(folder: Path) -> None:
    for path in sorted(folder.glob("step-*"))[: -(KEPT - 1)]:
        shutil.rmtree(path)


def _sum(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A number that other weights or another state of the optimizer would not have."""
    moments = [moment for state in optimizer.state.values() for moment in state.values()]
    return repr([float(tensor.detach().double().sum()) for tensor in (*model.parameters(), *moments)])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["train", "load"])
    parser.add_argument("how", choices=SAVERS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--width", type=int, default=job.WIDTH)
    parser.add_argument("--layers", type=int, default=job.LAYERS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

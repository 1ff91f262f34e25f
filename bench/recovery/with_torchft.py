"""torchft under kills: one process per replica group, a lighthouse, and somebody who starts again what has died.

    PYTHONPATH=. python bench/recovery/with_torchft.py mlp --workers 3 --out DIR

torchft restarts nothing itself, so this supervisor does, at once. Gradients go through `Manager.allreduce` as one flat
tensor. The times are tuned for one idle machine, much below torchft's defaults (a replica counts as dead after 5 s
without a heartbeat there, which is what a kill costs then).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.nn.utils import parameters_to_vector
from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]
from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]

from bench.recovery.peer import Batches, StepLog
from bench.workloads import SEED, WORKLOADS
from distbelief.lifeline import die_with_parent

HEARTBEAT_MS = 50
DEAD_AFTER_MS = 300
TICK_MS = 20
TIMEOUT = timedelta(seconds=10)
WATCH_S = 0.05


def supervise(workload: str, workers: int, out: Path) -> None:
    """Never returns: it is ended by a signal, and the replicas die with it."""
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=DEAD_AFTER_MS,
        quorum_tick_ms=TICK_MS,
        heartbeat_timeout_ms=DEAD_AFTER_MS,
    )
    environment = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address()}
    base = [sys.executable, str(Path(__file__).resolve()), workload, "--workers", str(workers), "--out", str(out)]

    def start(replica: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*base, "--replica", str(replica)], env=environment)

    replicas = {number: start(number) for number in range(workers)}
    while True:
        for number, process in replicas.items():
            if process.poll() is not None:
                replicas[number] = start(number)
        time.sleep(WATCH_S)


def train(workload_name: str, replica: int, out: Path) -> None:
    torch.set_num_threads(1)
    workload = WORKLOADS[workload_name]
    torch.manual_seed(SEED)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    batches = Batches(workload, workload.data())
    log = StepLog(out)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        replica_id=f"replica{replica}",
        heartbeat_interval=timedelta(milliseconds=HEARTBEAT_MS),
        init_sync=False,
    )
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    while True:
        manager.start_quorum()
        rank = manager.participating_rank()
        x, y = batches.part(manager.current_step(), rank or 0, max(1, manager.num_participants()))
        optimizer.zero_grad(set_to_none=True)
        workload.loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        flat = parameters_to_vector([p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters])
        manager.allreduce(flat).wait()
        step = manager.current_step()
        if manager.should_commit():
            for parameter, gradient in zip(parameters, torch.split(flat, sizes), strict=True):
                parameter.grad = gradient.view_as(parameter)
            optimizer.step()
            log.applied(step, manager._quorum_id)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--replica", type=int)
    args = parser.parse_args()
    if args.replica is None:
        supervise(args.workload, args.workers, args.out)
    die_with_parent(os.getppid())
    train(args.workload, args.replica, args.out)


if __name__ == "__main__":
    main()

"""The systems that are compared: ours with several strategies, torch's own, and other people's (peers.py)."""

from __future__ import annotations

from collections.abc import Callable

from bench.compare.peers import PEERS
from bench.compare.system import Commands, Start, System
from bench.workloads import WORKLOADS

SINGLE, IDEAL, DDP, OURS = "single", "ideal", "ddp", "allreduce"
CUTTABLE = tuple(name for name, one in WORKLOADS.items() if one.blocks[1])
"""Workloads whose model is a row of blocks: what pipelines are for."""
DIVISIBLE = tuple(name for name, one in WORKLOADS.items() if not one.batch_norm)
"""Workloads that are the same however a batch is divided."""


def torchrun(start: Start, processes: int) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [start.python, *launcher, "--nproc-per-node", str(processes), str(start.driver)]


def _ours(strategy: str, shards_per_worker: int = 1, *, freely: bool = False) -> Callable[[Start], Commands]:
    """`freely`: nobody waits, and an update is one worker's batch; so a step of the others is one update per worker."""

    def commands(start: Start) -> Commands:
        command = [
            start.python, "-m", "distbelief.cli.main", "train", str(start.driver), "--workers", str(start.workers),
            "--strategy", strategy.format(workers=start.workers), "--threads", "1", "--save-every", "never",
            "--run-dir", str(start.folder / "run"), "--json", "--set", f"shards={shards_per_worker * start.workers}",
        ]  # fmt: skip
        if freely:
            from bench.task import Task

            task = Task.load(str(start.folder))
            command += ["--set", f"batch={task.batch_per_worker}", "--set", f"steps={task.steps * task.workers}"]
        return [command]

    return commands


def _distbelief(
    name: str, strategy: str, note: str, shards: int = 1, *, freely: bool = False, workloads: tuple[str, ...] = ()
) -> System:
    if shards > 1 and not workloads:
        workloads = DIVISIBLE
    return System(
        name,
        f"DistBelief {strategy.replace(':{workers}', '').replace(':servers=1', '')}"
        + (f", {shards} shards each" if shards > 1 else ""),
        "with_distbelief.py",
        _ours(strategy, shards, freely=freely),
        kind="ours",
        asynchronous=freely,
        workloads=workloads,
        note=note,
    )


OURS_ALL = (
    _distbelief(OURS, "allreduce", "exact mode, atomic commit, one shard per worker; gradients in shared memory"),
    _distbelief("allreduce-4", "allreduce", "four shards per worker: what elasticity costs", 4),
    _distbelief("inexact", "allreduce:inexact", "four shards per worker, the result may depend on their number", 4),
    _distbelief("allreduce-gloo", "allreduce:gloo", "the same over torch's gloo instead of shared memory"),
    _distbelief("ps-sync", "ps:sync:servers=1", "one parameter server, bytes in shared memory; the bits of allreduce"),
    _distbelief("ps-sync-tcp", "ps:sync:servers=1:tcp", "the same over TCP"),
    _distbelief("ps-async", "ps:async:servers=1", "Downpour SGD: nobody waits", freely=True),
    _distbelief(
        "pipeline", "pipeline:{workers}", "one stage per worker, four micro-batches each", 4, workloads=CUTTABLE
    ),
    _distbelief("sharded", "sharded", "parameters, gradients and optimizer state divided; as FSDP2"),
)

TORCH = (
    System(
        SINGLE,
        "one process",
        "with_plain.py",
        lambda start: [[start.python, str(start.driver)]],
        kind="reference",
        note="one plain process with one worker's part of each batch, while the other cores rest",
    ),
    System(
        IDEAL,
        "ideal (no exchange)",
        "with_plain.py",
        lambda start: [[start.python, str(start.driver), str(rank)] for rank in range(start.workers)],
        ends_with_all=True,
        kind="reference",
        time_to_accuracy=False,
        first_step=False,
        note="as many plain processes as workers at the same time, each with its part of the data; speeds added up",
    ),
    System(DDP, "torch DDP", "with_ddp.py", lambda start: [torchrun(start, start.workers)], note="gloo, torchrun"),
    System(
        "fsdp", "torch FSDP2", "with_fsdp.py", lambda start: [torchrun(start, start.workers)], note="gloo, torchrun"
    ),
    System(
        "gloo-server",
        "server on torch gloo",
        "with_gloo_server.py",
        lambda start: [torchrun(start, start.workers + 1)],
        note="a synchronous parameter server written by hand, point to point, one flat buffer",
    ),
)

SYSTEMS = {system.name: system for system in (*OURS_ALL, *TORCH, *PEERS)}

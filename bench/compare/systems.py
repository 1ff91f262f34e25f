"""The systems that are compared: ours with several strategies, torch's own, and other people's (peers.py)."""

from __future__ import annotations

from collections.abc import Callable

from bench.compare.peers import PEERS
from bench.compare.system import Commands, Start, System
from bench.workloads import WORKLOADS

SINGLE, IDEAL, DDP, OURS = "single", "ideal", "ddp", "allreduce"
OURS_ONEDNN, DDP_ONEDNN = "allreduce-onednn", "ddp-onednn"
LINEAR = ("mlp", "gpt", "bert", "wide", "wide8")
"""Workloads that consist of linear layers: where it matters which library multiplies."""
MICRO_BATCHES = 4
"""Of one worker's part of a batch, where it is divided further."""
DIVISIBLE = tuple(
    name for name, one in WORKLOADS.items() if not one.batch_norm and one.batch_per_worker >= MICRO_BATCHES
)
"""Workloads that can be divided so, and are the same then."""
CUTTABLE = tuple(name for name in DIVISIBLE if WORKLOADS[name].blocks[1])
"""Workloads whose model is a row of blocks, too: what pipelines are for."""


def torchrun(start: Start, processes: int) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [start.python, *launcher, "--nproc-per-node", str(processes), str(start.driver)]


def _ours(
    strategy: str, shards_per_worker: int = 1, *, freely: bool = False, matmul: str = "torch"
) -> Callable[[Start], Commands]:
    """`freely`: nobody waits, and an update is one worker's batch; so a step of the others is one update per worker."""

    def commands(start: Start) -> Commands:
        command = [
            start.python, "-m", "distbelief.cli.main", "train", str(start.driver), "--workers", str(start.workers),
            "--strategy", strategy.format(workers=start.workers), "--threads", "1", "--save-every", "never",
            "--run-dir", str(start.folder / "run"), "--json", "--set", f"shards={shards_per_worker * start.workers}",
            "--set", f"matmul={matmul}",
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
    System(
        OURS_ONEDNN,
        "DistBelief allreduce, oneDNN",
        "with_distbelief.py",
        _ours("allreduce", matmul="onednn"),
        kind="ours",
        workloads=LINEAR,
        note="the same with Job(matmul='onednn'): another library multiplies in linear layers",
    ),
    _distbelief("allreduce-4", "allreduce", "four shards per worker: what elasticity costs", MICRO_BATCHES),
    _distbelief(
        "inexact", "allreduce:inexact", "four shards per worker, the result may depend on their number", MICRO_BATCHES
    ),
    _distbelief("allreduce-gloo", "allreduce:gloo", "the same over torch's gloo instead of shared memory"),
    _distbelief("ps-sync", "ps:sync:servers=1", "one parameter server, bytes in shared memory; the bits of allreduce"),
    _distbelief("ps-sync-tcp", "ps:sync:servers=1:tcp", "the same over TCP"),
    _distbelief("ps-async", "ps:async:servers=1", "Downpour SGD: nobody waits", freely=True),
    _distbelief(
        "pipeline",
        "pipeline:{workers}",
        "a stage per worker, four micro-batches each",
        MICRO_BATCHES,
        workloads=CUTTABLE,
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
        DDP_ONEDNN,
        "torch DDP with our layers",
        "with_ddp_onednn.py",
        lambda start: [torchrun(start, start.workers)],
        kind="reference",
        workloads=LINEAR,
        first_step=False,
        note="DDP on a model whose linear layers are ours: what is left of our advantage with the same products",
    ),
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

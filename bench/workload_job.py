"""A workload as a job file, for benchmarks that have DistBelief train it without a peer beside it.

PYTHONPATH=. distbelief train bench/workload_job.py --set workload=gpt --set steps=20 --set shards=2
"""

from __future__ import annotations

from bench.workloads import SEED, WORKLOADS
from distbelief import Job, JobError


def job(workload: str = "mlp", steps: int = 100, shards: int = 2, batch: int = 0) -> Job:
    """`batch`: samples of a step, if not those of two workers."""
    if workload not in WORKLOADS:
        raise JobError(f"there is no workload '{workload}'", hint=f"one of {', '.join(WORKLOADS)}")
    chosen = WORKLOADS[workload]
    return Job(
        name=workload,
        model=chosen.model,
        loss=chosen.loss,
        optimizer=chosen.optimizer,
        data=chosen.data(),
        global_batch=batch or chosen.global_batch(),
        steps=steps,
        shards=shards,
        seed=SEED,
    )

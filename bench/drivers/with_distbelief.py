"""DistBelief, with any strategy: distbelief train with_distbelief.py --workers 2 --strategy allreduce"""

from bench.task import Task
from distbelief import Job, accuracy

task = Task.load()


def job(
    shards: int = task.workers, batch: int = task.global_batch, steps: int = task.steps, matmul: str = "torch"
) -> Job:
    return Job(
        name=task.workload,
        model=task.model,
        loss=task.loss,
        optimizer=task.optimizer,
        data=task.tensors(),
        validation=task.test_tensors(),
        metrics={"accuracy": accuracy},
        evaluate_every=task.evaluate_every or None,
        global_batch=batch,
        steps=steps,
        shards=shards,
        seed=task.seed,
        matmul=matmul,
        split=task.cuts(task.workers),
    )

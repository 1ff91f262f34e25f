"""Distributed training whose results do not depend on the cluster.

The public names are loaded when first used, so that the coordinator and the command line start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from distbelief.version import __version__

if TYPE_CHECKING:
    from distbelief.api import resume, train
    from distbelief.data.idx import idx
    from distbelief.errors import DistBeliefError, JobError, RunFailed
    from distbelief.job import Job
    from distbelief.result import Result
    from distbelief.strategies.dataparallel.strategy import AllReduce
    from distbelief.strategies.localsgd.strategy import LocalSGD
    from distbelief.strategies.mesh.strategy import Hybrid, Pipeline, Sharded, Tensor
    from distbelief.strategies.sandblaster.strategy import Sandblaster
    from distbelief.strategies.tables.embedding import EmbeddingTable
    from distbelief.worker.metrics import accuracy

_HOME = {
    "AllReduce": "distbelief.strategies.dataparallel.strategy",
    "DistBeliefError": "distbelief.errors",
    "EmbeddingTable": "distbelief.strategies.tables.embedding",
    "Hybrid": "distbelief.strategies.mesh.strategy",
    "Job": "distbelief.job",
    "JobError": "distbelief.errors",
    "LocalSGD": "distbelief.strategies.localsgd.strategy",
    "Pipeline": "distbelief.strategies.mesh.strategy",
    "Result": "distbelief.result",
    "RunFailed": "distbelief.errors",
    "Sandblaster": "distbelief.strategies.sandblaster.strategy",
    "Sharded": "distbelief.strategies.mesh.strategy",
    "Tensor": "distbelief.strategies.mesh.strategy",
    "accuracy": "distbelief.worker.metrics",
    "idx": "distbelief.data.idx",
    "resume": "distbelief.api",
    "train": "distbelief.api",
}

__all__ = [
    "AllReduce",
    "DistBeliefError",
    "EmbeddingTable",
    "Hybrid",
    "Job",
    "JobError",
    "LocalSGD",
    "Pipeline",
    "Result",
    "RunFailed",
    "Sandblaster",
    "Sharded",
    "Tensor",
    "__version__",
    "accuracy",
    "idx",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'distbelief' has no attribute {name!r}")

"""Makes the model of a run again, from the job file named in job.json, the run's settings and the trained weights.

The model is on the CPU and in evaluation mode. A few samples of the job's data come with it, as the model's arguments.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distbelief.checkpoint.fit import differences, forms, misfit
from distbelief.checkpoint.sources import recorded_job
from distbelief.checkpoint.weights import persistent_tensors
from distbelief.data.reading import Failure, Request, read
from distbelief.data.sources import InMemory, as_source, seed_everything, split_batch
from distbelief.errors import DistBeliefError, JobError
from distbelief.job import Job
from distbelief.strategies.flatmodel.compute import make_model
from distbelief.strategies.ps.tables.embedding import densified
from distbelief.worker.jobfile import load_job

SAMPLES = 3  # more than 1: torch.export treats a dimension of 1 as a constant

_WEIGHTS_ONLY = "the weights alone can be exported: --to FILE.safetensors"


@dataclass(frozen=True)
class Inputs:
    """The model's arguments for a batch of `samples` samples."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int

    def leaves(self) -> list[Any]:
        return list(torch.utils._pytree.tree_leaves((self.args, self.kwargs)))

    def counts_samples(self, leaf: Any) -> bool:
        """Whether the leaf is a tensor whose first dimension counts samples."""
        return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == self.samples

    def longer(self) -> Inputs:
        """The same inputs with the first samples repeated at the end: only the batch size differs."""

        def grow(leaf: Any) -> Any:
            return torch.cat([leaf, leaf[: self.samples - 1]]) if self.counts_samples(leaf) else leaf

        args, kwargs = torch.utils._pytree.tree_map(grow, (self.args, self.kwargs))
        return Inputs(args, kwargs, 2 * self.samples - 1)


@dataclass(frozen=True)
class Rebuilt:
    job: Job
    model: torch.nn.Module
    inputs: Inputs

    def answer(self, inputs: Inputs, model: Callable[..., Any] | None = None) -> list[torch.Tensor]:
        """The output tensors of the model (or of another one in its place) for the inputs."""
        seed_everything(self.job.seed)  # a model with random numbers draws the same ones each time
        with torch.no_grad():
            output = (model or self.model)(*inputs.args, **inputs.kwargs)
        return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def rebuild(run_dir: Path, tensors: Mapping[str, torch.Tensor], where: str) -> Rebuilt:
    """The model of the run, with the tensors (read from `where`) as its weights."""
    job = _load(run_dir)
    model = _in_user_code("the model could not be made", lambda: make_model(job, torch.device("cpu"))).eval()
    tensors = densified(model, tensors)
    expected = persistent_tensors(model)
    lines = differences(forms(tensors), where, forms(expected), "the model")
    if lines:
        raise misfit(
            f"the weights do not fit the model that {job.name}'s job file makes now",
            lines,
            hint=f"has the job file changed since the run? Put it back as it was; or {_WEIGHTS_ONLY}",
        )
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(tensors[name])
    rebuilt = Rebuilt(job, model, _some_inputs(job))
    _in_user_code("the model failed on a batch of its data", lambda: rebuilt.answer(rebuilt.inputs))
    return rebuilt


def _load(run_dir: Path) -> Job:
    recorded = recorded_job(run_dir)
    if not recorded.file:
        raise DistBeliefError(
            f"the job of {run_dir} came from a Python program, not from a file: its model cannot be made again",
            hint=_WEIGHTS_ONLY,
        )
    if not Path(recorded.file).is_file():
        raise DistBeliefError(
            f"the job file {recorded.file} is gone: the model of {run_dir} cannot be made again",
            hint=f"put it back; or {_WEIGHTS_ONLY}",
        )
    seed_everything(0)  # as a worker does before running a job file
    return load_job(Path(recorded.file), recorded.settings)


def _some_inputs(job: Job) -> Inputs:
    source = as_source(job.data, job.collate)
    samples = np.arange(min(SAMPLES, len(source)), dtype=np.int64)
    if isinstance(source, InMemory):
        batch = source.fetch(samples)
    else:
        batch = read(source, job.seed, Request(0, samples))
        if isinstance(batch, Failure):
            raise DistBeliefError(batch.message, details=batch.traceback)
    args, kwargs, _ = split_batch(batch)
    return Inputs(args, kwargs, len(samples))


def _in_user_code(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except DistBeliefError:
        raise
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        details = "".join(traceback.format_exception(error))
        raise JobError(f"{what}: {type(error).__name__}: {first}", details=details) from error

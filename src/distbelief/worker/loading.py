"""Loads the job on a worker: data, model, canary. Afterwards the worker can take any seat."""

from __future__ import annotations

import json
import math
import pickle
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch

from distbelief.atomicfile import lacks_room, replace_file
from distbelief.checkpoint.manifest import RUN, Facts
from distbelief.control.messages import Canary, JobFacts
from distbelief.data.sources import InMemory, MapStyle, as_source, seed_everything
from distbelief.errors import JobError
from distbelief.job import Job
from distbelief.shards import Schedule
from distbelief.strategies import plugin, require
from distbelief.strategies.base import Fetch, Prepared, ServerJob, Strategy
from distbelief.strategies.flatmodel.namedtensors import tied, transient
from distbelief.strategies.purity import Checked
from distbelief.strategies.purity.rules.findings import notice, refusal
from distbelief.strategies.purity.samples import BatchReadTwice
from distbelief.strategies.purity.shards import CANARY
from distbelief.transport.shm.memfd import require_memory
from distbelief.transport.shm.segment import SegmentClient
from distbelief.version import __version__
from distbelief.worker.devices import describe, named_device, open_device, require_device_memory
from distbelief.worker.evaluate import Evaluator
from distbelief.worker.feed import Feed
from distbelief.worker.jobfile import load_job
from distbelief.worker.metrics import check_metrics
from distbelief.worker.spec import WorkerSpec
from distbelief.worker.training import Stopwatch


@dataclass
class Loaded:
    """The loaded job, ready for a seat."""

    job: Job
    schedule: Schedule
    steps: int
    strategy: Strategy
    prepared: Prepared
    watch: Stopwatch
    feed: Feed
    evaluator: Evaluator | None
    canary: Canary
    device: torch.device
    """The device that computes the shards."""
    notices: Sequence[str] = ()
    """What the user is told when the run starts."""
    run_id: str = ""
    """See WorkerSpec."""

    @property
    def state_device(self) -> torch.device:
        """The device that holds the run's state."""
        return self.device if self.strategy.state_on_device else torch.device("cpu")

    def facts(self) -> JobFacts:
        return JobFacts(
            name=self.job.name,
            shards=self.prepared.shards,
            steps=self.steps,
            global_batch=self.job.global_batch,
            samples=self.schedule.samples,
            parameters=self.prepared.parameters,
            strategy=str(self.strategy),
        )

    @cached_property
    def checkpoint_facts(self) -> Facts:
        """The facts about the job that every checkpoint repeats; made once, because every generation needs them.

        Random numbers need no state: a shard's numbers are a function of the seed, the step and the shard.
        """
        model = self.prepared.model
        return Facts(
            job={
                **msgspec.to_builtins(self.facts()),
                "tied": tied(model),
                "transient": transient(model),
                **({RUN: self.run_id} if self.run_id else {}),
            },
            random={"seed": self.job.seed},
            versions=versions(),
        )


def load_for_server(spec: WorkerSpec, segments: SegmentClient | None) -> ServerJob:
    """The part of the job that a parameter server needs. A server computes no shard and reads no sample."""
    job = _job(spec, segments)
    source = as_source(job.data, job.collate)
    strategy = require(spec.options.strategy, spec.plugin, spec.host)
    schedule = strategy.schedule_of(job, len(source))
    # The servers' parameters are in the host's memory, wherever the workers compute.
    return ServerJob(job, schedule, _steps(job, schedule, spec), strategy.prepare(job, schedule, torch.device("cpu")))


def _steps(job: Job, schedule: Schedule, spec: WorkerSpec) -> int:
    steps = job.steps or max(1, math.ceil((job.epochs or 1) * schedule.steps_per_epoch))
    return min(steps, spec.options.most_steps or steps)


def _job(spec: WorkerSpec, segments: SegmentClient | None) -> Job:
    sys.path[:] = [*spec.job.sys_path, *(p for p in sys.path if p not in spec.job.sys_path)]
    seed_everything(0)  # a job file that makes random data makes the same data on every worker
    if spec.job.file:
        return load_job(Path(spec.job.file), dict(spec.job.settings))
    if segments is None:
        raise JobError("the run's job came from a Python program and is only on its own machine", hint="use a job file")
    segment = segments.segment("job")
    job: Job = pickle.loads(segment.view(0, segment.size_bytes))  # from this run's engine, over its own socket
    return job


def load(spec: WorkerSpec, segments: SegmentClient | None, checks: bool = True) -> Loaded:
    """`checks`: whether an exact strategy's shards are checked to be pure functions (docs/purity.md)."""
    job = _job(spec, segments)
    strategy = require(spec.options.strategy, spec.plugin, spec.host)
    kind = named_device(spec.options.device)
    source = as_source(job.data, job.collate)
    check_metrics(job.metrics)
    schedule = strategy.schedule_of(job, len(source))
    if schedule.shards > len(source):
        raise JobError(
            f"{schedule.shards} shards are more than the {len(source)} samples of the data set",
            hint="set a smaller `shards` or `global_batch` in the job",
        )
    steps = _steps(job, schedule, spec)
    feed = Feed(source, schedule, job, shuffle=job.shuffle)
    evaluator = None
    if job.validation is not None:
        evaluator = Evaluator(job, _validation(job), kind)
    device = open_device(kind, spec.place, strategy.exact)  # after the fork: readers must not inherit it
    watch = Stopwatch(feed)
    prepared = strategy.prepare(job, schedule, device)
    _require_memory(prepared, device)
    has = plugin(spec.options.strategy)  # members with different versions of a plug-in may not run together
    facts = {**prepared.facts(), **describe(device), **({"plug-in": has} if has else {})}
    if strategy.exact:
        facts["data"] = feed.checksum()
    checked = checked_canary(strategy, prepared, feed, watch.fetch) if checks else Checked(prepared.canary(watch.fetch))
    if checked.impurities and not spec.options.impure:
        message, hint, details = refusal(checked.impurities)
        raise JobError(message, hint=hint, details=details)
    canary = Canary(checked.canary, facts)
    if evaluator and not next(prepared.model.parameters()).is_meta:
        evaluator.rehearse(prepared.model)
    watch.data_s, watch.shards, watch.step, watch.shard = 0.0, 0, -1, -1  # do not count the canary
    notices = [notice(checked.impurities)] if checked.impurities else []
    return Loaded(
        job, schedule, steps, strategy, prepared, watch, feed, evaluator, canary, device, notices, spec.run_id
    )


def checked_canary(strategy: Strategy, prepared: Prepared, feed: Feed, fetch: Fetch) -> Checked:
    """The canary; of exact strategies also the reasons why a shard's result is not always the same."""
    if not strategy.exact:
        return Checked(prepared.canary(fetch))
    if not feed.is_read():
        return prepared.checked_canary(fetch)
    batch = BatchReadTwice(fetch)
    of_samples = feed.what_is_kept(*CANARY) if batch.is_same else feed.what_differs(*CANARY)
    checked = prepared.checked_canary(batch)
    return replace(checked, impurities=[of_samples, *checked.impurities]) if of_samples else checked


def _require_memory(prepared: Prepared, device: torch.device) -> None:
    what = "parameters, gradients and control data"
    if device.type == "cuda":
        require_device_memory(device, what, prepared.least_bytes())
    else:
        require_memory(what, prepared.least_bytes())


def _validation(job: Job) -> InMemory | MapStyle:
    try:
        return as_source(job.validation, job.validation_collate, usual=job.collate)
    except JobError as error:
        raise JobError(f"`validation`: {error.message}", hint=error.hint, details=error.details) from error


def versions() -> dict[str, str]:
    return {
        "distbelief": __version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def write_job_json(spec: WorkerSpec, loaded: Loaded, workers: int, durable: bool) -> None:
    content: dict[str, Any] = {
        **msgspec.to_builtins(loaded.facts()),
        "file": spec.job.file,
        "settings": spec.job.settings,
        "seed": loaded.job.seed,
        "precision": loaded.job.precision,
        "matmul": loaded.job.matmul,
        "workers": workers,
        "readers": loaded.feed.readers,
        "threads": spec.options.threads,
        "device": spec.options.device,
        "canary": msgspec.to_builtins(loaded.canary),
        "versions": versions(),
    }
    path = Path(spec.run_dir) / "job.json"
    try:
        replace_file(path, json.dumps(content, indent=2).encode() + b"\n", private=True, durable=durable)
    except OSError as error:
        if not lacks_room(error) or not path.exists():  # an earlier generation's says nearly the same
            raise
        print(f"{path} cannot be renewed: {error.strerror}", flush=True)

"""A worker process: load the job, show the canary, then train each generation it is given a seat in."""

from __future__ import annotations

import json
import math
import os
import pickle
import platform
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch

from distbelief.comm.exchange import Exchange
from distbelief.comm.memfd import require_memory
from distbelief.comm.messages import EXIT_REPORTED, Canary, JobFacts, WorkerFailed, WorkerJoined, WorkerReady
from distbelief.comm.segment import KeeperClient
from distbelief.comm.shared import SharedExchange
from distbelief.comm.torchgroup import Rendezvous, TorchExchange
from distbelief.comm.words import Aborted
from distbelief.data.readers import ReaderError
from distbelief.data.seeding import seed_everything
from distbelief.data.sources import InMemory, MapStyle, as_source
from distbelief.errors import DistBeliefError, JobError, NotEnoughMemory
from distbelief.job import Job
from distbelief.shards import Schedule
from distbelief.strategies import parse
from distbelief.strategies.base import NonFiniteLoss, Prepared, Seat, Strategy
from distbelief.version import __version__
from distbelief.worker.control import Leave, TrainGeneration
from distbelief.worker.evaluate import Evaluator
from distbelief.worker.feed import Feed
from distbelief.worker.jobfile import load_job
from distbelief.worker.link import ControlLink
from distbelief.worker.metrics import check_metrics
from distbelief.worker.spec import WorkerSpec
from distbelief.worker.training import Assignment, Stopwatch, train

UNEXPLAINED_S = 10.0  # how long a broken connection may stay without a word from the coordinator


@dataclass
class Loaded:
    """The job on this worker, ready to be seated."""

    job: Job
    schedule: Schedule
    steps: int
    strategy: Strategy
    prepared: Prepared
    watch: Stopwatch
    feed: Feed
    evaluator: Evaluator | None
    canary: Canary

    def facts(self) -> JobFacts:
        return JobFacts(
            name=self.job.name,
            shards=self.schedule.shards,
            steps=self.steps,
            global_batch=self.job.global_batch,
            samples=self.schedule.samples,
            parameters=self.prepared.parameters,
            strategy=str(self.strategy),
        )


def run_worker(spec: WorkerSpec, keeper_socket: socket.socket) -> int:
    """The life of a worker. Returns its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to everybody; the engine decides
    torch.set_num_threads(spec.threads)
    keeper = KeeperClient(keeper_socket)
    loaded: Loaded | None = None
    failure: WorkerFailed | None = None
    try:
        loaded = _load(spec, keeper)  # forks readers: before the link's thread exists
    except BaseException as error:
        failure = _failure(spec, error, -1, -1)
    with ControlLink(spec.address, bytes.fromhex(spec.secret), spec.worker) as link:
        link.send(WorkerJoined(spec.worker, spec.host, os.getpid()))
        if loaded is not None:
            link.send(WorkerReady(spec.worker, loaded.facts(), loaded.canary))
            try:
                return _obey(spec, loaded, keeper, link)
            except BaseException as error:
                failure = _failure(spec, error, loaded.watch.step, loaded.watch.shard)
            finally:
                loaded.feed.close()
                if loaded.evaluator:
                    loaded.evaluator.close()
        assert failure is not None
        link.send(failure)
        while not isinstance(link.actions.get(), Leave):
            pass
    return EXIT_REPORTED


def _obey(spec: WorkerSpec, loaded: Loaded, keeper: KeeperClient, link: ControlLink) -> int:
    while True:
        action = link.actions.get()
        if isinstance(action, Leave):
            return 0
        if isinstance(action, TrainGeneration):
            try:
                _train_generation(spec, loaded, keeper, link, action)
            except Aborted as error:
                _await_word(link, error)  # the coordinator says what follows


def _await_word(link: ControlLink, error: Aborted) -> None:
    """A connection may break before the coordinator knows why. If it has nothing to say, the break is the failure."""
    deadline = time.monotonic() + UNEXPLAINED_S
    while not link.abort.reason and link.actions.empty():
        if time.monotonic() > deadline:
            raise DistBeliefError(str(error), hint="see the other workers' logs; is the network up?") from error
        time.sleep(0.02)


def _train_generation(
    spec: WorkerSpec, loaded: Loaded, keeper: KeeperClient, link: ControlLink, action: TrainGeneration
) -> None:
    mine = action.ranges[action.rank]
    units = [(v, v + 1) for v in range(*mine)] if loaded.strategy.exact else [mine]
    loaded.feed.expect(units, until=loaded.steps)
    exchange = _exchange(spec, loaded, keeper, link, action)
    try:
        replica = loaded.prepared.build(Seat(action.rank, action.ranges, loaded.steps), exchange, loaded.watch.fetch)
        if action.rank == 0:
            _write_job_json(spec, loaded, len(action.members))
        task = Assignment(spec.worker, action.generation, loaded.steps, Path(spec.run_dir))
        finished = train(loaded.job, replica, loaded.evaluator, loaded.watch, link.progress, task)
        link.send(finished)
        link.finished(action.generation)
    finally:
        exchange.close()


def _exchange(
    spec: WorkerSpec, loaded: Loaded, keeper: KeeperClient, link: ControlLink, action: TrainGeneration
) -> Exchange:
    geometry = loaded.prepared.geometry(action.ranges)
    name = f"generation {action.generation}"
    if action.transport == "shm":
        return SharedExchange(keeper, name, action.rank, geometry, link.abort)
    if spec.store is None:
        raise DistBeliefError("the members are on several hosts, but this worker was told of no rendezvous store")
    return TorchExchange(Rendezvous(*spec.store, name), action.rank, geometry, link.abort)


def _load(spec: WorkerSpec, keeper: KeeperClient) -> Loaded:
    sys.path[:] = [*spec.sys_path, *(p for p in sys.path if p not in spec.sys_path)]
    seed_everything(0)  # a job file that makes random data makes the same data on every worker
    if spec.job_file:
        job = load_job(Path(spec.job_file), dict(spec.settings))
    else:
        segment = keeper.segment("job")
        job = pickle.loads(segment.view(0, segment.size_bytes))  # from the engine of this run, over its own socket
    strategy = parse(spec.strategy)
    device = _device(spec.device)
    source = as_source(job.data, job.collate)
    check_metrics(job.metrics)
    if job.resolved_shards > len(source):
        raise JobError(
            f"{job.resolved_shards} shards are more than the {len(source)} samples of the data set",
            hint="set a smaller `shards` or `global_batch` in the job",
        )
    schedule = Schedule(len(source), job.global_batch, job.resolved_shards, job.drop_last)
    steps = job.steps or max(1, math.ceil((job.epochs or 1) * schedule.steps_per_epoch))
    feed = Feed(source, schedule, job, shuffle=job.shuffle)
    evaluator = None
    if job.validation is not None:
        evaluator = Evaluator(job, _validation(job), device)
    watch = Stopwatch(feed)
    prepared = strategy.prepare(job, schedule, device)
    require_memory("gradients, parameters and optimizer state", prepared.least_bytes())
    canary = Canary(prepared.canary(watch.fetch), prepared.facts())
    if evaluator:
        evaluator.rehearse(prepared.model)
    watch.data_s, watch.shards = 0.0, 0
    return Loaded(job, schedule, steps, strategy, prepared, watch, feed, evaluator, canary)


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise JobError(f"unknown device '{name}'", hint="a device is cpu, cuda or cuda:0") from error


def _validation(job: Job) -> InMemory | MapStyle:
    try:
        return as_source(job.validation, job.collate)
    except JobError as error:
        raise JobError(f"`validation`: {error.message}", hint=error.hint, details=error.details) from error


def _failure(spec: WorkerSpec, error: BaseException, step: int, shard: int) -> WorkerFailed:
    kinds: list[tuple[type[BaseException], str]] = [
        (NonFiniteLoss, "loss"),
        (ReaderError, "data"),
        (NotEnoughMemory, "memory"),
        (JobError, "job"),
        (DistBeliefError, "internal"),
    ]
    kind = next((name for cls, name in kinds if isinstance(error, cls)), "user")
    if isinstance(error, DistBeliefError):
        message, hint, details = error.message, error.hint, error.details
    else:
        message = f"{type(error).__name__}: {error}"
        details, shown = _user_traceback(error)
        hint = "the traceback shows where in the job's code it happened" if shown else ""
    if isinstance(error, NonFiniteLoss):
        step, shard = error.step, error.shard
    return WorkerFailed(spec.worker, spec.host, kind, message, hint, details, step, shard)


def _user_traceback(error: BaseException) -> tuple[str, bool]:
    """The traceback without our own frames above the user's code, and whether there is any of the user's in it."""
    packages = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    theirs = [i for i, file in enumerate(files) if not file.startswith(packages)]
    frame = error.__traceback__
    for _ in range(theirs[0] if theirs else 0):
        frame = frame.tb_next if frame else None
    return "".join(traceback.format_exception(type(error), error, frame)), bool(theirs)


def _write_job_json(spec: WorkerSpec, loaded: Loaded, workers: int) -> None:
    content: dict[str, Any] = {
        **msgspec.to_builtins(loaded.facts()),
        "file": spec.job_file,
        "settings": spec.settings,
        "seed": loaded.job.seed,
        "precision": loaded.job.precision,
        "workers": workers,
        "threads": spec.threads,
        "device": spec.device,
        "canary": msgspec.to_builtins(loaded.canary),
        "versions": {
            "distbelief": __version__,
            "torch": str(torch.__version__),
            "numpy": numpy.__version__,
            "python": platform.python_version(),
        },
    }
    draft = Path(spec.run_dir) / ".job.json.draft"
    draft.write_text(json.dumps(content, indent=2) + "\n")
    draft.rename(Path(spec.run_dir) / "job.json")

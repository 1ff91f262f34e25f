"""Rebuilds a run in this one process: loads the job as a worker does, finds a start state, and gives all shards to one
seat.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import msgspec
import torch

from distbelief.checkpoint.reading import newest_sound
from distbelief.checkpoint.storage import Where
from distbelief.control.credentials import NO_CREDENTIAL
from distbelief.errors import DistBeliefError, RunFailed
from distbelief.replaying.records import RecordedRun
from distbelief.strategies import parse
from distbelief.strategies.base import BeginFrom, Saved, Seat, nothing_saved
from distbelief.strategies.dataparallel.prepared import PreparedAllReduce
from distbelief.strategies.dataparallel.replica import DataParallelReplica
from distbelief.transport.device.accelerator import memory_on
from distbelief.transport.device.exchange import DeviceExchange
from distbelief.transport.shm.segment import Memory, Segment
from distbelief.transport.singlemember import SingleMemberExchange
from distbelief.worker.failure import describe_failure
from distbelief.worker.loading import Loaded, load
from distbelief.worker.origin import saved_at, weights_of
from distbelief.worker.spec import WorkerSpec

EXACT = "allreduce"
"""The strategy for replays of inexact runs, whose own results depended on the members."""


def worker_spec(run: RecordedRun) -> WorkerSpec:
    """The specification of a worker of the run, with the fields that a single process needs."""
    launch = run.launch
    return WorkerSpec(
        worker=0,
        host=platform.node(),
        address="",
        credential=NO_CREDENTIAL,
        run_dir=str(run.run_dir),
        options=launch.options if is_exact(run) else msgspec.structs.replace(launch.options, strategy=EXACT),
        job=launch.job,
    )


@contextlib.contextmanager
def loaded_here(run: RecordedRun) -> Iterator[Loaded]:
    """The job of the run as its workers loaded it: the same file, settings, module path and number of threads."""
    for one in map(parse, run.strategies):
        if one.no_replay:
            name = str(one).partition(":")[0]
            raise DistBeliefError(
                f"{run.run_dir} was trained with {name}: {one.no_replay}, so its single steps cannot be replayed",
                hint=f"`distbelief verify JOB --strategy {one}` trains it again beside a plain loop",
            )
    device = run.launch.options.device
    if device != "cpu" and is_exact(run) and any(parse(strategy).servers for strategy in run.strategies):
        raise DistBeliefError(
            f"{run.run_dir} was trained with parameter servers: shards were computed on {device}, and steps "
            "applied on processors, which one process cannot repeat",
            hint="--device cpu replays it on a processor, with other bits",
        )
    torch.set_num_threads(run.launch.options.threads)
    try:
        loaded = load(worker_spec(run), None, checks=False)
    except Exception as error:
        raise in_words(run, error, "the job cannot be loaded: ") from error
    try:
        yield loaded
    finally:
        loaded.feed.close()
        if loaded.evaluator:
            loaded.evaluator.close()


def in_words(run: RecordedRun, error: Exception, before: str = "") -> DistBeliefError:
    """An exception of the job's own code as an error message for the user."""
    if isinstance(error, DistBeliefError):
        return error
    told = describe_failure(worker_spec(run), error, -1, -1)
    return RunFailed(before + told.message, hint=told.hint, details=told.traceback)


def is_exact(run: RecordedRun) -> bool:
    """Whether every strategy of the run gave bits that do not depend on the members."""
    return all(parse(strategy).exact for strategy in run.strategies) and not run.launch.options.impure


def is_equal_within_rounding(run: RecordedRun) -> bool:
    """Whether one process gives the same losses except for the order of additions, so that losses can be compared."""
    strategies = [parse(strategy) for strategy in run.strategies]
    return (
        not is_exact(run)
        and not run.launch.options.impure
        and all(one.exact or one.wish is not None for one in strategies)
    )


@dataclass(frozen=True)
class Start:
    """The start of a replay."""

    saved: Saved | None
    """None: the job's own initial values."""
    checkpoint: int | None
    """The step of the checkpoint; None: the start is no checkpoint."""
    skipped: tuple[tuple[int, str], ...]
    """Nearer checkpoints that cannot be used, and why."""


def nearest(run: RecordedRun, step: int, suits: Callable[[Saved], bool] = lambda saved: True) -> Start:
    """The newest checkpoint at or before `step` that `suits` accepts; otherwise the start of the run itself.

    A resumed run must not start anew without being asked; a replay may, because it loses nothing.
    """

    def read(folder: Where, there: int) -> Saved | None:
        saved = saved_at(folder, there)
        return saved if suits(saved) else None

    saved, skipped = newest_sound(run.launch.checkpoint_folder, read, at_most=step)
    if saved:
        return Start(saved, saved.step, tuple(skipped))
    given = run.launch.options.begin_from
    return Start(weights_of(given) if given else None, None, tuple(skipped))


class Rebuilt:
    """A replica with all shards. `keep` stores a copy of the state, and `rewind` restores it."""

    def __init__(self, loaded: Loaded, saved: Saved | None, until: int) -> None:
        """`until`: the end of the steps to inspect; later batches are not read."""
        self._loaded = loaded
        self._ranges = [(0, loaded.schedule.shards)]
        self._seat = Seat(0, self._ranges, min(until, loaded.steps))
        self._kept: list[Memory] = []
        loaded.feed.expect([(v, v + 1) for v in range(loaded.schedule.shards)], until=self._seat.steps)
        # `loaded_here` refuses strategies without replay; members of all others are prepared as those of allreduce.
        self._prepared = cast(PreparedAllReduce, loaded.prepared)
        self._exchange, self._memory = self._alone()
        self.replica = self._build(lambda step=-1: saved)

    def _alone(
        self, state: Segment | None = None, numbers: Memory | None = None
    ) -> tuple[SingleMemberExchange | DeviceExchange, Callable[[], list[Memory]]]:
        """`state`, `numbers`: the state to continue from; on an accelerator the parameters are in `numbers`."""
        geometry, device = self._prepared.geometry(self._ranges), self._loaded.device
        alone = SingleMemberExchange(geometry, state)
        if device.type == "cpu":
            return alone, lambda: [alone.state(0)]
        beside = DeviceExchange(alone, geometry, device, {"numbers": numbers} if numbers else None)
        return beside, lambda: [beside.state(0), beside.numbers(0)]

    def _build(self, begin_from: BeginFrom = nothing_saved) -> DataParallelReplica:
        return self._prepared.build(self._seat, self._exchange, self._loaded.watch.fetch, begin_from)

    def keep(self) -> None:
        """Store the present state; replaces the stored one."""
        present = self._memory()  # views: no second copy
        devices = [torch.device("cpu"), self._loaded.device]
        self._kept = self._kept or [memory_on(d, one.size_bytes) for d, one in zip(devices, present, strict=False)]
        for into, source in zip(self._kept, present, strict=True):
            into.tensor(torch.uint8, 0, source.size_bytes).copy_(source.tensor(torch.uint8, 0, source.size_bytes))

    def rewind(self) -> None:
        """Restore the stored state."""
        state, *numbers = self._kept
        assert isinstance(state, Segment)
        self._kept = []
        self._exchange, self._memory = self._alone(state, *numbers)
        self.replica = self._build()

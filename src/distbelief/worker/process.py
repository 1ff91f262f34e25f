"""A worker process: load the job, send the canary, then train in each generation in which this worker is a member.

How the parts of a worker fit: `loading.py` makes the job (`jobfile.py`), its data (`feed.py`), the prepared model and
the evaluator (`evaluate.py`, `metrics.py`). `link.py` runs the thread that talks to the coordinator; it asks
`rules/control.py` what to do and hands actions to the training thread here. `_obey` takes them: for each generation it
has the strategy open an exchange and build a replica, from a checkpoint if need be (`origin.py`), and runs the loop of
`training.py`, or the strategy's own loop. `saving.py` writes checkpoints in threads of its own, `profiling/` records a
profile, and `failure.py` describes an error for the coordinator. A parameter server begins in `serving.py` instead.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from distbelief.control.addresses import interface_to
from distbelief.control.messages import (
    EXIT_REPORTED,
    BrokenShard,
    CheckpointLoaded,
    CollectiveFailed,
    Event,
    LeaveRequested,
    PeerDied,
    PlanShown,
    RolledBack,
    StepTakenOver,
    WorkerFailed,
    WorkerJoined,
    WorkerLeft,
    WorkerReady,
)
from distbelief.data.readers import ReadersLost
from distbelief.lifeline import allow_open_files
from distbelief.options import NEVER, recheck_plan
from distbelief.strategies.base import Replica, Saved, Seat, Seated
from distbelief.transport.abort import Abort, Aborted
from distbelief.transport.exchange import DeathWatch
from distbelief.transport.gloo.group import train_or_be_succeeded, use_interface
from distbelief.transport.membership import Earlier, Membership
from distbelief.transport.shm.segment import Memory, Segment, SegmentClient
from distbelief.worker.devices import identity
from distbelief.worker.failure import describe_failure, refused_thread
from distbelief.worker.link import ControlLink
from distbelief.worker.loading import Loaded, load, write_job_json
from distbelief.worker.origin import frozen_of, newest_saved, opened_at, weights_of
from distbelief.worker.rules.control import Leave, StandDown, TrainGeneration
from distbelief.worker.saving import Saver
from distbelief.worker.spec import Origin, WorkerSpec
from distbelief.worker.training import Assignment, GenerationTraining, LastReports, report_again, train

if TYPE_CHECKING:
    from distbelief.worker.profiling.profiler import Profiler

LEAVE_AFTER_S = 0.3
_UNHEARD = 256  # steps; more than are committed between two heartbeats


@dataclass(frozen=True)
class Place:
    """A worker's environment: its spec, its connection to the coordinator, and the memory that it can reach."""

    spec: WorkerSpec
    link: ControlLink
    segments: SegmentClient | None
    """None: the worker is not on the engine's host."""
    saver: Saver | None
    """None: the run saves no checkpoints."""
    profile: Profiler | None
    """None: this worker is not profiled."""
    memory: dict[str, Segment] = field(default_factory=dict)
    """Private memory that the worker keeps across generations."""
    device_memory: dict[str, Memory] = field(default_factory=dict)
    """The same, on the accelerator."""


def run_worker(spec: WorkerSpec, segment_socket: socket.socket | None, by_hand: bool = False) -> int:
    """Run a worker until it ends. Returns its exit status."""
    try:
        return _run(spec, segment_socket, by_hand)
    except RuntimeError as error:  # an exit without a report is a death: another worker takes this one's place
        if not (why := refused_thread(error)):
            raise
        print(f"this worker ends: a thread could not be started: {why}; raise that limit", file=sys.stderr, flush=True)
        return 1


def _run(spec: WorkerSpec, segment_socket: socket.socket | None, by_hand: bool) -> int:
    if not by_hand:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the engine decides
    leaving = [signal.SIGTERM]
    if by_hand:  # Ctrl-C, and the loss of its terminal unless `nohup` has the worker ignore that
        leaving += [signal.SIGINT, *([] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP])]
    for number in leaving:
        signal.signal(number, lambda number, frame: os._exit(0))  # nothing depends on this worker yet
    allow_open_files()  # a worker by hand has not inherited it from an agent
    torch.set_num_threads(spec.options.threads)
    # Use the interface that reaches the coordinator; the host's name may resolve to another one.
    use_interface(interface_to(spec.address))
    segments = SegmentClient(segment_socket) if segment_socket else None
    loaded: Loaded | None = None
    failure: WorkerFailed | None = None
    try:
        loaded = load(spec, segments)  # forks the readers, before the link's thread exists
        _adopt_frozen(spec, loaded)
    except BaseException as error:
        if refused_thread(error):
            raise
        failure = describe_failure(spec, error, -1, -1)
    with ControlLink(spec.address, spec.credential) as link:
        for number in leaving:
            signal.signal(number, lambda number, frame: _leave_soon(spec, link))
        link.send(WorkerJoined(spec.worker, spec.host, os.getpid()))
        if loaded is not None:
            gc.freeze()  # the loaded job stays: later collections skip it
            link.send(
                WorkerReady(
                    spec.worker, loaded.facts(), loaded.canary, identity(loaded.state_device), list(loaded.notices)
                )
            )
            try:
                saver = Saver(spec.saves, spec.worker, link.send) if spec.saves else None
                _connect(spec, loaded, link)
                profile = _profiler(spec, loaded, link)
            except BaseException as error:
                _close(loaded)
                if refused_thread(error):
                    raise
                return _report(link, describe_failure(spec, error, -1, -1))
            return _serve(Place(spec, link, segments, saver, profile), loaded, by_hand)
        assert failure is not None
        return _report(link, failure)


def _serve(place: Place, loaded: Loaded, by_hand: bool) -> int:
    """Carry out actions until the coordinator ends this worker. Returns the exit status."""
    spec = place.spec
    try:
        end = _obey(place, loaded, partial(_go_on, place, loaded, by_hand))
        if by_hand or (end.status == "refused" and not spec.shares_memory):
            _say_how_it_ended(spec, end)
        return int(by_hand and end.status in ("refused", "failed"))
    except ReadersLost as error:  # an exit without a report is a death: another worker takes this one's place
        print(f"this worker ends: {error.message}; {error.hint}", file=sys.stderr, flush=True)
        return 1
    except BaseException as error:
        if refused_thread(error):
            raise
        failure = describe_failure(spec, error, loaded.watch.step, loaded.watch.shard)
    finally:
        _close(loaded)
    return _report(place.link, failure)


def _close(loaded: Loaded) -> None:
    loaded.feed.close()
    if loaded.evaluator:
        loaded.evaluator.close()


def _go_on(place: Place, loaded: Loaded, by_hand: bool) -> int:
    """Continue in a new thread, because the thread that trained stays blocked."""
    _let_go(place, loaded)
    try:
        return _serve(place, loaded, by_hand)
    finally:
        place.link.close()


def _report(link: ControlLink, failure: WorkerFailed) -> int:
    link.send(failure)
    while not isinstance(link.actions.get()[0], Leave):
        pass
    return EXIT_REPORTED


def _connect(spec: WorkerSpec, loaded: Loaded, link: ControlLink) -> None:
    """Connect to the parameter servers, if the strategy has any."""
    if servers := loaded.prepared.connect(spec.credential):
        link.progress.learn = servers.learn
        link.progress.servers = lambda: servers.version


def _profiler(spec: WorkerSpec, loaded: Loaded, link: ControlLink) -> Profiler | None:
    if spec.profile is None:
        return None
    from distbelief.worker.profiling.profiler import Profiler

    return Profiler(spec, loaded.steps, loaded.strategy, torch.device(spec.options.device), link.send)


def _say_how_it_ended(spec: WorkerSpec, end: Leave) -> None:
    """Print how the worker ended, for a user who started it, or its host's agent, by hand and sees no other output."""
    with contextlib.suppress(OSError):  # the terminal may be closed
        print(f"worker {spec.worker}: {end.status}{': ' if end.reason else ''}{end.reason}", flush=True)


def _obey(place: Place, loaded: Loaded, go_on: Callable[[], int]) -> Leave:
    """Carry out actions until one is Leave, and return it. `go_on` continues in a new thread if this one stays
    blocked."""
    worker, link = place.spec.worker, place.link
    while True:
        action, abort = link.actions.get()
        gc.collect()  # a generation's memory is large and held by reference cycles
        match action:
            case Leave():
                return action
            case StandDown(generation):
                link.send(WorkerLeft(worker, generation))
            case TrainGeneration():
                try:
                    train_one = partial(_train_generation, place, loaded, action, abort)
                    if loaded.device.type == "cpu":
                        train_or_be_succeeded(train_one, abort, go_on)
                    else:
                        train_one()
                except Aborted as error:
                    if not abort.reason:  # a connection broke; the coordinator decides what follows
                        link.send(CollectiveFailed(worker, action.generation, str(error)))


def _train_generation(place: Place, loaded: Loaded, action: TrainGeneration, abort: Abort) -> None:
    spec, link = place.spec, place.link
    mine = action.ranges[action.rank]
    in_steps = loaded.strategy.in_steps
    until = loaded.steps if in_steps else 0  # 0: the next batch is not known in advance
    loaded.feed.expect_groups(loaded.prepared.groups(mine), until, loaded.strategy.stride)
    membership = _membership(place, action, abort)
    exchange = loaded.prepared.exchange(membership)
    start = Beginning(spec, action, link.send)
    may_recheck = loaded.strategy.rechecks and not spec.options.impure  # an impure shard differs by itself
    recall = _nothing
    link.progress.waiting = lambda: exchange.waiting or start.reading
    try:
        workers = [member.worker for member in action.members]
        seat = Seat(
            action.rank, action.ranges, loaded.steps, action.generation, action.degrees, workers,
            [member.host for member in action.members],
            recheck_plan(spec.options.recheck) if may_recheck else NEVER,
        )  # fmt: skip
        try:
            replica = loaded.prepared.build(seat, exchange, loaded.watch.fetch, start)
        except Exception:
            loaded.watch.step = loaded.watch.shard = -1  # no shard of a step has failed
            raise
        link.progress.step = replica.steps_applied()
        if place.saver:
            place.saver.prepare(replica)
            saver = place.saver
            link.progress.save = lambda wish: saver.ask(wish, link.progress.step)
            link.progress.seal = saver.seal
        if membership.watch and spec.options.threads == 1 and exchange.size > 1:
            threading.Thread(target=_watch_neighbour, args=[membership.watch, link, action], daemon=True).start()
        if action.rank == 0:
            # Later generations change the number of workers only, and a recovery must not wait for the disk.
            write_job_json(spec, loaded, len(action.members), durable=not action.past)
            _report_takeover(link, replica, action)
            _report_rollback(link, replica, action)
        task = Assignment(
            spec.worker,
            action.generation,
            loaded.steps,
            Path(spec.run_dir),
            action.reported,
            # In the first generation the state of rank 0 comes from a checkpoint, if there is one.
            max(action.sealed, start.step) if action.past else replica.steps_applied(),
            place.saver,
            loaded.checkpoint_facts,
            lambda lines: link.send(PlanShown(spec.worker, action.generation, list(lines))),
            loaded.strategy.stride,
            place.profile,
        )
        if place.profile:
            sharing = 1 if in_steps else len(action.members)
            place.profile.seated(action.members[action.rank].place, sharing)
        try:
            training = GenerationTraining(loaded.job, replica, loaded.evaluator, loaded.watch, link.progress, task)
            loop = loaded.prepared.loop
            finished = loop(replica, training) if loop else train(cast(Replica, replica), training)
        except Aborted:
            raise
        except Exception:
            # The first report of a failure ends the run: send the results of earlier steps before it.
            report_again(replica, link.progress, max(0, replica.steps_applied() - _UNHEARD))
            raise
        if place.profile:
            place.profile.finish()
        if action.rank == 0:
            recall = partial(report_again, LastReports.of(replica), link.progress)
        link.send(finished)
        link.finished(action.generation)
    finally:
        if not abort.left_behind:  # otherwise the successor thread owns all of this
            _let_go(place, loaded, recall)
            exchange.close()


def _nothing(reported: int) -> None: ...


def _let_go(place: Place, loaded: Loaded, recall: Callable[[int], None] = _nothing) -> None:
    """Release the resources of a generation. `recall`: reports its steps again, if it has come to its end."""
    if place.profile:
        place.profile.left()
    if place.saver:
        place.saver.let_go()
    loaded.prepared.let_go()
    place.link.progress.waiting = lambda: False
    place.link.progress.recall = recall


def _membership(place: Place, action: TrainGeneration, abort: Abort) -> Membership:
    """How this worker reaches the other members of the generation."""
    earlier = [Earlier(one.generation, [member.shards for member in one.members]) for one in action.past]
    return Membership(
        action.generation, action.rank, action.ranges, action.transport, abort, place.segments, earlier,
        place.spec.store, place.spec.credential, place.memory, place.device_memory,
    )  # fmt: skip


def _leave_soon(spec: WorkerSpec, link: ControlLink) -> None:
    """Ask to leave after a short delay: a batch system may signal all processes, and the engine then saves and stops
    the run."""
    timer = threading.Timer(LEAVE_AFTER_S, lambda: link.send(LeaveRequested(spec.worker)))
    timer.daemon = True
    timer.start()


class Beginning:
    """Loads the run's first state for the member that writes it, and reports the checkpoint."""

    def __init__(self, spec: WorkerSpec, action: TrainGeneration, tell: Callable[[Event], None]) -> None:
        self._spec = spec
        self._has_run = bool(action.past) or (spec.origin is not None and spec.origin.resumed)
        self._tell = tell
        self._divided = bool(action.degrees)
        """The model is divided: each member reads its own part of the checkpoint."""
        self.reading = False
        self.step = 0
        """The step of the loaded checkpoint; 0: none."""

    def __call__(self, step: int = -1) -> Saved | None:
        origin = self._spec.origin
        if origin is None:
            return None
        self.reading = True  # reading may take long: this member is not stuck
        try:
            if step > 0:
                return opened_at(origin.checkpoints, step)
            saved = None
            if step < 0 and origin.checkpoints and self._has_run:
                saved = self._newest(origin)
            return saved or (weights_of(origin.weights, self._divided) if origin.weights else None)
        finally:
            self.reading = False

    def _newest(self, origin: Origin) -> Saved | None:
        folder = origin.checkpoints
        saved, skipped = newest_saved(folder, self._divided, run_id=origin.run_id)
        self.step = saved.step if saved else 0
        self._tell(CheckpointLoaded(self._spec.worker, self.step, folder, skipped))
        return saved


def _adopt_frozen(spec: WorkerSpec, loaded: Loaded) -> None:
    """Load the parameters that are not trained. They are in no shared memory, so every worker reads them itself."""
    names = loaded.prepared.frozen()
    if spec.origin and names:
        found = frozen_of(spec.origin, names)
        if found:
            loaded.prepared.set_frozen(found)


def _watch_neighbour(watch: DeathWatch, link: ControlLink, action: TrainGeneration) -> None:
    """Runs in a thread: report the death of the next member's training thread. Only for members with one thread: other
    threads of a dying process could still write for a moment."""
    while True:
        rank, news = watch.neighbour(timeout_s=1.0)
        if news == "dead":
            me, dead = action.members[action.rank].worker, action.members[rank].worker
            link.send(PeerDied(me, action.generation, dead))
        if news != "alive":
            return


def _report_takeover(link: ControlLink, replica: Seated, action: TrainGeneration) -> None:
    found = replica.taken_over()
    dead = [
        BrokenShard(action.past[one.back - 1].members[one.rank].worker, one.step, one.shard)
        for one in replica.exchange.died_computing()
    ]
    if found or dead:
        step, recomputed = (found.step, found.recomputed) if found else (replica.steps_applied(), 0)
        me = action.members[action.rank].worker
        link.send(StepTakenOver(me, action.generation, step, recomputed, dead))
        link.flush()  # before we recompute a shard that may kill this process too


def _report_rollback(link: ControlLink, replica: Seated, action: TrainGeneration) -> None:
    me = action.members[action.rank].worker
    if back := replica.rolled_back():
        link.send(RolledBack(me, action.generation, back.reached, back.step, back.source))

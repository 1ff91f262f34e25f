"""A training whose members die at chosen points of a step, and whose survivors go on in the next generation, taking the
unfinished step over. Runs in processes of the stage, with the job of member.py.

Everybody knows the whole script: who dies in which generation, at which point of which step, and who comes. A member
dies by its own SIGKILL at that very point; the others notice it by its process number on a board in shared memory,
confirm that it is gone, and only then abort. So nothing here depends on time.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from distbelief.checkpoint.weights import weights_sha256
from distbelief.data.sources import as_source
from distbelief.errors import ResultsDiffer
from distbelief.options import NEVER, RecheckPlan
from distbelief.shards import Range, Schedule
from distbelief.strategies.base import Seat
from distbelief.strategies.dataparallel.prepared import PreparedAllReduce
from distbelief.strategies.dataparallel.replica import DataParallelReplica
from distbelief.transport.abort import Abort, Aborted
from distbelief.transport.exchange import Exchange
from distbelief.transport.gloo.exchange import TorchExchange
from distbelief.transport.gloo.group import train_or_be_succeeded
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.shm.controlblock import ARRIVED, GenerationMemory
from distbelief.transport.shm.exchange import SharedExchange
from distbelief.transport.shm.segment import Segment, SegmentClient
from distbelief.worker.feed import Feed
from tests.support.replicas.member import GLOBAL_BATCH, SAMPLES, STEPS, make_job
from tests.support.stage import perform_and_end

POINTS = [
    "before its shards",
    "in a shard",
    "after some tiles",
    "before it arrives",
    "after it arrived",
    "when all have arrived",
    "with a tile torn",
    "before a function of after_update",
    "with some tiles applied",
    "with all tiles applied",
    "after it applied",
    "after the step",
]


@dataclass(frozen=True)
class Death:
    """Ends the generation of its place in the script."""

    worker: int
    step: int
    point: str


@dataclass(frozen=True)
class Script:
    shards: int
    first: tuple[int, ...]
    """The members of the first generation."""
    deaths: tuple[Death, ...]
    joins: dict[int, int] = field(default_factory=dict)
    """Worker -> the generation that it is in for the first time."""
    port: int = 0
    """Of a store: then members meet in torch groups."""
    name: str = ""
    exact: bool = True
    recheck: RecheckPlan = NEVER

    def members(self, generation: int) -> list[int]:
        gone = {death.worker for death in self.deaths[: generation - 1]}
        there = [*self.first, *(worker for worker, first in sorted(self.joins.items()) if first <= generation)]
        return [worker for worker in there if worker not in gone]

    def ranges(self, generation: int) -> list[Range]:
        size = len(self.members(generation))
        return [(r * self.shards // size, (r + 1) * self.shards // size) for r in range(size)]

    @property
    def generations(self) -> int:
        return len(self.deaths) + 1

    @property
    def workers(self) -> list[int]:
        return [*self.first, *self.joins]


@dataclass(frozen=True)
class Survived:
    sha256: str
    losses: list[float]
    """Of every step, as it is kept with the state, whoever applied it."""
    fingerprints: list[str]
    takeovers: dict[int, tuple[int, int]]
    """Generation -> (step, shards that were computed again)."""
    broken: dict[int, list[tuple[int, int, int]]]
    """Generation -> (worker, step, shard) of those that died while computing."""
    note: tuple[int, bytes]


class Board:
    """Who has died, for everybody to see."""

    def __init__(self, segments: SegmentClient) -> None:
        self._segment: Segment = segments.segment("board", 4096)
        self._pids = self._segment.tensor(torch.int64, 0, 16)

    def die(self, generation: int) -> None:
        self._pids[generation] = os.getpid()
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def confirmed(self, generation: int) -> bool:
        pid = int(self._pids[generation])
        if not pid:
            return False
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True

    def watch(self, generation: int, abort: Abort, stands: Callable[[], bool]) -> None:
        """Abort when whoever is to die in this generation certainly has, and we wait for it."""

        def look() -> None:
            while not (self.confirmed(generation) and stands()):
                time.sleep(0.001)
            abort.set(f"somebody died in generation {generation}")

        threading.Thread(target=look, daemon=True).start()


def train(segments: SegmentClient, worker: int, script: Script) -> Survived:
    board = Board(segments)
    job = make_job(script.shards)
    schedule = Schedule(SAMPLES, GLOBAL_BATCH, script.shards)
    feed = Feed(as_source(job.data), schedule, job, shuffle=True)
    prepared = PreparedAllReduce(job, schedule, torch.device("cpu"), exact=script.exact)
    own: dict[str, Segment] = {}
    takeovers: dict[int, tuple[int, int]] = {}
    broken: dict[int, list[tuple[int, int, int]]] = {}
    first = script.joins.get(worker, 1)
    while first > 1 and not board.confirmed(first - 1):
        time.sleep(0.001)

    def take_part(generation: int, abort: Abort) -> Survived | None:
        """None: a member died, and the generation was given up."""
        ranges = script.ranges(generation)
        rank = script.members(generation).index(worker)
        feed.expect([(v, v + 1) for v in range(*ranges[rank])], until=STEPS)
        group: Exchange | None = None
        try:
            group = _meet(segments, prepared, script, generation, rank, abort, own)
            begun = [-1]
            if generation < script.generations:
                last = script.deaths[generation - 1].step
                board.watch(generation, abort, lambda: begun[0] >= last and group.waiting)
            member = prepared.build(Seat(rank, ranges, STEPS, recheck=script.recheck), group, feed.fetch)
            assert isinstance(member, DataParallelReplica)
            if found := member.taken_over():
                takeovers[generation] = (found.step, found.recomputed)
            broken[generation] = [
                (script.members(generation - one.back)[one.rank], one.step, one.shard) for one in group.died_computing()
            ]
            doom = script.deaths[generation - 1] if generation < script.generations else None
            if doom and doom.worker == worker:
                _arm(member, group, doom, lambda: board.die(generation))
            for step in range(member.steps_applied(), STEPS):
                begun[0] = step
                member.compute(step)
                member.commit(step)
                if step == 2:
                    member.keep_note(b"after three")
            group.gather(b"")
            if generation < script.generations:
                raise AssertionError(f"nobody died in generation {generation}")
        except Aborted:
            return None
        finally:
            if group and not abort.left_behind:  # the successor thread has a group of its own by now
                group.close()
        member.synchronise()
        kept = member.remembered(0)
        assert [one.step for one in kept] == list(range(STEPS))
        assert all(one.at > 0 for one in kept)
        fingerprints = [one.fingerprint for one in kept]
        losses = [one.loss for one in kept]
        return Survived(weights_sha256(member.model), losses, fingerprints, takeovers, broken, member.note())

    def live(first: int) -> Survived:
        for generation in range(first, script.generations + 1):
            abort = Abort()
            found: list[Survived | None] = []
            train_or_be_succeeded(
                lambda generation=generation, abort=abort, found=found: found.append(take_part(generation, abort)),
                abort,
                lambda generation=generation: perform_and_end(lambda: live(generation + 1)),
            )
            if survived := found[0]:
                return survived
        raise AssertionError("there was no last generation")

    return live(first)


def _meet(
    segments: SegmentClient, prepared: PreparedAllReduce, script: Script, generation: int, rank: int, abort: Abort,
    own: dict[str, Segment],
) -> Exchange:  # fmt: skip
    geometry = prepared.geometry(script.ranges(generation))
    name = f"{script.name}generation {generation}"
    if script.port:
        # Under load gloo sometimes misses that its connections are gone, and a member comes out of a wait by the time
        # limit only; the others must wait for it longer than that.
        meeting = Rendezvous("127.0.0.1", script.port, name, timeout_s=20 * 2 ** (generation - 1))
        return TorchExchange(meeting, rank, geometry, abort, own)
    past = [
        GenerationMemory(f"generation {g}", prepared.geometry(script.ranges(g))) for g in range(generation - 1, 0, -1)
    ]
    return SharedExchange(segments, name, rank, geometry, abort, past[:16])


def _arm(member: DataParallelReplica, group: Exchange, doom: Death, die: Callable[[], None]) -> None:
    """Put the death where it belongs. Where the point does not come (no shard or tile to work on), it is at the latest
    when the next step begins."""

    def at(owner: Any, name: str, *, before: bool, when: Callable[..., bool] = lambda *_: True) -> None:
        original = getattr(owner, name)
        calls = 0

        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            due = current == doom.step and when(calls, *arguments)
            calls += current == doom.step
            if before and due:
                die()
            result = original(*arguments, **keywords)
            if due:
                die()
            return result

        setattr(owner, name, wrapped)

    current = -1
    compute = member.compute

    def counted(step: int) -> None:
        nonlocal current
        current = step
        if step > doom.step:
            die()
        compute(step)

    member.compute = counted  # type: ignore[method-assign]
    state = member._state
    whole_open = state.open

    def torn(tile: int, step: int) -> None:
        whole_open(tile, step)
        if step == doom.step:
            state.values[tile][: state.values[tile].numel() // 2 + 1] = float("nan")
            die()

    match doom.point:
        case "before its shards":
            at(group, "begin", before=False)
        case "in a shard":
            at(member._computer, "begin", before=True, when=lambda calls, *_: calls == 1)
            at(member, "_take", before=True)  # where it is late, somebody else may have computed that shard for it
        case "after some tiles":
            at(group, "publish", before=False, when=lambda calls, *_: calls == 1)
        case "before it arrives":
            at(group, "share", before=True)
        case "after it arrived" if isinstance(group, SharedExchange):
            at(group._flags, "announce", before=False, when=lambda _, word, *__: word == ARRIVED)
        case "after it arrived" | "when all have arrived":
            at(member, "_judge", before=True)
        case "in a recheck":
            at(member._recheck, "_compute", before=True)
        case "before the comparison":
            at(member._recheck, "_gather", before=True)
        case "after the comparison":
            at(member._recheck, "_gather", before=False)
        case "with its copy updated":
            at(member, "_reports", before=True)
        case "when all copies agree":
            at(member, "_reports", before=False)
        case "with a difference found":
            _die_of_a_difference(member, doom.step, die)
        case "with a tile torn":
            state.open = torn  # type: ignore[method-assign]
        case "before a function of after_update":
            for optimizer in member._updates._optimizers.values():
                at(optimizer, "after_update", before=True)
        case "with some tiles applied":
            at(state, "close", before=False)
        case "with all tiles applied":
            at(group, "applied", before=True)
        case "after it applied":
            at(group, "applied", before=False)
        case "after the step":
            pass


def _die_of_a_difference(member: DataParallelReplica, step: int, die: Callable[[], None]) -> None:
    """In this step one bit of an update of this member is wrong. It dies when its witness's copy shows that."""
    assert member._witness is not None
    apply, confirm = member._updates.apply, member._witness.confirm

    def applied(now: int, gradients: dict[int, torch.Tensor], *others: Any) -> None:
        apply(now, gradients, *others)
        if now == step:
            member._state.values[min(gradients)].view(torch.uint8)[0] ^= 1

    def confirming(now: int, tile: int) -> None:
        try:
            confirm(now, tile)
        except ResultsDiffer:
            die()

    member._updates.apply = applied  # type: ignore[method-assign]
    member._witness.confirm = confirming  # type: ignore[method-assign]

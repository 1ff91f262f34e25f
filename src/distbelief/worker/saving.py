"""Checkpoints without stopping training: one thread copies this member's portion, another thread writes the copy.

Training waits only before it overwrites bytes that are not copied yet (strategies/flatmodel/copying.py). One copy is
written while the next is taken. A failed write is repeated from the same copy until it succeeds or a newer snapshot
replaces it. A failure never ends the run.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from distbelief.checkpoint.faults import CheckpointExists, CheckpointIncomplete, CheckpointUnusable
from distbelief.checkpoint.manifest import MANIFEST, RUN, Facts, Manifest, PartRecord, check_run, part_name, step_name
from distbelief.checkpoint.reading import verify
from distbelief.checkpoint.saving import clear_up, seal, write_part
from distbelief.checkpoint.storage import folder_at, remove_file
from distbelief.control.messages import CheckpointSealed, Event, PartSaved, SaveFailed, SaveMissed, WrittenPart
from distbelief.errors import DistBeliefError, NotEnoughMemory
from distbelief.options import SavePlan
from distbelief.strategies.base import Copying, Portion, Seated
from distbelief.transport.shm.memfd import require_memory
from distbelief.transport.shm.segment import Segment
from distbelief.worker.rules.control import Save, Seal
from distbelief.worker.rules.writing import Attempts, after_failure

BUFFERS = 2
"""Copies of the state in memory: one is written to the checkpoint while the next one is taken."""


@dataclass
class CopyMemory:
    """Memory for copies of the state. It is allocated and touched before the first snapshot, because the first touch of
    a page is slow."""

    free: list[Segment] = field(default_factory=list)
    made: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, size_bytes: int, wait: bool) -> Segment | None:
        with self.changed:
            while True:
                fitting = [segment for segment in self.free if segment.size_bytes >= size_bytes]
                if fitting:
                    self.free.remove(fitting[0])
                    return fitting[0]
                if self.free:  # too small: from a generation with more members
                    self.free.pop()
                    self.made -= 1
                if self.made < BUFFERS:
                    require_memory("a copy of the state, for checkpoints", size_bytes)
                    segment = Segment.private(size_bytes)
                    self.made += 1
                    return segment
                if not wait:
                    return None
                self.changed.wait()

    def give_back(self, segment: Segment) -> None:
        with self.changed:
            self.free.append(segment)
            self.changed.notify_all()

    def prepare(self, size_bytes: int) -> None:
        with self.changed:
            if self.made:
                return
            require_memory("a copy of the state, for checkpoints", size_bytes)
            self.made += 1
        segment = Segment.private(size_bytes)
        segment.tensor(torch.uint8, 0, size_bytes).fill_(0)
        self.give_back(segment)


REMEMBERED = 4  # written snapshots that are kept until their checkpoint is sealed


@dataclass(frozen=True)
class _Snapshot:
    number: int
    """Unique and increasing; another generation may take a snapshot of the same step."""
    step: int
    generation: int
    rank: int
    portions: Sequence[Portion]
    facts: Facts
    memory: Segment
    copying: Copying
    started_s: float
    """Seconds that the training thread spent to start the copy."""
    last: bool
    """The snapshot after the run's last step."""


class Saver:
    """Lives as long as the worker. `take` is for the training thread, `ask` and `seal` are for any thread.

    `plan` and `asked` are for the training loop: training.py decides by them after every step whether to save.
    """

    def __init__(self, plan: SavePlan, worker: int, tell: Callable[[Event], None]) -> None:
        self.plan = plan
        self.asked = -1
        """The step of the last requested checkpoint; -1: none."""
        self._worker = worker
        self._tell = tell
        self._memory = CopyMemory()
        self._copying: Copying | None = None
        self._under_way: set[int] = set()
        """Steps of snapshots that are taken but not written."""
        self._to_copy: SimpleQueue[Copying] = SimpleQueue()
        self._waiting: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._newest = (0, 0)
        """Number and step of the last snapshot that was taken, or is about to be."""
        self._written: dict[int, tuple[_Snapshot, PartSaved]] = {}
        self._sealed = CheckpointSealed(worker, 0, 0, 0)
        """The newest sealed checkpoint."""
        self._asked_to_seal: set[int] = set()
        threading.Thread(target=self._copy, name="copier", daemon=True).start()
        threading.Thread(target=self._work, name="saver", daemon=True).start()

    @property
    def wished(self) -> int:
        """The step of a requested checkpoint that is not taken yet; -1: none."""
        return self.asked if self.asked > self._newest[1] else -1

    def ask(self, wish: Save, present: int) -> None:
        """The coordinator requests a checkpoint after `wish.step` steps. `present`: the steps applied so far."""
        self.asked = wish.step
        if news := self._news_of(wish.step):  # a repeated request: the coordinator did not get the answer
            self._tell(news)
        elif present > wish.step and wish.step not in self._under_way:
            self._tell(SaveMissed(self._worker, wish.step))

    def miss(self, applied: int) -> None:
        """The state after `applied` steps no longer exists: report that no member can save it."""
        if applied == self.asked:
            self._tell(SaveMissed(self._worker, applied))

    def _news_of(self, step: int) -> Event | None:
        if step == self._sealed.step:
            return self._sealed
        return self._written[step][1] if step in self._written else None

    def prepare(self, replica: Seated) -> None:
        """At a generation's start: allocate memory for the first snapshot unless an earlier generation did."""
        if self._memory.made:
            return
        size_bytes = replica.portions()[replica.exchange.rank].size_bytes
        self._waiting.put(lambda: self._memory.prepare(size_bytes))

    def take(self, replica: Seated, applied: int, generation: int, facts: Facts, last: bool) -> None:
        """Start to copy and write this member's portion of the present state."""
        portions, rank = replica.portions(), replica.exchange.rank
        number, started = self._newest[0] + 1, time.perf_counter()
        if last:
            self._newest = number, applied  # before the wait: it replaces snapshots whose writes keep failing
        try:
            memory = self._memory.take(portions[rank].size_bytes, wait=last)
        except (OSError, NotEnoughMemory) as error:
            self._tell_failure(applied, error, gave_up=True)
            return
        if memory is None:
            message = "the two checkpoints before it are still being written"
            hint = "save less often, or to a faster disk"
            self._tell(SaveFailed(self._worker, applied, message, hint, gave_up=True))
            return
        try:
            copying = self._copying = replica.copy_portion(applied, memory)
        except DistBeliefError as error:  # the holder of the state has applied a later step
            self._memory.give_back(memory)
            self._tell_failure(applied, error, gave_up=True)
            return
        self._to_copy.put(copying)
        self._under_way.add(applied)
        started_s = time.perf_counter() - started
        self._newest = number, applied
        snapshot = _Snapshot(number, applied, generation, rank, portions, facts, memory, copying, started_s, last)
        self._waiting.put(lambda: self._write(snapshot))

    def let_go(self) -> None:
        """At a generation's end: finish the copy, because the next generation writes to the same memory."""
        if self._copying:
            self._copying.finish()

    def seal(self, wish: Seal) -> None:
        if wish.step not in self._asked_to_seal:
            self._asked_to_seal.add(wish.step)
            self._waiting.put(lambda: self._seal(wish))

    # --- in the threads ----------------------------------------------------------------------------------------------

    def _copy(self) -> None:
        while True:
            self._to_copy.get().run()

    def _work(self) -> None:
        while True:
            try:
                self._waiting.get()()
            except DistBeliefError as error:  # not enough memory to prepare: `take` tries again
                print(error.message, flush=True)
            except Exception:  # an unexpected error; the next checkpoint may still succeed
                traceback.print_exc()

    def _write(self, snapshot: _Snapshot) -> None:
        snapshot.copying.finish()
        started = time.perf_counter()
        try:
            record = self._write_with_retries(snapshot)
        finally:
            self._memory.give_back(snapshot.memory)
        if record is None:
            self._under_way.discard(snapshot.step)
            return
        part, write_s = WrittenPart(record.size_bytes, record.sha256), time.perf_counter() - started
        pause_s = snapshot.started_s + snapshot.copying.waited_s
        news = PartSaved(self._worker, snapshot.generation, snapshot.step, part, pause_s, write_s)
        known = {**self._written, snapshot.step: (snapshot, news)}
        self._written = {step: known[step] for step in sorted(known)[-REMEMBERED:]}
        self._under_way.discard(snapshot.step)
        self._tell(news)

    def _write_with_retries(self, snapshot: _Snapshot) -> PartRecord | None:
        """Write the snapshot, with retries. None: it is no longer needed."""
        attempts = Attempts()
        while True:
            try:
                return self._try(snapshot)
            except Exception as error:  # no error of saving ends the run
                exists = isinstance(error, CheckpointExists)
                then = after_failure(attempts, exists, snapshot.number, snapshot.step, self._newest, snapshot.last)
                if not exists:
                    self._tell_failure(snapshot.step, error, then.gave_up)
                if then.over:
                    return None
            attempts = then.attempts
            time.sleep(then.pause_s)

    def _try(self, snapshot: _Snapshot) -> PartRecord | None:
        folder, step, rank, portions = self.plan.folder, snapshot.step, snapshot.rank, snapshot.portions
        slices = portions[rank].slices(snapshot.memory, snapshot.copying.outside)
        try:
            return write_part(folder, step, rank + 1, len(portions), slices)
        except CheckpointExists:
            # It is from before the resume. Rank 0 verifies it, and removes its manifest if it is damaged.
            if rank > 0:
                raise
        try:
            manifest = verify(folder, step)
        except CheckpointUnusable:
            # Only the manifest: other members may be writing parts in this folder. `tidy` removes the old parts.
            remove_file(folder_at(folder) / step_name(step), MANIFEST)
            return write_part(folder, step, rank + 1, len(portions), slices)
        check_run(manifest, folder, str(snapshot.facts.job.get(RUN, "")))
        self._sealed = self._news_of_seal(manifest)
        self._tell(self._sealed)
        return None

    def _news_of_seal(self, manifest: Manifest) -> CheckpointSealed:
        size_bytes = sum(part.size_bytes for part in manifest.parts)
        return CheckpointSealed(self._worker, manifest.step, size_bytes, len(manifest.parts))

    def _tell_failure(self, step: int, error: Exception, gave_up: bool) -> None:
        if not isinstance(error, DistBeliefError):
            traceback.print_exception(error)
            error = DistBeliefError(f"{type(error).__name__}: {error}", hint=f"see logs/worker-{self._worker}.log")
        self._tell(SaveFailed(self._worker, step, error.message, error.hint, gave_up))

    def _seal(self, wish: Seal) -> None:
        self._asked_to_seal.discard(wish.step)
        if wish.step == self._sealed.step:  # a repeated request: the coordinator did not get the answer
            self._tell(self._sealed)
            return
        snapshot, _ = self._written.get(wish.step, (None, None))
        if snapshot is None or len(snapshot.portions) != len(wish.parts):  # another generation took the same step again
            return
        records = [
            PartRecord(part_name(number, len(wish.parts)), part.size_bytes, part.sha256, tuple(portion.entries()))
            for number, (part, portion) in enumerate(zip(wish.parts, snapshot.portions, strict=True), start=1)
        ]
        try:
            manifest = seal(self.plan.folder, wish.step, snapshot.facts, records)
        except Exception as error:  # the coordinator asks again, perhaps another worker; lost parts stay lost
            self._tell_failure(wish.step, error, gave_up=isinstance(error, CheckpointIncomplete))
            return
        self._sealed = self._news_of_seal(manifest)
        self._written = {step: kept for step, kept in self._written.items() if step > wish.step}
        self._clear_up()  # before the report: after the last one this process is ended
        self._tell(self._sealed)

    def _clear_up(self) -> None:
        """Remove old checkpoints. A failure is only logged, because the next checkpoint tries again."""
        plan = self.plan
        try:
            clear_up(
                plan.folder, self._sealed.step, last=plan.keep_last, every=plan.keep_every or None, best=plan.keep_best
            )
        except DistBeliefError as error:
            print(f"old checkpoints were not removed: {error.message}", flush=True)

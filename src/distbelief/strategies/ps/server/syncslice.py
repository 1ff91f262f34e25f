"""A slice of dense parameters in `ps:sync`: it gathers partial sums, and applies the step when it has all of them.

A step has two phases. When a slice and its backup have all partial sums of the step, the slice answers `MeasureStep`.
It applies the step only after `ApplyStep`, which a worker sends when all slices have answered. Otherwise the values
that the step began with could be gone in some slices while a dead worker's sums are missing in others.

A slice is a function of its changes alone. It adds the partial sums in the order of the tree, so the result has the
bits of allreduce, whichever workers have computed them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from distbelief.errors import DistBeliefError
from distbelief.job import Job
from distbelief.shards import Range, Schedule
from distbelief.strategies.base import REMEMBERED
from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.flatmodel.rules.stepwork import COUNTS, WEIGHT, judge_rows
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import (
    ApplyStep,
    Inspect,
    Inspected,
    MeasureStep,
    Note,
    PartialSum,
    PulledValues,
    PullValues,
    PushResult,
    Question,
    ReadState,
    RestartStep,
    SliceState,
    Snapshot,
    StepBegun,
    StepMeasured,
    StepRecord,
)
from distbelief.strategies.ps.protocol.pushcoding import PushCoding
from distbelief.strategies.ps.rules.gathering import StepSums
from distbelief.strategies.ps.rules.slicing import SliceShape
from distbelief.strategies.ps.server.slicememory import OpenSegment, SliceMemory, tiles_of, with_bytes
from distbelief.strategies.ps.server.stores import Change, State
from distbelief.transport.exchange import ROW, depth, tree_add


class SumMemory:
    """Memory for the sums of one slice at a time, shared by all slices of a server, so that the sums stay in the
    processor's cache until they are applied."""

    def __init__(self, size_bytes: int) -> None:
        """`size_bytes`: the values of the largest slice."""
        self._room = torch.empty(size_bytes, dtype=torch.uint8)

    def tiles(self, shape: SliceShape, layout: Layout) -> dict[int, torch.Tensor]:
        """The memory as tiles of this slice, until another slice uses it."""
        found = {}
        for number in shape.tiles:
            tile = layout.tiles[number]
            at = tile.offset_bytes - shape.first_byte
            found[number] = self._room[at : at + tile.size_bytes].view(tile.dtype)
        return found


def own_tiles(shape: SliceShape, layout: Layout) -> dict[int, torch.Tensor]:
    """Memory of its own for a slice whose sums are made long before they are applied."""
    tiles = layout.tiles
    return {t: torch.empty(tiles[t].numel, dtype=tiles[t].dtype) for t in shape.tiles}


class _Step(msgspec.Struct, frozen=True):
    """For copies: the slice's partial sums of the step under way, and its results of earlier steps."""

    rows: bytes
    touched: bytes
    integers: tuple[bytes, bytes]
    nodes: list[tuple[int, int]]
    go: float | None
    measured: tuple[int, list[float]]
    past: list[StepRecord]
    note: tuple[int, bytes]
    begun: tuple[int, list[int]] = (0, [])
    generation: int = -1


class SynchronousSlice:
    def __init__(
        self, memory: SliceMemory, job: Job, schedule: Schedule, open_segment: OpenSegment,
        coding: PushCoding | None = None, *, space: SumMemory | None = None,
    ) -> None:  # fmt: skip
        """`coding`: the compression of partial sums, if any. `space`: memory that the server's slices share."""
        self.memory = memory
        self.version = 0
        """Steps applied."""
        self.past: deque[StepRecord] = deque(maxlen=REMEMBERED)
        self.note: tuple[int, bytes] = (-1, b"")
        self.measured: tuple[int, list[float]] = (-1, [])
        """The last step whose partial sums were all there, and with clipping the squares of its gradients by tile."""
        self.clock: Callable[[], float] = lambda: 0.0
        self._job = job
        self._schedule = schedule
        self._open = open_segment
        self._coding = coding
        self._generation = -1
        """The generation of the last `RestartStep`. Partial sums of other generations do not count."""
        self._entries = len(memory.layout.entries)
        self._mine = np.zeros(self._entries, np.bool_)
        self._mine[[piece.entry for t in memory.shape.tiles for piece in memory.layout.pieces[t]]] = True
        """The entries of this slice. A worker that pushes a slice early does not know yet which others are touched."""
        self._integers = (b"", b"")
        """The integer buffers after the last step, and after the step under way."""
        space = space or SumMemory(memory.shape.value_bytes)
        self._sums = self._passing = space.tiles(memory.shape, memory.layout)
        self._scratch: dict[torch.dtype, list[torch.Tensor]] = {}
        self._start()

    def begin(self, contents: torch.Tensor, version: int, integers: bytes) -> None:
        """Take the first state of a life."""
        self.memory.load(contents, version)
        self.version = version
        self._integers = (integers, b"")
        self.measured = (-1, [])
        self._start()

    def _start(self) -> None:
        """Begin the next step, without any partial sums."""
        self._gathered: StepSums[list[torch.Tensor]] = StepSums(
            self._schedule.shards, self._schedule.occupied(self.version)
        )
        self._rows = np.zeros((self._schedule.shards, ROW))
        self._touched = np.zeros(self._entries, np.uint8)
        self._go: float | None = None
        self._begun: tuple[int, list[int]] = (0, [])
        """The newest generation of which members have begun the step, and their ranks."""
        self._unsound = False
        self._added = False
        self._from_afar = False
        """Partial sums came over a network. Then the slice adds them up while workers still compute."""

    # --- as a store --------------------------------------------------------------------------------------------------

    def apply(self, change: Change) -> None:
        match change.content:
            case Note():
                self.note = (change.content.step, change.content.content)
            case StepBegun(step=step, generation=generation, rank=rank) if step == self.version:
                newest, ranks = self._begun
                if generation >= newest:
                    self._begun = generation, sorted({*(ranks if generation == newest else ()), rank})
            case RestartStep(step=step, generation=generation) if generation > self._generation:
                self._generation = generation
                if step <= self.version:
                    self.measured = (-1, [])
                    self._start()
            case PartialSum(step=step, generation=generation) if (step, generation) == (self.version, self._generation):
                self._add(change.content, change.payload)
            case ApplyStep() if change.content.step == self.version and self._go is None:
                self._go = change.content.factor
                self._proceed()

    def state(self) -> tuple[Snapshot, torch.Tensor]:
        nodes = self.nodes()
        about = _Step(
            self._rows.tobytes(), self._touched.tobytes(), self._integers, nodes, self._go,
            self.measured, list(self.past), self.note, self._begun, self._generation,
        )  # fmt: skip
        parts = [self.memory.contents()]
        for node in nodes:
            parts += [part.reshape(-1).view(torch.uint8) for part in self._gathered.sums[node]]
        return Snapshot(self.version, msgspec.msgpack.encode(about)), torch.cat(parts)

    def load(self, state: State) -> None:
        snapshot, content = state
        about = msgspec.msgpack.decode(snapshot.about, type=_Step)
        size_bytes = self.memory.shape.size_bytes
        self.memory.load(content[:size_bytes], snapshot.version)
        self.version, self._integers, self.note = snapshot.version, about.integers, about.note
        self.past = deque(about.past, maxlen=REMEMBERED)
        self._start()
        self._rows[:] = np.frombuffer(about.rows).reshape(self._rows.shape)
        self._touched[:] = np.frombuffer(about.touched, np.uint8)
        at = size_bytes
        for node in about.nodes:
            parts = []
            for tile in self.memory.shape.tiles:
                shape = self.memory.layout.tiles[tile]
                parts.append(content[at : at + shape.size_bytes].clone().view(shape.dtype))
                at += shape.size_bytes
            self._gathered.add(node, parts)
        self._go, self._begun, self._generation = about.go, about.begun, about.generation
        # A copy has the partial sums, not their total: it is added up again.
        self.measured = about.measured if about.measured[0] < snapshot.version else (-1, [])
        self._proceed()

    def with_bytes(self, change: Change) -> Change:
        if isinstance(change.content, PartialSum) and change.content.step != self.version:
            return change  # it will change nothing
        return with_bytes(self.memory.shape, change, self._open)

    # --- the step ----------------------------------------------------------------------------------------------------

    def _add(self, node: PartialSum, payload: Any) -> None:
        if not 0 <= node.first < node.end <= self._schedule.shards:
            raise DistBeliefError(f"there are no shards {node.first} to {node.end} in a step")
        parts = self._parts(node, payload)
        if not self._gathered.add((node.first, node.end), parts):
            return
        self._from_afar |= not node.segment
        rows = np.frombuffer(node.rows).reshape(-1, ROW)
        self._rows[node.first : node.first + len(rows)] = rows
        self._touched |= np.frombuffer(node.touched, np.uint8)
        if node.first == 0:
            self._integers = (self._integers[0], node.integers)
        self._proceed()

    def _parts(self, node: PartialSum, payload: Any) -> list[torch.Tensor]:
        shape, layout = self.memory.shape, self.memory.layout
        if not node.coded:
            return tiles_of(shape, layout, node.segment, payload, self._open)
        if self._coding is None:
            raise DistBeliefError("a partial sum is compressed, and the strategy does not say how")
        parts = {t: torch.empty(layout.tiles[t].numel, dtype=layout.tiles[t].dtype) for t in shape.tiles}
        self._coding.read(payload, parts)
        return list(parts.values())

    def _proceed(self) -> None:
        """Add up the sums if they are complete, and apply the step if `ApplyStep` came."""
        order = self._gathered.order()
        if order is None or self._unsound:
            return
        weight = math.fsum(self._rows[:, WEIGHT])
        if self.measured[0] < self.version:
            try:
                judge_rows(self.version, self._rows)
            except DistBeliefError:
                self._unsound = True  # the workers get the rows, and raise the same error
                return
            self.measured = (self.version, [])
            if self._from_afar or self._job.clip_norm is not None:
                if self._sums is self._passing:
                    self._sums = own_tiles(self.memory.shape, self.memory.layout)
                self._reduce(order, weight)
        if self._go is None:
            return
        if not self._added:
            self._sums = self._passing
            self._reduce(order, weight)
        if self._job.clip_norm is not None and self._go < 1.0:
            for tile in self.memory.parameter_tiles:
                self._sums[tile].mul_(self._go)
        untouched = (self._touched == 0) & self._mine
        if not weight:  # all samples are ignored: as if no parameter had a gradient; buffers do change
            untouched[: len(self.memory.layout.entries_of("parameter"))] = True
        self.memory.update(self.version, self._sums, int(np.count_nonzero(self._rows[:, COUNTS])), untouched)
        if self.memory.shape.number == 0:
            self.past.append(StepRecord(self.version, self._rows.tobytes(), self.clock()))
        self._integers = (self._integers[1], b"")
        self.version += 1
        self._start()

    def _reduce(self, order: Any, weight: float) -> None:
        sums = self._gathered.values()
        levels, scale = depth(order), 1.0 / weight if weight else 0.0
        squares = []
        for number, tile in enumerate(self.memory.shape.tiles):
            out = self._sums[tile]
            tree_add(order, [parts[number] for parts in sums], out, self._space(out.dtype, levels))
            if tile < self.memory.layout.parameter_tiles:
                out.mul_(scale)
                if self._job.clip_norm is not None:
                    squares.append(float(torch.linalg.vector_norm(out, dtype=torch.float64)) ** 2)
        self.measured, self._added = (self.version, squares), True

    def _space(self, dtype: torch.dtype, levels: int) -> list[torch.Tensor]:
        largest = max(out.numel() for out in self._sums.values() if out.dtype == dtype)
        scratch = self._scratch.setdefault(dtype, [])
        while len(scratch) < levels:
            scratch.append(torch.empty(largest, dtype=dtype))
        return scratch

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def unsound(self) -> bool:
        """The step under way cannot be applied; its loss rows say why."""
        return self._unsound

    def rows(self, version: int) -> bytes:
        """The loss rows of the step that led to this version, or of the step that cannot be applied."""
        if self._unsound and version > self.version:
            return self._rows.tobytes()
        return next((one.rows for one in reversed(self.past) if one.step == version - 1), b"")

    @property
    def integers(self) -> bytes:
        """The integer buffers after the last step."""
        return self._integers[0]

    def nodes(self) -> list[Range]:
        """The partial sums of the step under way."""
        return sorted(self._gathered.sums)

    def given(self, client: int) -> PushResult | None:
        return None

    def reply(self, question: Question, segment: str, everywhere: bool, caught_up: bool) -> Framed | None:
        match question:
            case Inspect():
                if not caught_up:
                    return None  # members do not compute again what this reply shows, so no death may undo it
                first = question.slice == 0 and not question.briefly
                looked = Inspected(
                    question.ticket, question.slice, self.version, self.nodes(), list(self.past) if first else [],
                    self.note if first else (-1, b""), self.integers if first else b"",
                )  # fmt: skip
                return Framed(looked)
            case MeasureStep():
                step, squares = self.measured
                if not caught_up or (step < question.step and not self._unsound):
                    return None  # members go on from this reply, so no death may undo it
                if self.version == question.step and question.members and not self._have_begun(question):
                    return None
                return Framed(StepMeasured(question.ticket, question.slice, squares))
            case ReadState():
                if self.version != question.version:
                    return Framed(SliceState(question.ticket, question.slice, -1))
                contents = self.memory.contents().numpy()
                return Framed(SliceState(question.ticket, question.slice, self.version), contents)
            case PullValues():
                return self._fetched(question, segment, everywhere)
            case _:
                raise DistBeliefError(f"a slice of dense parameters does not answer {type(question).__name__}")

    def _have_begun(self, question: MeasureStep) -> bool:
        generation, ranks = self._begun
        return question.slice != 0 or (generation == question.generation and len(ranks) >= question.members)

    def _fetched(self, question: PullValues, segment: str, everywhere: bool) -> Framed | None:
        first = question.slice == 0
        if self.version < question.version:
            if not self.unsound:
                return None
            return Framed(PulledValues(question.ticket, question.slice, -1, self.rows(question.version)))
        if not everywhere:
            return None  # the worker is about to overwrite sums that a backup may still have to read
        rows = self.rows(self.version) if first else b""
        segment = "" if question.inline else segment
        header = PulledValues(
            question.ticket, question.slice, self.version, rows, self.integers if first else b"", segment
        )
        # Not a copy. If the next step is applied while the values are being sent, the worker gets a mixture. Its
        # results are then not used: other members have computed the step.
        return Framed(header, None if segment else self.memory.value_view())

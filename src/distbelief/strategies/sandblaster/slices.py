"""The slices of `sandblaster` on a server: `VectorSlice` (a stretch of every vector) and `SearchSlice` (the ledger).

Both are `SliceStore`s (ps/server/stores.py): primary and backup apply the same changes.

A `VectorSlice` performs the driver's batches of commands in the order of their numbers. Gradient sums come from many
workers in any order. When both halves of a node are there, the slice adds them at once, so it holds few sums, and the
total is that of the whole tree, bit for bit. Workers fetch the shown vector from memory that they may map. Its first
two int64 are version numbers: of the vector that is being written, and of the last one that was written completely. A
reader compares them to know whether its copy is whole.

The `SearchSlice` holds the state of the search and the portions of the evaluation (rules/portions.py). A step is done
when this slice has applied `Keep`: one change of one slice, after all vectors that the state names are on the servers.
If the search slice lists a portion as computed, every slice has its sum: a driver announces an evaluation here first,
and a member reports a sum only after all slices acknowledged it, in the same generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from distbelief.errors import DistBeliefError
from distbelief.shards import Range, split
from distbelief.strategies.base import REMEMBERED, BeginFrom, Saved, ServerHost, ServerJob
from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.flatmodel.state import ReplicaState
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import (
    Inspect,
    Note,
    PartialSum,
    PulledValues,
    PullValues,
    PushResult,
    Question,
    SliceState,
    Snapshot,
    values_at,
)
from distbelief.strategies.ps.rules.slicing import SliceShape, parameter_stretch
from distbelief.strategies.ps.server.slicememory import OpenSegment, with_bytes
from distbelief.strategies.ps.server.sockets import run_server
from distbelief.strategies.ps.server.stores import SMALL_SLICE_BYTES, Change, SliceSource, SliceStore, State
from distbelief.strategies.sandblaster.messages import (
    COUNTS,
    MESSAGES,
    Begin,
    Combine,
    Command,
    Copy,
    Do,
    Drop,
    Finish,
    Heard,
    Idle,
    Keep,
    Portions,
    Produced,
    Products,
    ReadVectors,
    SearchGiven,
    SearchKnown,
    Show,
    Stepped,
    StepsDone,
    Take,
    Total,
)
from distbelief.strategies.sandblaster.prepared import PreparedSandblaster
from distbelief.strategies.sandblaster.rules.portions import Portioning
from distbelief.strategies.sandblaster.saved import START, saved_state, saved_vectors, state_bytes
from distbelief.strategies.sandblaster.vectors import SlicedVectors
from distbelief.transport.shm.segment import Segment


class _CopyHeader(msgspec.Struct, frozen=True):
    """The header of a copy of the slice. Its bytes are values, vectors and sums, in this order."""

    done: int
    pending: dict[int, list[Command]]
    evaluation: int
    integers: bytes
    vectors: list[str]
    nodes: list[Range]


class VectorSlice:
    """The stretch of every vector that one server holds."""

    def __init__(
        self, shape: SliceShape, layout: Layout, portions: int, values: Segment, open_segment: OpenSegment
    ) -> None:
        """`values`: two version numbers, then the slice's stretch of the layout, as in ps/server/slicememory.py."""
        self.shape = shape
        self.version = 0
        """The number of the command that showed the vector which workers can fetch now."""
        self._portions = portions
        self._segment = values
        self._at = values_at(shape.first_byte)
        self._versions = np.frombuffer(values.buffer, np.int64, 2)
        self._open = open_segment
        size, self._where = parameter_stretch(layout, shape)
        self._numel = self._where[1] - self._where[0]
        self._dtype = layout.tiles[0].dtype
        self._shown = values.tensor(self._dtype, self._at, self._numel)
        self._vectors = SlicedVectors(size, [self._where] if self._numel else [], self._dtype)
        self._integers = b""
        self._done = -1
        self._pending: dict[int, list[Command]] = {}
        self._evaluation = -1
        self._sums: dict[Range, torch.Tensor] = {}
        self._taken: PartialSum | None = None
        """The last partial sum that changed the slice."""

    def begin(self, values: torch.Tensor, vectors: Mapping[str, torch.Tensor], integers: bytes) -> None:
        """The first state of a life. `values`: the bytes of this stretch of the layout."""
        self._segment.tensor(torch.uint8, self._at, self.shape.value_bytes).copy_(values)
        self._integers = integers
        for name, value in vectors.items() if self._numel else ():
            self._vectors.tensor(name, self._where).copy_(value)

    # --- changes and copies ------------------------------------------------------------------------------------------

    def apply(self, change: Change) -> None:
        match change.content:
            case Do(number=number, commands=commands) if number > self._done:
                self._pending[number] = commands
                if not number & ((1 << COUNTS) - 1):  # a new driver: commands of earlier drivers are void
                    self._pending = {n: some for n, some in self._pending.items() if n >= number}
                    self._done = number - 1
                while self._done + 1 in self._pending:
                    self._done += 1
                    for command in self._pending.pop(self._done):
                        self._perform(command)
            case PartialSum() if change.content.step == self._evaluation:
                self._add(change.content, change.payload)

    def _perform(self, command: Command) -> None:
        match command:
            case Show():
                self._show(command)
            case _ if not self._numel:
                pass  # buffers alone: they never change
            case Combine(target=target, terms=terms):
                self._vectors.combine(target, terms)
            case Copy(target=target, source=source):
                self._vectors.copy(target, source)
            case Drop(names=names):
                self._vectors.drop(names)
            case Finish():
                total = self._sums.get((0, self._portions))
                if total is None or command.evaluation != self._evaluation:
                    raise DistBeliefError(f"slice {self.shape.number} lacks sums of evaluation {command.evaluation}")
                torch.mul(total, command.factor, out=self._vectors.tensor(command.gradient, self._where))

    def _show(self, show: Show) -> None:
        if show.evaluation >= 0 and show.evaluation != self._evaluation:
            self._sums.clear()
            self._evaluation = show.evaluation
        self._versions[0] = self._done
        if self._numel:
            self._shown.copy_(self._vector(show.point))
        self._versions[1] = self.version = self._done

    def _vector(self, name: str) -> torch.Tensor:
        if name not in self._vectors.names:
            raise DistBeliefError(f"slice {self.shape.number} has no vector '{name}'")
        return self._vectors.tensor(name, self._where)

    def _add(self, node: PartialSum, payload: Any) -> None:
        """Add a copy of the sum: the worker overwrites its own as soon as the push is acknowledged."""
        where = (node.first, node.end)
        if self._has(node):  # another copy came first; the memory of a late copy may be gone
            return
        if node.segment:
            part = self._open(node.segment).tensor(self._dtype, self.shape.first_byte, self._numel).clone()
        else:
            part = torch.frombuffer(payload, dtype=self._dtype, count=self._numel).clone()
        self._taken = node
        for known in [one for one in self._sums if where[0] <= one[0] and one[1] <= where[1]]:
            del self._sums[known]
        while (above := _above(where, self._portions)) and (other := above[1]) in self._sums:
            part.add_(self._sums.pop(other))
            where = above[0]
        self._sums[where] = part

    def _has(self, node: PartialSum) -> bool:
        return any(first <= node.first and node.end <= end for first, end in self._sums)

    def state(self) -> State:
        names, nodes = self._vectors.names, sorted(self._sums)
        about = _CopyHeader(self._done, self._pending, self._evaluation, self._integers, names, nodes)
        parts = [self._segment.tensor(torch.uint8, self._at, self.shape.value_bytes)]
        parts += [self._vector(name).view(torch.uint8) for name in names]
        parts += [self._sums[node].view(torch.uint8) for node in nodes]
        return Snapshot(self.version, msgspec.msgpack.encode(about)), torch.cat(parts)

    def load(self, state: State) -> None:
        snapshot, content = state
        about = msgspec.msgpack.decode(snapshot.about, type=_CopyHeader)
        size_bytes = self.shape.value_bytes
        parts = list(content[size_bytes:].view(self._dtype).reshape(-1, max(self._numel, 1)))
        self._vectors.drop(self._vectors.names)
        self._versions[0] = -1
        self.begin(content[:size_bytes], dict(zip(about.vectors, parts, strict=False)), about.integers)
        self._sums = {node: part.clone() for node, part in zip(about.nodes, parts[len(about.vectors) :], strict=True)}
        self._done, self._pending, self._evaluation = about.done, dict(about.pending), about.evaluation
        self._versions[:] = self.version = snapshot.version

    def with_bytes(self, change: Change) -> Change:
        if isinstance(change.content, PartialSum) and change.content is not self._taken:
            return change  # it changes nothing
        return with_bytes(self.shape, change, self._open)

    # --- questions ---------------------------------------------------------------------------------------------------

    def given(self, client: int) -> PushResult | None:
        return None

    def reply(self, question: Question, segment: str, everywhere: bool, caught_up: bool) -> Framed | None:
        match question:
            case PullValues():
                # Answer only when the backup has the point too: otherwise it would refuse sums after a promotion.
                if self.version < question.version or not everywhere:
                    return None
                segment = "" if question.inline else segment
                integers = self._integers if question.slice == 0 else b""
                header = PulledValues(question.ticket, question.slice, self.version, b"", integers, segment)
                return Framed(header, None if segment else bytes(self._segment.view(self._at, self.shape.value_bytes)))
            case Products():
                return self._products(question) if self._done >= question.after else None
            case ReadVectors():
                if self._done < question.after:
                    return None
                parts = [self._vector(name).view(torch.uint8) for name in question.names] if self._numel else []
                content = torch.cat(parts).numpy() if parts else b""
                return Framed(SliceState(question.ticket, question.slice, self.version), content)
            case _:
                raise DistBeliefError(f"a slice of vectors does not answer {type(question).__name__}")

    def _products(self, asked: Products) -> Framed:
        if not self._numel:
            return Framed(Produced(asked.ticket, asked.slice, largest=[0.0] * len(asked.largest)))
        vectors = self._vectors
        return Framed(
            Produced(
                asked.ticket,
                asked.slice,
                vectors.partial_dot(asked.dots) if asked.dots else [],
                vectors.partial_sum_abs(asked.sums) if asked.sums else [],
                vectors.max_abs(asked.largest) if asked.largest else [],
            )
        )


def _above(node: Range, portions: int) -> tuple[Range, Range] | None:
    """(parent, sibling) of a node; None: the node is the root.

    >>> _above((4, 5), 5), _above((0, 2), 5), _above((0, 5), 5)
    (((0, 5), (0, 4)), ((0, 4), (2, 4)), None)
    """
    parent = (0, portions)
    while parent != node:
        left, right = split(parent)
        if node in (left, right):
            return parent, left if node == right else right
        parent = left if node[1] <= left[1] else right
    return None


class _Record(msgspec.Struct):
    work: Portioning
    steps: int
    number: int = -1
    """The last number of a driver."""
    kept: int = -1
    """The number of the last `Keep`."""
    state: bytes = b""
    note: tuple[int, bytes] = (-1, b"")
    past: list[StepsDone] = []
    given: dict[int, SearchGiven] = {}
    """Worker -> the answer to its last request. It is part of the state, since the request changes the state."""


class SearchSlice:
    """The state of the search, and the ledger of portions."""

    def __init__(self, portions: int) -> None:
        self.version = 0
        self._record = _Record(Portioning(portions), 0)

    def begin(self, steps: int, state: bytes, note: tuple[int, bytes], past: list[StepsDone]) -> None:
        """The first state of a life."""
        self._record = _Record(Portioning(self._record.work.portions), steps, state=state, note=note, past=past)

    # --- changes and copies ------------------------------------------------------------------------------------------

    def apply(self, change: Change) -> None:
        record, content = self._record, change.content
        match content:
            case Begin() | Keep():
                counts = content.number >= record.number
                record.given[content.worker] = SearchGiven(Heard(counts), record.steps)
                if counts and isinstance(content, Keep):
                    self._keep(content)
                elif counts and isinstance(content, Begin):
                    self._begin(content)
            case Take():
                self._take(content)
            case Note():
                record.note = (content.step, content.content)

    def _begin(self, begin: Begin) -> None:
        self._record.number = begin.number
        if begin.evaluation >= 0:
            self._record.work.begin(begin.evaluation, begin.members)
        else:
            self._record.work.gather(begin.members)

    def _take(self, take: Take) -> None:
        record, work, done = self._record, self._record.work, take.computed
        what: Portions | Idle | Total | Stepped = Idle()
        if take.generation == record.number >> COUNTS:  # else it is of a generation that is over, or not yet here
            if done:
                work.computed(take.worker, done.evaluation, done.node, done.losses, take.now)
            total = work.total()
            if record.steps > take.step:
                what = Stepped(record.kept, record.state, record.past[-1])
            elif total:
                what = Total(work.evaluation, *total)
            elif node := work.take(take.worker, take.now):
                what = Portions(work.evaluation, record.number, node)
        record.given[take.worker] = SearchGiven(what, record.steps)

    def _keep(self, keep: Keep) -> None:
        record = self._record
        record.number = record.kept = keep.number
        record.state = keep.state
        if keep.steps > record.steps:
            record.past.append(StepsDone(record.steps, keep.steps, keep.loss, keep.samples, keep.at))
            record.past = record.past[-REMEMBERED:]
        record.steps = keep.steps
        self.version += 1

    def state(self) -> State:
        return Snapshot(self.version, msgspec.msgpack.encode(self._record)), torch.zeros(1, dtype=torch.uint8)

    def load(self, state: State) -> None:
        snapshot, _ = state
        self._record = msgspec.msgpack.decode(snapshot.about, type=_Record)
        self.version = snapshot.version

    def with_bytes(self, change: Change) -> Change:
        return change  # it has none

    # --- questions ---------------------------------------------------------------------------------------------------

    def given(self, client: int) -> SearchGiven | None:
        return self._record.given.get(client)

    def reply(self, question: Question, segment: str, everywhere: bool, caught_up: bool) -> Framed | None:
        if not isinstance(question, Inspect):
            raise DistBeliefError(f"a search does not answer {type(question).__name__}")
        if not caught_up:
            return None  # an answer that a server's death could undo must not be given
        record = self._record
        return Framed(
            SearchKnown(question.ticket, question.slice, record.steps, record.state, record.note, list(record.past))
        )


class SliceMaker:
    """Makes slices with their first contents: the initial weights of the job, or a checkpoint, read once per life."""

    def __init__(self, prepared: PreparedSandblaster, portions: int, open_segment: OpenSegment) -> None:
        self._prepared = prepared
        self._portions = portions
        self._open = open_segment
        self._first: tuple[ReplicaState, Saved | None] | None = None

    def forget(self) -> None:
        """Free the first contents: every slice is made, or all begin anew."""
        self._first = None

    def search(self, begin_from: BeginFrom | None) -> SearchSlice:
        """`begin_from`: None if the slice will receive a copy of another server's."""
        store = SearchSlice(self._portions)
        if begin_from:
            state, saved = self._begun(begin_from)
            past = [StepsDone(one.step, one.step + 1, one.loss, one.samples, one.at) for one in state.remembered(0)]
            store.begin(state.steps_applied, state_bytes(saved_state(saved)), state.note(), past)
        return store

    def slice(self, shape: SliceShape, values: Segment, begin_from: BeginFrom | None) -> VectorSlice:
        layout = self._prepared.layout
        store = VectorSlice(shape, layout, self._portions, values, self._open)
        if begin_from:
            state, saved = self._begun(begin_from)
            content = torch.zeros(shape.value_bytes, dtype=torch.uint8)
            for tile in shape.tiles:
                at = layout.tiles[tile].offset_bytes - shape.first_byte
                content[at : at + layout.tiles[tile].size_bytes] = state.values[tile].view(torch.uint8)
            search = saved_state(saved)
            if saved and search:
                vectors = saved_vectors(saved, search, layout, shape, content)
            else:
                _, (first, end) = parameter_stretch(layout, shape)
                dtype = layout.tiles[0].dtype
                vectors = {START: content[: (end - first) * dtype.itemsize].view(dtype)}
            store.begin(content, vectors, state.integers(state.steps_applied))
        return store

    def _begun(self, begin_from: BeginFrom) -> tuple[ReplicaState, Saved | None]:
        if self._first is None:
            saved = begin_from()
            self._first = self._prepared.first_state(lambda step=-1: saved), saved
        return self._first


class SandblasterSlices(SliceSource):
    """The slices that a server of a run can be given (`Slices`)."""

    messages = MESSAGES

    def __init__(self, host: ServerHost, loaded: ServerJob) -> None:
        prepared: PreparedSandblaster = loaded.prepared
        super().__init__(host, prepared.facts())
        self._shapes = prepared.slices()
        self._vectors = SliceMaker(prepared, loaded.schedule.shards, self._open)
        self.sizes = [*prepared.slice_sizes, SMALL_SLICE_BYTES]

    def make(self, number: int, first: bool) -> tuple[SliceStore, str]:
        begin_from = self._saved if first else None
        if number == len(self._shapes):
            return self._vectors.search(begin_from), ""
        values, name = self._segment(number, self._shapes[number].value_bytes)
        return self._vectors.slice(self._shapes[number], values, begin_from), name

    def began(self) -> None:
        self._vectors.forget()


def serve(host: ServerHost) -> int:
    """The process of a server of `sandblaster`."""
    return run_server(host, lambda host: SandblasterSlices(host, host.load()))

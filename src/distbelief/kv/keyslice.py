"""One slice of a key-value store: stretches of many tensors with their optimizers, and rows of every table.

`KeySlice` is a `SliceStore` (ps/server/stores.py): primary and backup apply the same changes in the same order, and the
same pushes in the same order give the same bits. Synchronous pushes wait until the pushes of all workers are there, and
are added in the order of ranks. A change that fits no key of the slice changes nothing: clients check their arguments
(checks.py), so it comes from no correct client.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import numpy as np
import torch
from msgspec import Struct

from distbelief.kv.keyoptimizer import differs_in_rate_only, made, row_optimizer
from distbelief.kv.messages import (
    AddToKey,
    AddToRows,
    Dense,
    Form,
    KeyPulled,
    OptimizerSpec,
    PlaceKey,
    PullKey,
    PullKeyRows,
    Rows,
    SetOptimizer,
)
from distbelief.kv.tensorbytes import TensorKind, as_bytes, dtype_of, packed, unpacked
from distbelief.strategies.flatmodel.tileoptimizer import eager_step
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import PushResult, Question, Snapshot
from distbelief.strategies.ps.server.stores import Change, State
from distbelief.strategies.ps.tables.store import Table
from distbelief.strategies.tables.rowinit import RowInit, TableForm
from distbelief.transport.shm.segment import Segment


class Space(Protocol):
    """Makes memory for values, and opens the clients' memory by its name."""

    def make(self, size_bytes: int) -> tuple[torch.Tensor, str]:
        """(memory, the name under which clients can map it; empty: they cannot)."""

    def release(self, name: str) -> None:
        """Free the memory with that name."""

    def open(self, name: str) -> Segment: ...


class _CopyHeader(msgspec.Struct, frozen=True):
    spec: OptimizerSpec | None
    parts: list[tuple[str, KeyState, int]]
    """(key, header, number of tensors), by key."""
    kinds: list[TensorKind]


class KeySlice:
    """The stretches and rows of one slice, by key."""

    def __init__(self, space: Space) -> None:
        self.version = 0
        self._space = space
        self._spec: OptimizerSpec | None = None
        self._keys: dict[str, DenseStretch | TableRows] = {}

    # --- changes and copies ------------------------------------------------------------------------------------------

    def apply(self, change: Change) -> None:
        content = change.content
        match content:
            case PlaceKey():
                self._place(content, change.payload)
            case AddToKey():
                self._push(content, change.payload)
            case AddToRows():
                self._push_rows(content, change.payload)
            case SetOptimizer(spec=spec):
                if spec != self._spec:
                    self._spec = spec
                    for one in self._keys.values():
                        if isinstance(one, DenseStretch):
                            one.optimize(spec)
        self.version += 1

    def _place(self, place: PlaceKey, payload: Any) -> None:
        held = self._keys.get(place.key)
        if held is not None and held.attempt >= place.attempt:
            return
        if not isinstance(place.form, Dense):
            self._keys[place.key] = TableRows(place.key, place.form, place.attempt)
            return
        stretch = self._stretch(place.form, place.first, place.end, place.attempt)
        values = self._numbers(stretch, place.segment, place.offset, payload)
        if values is not None:
            stretch.values.copy_(values)
            stretch.optimize(self._spec)
            self._keys[place.key] = stretch

    def _stretch(self, form: Dense, first: int, end: int, attempt: int) -> DenseStretch:
        dtype = dtype_of(form.dtype)
        memory, name = self._space.make((end - first) * dtype.itemsize)
        stretch = DenseStretch(form, first, end, attempt, memory.view(dtype), name)
        if name:  # free its memory whenever it is replaced, loaded anew, or dropped with the slice
            weakref.finalize(stretch, self._space.release, name).atexit = False
        return stretch

    def _push(self, push: AddToKey, payload: Any) -> None:
        stretch = self._keys.get(push.key)
        if not isinstance(stretch, DenseStretch):
            return
        gradient = self._numbers(stretch, push.segment, push.offset, payload)
        if gradient is None:
            return
        if push.round < 0:
            stretch.push(gradient)
        else:
            stretch.push_round(push.round, push.rank, push.workers, gradient)

    def _numbers(self, stretch: DenseStretch, segment: str, offset: int, payload: Any) -> torch.Tensor | None:
        """A view of the numbers that the client sent; None: they do not fit the stretch."""
        count = stretch.end - stretch.first
        if segment:
            return self._space.open(segment).tensor(stretch.dtype, offset, count)
        if memoryview(payload).nbytes != count * stretch.dtype.itemsize:
            return None
        return torch.frombuffer(payload, dtype=stretch.dtype) if count else torch.empty(0, dtype=stretch.dtype)

    def _push_rows(self, push: AddToRows, payload: Any) -> None:
        part = self._keys.get(push.key)
        if not isinstance(part, TableRows):
            return
        width, border = part.form.width, 8 * push.count
        if memoryview(payload).nbytes != border + 4 * push.count * width:
            return
        if push.count:
            rows = torch.frombuffer(payload, dtype=torch.int64, count=push.count)
            gradients = torch.frombuffer(payload, dtype=torch.float32, offset=border).view(push.count, width)
        else:
            rows, gradients = torch.zeros(0, dtype=torch.int64), torch.zeros(0, width)
        if not part.fits(rows):
            return
        if push.round < 0:
            part.push(rows, gradients)
        else:
            part.push_round(push.round, push.rank, push.workers, rows, gradients)

    def state(self) -> State:
        parts: list[tuple[str, KeyState, int]] = []
        tensors: list[torch.Tensor] = []
        for key, one in self._keys.items():
            about, some = one.part()
            parts.append((key, about, len(some)))
            tensors += some
        kinds, content = packed([*tensors, torch.zeros(1, dtype=torch.uint8)])  # never without bytes
        whole = _CopyHeader(self._spec, parts, kinds)
        return Snapshot(self.version, msgspec.msgpack.encode(whole)), content

    def load(self, state: State) -> None:
        snapshot, content = state
        about = msgspec.msgpack.decode(snapshot.about, type=_CopyHeader)
        self.version, self._spec = snapshot.version, about.spec
        self._keys = {}
        at = byte = 0
        for key, part, count in about.parts:
            kinds = about.kinds[at : at + count]
            tensors = unpacked(kinds, content[byte:])
            at, byte = at + count, byte + sum(_bytes(kind) for kind in kinds)
            if isinstance(part.form, Dense):
                stretch = self._stretch(part.form, part.first, part.end, part.attempt)
                stretch.load(part, tensors, self._spec)
                self._keys[key] = stretch
            else:
                table = TableRows(key, part.form, part.attempt)
                table.load(part, tensors)
                self._keys[key] = table

    def with_bytes(self, change: Change) -> Change:
        content = change.content
        if not isinstance(content, PlaceKey | AddToKey) or not content.segment:
            return change
        if isinstance(content, PlaceKey):
            form, count = content.form, content.end - content.first
        else:
            stretch = self._keys.get(content.key)
            if not isinstance(stretch, DenseStretch):
                return change  # it changes nothing
            form, count = stretch.form, stretch.end - stretch.first
        if not isinstance(form, Dense):
            return change
        size_bytes = count * dtype_of(form.dtype).itemsize
        payload = bytearray(self._space.open(content.segment).view(content.offset, size_bytes))
        return Change(msgspec.structs.replace(content, segment="", offset=0), payload)

    # --- questions ---------------------------------------------------------------------------------------------------

    def given(self, client: int) -> PushResult | None:
        return None

    def reply(self, question: Question, segment: str, everywhere: bool, caught_up: bool) -> Framed | None:
        if not isinstance(question, PullKey | PullKeyRows):
            return None
        one = self._keys.get(question.key)
        if one is None:
            return Framed(KeyPulled(question.ticket, question.slice, 0, there=False))
        if one.rounds.done < question.round or (question.round and not caught_up):
            return None  # answered only if no death can undo it, because all workers continue from it
        return self._values(question, one)

    def _values(self, question: PullKey | PullKeyRows, one: DenseStretch | TableRows) -> Framed:
        """The values at the moment: pushes of others may change them during the read. (Not in synchronous rounds: the
        next round needs a push of the asking client.)"""
        header = KeyPulled(question.ticket, question.slice, one.rounds.done)
        match question, one:
            case PullKey(values=True), DenseStretch():
                if one.segment and not question.inline:
                    return Framed(msgspec.structs.replace(header, segment=one.segment, inline=False))
                return Framed(header, as_bytes(one.values).numpy())
            case PullKeyRows(), TableRows():
                rows = torch.frombuffer(bytearray(question.rows), dtype=torch.int64)
                if one.fits(rows):
                    return Framed(header, one.pull(rows))
            case PullKey(), _:
                return Framed(msgspec.structs.replace(header, inline=False))
        return Framed(msgspec.structs.replace(header, there=False))


def _bytes(kind: TensorKind) -> int:
    return math.prod(kind.shape) * dtype_of(kind.dtype).itemsize


T = TypeVar("T")


@dataclass
class Rounds(Generic[T]):
    """Collects synchronous pushes until their round is complete."""

    done: int = 0
    waiting: dict[int, dict[int, T]] = field(default_factory=dict)
    """Round -> rank -> its push."""

    def add(self, number: int, rank: int, workers: int, push: T) -> list[list[T]]:
        """Add a push; returns the rounds that it completes, each in the order of ranks. A rank's first push counts."""
        if number < self.done or not 0 <= rank < workers:
            return []
        self.waiting.setdefault(number, {}).setdefault(rank, push)
        complete = []
        while len(self.waiting.get(self.done, ())) >= workers:
            pushes = self.waiting.pop(self.done)
            complete.append([pushes[one] for one in sorted(pushes)])
            self.done += 1
        return complete


class KeyState(Struct, frozen=True):
    """The header of a copy of a `DenseStretch` or `TableRows`, beside its tensors."""

    form: Form
    first: int
    end: int
    attempt: int
    rounds: int
    waiting: list[tuple[int, int]]
    """(round, rank) of the waiting pushes; their tensors come last."""
    names: list[str]
    """Names of the tensors before them."""


class DenseStretch:
    """A stretch of a tensor, and its optimizer."""

    def __init__(self, form: Dense, first: int, end: int, attempt: int, values: torch.Tensor, segment: str) -> None:
        """`values`: uninitialised memory."""
        self.form, self.first, self.end, self.attempt = form, first, end, attempt
        self.values = values
        self.segment = segment
        self.rounds: Rounds[torch.Tensor] = Rounds()
        self._spec: OptimizerSpec | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._step: Callable[[], Any] = lambda: None

    def optimize(self, spec: OptimizerSpec | None) -> None:
        """Apply later pushes with this optimizer; None: add them. A new `lr` alone keeps the optimizer's state."""
        if self._optimizer is not None and spec is not None and differs_in_rate_only(self._spec, spec):
            defaults: dict[str, Any] = made(spec, torch.zeros(1)).defaults
            self._optimizer.param_groups[0]["lr"] = defaults["lr"]
        else:
            self._optimizer = made(spec, self.values) if spec else None
            if self._optimizer is not None:
                self._step = eager_step(self._optimizer)
        self._spec = spec

    def push(self, gradient: torch.Tensor) -> None:
        if self._optimizer is None:
            self.values.add_(gradient)
        else:
            self._update(self._optimizer, gradient)

    def push_round(self, number: int, rank: int, workers: int, gradient: torch.Tensor) -> None:
        """Without an optimizer the sum of a round replaces the value."""
        for pushes in self.rounds.add(number, rank, workers, gradient.clone()):
            total = pushes[0]
            for one in pushes[1:]:
                total.add_(one)
            if self._optimizer is None:
                self.values.copy_(total)
            else:
                self._update(self._optimizer, total)

    def _update(self, optimizer: torch.optim.Optimizer, gradient: torch.Tensor) -> None:
        parameter = optimizer.param_groups[0]["params"][0]
        parameter.grad = gradient
        self._step()
        parameter.grad = None

    def part(self) -> tuple[KeyState, list[torch.Tensor]]:
        state: dict[str, torch.Tensor] = {}
        if self._optimizer is not None:
            entries = self._optimizer.state.get(self._optimizer.param_groups[0]["params"][0], {})
            state = {name: one for name, one in entries.items() if isinstance(one, torch.Tensor)}
        waiting = [(number, rank) for number, pushes in self.rounds.waiting.items() for rank in pushes]
        about = KeyState(self.form, self.first, self.end, self.attempt, self.rounds.done, waiting, ["", *state])
        pushes = [self.rounds.waiting[number][rank] for number, rank in waiting]
        return about, [self.values, *state.values(), *pushes]

    def load(self, about: KeyState, tensors: list[torch.Tensor], spec: OptimizerSpec | None) -> None:
        self.values.copy_(tensors[0])
        self.optimize(spec)
        named = dict(zip(about.names[1:], tensors[1 : len(about.names)], strict=True))
        if self._optimizer is not None and named:
            self._optimizer.state[self._optimizer.param_groups[0]["params"][0]] = named
        self.rounds = Rounds(about.rounds)
        for (number, rank), push in zip(about.waiting, tensors[len(about.names) :], strict=True):
            self.rounds.waiting.setdefault(number, {})[rank] = push

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.form.dtype)


Push = tuple[torch.Tensor, torch.Tensor]
"""(row numbers, a gradient for each)."""


class TableRows:
    """The rows of a table that belong to this slice, and their optimizer."""

    def __init__(self, key: str, form: Rows, attempt: int) -> None:
        self.form, self.attempt = form, attempt
        optimizer, self._factor = row_optimizer(form.optimizer)
        declared = TableForm(key, form.rows, form.width, RowInit(form.init, form.scale), form.seed)
        self.table = Table(declared, optimizer)
        self.rounds: Rounds[Push] = Rounds()

    def fits(self, rows: torch.Tensor) -> bool:
        return not rows.numel() or (int(rows.min()) >= 0 and int(rows.max()) < self.form.rows)

    def push(self, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        if rows.numel():
            self.table.push(rows, gradients, self._factor)

    def push_round(self, number: int, rank: int, workers: int, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        for pushes in self.rounds.add(number, rank, workers, (rows.clone(), gradients.clone())):
            self.push(torch.cat([one for one, _ in pushes]), torch.cat([one for _, one in pushes]))

    def pull(self, rows: torch.Tensor) -> np.ndarray:
        return self.table.pull(rows).numpy()

    def part(self) -> tuple[KeyState, list[torch.Tensor]]:
        state = self.table.state()
        waiting = [(number, rank) for number, pushes in self.rounds.waiting.items() for rank in pushes]
        about = KeyState(self.form, 0, 0, self.attempt, self.rounds.done, waiting, list(state))
        pushes = [part for number, rank in waiting for part in self.rounds.waiting[number][rank]]
        return about, [*state.values(), *pushes]

    def load(self, about: KeyState, tensors: list[torch.Tensor]) -> None:
        self.table.load(dict(zip(about.names, tensors[: len(about.names)], strict=True)))
        self.rounds = Rounds(about.rounds)
        rest = tensors[len(about.names) :]
        for at, (number, rank) in enumerate(about.waiting):
            self.rounds.waiting.setdefault(number, {})[rank] = (rest[2 * at], rest[2 * at + 1])

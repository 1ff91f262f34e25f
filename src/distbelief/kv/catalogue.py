"""The catalogue of a key-value store: the keys, the places of their stretches, and the workers at a barrier.

It is a slice like the others (a `SliceStore`, ps/server/stores.py), so primary and backup have it. It answers a
question only when its backup has every change too, so the death of a server undoes no answer.
"""

from __future__ import annotations

import math

import msgspec
import torch

from distbelief.kv.messages import (
    Arrive,
    Consult,
    Consulted,
    DeclareKey,
    Dense,
    Entry,
    Form,
    SealKey,
    Stretch,
    Withdraw,
)
from distbelief.kv.tensorbytes import dtype_of
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import PushResult, Question, Snapshot
from distbelief.strategies.ps.server.stores import Change, State

PIECE_BYTES = 1 << 20
"""The smallest piece that a value is cut into: smaller pieces cost more in messages than more servers gain."""
GRAIN = 64
"""Cuts are at multiples of this many elements, so that vectorised arithmetic gives a piece the bits of the whole."""


def cut(elements: int, item_bytes: int, loads: dict[int, int]) -> list[Stretch]:
    """Place the stretches of a new value on the least loaded slices. `loads`: bytes by slice; this updates it.

    >>> loads = {1: 0, 2: 4, 3: 0}
    >>> cut(10, 4, loads), loads
    ([Stretch(slice=1, first=0, end=10)], {1: 40, 2: 4, 3: 0})
    >>> [(one.slice, one.end - one.first) for one in cut(600_000, 4, loads)]
    [(3, 200000), (2, 200000), (1, 200000)]
    """
    pieces = min(len(loads), max(1, -(-elements * item_bytes // PIECE_BYTES)))
    size = -(-elements // (pieces * GRAIN)) * GRAIN
    found = []
    for first, slice_ in zip(range(0, max(elements, 1), max(size, 1)), _lightest(loads, pieces), strict=False):
        end = min(first + size, elements)
        loads[slice_] += (end - first) * item_bytes
        found.append(Stretch(slice_, first, end))
    return found


def _lightest(loads: dict[int, int], count: int) -> list[int]:
    return sorted(loads, key=lambda number: (loads[number], number))[:count]


class _Record(msgspec.Struct):
    room: int
    """Bytes for all values. Every server has the same number, so that primary and backup refuse the same keys."""
    loads: dict[int, int]
    entries: dict[str, Entry]
    waiting: dict[int, tuple[int, int]]
    """Workers at the barrier: rank -> (client, number of workers)."""


class Catalogue:
    """The slice with the number `CATALOGUE`."""

    def __init__(self, slices: int, room: int) -> None:
        """`slices`: the number of slices that hold values, numbered from 1. `room`: bytes for all values."""
        self.version = 0
        self._record = _Record(room, dict.fromkeys(range(1, slices + 1), 0), {}, {})

    # --- changes and copies ------------------------------------------------------------------------------------------

    def apply(self, change: Change) -> None:
        content, record = change.content, self._record
        match content:
            case DeclareKey():
                self._declare(content)
            case SealKey(client=client, key=key, attempt=attempt):
                entry = record.entries.get(key)
                if entry is not None and (entry.owner, entry.attempt) == (client, attempt):
                    record.entries[key] = msgspec.structs.replace(entry, sealed=True)
            case Arrive(client=client, rank=rank, workers=workers):
                record.waiting[rank] = (client, workers)
                wanted = max(workers for _, workers in record.waiting.values())
                if record.waiting.keys() >= set(range(wanted)):
                    record.waiting.clear()
            case Withdraw(client=client, rank=rank):
                if record.waiting.get(rank, (-1, 0))[0] == client:
                    del record.waiting[rank]
        self.version += 1

    def _declare(self, wish: DeclareKey) -> None:
        entries = self._record.entries
        entry = entries.get(wish.key)
        if entry is None:
            if _size(wish.form) <= self._room:
                entries[wish.key] = Entry(wish.form, self._cut(wish.form), wish.client, 0)
        elif not entry.sealed and entry.form == wish.form and entry.attempt == wish.instead_of:
            entries[wish.key] = msgspec.structs.replace(entry, owner=wish.client, attempt=entry.attempt + 1)

    @property
    def _room(self) -> int:
        return self._record.room - sum(self._record.loads.values())

    def _cut(self, form: Form) -> list[Stretch]:
        if isinstance(form, Dense):
            return cut(math.prod(form.shape), dtype_of(form.dtype).itemsize, self._record.loads)
        return []  # every slice has rows of it

    def state(self) -> State:
        return Snapshot(self.version, msgspec.msgpack.encode(self._record)), torch.zeros(1, dtype=torch.uint8)

    def load(self, state: State) -> None:
        self._record = msgspec.msgpack.decode(state[0].about, type=_Record)
        self.version = state[0].version

    def with_bytes(self, change: Change) -> Change:
        return change  # it has none

    # --- questions ---------------------------------------------------------------------------------------------------

    def given(self, client: int) -> PushResult | None:
        return None

    def reply(self, question: Question, segment: str, everywhere: bool, caught_up: bool) -> Framed | None:
        record = self._record
        if not isinstance(question, Consult) or not caught_up:
            return None
        found = {key: record.entries[key] for key in question.keys if key in record.entries}
        if question.sealed and not all(entry.sealed for entry in found.values()):
            return None
        if question.rank >= 0 and record.waiting.get(question.rank, (-1, 0))[0] == question.client:
            return None
        workers = max((workers for _, workers in record.waiting.values()), default=0)
        return Framed(Consulted(question.ticket, question.slice, found, sorted(record.waiting), workers, self._room))


def _size(form: Form) -> int:
    """The size of a first value; a table has no rows at first."""
    return math.prod(form.shape) * dtype_of(form.dtype).itemsize if isinstance(form, Dense) else 0

"""One slice of a key-value store: stretches of many keys, and rows of every table.

It is a `Store` (see holding.py): primary and backup apply the same changes in the same order. A change that fits to
nothing here changes nothing: clients check what they send (kv/store.py), so it is not from one of ours.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, Protocol

import msgspec
import torch

from distbelief.kv.keystretch import DenseStretch, Part, TablePart
from distbelief.kv.messages import (
    AddToKey,
    AddToRows,
    Dense,
    KeyPulled,
    OptimizerSpec,
    PlaceKey,
    PullKey,
    PullKeyRows,
    SetOptimizer,
)
from distbelief.kv.tensorbytes import Kind, as_bytes, dtype_of, packed, unpacked
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import PushResult, Question, Snapshot
from distbelief.strategies.ps.server.stores import Change, State
from distbelief.transport.shm.segment import Segment


class Space(Protocol):
    """Memory for values, and the clients' memory by its name."""

    def make(self, size_bytes: int) -> tuple[torch.Tensor, str]:
        """Bytes, with the name under which clients can map it; no name: they cannot."""

    def release(self, name: str) -> None:
        """What was made under that name is needed no more."""

    def open(self, name: str) -> Segment: ...


class _About(msgspec.Struct, frozen=True):
    spec: OptimizerSpec | None
    parts: list[tuple[str, Part, int]]
    """With how many tensors each has."""
    kinds: list[Kind]


class KeySlice:
    def __init__(self, space: Space) -> None:
        self.version = 0
        self._space = space
        self._spec: OptimizerSpec | None = None
        self._keys: dict[str, DenseStretch | TablePart] = {}

    # --- as a store --------------------------------------------------------------------------------------------------

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
            self._keys[place.key] = TablePart(place.key, place.form, place.attempt)
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
        if name:  # its memory goes with it, however it goes: replaced, loaded anew, or with the whole slice
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
        """A view of what the client sent; None if it does not fit."""
        count = stretch.end - stretch.first
        if segment:
            return self._space.open(segment).tensor(stretch.dtype, offset, count)
        if memoryview(payload).nbytes != count * stretch.dtype.itemsize:
            return None
        return torch.frombuffer(payload, dtype=stretch.dtype) if count else torch.empty(0, dtype=stretch.dtype)

    def _push_rows(self, push: AddToRows, payload: Any) -> None:
        part = self._keys.get(push.key)
        if not isinstance(part, TablePart):
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
        parts: list[tuple[str, Part, int]] = []
        tensors: list[torch.Tensor] = []
        for key, one in self._keys.items():
            about, some = one.part()
            parts.append((key, about, len(some)))
            tensors += some
        kinds, content = packed([*tensors, torch.zeros(1, dtype=torch.uint8)])  # a copy has bytes, also of nothing
        whole = _About(self._spec, parts, kinds)
        return Snapshot(self.version, msgspec.msgpack.encode(whole)), content

    def load(self, state: State) -> None:
        snapshot, content = state
        about = msgspec.msgpack.decode(snapshot.about, type=_About)
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
                table = TablePart(key, part.form, part.attempt)
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

    # --- what is asked of it -----------------------------------------------------------------------------------------

    def given(self, client: int) -> PushResult | None:
        return None

    def reply(self, question: Question, segment: str, everywhere: bool, caught_up: bool) -> Framed | None:
        if not isinstance(question, PullKey | PullKeyRows):
            return None
        one = self._keys.get(question.key)
        if one is None:
            return Framed(KeyPulled(question.ticket, question.slice, 0, there=False))
        if one.rounds.done < question.round or (question.round and not caught_up):
            return None  # what all workers go on from must not be undone by a death
        return self._values(question, one)

    def _values(self, question: PullKey | PullKeyRows, one: DenseStretch | TablePart) -> Framed:
        """As they are at the moment: others may change them while they are read, or sent. (Not in synchronous rounds:
        the next one needs a push of whoever asks.)"""
        header = KeyPulled(question.ticket, question.slice, one.rounds.done)
        match question, one:
            case PullKey(values=True), DenseStretch():
                if one.segment and not question.inline:
                    return Framed(msgspec.structs.replace(header, segment=one.segment, inline=False))
                return Framed(header, as_bytes(one.values).numpy())
            case PullKeyRows(), TablePart():
                rows = torch.frombuffer(bytearray(question.rows), dtype=torch.int64)
                if one.fits(rows):
                    return Framed(header, one.pull(rows))
            case PullKey(), _:
                return Framed(msgspec.structs.replace(header, inline=False))
        return Framed(msgspec.structs.replace(header, there=False))


def _bytes(kind: Kind) -> int:
    return math.prod(kind.shape) * dtype_of(kind.dtype).itemsize

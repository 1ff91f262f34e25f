"""The slices of `ps:async` and `ps:ssp` on servers: parameters that apply each update as it comes, and the leases.

Primary and backup apply the same changes in the same order, so a slice is a function of its changes alone.

Delay compensation (Zheng et al. 2017, DC-ASGD) corrects a stale gradient for the updates that it misses: by the
first-order term of the gradient at the present values, with g ⊙ g in place of the Hessian. The worker sends the values
that it computed the gradient with, so servers keep no copy of values per worker.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np
import torch

from distbelief.errors import DistBeliefError
from distbelief.strategies.base import REMEMBERED
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import (
    CompleteUpdate,
    Completion,
    Gradient,
    Inspect,
    Inspected,
    LeaseResult,
    Members,
    Note,
    OpenGate,
    PulledValues,
    PullValues,
    PushResult,
    Question,
    ReadState,
    RequestLease,
    SetGate,
    SliceState,
    Snapshot,
)
from distbelief.strategies.ps.protocol.pushcoding import PushCoding
from distbelief.strategies.ps.rules.leases import (
    LeaseTerms,
    UpdateBook,
    complete_update,
    new_book,
    open_gate,
    request_lease,
    set_gate,
    set_members,
)
from distbelief.strategies.ps.server.slicememory import OpenSegment, SliceMemory, gradient_and_values, with_bytes
from distbelief.strategies.ps.server.stores import Change, State


def compensate(gradient: torch.Tensor, now: torch.Tensor, then: torch.Tensor, strength: float) -> None:
    """g + λ g ⊙ g ⊙ (w_now − w_then), in place. Where a value has not moved, the gradient keeps its bits.

    >>> g = torch.tensor([2.0, 2.0, -0.0])
    >>> compensate(g, now=torch.tensor([1.5, 1.0, 1.0]), then=torch.ones(3), strength=0.1)
    >>> g
    tensor([2.2000, 2.0000, -0.0000])
    """
    if torch.equal(now, then):
        return
    moved = now - then
    corrected = torch.addcmul(gradient, gradient * gradient, moved, value=strength)
    gradient.copy_(torch.where(moved == 0, gradient, corrected))


class AsynchronousSlice:
    def __init__(
        self, memory: SliceMemory, open_segment: OpenSegment, delay: float = 0.0, coding: PushCoding | None = None
    ) -> None:
        """`delay`: the strength of delay compensation. `coding`: the compression of updates, if any."""
        self.memory = memory
        self.version = 0
        """Updates applied in this life."""
        self._open = open_segment
        self._delay = delay
        self._coding = coding
        self._integers = np.zeros(0, np.int64)
        tiles = memory.layout.tiles
        self._scratch = {t: torch.empty(tiles[t].numel, dtype=tiles[t].dtype) for t in memory.shape.tiles}

    def begin(self, contents: torch.Tensor, integers: np.ndarray) -> None:
        """Take the first state of a life."""
        self.memory.load(contents, 0)
        self._integers = integers.copy()

    # --- as a store --------------------------------------------------------------------------------------------------

    def apply(self, change: Change) -> None:
        match change.content:
            case Gradient():
                self._update(change.content, change)
            case Note():
                pass  # the slice of leases keeps it

    def _update(self, update: Gradient, change: Change) -> None:
        memory, values = self.memory, list[torch.Tensor]()
        if update.coded:
            if self._coding is None:
                raise DistBeliefError("an update is compressed, and the strategy does not say how")
            self._coding.read(change.payload, self._scratch)
        else:
            parts, values = gradient_and_values(memory.shape, memory.layout, update, change.payload, self._open)
            for tile, part in zip(memory.shape.tiles, parts, strict=True):
                self._scratch[tile].copy_(part)  # the optimizer may overwrite it, and a backup reads it too
        for tile, then in zip(memory.parameter_tiles, values, strict=False):  # tiles of buffers come last
            compensate(self._scratch[tile], memory.values[tile], then, self._delay)
        untouched = np.frombuffer(update.touched, np.uint8) == 0
        self.memory.update_freely(update.step, self.version, self._scratch, untouched)
        if update.integers:
            self._integers += np.frombuffer(update.integers, np.int64)
        self.version += 1

    def state(self) -> State:
        return Snapshot(self.version, self._integers.tobytes()), self.memory.contents()

    def load(self, state: State) -> None:
        snapshot, content = state
        self.memory.load(content, snapshot.version)
        self.version = snapshot.version
        self._integers = np.frombuffer(snapshot.about, np.int64).copy()

    def with_bytes(self, change: Change) -> Change:
        return with_bytes(self.memory.shape, change, self._open)

    # --- questions ----------------------------------------------------------------------------------------------------

    def given(self, client: int) -> PushResult | None:
        return None

    def reply(self, question: Question, segment: str, everywhere: bool, caught_up: bool) -> Framed | None:
        """The values of this moment: a worker may copy them while other updates change them."""
        match question:
            case ReadState():
                if not caught_up:
                    return None
                return Framed(SliceState(question.ticket, question.slice, self.version), self.memory.contents().numpy())
            case PullValues():
                segment = "" if question.inline else segment
                integers = self._integers.tobytes() if question.slice == 0 else b""
                header = PulledValues(question.ticket, question.slice, self.version, b"", integers, segment)
                return Framed(header, None if segment else self.memory.value_view())
            case _:
                raise DistBeliefError(f"a slice of an asynchronous run does not answer {type(question).__name__}")


class LeaseSlice:
    """The leases of a run (rules/leases.py) as a slice: primary and backup hold them, as they hold parameters.

    The answer to a worker's request for a lease is part of the change that the request makes, so the slice keeps it
    until the same worker asks again.
    """

    def __init__(self, terms: LeaseTerms) -> None:
        self.version = 0
        self._book = new_book(terms)
        self._note: tuple[int, bytes] = (-1, b"")
        self._news: deque[Completion] = deque(maxlen=REMEMBERED)
        self._given: dict[int, LeaseResult] = {}

    # --- as a store --------------------------------------------------------------------------------------------------

    def apply(self, change: Change) -> None:
        match change.content:
            case RequestLease():
                self._lease(change.content)
            case CompleteUpdate():
                self._book, news = complete_update(self._book, change.content)
                self._news.extend(news)
                self.version = self._book.ledger.completed
            case Members(generation=generation, workers=workers):
                self._book = set_members(self._book, generation, workers)
            case SetGate(step=step):
                self._book = set_gate(self._book, step)
            case OpenGate(step=step):
                self._book = open_gate(self._book, step)
            case Note(step=step, content=content):
                self._note = (step, content)

    def _lease(self, ask: RequestLease) -> None:
        self._book, what = request_lease(self._book, ask)
        news = [one for one in self._news if one.step >= ask.known]
        self._given[ask.worker] = LeaseResult(what, self._book.done, news, self._book.ledger.staleness)

    def state(self) -> State:
        about = msgspec.msgpack.encode((self._book, self._note, list(self._news), self._given))
        return Snapshot(self.version, about), torch.zeros(1, dtype=torch.uint8)

    def load(self, state: State) -> None:
        snapshot, _ = state
        kind = tuple[UpdateBook, tuple[int, bytes], list[Completion], dict[int, LeaseResult]]
        self._book, self._note, news, self._given = msgspec.msgpack.decode(snapshot.about, type=kind)
        self._news = deque(news, maxlen=REMEMBERED)
        self.version = snapshot.version

    def with_bytes(self, change: Change) -> Change:
        return change  # it has none

    # --- questions ------------------------------------------------------------------------------------------------

    def given(self, client: int) -> LeaseResult | None:
        return self._given.get(client)

    def reply(self, question: Question, segment: str, everywhere: bool, caught_up: bool) -> Framed | None:
        assert isinstance(question, Inspect)
        found = Inspected(question.ticket, question.slice, self._book.done, [], note=self._note)
        return Framed(msgspec.structs.replace(found, began=self._book.terms.first))

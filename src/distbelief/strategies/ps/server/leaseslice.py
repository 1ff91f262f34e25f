"""Which update is with whom, as a slice among slices: replicated as the parameters are.

It is a `Store` (see holding.py) around the pure ledger of leases.py. The answer to a question for an update is part of
what the question changes, so it is kept until the same worker asks again.
"""

from __future__ import annotations

from collections import deque

import msgspec
import torch

from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import (
    AtGate,
    CompleteUpdate,
    Completion,
    Inspect,
    Inspected,
    LeasedUpdate,
    LeaseResult,
    Members,
    NoLease,
    Note,
    OpenGate,
    Question,
    RequestLease,
    SetGate,
)
from distbelief.strategies.ps.rules import leases
from distbelief.strategies.ps.server.stores import Change, Snapshot, State

REMEMBERED = 1024
"""Batches whose results are kept: many more than are completed between two heartbeats."""


class LeaseTerms(msgspec.Struct, frozen=True):
    """What the run fixes."""

    first: int
    """The steps that were done before this life began."""
    steps: int
    batches: int = 1
    """Of an update, unless whoever asks says how many it wants; gates are at multiples of it."""
    bound: int | None = None
    warm_up: int = 0
    """So many updates are computed one after the other, before several at a time are."""
    save_every: int = 0
    """Steps; 0: only when it is asked for."""

    def boundary(self, step: int) -> int:
        """The first step from this one on at which an update can end."""
        return min(self.first + -(-(step - self.first) // self.batches) * self.batches, self.steps)


class _Book(msgspec.Struct, frozen=True):
    ledger: leases.Ledger
    planned: int
    """All steps before this one are in an update that was leased."""
    opened: int
    """Gates up to this step are behind us."""
    gates: list[int] = []
    """Steps beyond which nothing more is leased; sorted."""
    spans: dict[int, tuple[int, int]] = {}
    """Of updates that are leased or wait to be leased again: the first step, and how many."""
    generation: int = 0
    workers: int = 1
    note: tuple[int, bytes] = (-1, b"")
    completed: int = 0
    """Batches."""


class LeaseSlice:
    def __init__(self, terms: LeaseTerms) -> None:
        self.version = 0
        self._terms = terms
        self._book = _Book(leases.Ledger(0, terms.bound), terms.first, terms.first)
        self._news: deque[Completion] = deque(maxlen=REMEMBERED)
        self._given: dict[int, LeaseResult] = {}

    # --- as a store --------------------------------------------------------------------------------------------------

    def apply(self, change: Change) -> None:
        book = self._book
        match change.content:
            case RequestLease():
                self._lease(change.content)
            case CompleteUpdate():
                self._complete(change.content)
            case Members(generation=generation, workers=workers):
                if generation > book.generation:
                    self._book = msgspec.structs.replace(book, generation=generation, workers=len(workers))
                    self._dismiss(set(workers))
            case SetGate(step=step):
                # What was leased is not taken back: a gate that comes too late is where that ends.
                gate = self._terms.boundary(max(step, book.planned, book.opened + 1))
                self._book = msgspec.structs.replace(book, gates=sorted({*book.gates, gate}))
            case OpenGate(step=step):
                opened = max(book.opened, self._terms.boundary(step))
                left = [one for one in book.gates if one > opened]
                self._book = msgspec.structs.replace(book, opened=opened, gates=left)
            case Note(step=step, content=content):
                self._book = msgspec.structs.replace(book, note=(step, content))

    def _dismiss(self, workers: set[int]) -> None:
        ledger = self._book.ledger
        holders = {holder.worker for some in ledger.open.values() for holder in some}
        for worker in sorted(holders - workers):
            ledger = leases.lost(ledger, worker)
        self._book = msgspec.structs.replace(self._book, ledger=ledger)

    def _gate(self) -> int:
        """The step at which to stop next."""
        terms, book = self._terms, self._book
        found = [*book.gates, terms.steps]
        if terms.save_every:
            found.append(terms.boundary((book.opened // terms.save_every + 1) * terms.save_every))
        return min(gate for gate in found if gate > book.opened or gate == terms.steps)

    def _lease(self, ask: RequestLease) -> None:
        book, terms = self._book, self._terms
        gate = self._gate()
        bound = 0 if book.ledger.completed < terms.warm_up else terms.bound
        # Whoever asks has nothing: what it is said to have, it has forgotten.
        mine = leases.lost(book.ledger, ask.worker)
        limited = msgspec.structs.replace(mine, total=mine.fresh + (book.planned < gate), bound=bound)
        version = ask.version if ask.version >= 0 else None
        limited, found = leases.lease(limited, ask.worker, ask.now, version)
        ledger = msgspec.structs.replace(limited, bound=terms.bound)
        self._book = book = msgspec.structs.replace(book, ledger=ledger)
        completed = ledger.completed
        what: LeasedUpdate | NoLease | AtGate
        match found:
            case leases.Lease():
                if found.batch not in book.spans:
                    self._plan(found.batch, ask, gate)
                what = LeasedUpdate(found.batch, found.token, *self._book.spans[found.batch], completed)
            case leases.Wait():
                what = NoLease(found.reason, found.todo == "fetch", completed)
            case leases.Done():
                what = AtGate(gate, gate == terms.steps, completed)
        news = [one for one in self._news if one.step >= ask.known]
        self._given[ask.worker] = LeaseResult(what, terms.first + book.completed, news, ledger.staleness)

    def _plan(self, update: int, ask: RequestLease, gate: int) -> None:
        """Which steps are in it. Whoever computes it, they stay the same: some slices may have it already."""
        book = self._book
        room = gate - book.planned
        batches = min(ask.batches or self._terms.batches, room)
        if ask.batches:  # the last ones before a halt are small, so that nobody waits long for the others
            batches = min(batches, -(-room // book.workers))
        spans = {**book.spans, update: (book.planned, batches)}
        self._book = msgspec.structs.replace(book, spans=spans, planned=book.planned + batches)

    def _complete(self, done: CompleteUpdate) -> None:
        book = self._book
        version = next((h.version for h in book.ledger.open.get(done.update, ()) if h.token == done.token), 0)
        staleness = book.ledger.completed - version
        ledger, counts = leases.complete(book.ledger, done.update, done.token)
        if not counts:
            return
        step = self._terms.first + book.completed
        for loss, samples in zip(done.losses, done.samples, strict=True):
            self._news.append(Completion(step, loss, samples, done.worker, staleness, done.at))
            step += 1
        spans = {update: span for update, span in book.spans.items() if update != done.update}
        completed = step - self._terms.first
        self._book = msgspec.structs.replace(book, ledger=ledger, spans=spans, completed=completed)
        self.version += 1

    def state(self) -> State:
        about = msgspec.msgpack.encode((self._terms, self._book, list(self._news), self._given))
        return Snapshot(self.version, about), torch.zeros(1, dtype=torch.uint8)

    def load(self, state: State) -> None:
        snapshot, _ = state
        kind = tuple[LeaseTerms, _Book, list[Completion], dict[int, LeaseResult]]
        self._terms, self._book, news, self._given = msgspec.msgpack.decode(snapshot.about, type=kind)
        self._news = deque(news, maxlen=REMEMBERED)
        self.version = snapshot.version

    def with_bytes(self, change: Change) -> Change:
        return change  # it has none

    # --- what is asked of it -----------------------------------------------------------------------------------------

    def given(self, client: int) -> LeaseResult | None:
        return self._given.get(client)

    def reply(self, question: Question, segment: str, everywhere: bool, caught_up: bool) -> Framed | None:
        assert isinstance(question, Inspect)
        done = self._terms.first + self._book.completed
        return Framed(
            Inspected(question.ticket, question.slice, done, [], note=self._book.note, began=self._terms.first)
        )

"""Where a search is and who computes what of it, as a slice among slices: replicated as the vectors are.

A step is done when this slice says so, and only then (`Keep`): one change of one slice, after all vectors that it names
are where they must be. It is a `Store` (see holding.py) around the pure ledger of portioning.py.

What the ledger calls computed is on every slice: a driver tells this slice of an evaluation before it tells the others,
and a member tells it of sums after all slices have them, in the same generation.
"""

from __future__ import annotations

import msgspec
import torch

from distbelief.errors import DistBeliefError
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import Inspect, Note, Question
from distbelief.strategies.ps.server.stores import Change, Snapshot, State
from distbelief.strategies.sandblaster.messages import (
    COUNTS,
    Begin,
    Heard,
    Idle,
    Keep,
    Portions,
    SearchGiven,
    SearchKnown,
    Stepped,
    StepsDone,
    Take,
    Total,
)
from distbelief.strategies.sandblaster.rules.portioning import Portioning

REMEMBERED = 1024
"""Steps whose results are kept: many more than are done between two heartbeats."""


class _Book(msgspec.Struct):
    work: Portioning
    steps: int
    number: int = -1
    """The last that a driver has said."""
    kept: int = -1
    """That with which the last state was kept."""
    state: bytes = b""
    note: tuple[int, bytes] = (-1, b"")
    past: list[StepsDone] = []
    given: dict[int, SearchGiven] = {}
    """Worker -> the answer to its last question, which is part of what the question changes."""


class SearchSlice:
    def __init__(self, portions: int) -> None:
        self.version = 0
        self._book = _Book(Portioning(portions), 0)

    def begin(self, steps: int, state: bytes, note: tuple[int, bytes], past: list[StepsDone]) -> None:
        """The first state of a life."""
        self._book = _Book(Portioning(self._book.work.portions), steps, state=state, note=note, past=past)

    # --- as a store --------------------------------------------------------------------------------------------------

    def apply(self, change: Change) -> None:
        book, content = self._book, change.content
        match content:
            case Begin() | Keep():
                counts = content.number >= book.number
                book.given[content.worker] = SearchGiven(Heard(counts), book.steps)
                if counts and isinstance(content, Keep):
                    self._keep(content)
                elif counts and isinstance(content, Begin):
                    self._begin(content)
            case Take():
                self._take(content)
            case Note():
                book.note = (content.step, content.content)

    def _begin(self, begin: Begin) -> None:
        self._book.number = begin.number
        if begin.evaluation >= 0:
            self._book.work.begin(begin.evaluation, begin.members)
        else:
            self._book.work.gather(begin.members)

    def _take(self, take: Take) -> None:
        book, work, done = self._book, self._book.work, take.computed
        what: Portions | Idle | Total | Stepped = Idle()
        if take.generation == book.number >> COUNTS:  # else it is of a generation that is over, or not yet here
            if done:
                work.computed(take.worker, done.evaluation, done.node, done.losses, take.now)
            total = work.total()
            if book.steps > take.step:
                what = Stepped(book.kept, book.state, book.past[-1])
            elif total:
                what = Total(work.evaluation, *total)
            elif node := work.take(take.worker, take.now):
                what = Portions(work.evaluation, book.number, node)
        book.given[take.worker] = SearchGiven(what, book.steps)

    def _keep(self, keep: Keep) -> None:
        book = self._book
        book.number = book.kept = keep.number
        book.state = keep.state
        if keep.steps > book.steps:
            book.past.append(StepsDone(book.steps, keep.steps, keep.loss, keep.samples, keep.at))
            book.past = book.past[-REMEMBERED:]
        book.steps = keep.steps
        self.version += 1

    def state(self) -> State:
        return Snapshot(self.version, msgspec.msgpack.encode(self._book)), torch.zeros(1, dtype=torch.uint8)

    def load(self, state: State) -> None:
        snapshot, _ = state
        self._book = msgspec.msgpack.decode(snapshot.about, type=_Book)
        self.version = snapshot.version

    def with_bytes(self, change: Change) -> Change:
        return change  # it has none

    # --- what is asked of it -----------------------------------------------------------------------------------------

    def given(self, client: int) -> SearchGiven | None:
        return self._book.given.get(client)

    def reply(self, question: Question, segment: str, everywhere: bool, caught_up: bool) -> Framed | None:
        if not isinstance(question, Inspect):
            raise DistBeliefError(f"a search is not asked {type(question).__name__}")
        if not caught_up:
            return None  # who goes on from here must find it again, whoever dies
        book = self._book
        return Framed(SearchKnown(question.ticket, question.slice, book.steps, book.state, book.note, list(book.past)))

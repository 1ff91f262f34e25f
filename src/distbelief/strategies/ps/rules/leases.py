"""Leases of updates in `ps:async` and `ps:ssp`: which worker computes which update, and which batches are in it. Pure.

The ledger
----------
A worker that asks gets the next update, so faster workers do more. An update of a dead worker is leased again first,
under a higher token. A completion with a token that is not valid any more changes nothing. So every update completes
once.

The bound on staleness. An update's staleness is the number of updates completed between the version of the parameters
that it was computed with and its own completion. Let C be the number completed, n the updates that are leased or wait
to be leased again, and v the oldest version of a valid lease. The ledger keeps

    C + n - 1 - v <= s

by not leasing what would break it. If all the others complete before the oldest one, its staleness is the left side,
so it is at most s in any order. A completion adds 1 to C and takes 1 from n: a leased update is never held back or
thrown away. n cannot be smaller: each of the n updates may still complete, and refusing one would lose its work. An
update of a dead worker keeps its place in n (some slices may already have its gradients), so leasing it again is always
allowed, and no death stops the others. For the same reason the bound holds on every slice, whose changes come before
their completion.

What s means for N workers:

    | s               | effect                                                                     |
    |-----------------|----------------------------------------------------------------------------|
    | 0               | one lease at a time                                                        |
    | N - 1           | all workers compute at once, in rounds that wait for the slowest worker    |
    | 2 (N - 1)       | equal workers never wait                                                   |
    | (f + 1) (N - 1) | workers never wait, even if one worker is f times slower                   |

The book
--------
`UpdateBook` maps updates to steps (batches) of the run, and holds gates: steps at which all workers halt, so that the
parameters are those after exactly that many steps. Workers halt there for a checkpoint and at the end of the run.

A new state is a new value, and the state grows with the open leases, not with the updates.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from distbelief.errors import DistBeliefError, JobError
from distbelief.strategies.ps.protocol.messages import (
    AtGate,
    CompleteUpdate,
    Completion,
    LeasedUpdate,
    NoLease,
    RequestLease,
)
from distbelief.strategies.ps.rules.applied import NumberSet

EXACT_BELOW: Final = 64
"""Staleness from here on is counted by powers of two, so that the histogram stays small."""


class Lease(Struct, frozen=True):
    update: int
    token: int
    version: int
    """The number of completed updates in the parameters that the update is computed with."""


class Wait(Struct, frozen=True):
    reason: str
    todo: Literal["wait", "fetch", "push"]
    """The action that helps: wait for other workers, fetch newer parameters, or push the worker's own updates."""


class Done(Struct, frozen=True):
    """Every update is completed."""


class Holder(Struct, frozen=True):
    """The worker that has an update, with its valid token."""

    worker: int
    token: int
    version: int


class Ledger(Struct, frozen=True):
    """The leases of updates 0 to `total` - 1."""

    total: int
    bound: int | None = None
    """The staleness that no update exceeds; None: any."""
    fresh: int = 0
    """The first update that was never leased."""
    open: dict[int, Holder] = {}
    returned: tuple[int, ...] = ()
    """Updates to lease again, lowest first."""
    done: NumberSet = NumberSet()
    issued: int = 0
    """The highest token given."""
    staleness: dict[int, int] = {}
    """Staleness -> the number of updates that had it. From EXACT_BELOW on a key is the power of two at or below it."""

    def __post_init__(self) -> None:
        if self.total < 0:
            raise JobError(f"{self.total} updates cannot be leased", hint="Give a number of at least 0.")
        if self.bound is not None and self.bound < 0:
            raise JobError(f"the bound on staleness is {self.bound}", hint="Give 0 or more, or leave it out for none.")

    @property
    def completed(self) -> int:
        """The number of complete updates: the version of the parameters."""
        return self.done.count


def lease(ledger: Ledger, worker: int, version: int | None = None) -> tuple[Ledger, Lease | Wait | Done]:
    """Lease an update to the worker. `version`: of the parameters that it has; None: it fetches them after this.

    >>> ledger, first = lease(Ledger(total=9, bound=0), worker=1)
    >>> first
    Lease(update=0, token=1, version=0)
    >>> lease(ledger, worker=2)[1].todo
    'wait'
    """
    completed = ledger.completed
    if completed == ledger.total:
        return ledger, Done()
    base = completed if version is None else version
    if not 0 <= base <= completed:
        raise DistBeliefError(
            f"worker {worker} has parameters of version {base}, but only {completed} updates are complete",
            hint="It has seen a state that was rolled back: let it fetch the parameters again.",
        )
    places = len(ledger.open) + len(ledger.returned)
    if not _fits(ledger, places, base):
        return ledger, Wait(f"its parameters are {completed - base} updates old: too old to start from", "fetch")
    if ledger.returned:
        update, *rest = ledger.returned
        return _give(replace(ledger, returned=tuple(rest)), update, worker, base)
    if ledger.fresh < ledger.total and _fits(ledger, places + 1, min(base, _oldest(ledger, base))):
        return _give(replace(ledger, fresh=ledger.fresh + 1), ledger.fresh, worker, base)
    return ledger, _wait(ledger, worker, base, places)


def complete(ledger: Ledger, update: int, token: int) -> tuple[Ledger, bool]:
    """Every slice has applied the update. False: the token is invalid by now, and nothing changes."""
    holder = ledger.open.get(update)
    if holder is None or holder.token != token:
        return ledger, False
    stale = _bucket(ledger.completed - holder.version)
    others = {number: other for number, other in ledger.open.items() if number != update}
    counts = {**ledger.staleness, stale: ledger.staleness.get(stale, 0) + 1}
    return replace(ledger, open=others, done=ledger.done.add(update), staleness=counts), True


def lost(ledger: Ledger, worker: int) -> Ledger:
    """The worker is dead or has left: its tokens become invalid, and its updates are leased again first."""
    left = {update: holder for update, holder in ledger.open.items() if holder.worker != worker}
    returned = sorted([*ledger.returned, *(update for update in ledger.open if update not in left)])
    return replace(ledger, open=left, returned=tuple(returned))


def _give(ledger: Ledger, update: int, worker: int, version: int) -> tuple[Ledger, Lease]:
    token = ledger.issued + 1
    held = {**ledger.open, update: Holder(worker, token, version)}
    return replace(ledger, open=held, issued=token), Lease(update, token, version)


def _fits(ledger: Ledger, places: int, oldest: int) -> bool:
    """The invariant. For an update that counts in n already, `places` is n; for a fresh one, n + 1."""
    return ledger.bound is None or ledger.completed + max(places, 1) - 1 - oldest <= ledger.bound


def _oldest(ledger: Ledger, otherwise: int) -> int:
    return min((holder.version for holder in ledger.open.values()), default=otherwise)


def _wait(ledger: Ledger, worker: int, base: int, places: int) -> Wait:
    if any(holder.worker == worker for holder in ledger.open.values()):
        return Wait("it has updates itself that are not completed", "push")
    if ledger.fresh == ledger.total:
        return Wait(f"the last {len(ledger.open)} updates are with other workers", "wait")
    oldest = _oldest(ledger, base)
    if base < min(oldest, ledger.completed) and _fits(ledger, places + 1, oldest):
        return Wait(f"its parameters are {ledger.completed - base} updates old: too old to start from", "fetch")
    return Wait(f"an update of version {oldest} is not complete, and would exceed the bound of {ledger.bound}", "wait")


def _bucket(staleness: int) -> int:
    return staleness if staleness < EXACT_BELOW else 1 << (staleness.bit_length() - 1)


# --- the book: which steps are in an update, and where all workers halt -----------------------------------------------


class LeaseTerms(Struct, frozen=True):
    """The run's constants."""

    first: int
    """The steps that were done before this life of the servers began."""
    steps: int
    batches: int = 1
    """Batches of an update, unless the worker asks for another number; gates are at multiples of it."""
    bound: int | None = None
    warm_up: int = 0
    """This many updates are computed one after the other, before several workers compute at once."""
    save_every: int = 0
    """Steps between two checkpoints; 0: checkpoints are taken only on request."""

    def boundary(self, step: int) -> int:
        """The first step from this one on at which an update can end."""
        return min(self.first + -(-(step - self.first) // self.batches) * self.batches, self.steps)


class UpdateBook(Struct, frozen=True):
    terms: LeaseTerms
    ledger: Ledger
    planned: int
    """All steps before this one are in an update that was leased."""
    opened: int
    """Gates up to this step are behind us."""
    gates: list[int] = []
    """Steps beyond which nothing more is leased; sorted."""
    spans: dict[int, tuple[int, int]] = {}
    """Update -> (first step, number of batches), for updates that are leased or wait to be leased again."""
    generation: int = 0
    workers: int = 1
    completed: int = 0
    """Batches of this life."""

    @property
    def done(self) -> int:
        """Steps of the run that are done."""
        return self.terms.first + self.completed

    @property
    def gate(self) -> int:
        """The step at which workers halt next."""
        terms = self.terms
        found = [*self.gates, terms.steps]
        if terms.save_every:
            found.append(terms.boundary((self.opened // terms.save_every + 1) * terms.save_every))
        return min(gate for gate in found if gate > self.opened or gate == terms.steps)


def new_book(terms: LeaseTerms) -> UpdateBook:
    return UpdateBook(terms, Ledger(0, terms.bound), terms.first, terms.first)


def request_lease(book: UpdateBook, ask: RequestLease) -> tuple[UpdateBook, LeasedUpdate | NoLease | AtGate]:
    """Lease an update to the worker, or tell it why there is none."""
    terms, gate = book.terms, book.gate
    bound = 0 if book.ledger.completed < terms.warm_up else terms.bound
    # A worker that asks computes nothing: it has forgotten the update that the ledger says it has.
    ledger = lost(book.ledger, ask.worker)
    limited = replace(ledger, total=ledger.fresh + (book.planned < gate), bound=bound)
    limited, found = lease(limited, ask.worker, ask.version if ask.version >= 0 else None)
    book = replace(book, ledger=replace(limited, bound=terms.bound))
    completed = book.ledger.completed
    match found:
        case Lease():
            if found.update not in book.spans:
                book = _planned(book, found.update, ask.batches)
            return book, LeasedUpdate(found.update, found.token, *book.spans[found.update], completed)
        case Wait():
            return book, NoLease(found.reason, found.todo == "fetch", completed)
        case Done():
            return book, AtGate(gate, gate == terms.steps, completed)


def _planned(book: UpdateBook, update: int, wanted: int) -> UpdateBook:
    """Choose the steps of an update. They stay with its number: some slices may have it when it is leased again."""
    left = book.gate - book.planned
    batches = min(wanted or book.terms.batches, left)
    if wanted:  # the last updates before a halt are small, so that no worker waits long for the others
        batches = min(batches, -(-left // book.workers))
    return replace(book, spans={**book.spans, update: (book.planned, batches)}, planned=book.planned + batches)


def complete_update(book: UpdateBook, done: CompleteUpdate) -> tuple[UpdateBook, list[Completion]]:
    """Returns the batches that are completed with the update. None are, if the update counts already."""
    ledger, counts = complete(book.ledger, done.update, done.token)
    if not counts:
        return book, []
    staleness = book.ledger.completed - book.ledger.open[done.update].version
    news = [
        Completion(step, loss, samples, done.worker, staleness, done.at)
        for step, (loss, samples) in enumerate(zip(done.losses, done.samples, strict=True), book.done)
    ]
    spans = {update: span for update, span in book.spans.items() if update != done.update}
    return replace(book, ledger=ledger, spans=spans, completed=book.completed + len(news)), news


def set_members(book: UpdateBook, generation: int, workers: Collection[int]) -> UpdateBook:
    """A generation begins: updates of workers that are not its members are leased again."""
    if generation <= book.generation:
        return book
    ledger = book.ledger
    for worker in sorted({holder.worker for holder in ledger.open.values()} - set(workers)):
        ledger = lost(ledger, worker)
    return replace(book, ledger=ledger, generation=generation, workers=len(workers))


def set_gate(book: UpdateBook, step: int) -> UpdateBook:
    """Halt all workers at this step, or, if later steps are leased already, where the last of these updates ends."""
    gate = book.terms.boundary(max(step, book.planned, book.opened + 1))
    return replace(book, gates=sorted({*book.gates, gate}))


def open_gate(book: UpdateBook, step: int) -> UpdateBook:
    """The work at this step's gate is done: workers may continue."""
    opened = max(book.opened, book.terms.boundary(step))
    return replace(book, opened=opened, gates=[gate for gate in book.gates if gate > opened])

"""Which worker computes which batch, when nobody waits for a common step: leases, with tokens that fence.

Whoever asks gets the next batch, so faster workers do more. What a dead worker had is leased again first, under a
higher token; what a silent one has may be leased a second time, and the first completion wins. Every batch completes
once.

The bound on staleness. An update's staleness is the number of updates completed between the version of the parameters
that it was computed with and its own completion. Let C be the number completed, n the batches that are leased or wait
to be leased again, and v the oldest version of a valid lease. The ledger keeps

    C + n - 1 - v <= s

by not leasing what would break it. If all the others complete before the oldest one, its staleness is the left side,
so it is at most s in any order. A completion adds 1 to C and takes 1 from n: nothing that was leased is ever held
back or thrown away. A smaller count would not do: any of the n may complete at any time, and none can be refused
without losing its work. A batch of a dead worker keeps its place in n (some slices may already have its change), so
leasing it again is always allowed, and no death stops the others. For the same reason the bound holds on every slice,
whose changes come before their completion.

What s means for N workers: 0 is one lease at a time; N - 1 lets all compute at once, in rounds that wait for the
slowest; with 2 (N - 1) equal workers never wait, with (f + 1) (N - 1) not even for one that is f times slower.

Pure: time arrives as data, a new state is a new value, and the state grows with the open leases, not with the batches.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from distbelief.errors import DistBeliefError, JobError
from distbelief.strategies.ps.rules.applied import NumberSet

EXACT_BELOW: Final = 64
"""Staleness from here on is counted by powers of two, so that the histogram stays small."""


class Lease(Struct, frozen=True, tag=True):
    batch: int
    token: int
    version: int
    """How many updates are in the parameters that it is computed with."""


class Wait(Struct, frozen=True, tag=True):
    reason: str
    todo: Literal["wait", "fetch", "push"]
    """What helps: waiting for others, fetching newer parameters, or pushing what the worker itself has leased."""


class Done(Struct, frozen=True, tag=True):
    """Every batch is completed."""


class Holder(Struct, frozen=True):
    """One valid lease of a batch."""

    worker: int
    token: int
    version: int
    seen: float
    """When it was leased, or its worker was last heard of."""


class Ledger(Struct, frozen=True):
    total: int
    bound: int | None = None
    """The staleness that no update exceeds; None: any."""
    silence_s: float | None = None
    """A lease whose worker was not heard of for so long may be leased to another as well; None: never."""
    fresh: int = 0
    """The first batch that was never leased."""
    open: dict[int, tuple[Holder, ...]] = {}
    returned: tuple[int, ...] = ()
    """Batches to lease again, lowest first."""
    done: NumberSet = NumberSet()
    issued: int = 0
    """The highest token given."""
    staleness: dict[int, int] = {}
    """How many updates had which staleness; from EXACT_BELOW on, under the power of two at or below it."""

    def __post_init__(self) -> None:
        if self.total < 0:
            raise JobError(f"{self.total} batches cannot be leased", hint="Give a number of at least 0.")
        if self.bound is not None and self.bound < 0:
            raise JobError(f"the bound on staleness is {self.bound}", hint="Give 0 or more, or leave it out for none.")

    @property
    def completed(self) -> int:
        """How many updates are complete: the version of the parameters."""
        return self.done.count

    @property
    def watermark(self) -> int:
        """All batches below this one are complete."""
        return self.done.below

    @property
    def stalest(self) -> int:
        """The highest staleness measured, or the power of two at or below it."""
        return max(self.staleness, default=0)


def lease(ledger: Ledger, worker: int, now: float, version: int | None = None) -> tuple[Ledger, Lease | Wait | Done]:
    """Give the worker a batch. `version` is that of the parameters it has; None: it fetches them after this.

    >>> ledger, first = lease(Ledger(total=9, bound=0), worker=1, now=0.0)
    >>> first
    Lease(batch=0, token=1, version=0)
    >>> lease(ledger, worker=2, now=0.0)[1].todo
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
        batch, *rest = ledger.returned
        return _give(replace(ledger, returned=tuple(rest)), batch, worker, base, now)
    if ledger.fresh < ledger.total and _fits(ledger, places + 1, min(base, _oldest(ledger, base))):
        return _give(replace(ledger, fresh=ledger.fresh + 1), ledger.fresh, worker, base, now)
    silent = _silent(ledger, worker, now)
    if silent is not None:
        return _give(ledger, silent, worker, base, now)
    return ledger, _wait(ledger, worker, base, places)


def complete(ledger: Ledger, batch: int, token: int) -> tuple[Ledger, bool]:
    """A worker says that its update is applied everywhere. False: the token is not valid any more, nothing changes."""
    holder = next((holder for holder in ledger.open.get(batch, ()) if holder.token == token), None)
    if holder is None:
        return ledger, False
    stale = _bucket(ledger.completed - holder.version)
    others = {number: holders for number, holders in ledger.open.items() if number != batch}
    counts = {**ledger.staleness, stale: ledger.staleness.get(stale, 0) + 1}
    return replace(ledger, open=others, done=ledger.done.add(batch), staleness=counts), True


def heard(ledger: Ledger, worker: int, now: float) -> Ledger:
    """A sign of life: the worker's leases are not silent."""
    if all(holder.worker != worker for holders in ledger.open.values() for holder in holders):
        return ledger
    heard_of = {
        batch: tuple(replace(h, seen=max(h.seen, now)) if h.worker == worker else h for h in holders)
        for batch, holders in ledger.open.items()
    }
    return replace(ledger, open=heard_of)


def lost(ledger: Ledger, worker: int) -> Ledger:
    """The worker is dead or has left: its tokens are refused now, and what only it had is leased again first."""
    left = {
        batch: tuple(holder for holder in holders if holder.worker != worker) for batch, holders in ledger.open.items()
    }
    returned = sorted([*ledger.returned, *(batch for batch, holders in left.items() if not holders)])
    return replace(
        ledger, open={batch: holders for batch, holders in left.items() if holders}, returned=tuple(returned)
    )


def restarted(ledger: Ledger, tokens_above: int) -> Ledger:
    """The ledger of a checkpoint, for a run that goes on from it: nobody has anything, and no old token is ever valid.

    `tokens_above` is the highest token that may have been given since that checkpoint, or anything higher, such as the
    number of the restart times 2**40.
    """
    returned = sorted([*ledger.returned, *ledger.open])
    return replace(ledger, open={}, returned=tuple(returned), issued=max(ledger.issued, tokens_above))


def _give(ledger: Ledger, batch: int, worker: int, version: int, now: float) -> tuple[Ledger, Lease]:
    token = ledger.issued + 1
    holders = (*ledger.open.get(batch, ()), Holder(worker, token, version, now))
    return replace(ledger, open={**ledger.open, batch: holders}, issued=token), Lease(batch, token, version)


def _fits(ledger: Ledger, places: int, oldest: int) -> bool:
    """The invariant. A batch that has its place already is asked for with `places` as they are."""
    return ledger.bound is None or ledger.completed + max(places, 1) - 1 - oldest <= ledger.bound


def _oldest(ledger: Ledger, otherwise: int) -> int:
    return min((holder.version for holders in ledger.open.values() for holder in holders), default=otherwise)


def _silent(ledger: Ledger, worker: int, now: float) -> int | None:
    """The batch whose holders have all been silent for too long, the longest; never one that the worker itself has."""
    if ledger.silence_s is None:
        return None
    since = {
        batch: max(holder.seen for holder in holders)
        for batch, holders in ledger.open.items()
        if all(holder.worker != worker for holder in holders)
    }
    overdue = [batch for batch, seen in since.items() if now - seen >= ledger.silence_s]
    return min(overdue, key=lambda batch: (since[batch], batch), default=None)


def _wait(ledger: Ledger, worker: int, base: int, places: int) -> Wait:
    if any(holder.worker == worker for holders in ledger.open.values() for holder in holders):
        return Wait("it has batches itself that are not completed", "push")
    if ledger.fresh == ledger.total:
        return Wait(f"the last {len(ledger.open)} batches are with other workers", "wait")
    oldest = _oldest(ledger, base)
    if base < min(oldest, ledger.completed) and _fits(ledger, places + 1, oldest):
        return Wait(f"its parameters are {ledger.completed - base} updates old: too old to start from", "fetch")
    return Wait(f"an update of version {oldest} is not complete, and would exceed the bound of {ledger.bound}", "wait")


def _bucket(staleness: int) -> int:
    return staleness if staleness < EXACT_BELOW else 1 << (staleness.bit_length() - 1)

"""A model of workers that compute, push to slices, and die; every step is checked against the ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from distbelief.strategies.ps.rules.leases import Done, Lease, Ledger, Wait, complete, lease, lost

SLICES = 3


@dataclass
class Held:
    """A lease as its worker knows it. `read` is what each slice had applied when the worker fetched it."""

    worker: int
    lease: Lease
    read: list[int]


@dataclass
class World:
    ledger: Ledger
    valid: list[Held] = field(default_factory=list)
    fenced: list[Held] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    """Updates in the order in which their completion was accepted."""
    slices: list[list[int]] = field(default_factory=lambda: [[] for _ in range(SLICES)])
    """The names that each slice has applied, in order."""
    stale: list[int] = field(default_factory=list)
    tokens: set[int] = field(default_factory=set)

    def ask(self, worker: int, version: int | None = None) -> Lease | Wait | Done:
        self.ledger, answer = lease(self.ledger, worker, version)
        if isinstance(answer, Lease):
            assert answer.token not in self.tokens
            assert answer.token > max(self.tokens, default=0), "tokens only rise"
            assert answer.update not in self.order
            assert answer.version == (len(self.order) if version is None else version)
            self.tokens.add(answer.token)
            self.valid.append(Held(worker, answer, [len(names) for names in self.slices]))
        return answer

    def push(self, held: Held, number: int) -> None:
        """Apply the update to one slice, once, as servers do by its name."""
        names = self.slices[number]
        if held.lease.update in names:
            return
        if held in self.valid and self.ledger.bound is not None:
            between = len(names) - held.read[number]
            assert between <= self.ledger.bound, "also on every single slice, whose changes come before completions"
        names.append(held.lease.update)

    def finish(self, held: Held) -> None:
        for number in range(SLICES):
            self.push(held, number)
        expected = held in self.valid
        before = len(self.order)
        self.ledger, accepted = complete(self.ledger, held.lease.update, held.lease.token)
        assert accepted == expected
        if not accepted:
            self.fenced.remove(held)
            return
        self.stale.append(before - held.lease.version)
        assert self.ledger.bound is None or self.stale[-1] <= self.ledger.bound
        self.order.append(held.lease.update)
        self.valid.remove(held)
        self._fence(lambda other: other.lease.update == held.lease.update)
        self.ledger, twice = complete(self.ledger, held.lease.update, held.lease.token)
        assert not twice

    def die(self, worker: int) -> None:
        self.ledger = lost(self.ledger, worker)
        self._fence(lambda held: held.worker == worker)

    def _fence(self, which: Callable[[Held], bool]) -> None:
        self.fenced += [held for held in self.valid if which(held)]
        self.valid = [held for held in self.valid if not which(held)]

    def check(self) -> None:
        ledger = self.ledger
        assert ledger.completed == len(self.order) == len(set(self.order))
        assert all(update in self.order for update in range(ledger.done.below))
        assert ledger.done.below not in self.order
        assert sum(ledger.staleness.values()) == len(self.order)
        assert max(ledger.staleness, default=0) == max(self.stale, default=0)
        assert {(held.lease.update, held.lease.token) for held in self.valid} == {
            (update, holder.token) for update, holder in ledger.open.items()
        }

    def drain(self, worker: int) -> None:
        """One worker that lives and answers is enough to come to the end."""
        for _ in range(10 * self.ledger.total + 10):
            answer = self.ask(worker)
            if isinstance(answer, Done):
                assert sorted(self.order) == list(range(self.ledger.total))
                assert all(sorted(names) == sorted(self.order) for names in self.slices)
                return
            mine = [held for held in self.valid if held.worker == worker]
            assert mine, f"nothing to compute and nothing to push: {answer}"
            self.finish(mine[0])
        raise AssertionError("it does not end")

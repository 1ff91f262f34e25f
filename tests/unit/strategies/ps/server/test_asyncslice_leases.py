"""The ledger as a replicated slice: what a worker is given, gates, and copies."""

from __future__ import annotations

from distbelief.strategies.ps.protocol.messages import (
    AtGate,
    CompleteUpdate,
    Inspect,
    LeasedUpdate,
    Members,
    NoLease,
    Note,
    OpenGate,
    RequestLease,
    SetGate,
)
from distbelief.strategies.ps.rules.leases import LeaseTerms
from distbelief.strategies.ps.server.asyncslice import LeaseSlice
from distbelief.strategies.ps.server.stores import Change


class Table:
    """A ledger and what workers do to it."""

    def __init__(self, **terms: int) -> None:
        self.slice = LeaseSlice(LeaseTerms(**{"first": 0, "steps": 10, **terms}))

    def ask(self, worker: int, version: int = -1, known: int = 0, batches: int = 0) -> LeasedUpdate | NoLease | AtGate:
        self.slice.apply(Change(RequestLease(worker, version, known, batches)))
        given = self.slice.given(worker)
        assert given is not None
        return given.what

    def lease(self, worker: int, batches: int = 0) -> LeasedUpdate:
        found = self.ask(worker, batches=batches)
        assert isinstance(found, LeasedUpdate), found
        return found

    def complete(self, worker: int, lease: LeasedUpdate) -> None:
        losses = [float(lease.step + number) for number in range(lease.batches)]
        self.slice.apply(Change(CompleteUpdate(lease.update, lease.token, worker, losses, [4] * lease.batches, at=1.0)))

    def do(self, worker: int) -> LeasedUpdate:
        lease = self.lease(worker)
        self.complete(worker, lease)
        return lease


def test_every_update_is_given_once_and_the_end_is_told_to_all() -> None:
    table = Table(steps=6, batches=2)
    given = [table.do(worker) for worker in (1, 2, 1)]
    assert [(lease.step, lease.batches) for lease in given] == [(0, 2), (2, 2), (4, 2)]
    assert table.ask(1) == table.ask(2) == AtGate(6, last=True, completed=3)


def test_the_last_update_may_be_shorter() -> None:
    table = Table(steps=5, batches=2)
    assert [table.do(1).batches for _ in range(3)] == [2, 2, 1]
    assert table.ask(1) == AtGate(5, last=True, completed=3)


def test_a_request_returns_the_completions_since_the_last_one() -> None:
    table = Table()
    for worker in (1, 2, 3):
        table.do(worker)
    table.ask(1, known=1)
    given = table.slice.given(1)
    assert given is not None
    assert [(one.step, one.worker, one.loss) for one in given.news] == [(1, 2, 1.0), (2, 3, 2.0)]
    assert given.done == 3
    assert given.staleness == {0: 3}


def test_what_a_worker_has_forgotten_it_is_given_again() -> None:
    table = Table()
    forgotten = table.lease(1)
    again = table.lease(1)
    assert again.update == forgotten.update
    assert again.token > forgotten.token
    table.complete(1, forgotten)  # too late: its token is not valid any more
    assert table.ask(2) != AtGate(10, True, 0)
    assert table.slice.version == 0
    table.complete(1, again)
    assert table.slice.version == 1


def test_what_a_dead_worker_had_is_leased_first() -> None:
    table = Table()
    dead = table.lease(1)
    table.lease(2)
    table.slice.apply(Change(Members(generation=2, workers=[2, 3])))
    assert table.lease(3).update == dead.update
    table.slice.apply(Change(Members(generation=1, workers=[])))  # an older one that was late: nobody is dismissed
    table.complete(1, dead)
    assert table.slice.version == 0


def test_at_a_gate_all_come_to_a_halt_after_exactly_so_many_steps() -> None:
    table = Table()
    open_lease = table.lease(1)
    table.slice.apply(Change(SetGate(3)))
    table.do(2)
    table.do(2)
    assert isinstance(table.ask(2), NoLease)  # worker 1 is not done
    table.complete(1, open_lease)
    assert table.ask(1) == table.ask(2) == AtGate(3, last=False, completed=3)
    table.slice.apply(Change(OpenGate(3)))
    assert table.lease(1).step == 3


def test_a_gate_that_comes_too_late_is_the_next_that_can_be_and_holds_up_once() -> None:
    table = Table()
    for _ in range(5):
        table.do(1)
    table.slice.apply(Change(SetGate(2)))
    assert table.ask(1) == AtGate(5, last=False, completed=5)
    table.slice.apply(Change(OpenGate(5)))
    assert table.lease(1).step == 5
    assert table.lease(2).step == 6


def test_a_gate_between_two_updates_is_at_the_later_one() -> None:
    table = Table(batches=2)
    table.slice.apply(Change(SetGate(3)))
    table.do(1)
    table.do(1)
    assert table.ask(1) == AtGate(4, last=False, completed=2)


def test_there_is_a_gate_wherever_a_checkpoint_is_due() -> None:
    table = Table(first=3, steps=12, save_every=5)
    halts = []
    for _ in range(20):
        found = table.ask(1)
        if isinstance(found, AtGate):
            halts.append(found.step)
            if found.last:
                break
            table.slice.apply(Change(OpenGate(found.step)))
        else:
            assert isinstance(found, LeasedUpdate)
            table.complete(1, found)
    assert halts == [5, 10, 12]


def test_the_bound_on_staleness_holds_others_back_until_the_oldest_is_done() -> None:
    table = Table(bound=1)
    oldest = table.lease(1)
    table.do(2)
    assert isinstance(table.ask(2), NoLease)
    table.complete(1, oldest)
    assert isinstance(table.ask(2), LeasedUpdate)


def test_a_warm_start_has_one_update_at_a_time() -> None:
    table = Table(warm_up=2)
    first = table.lease(1)
    assert isinstance(table.ask(2), NoLease)
    table.complete(1, first)
    table.do(2)
    table.lease(1)
    assert isinstance(table.ask(2), LeasedUpdate)


def test_a_copy_goes_on_as_the_original_does() -> None:
    table = Table(steps=8, bound=3)
    table.slice.apply(Change(Note(0, b"note")))
    table.do(1)
    open_lease = table.lease(2)
    other = Table()
    other.slice.load(table.slice.state())
    for one in (table, other):
        one.do(1)
        one.complete(2, open_lease)
        one.slice.apply(Change(SetGate(6)))
    assert table.slice.state()[0] == other.slice.state()[0]
    assert table.ask(3) == other.ask(3)
    looked = other.slice.reply(Inspect(7, 4), "", True, True)
    assert looked is not None
    assert looked.message.note == (0, b"note")
    assert looked.message.version == 3


def test_a_worker_asks_for_a_number_of_batches_and_gates_cut_it_short() -> None:
    table = Table(steps=30, save_every=10)
    table.slice.apply(Change(Members(generation=1, workers=[1, 2])))
    spans = []
    while True:
        for worker, wanted in ((1, 8), (2, 1)):
            found = table.ask(worker, batches=wanted)
            if isinstance(found, LeasedUpdate):
                table.complete(worker, found)
                spans.append((found.step, found.batches))
        if isinstance(found, AtGate):
            assert found.step == sum(batches for _, batches in spans) == spans[-1][0] + spans[-1][1]
            if found.last:
                break
            table.slice.apply(Change(OpenGate(found.step)))
    assert [step for step, _ in spans] == [sum(batches for _, batches in spans[:n]) for n in range(len(spans))]
    assert spans[:5] == [(0, 5), (5, 1), (6, 2), (8, 1), (9, 1)]  # the last ones before a halt are small
    assert {0, 10, 20} <= {step for step, _ in spans}


def test_an_update_keeps_its_batches_when_another_worker_gets_it() -> None:
    """Some slices may have it already."""
    table = Table(steps=100)
    dead = table.lease(1, batches=8)
    table.slice.apply(Change(Members(generation=2, workers=[2, 3])))
    again = table.lease(2, batches=1)
    assert (again.update, again.step, again.batches) == (dead.update, 0, 8)
    assert (table.lease(3, batches=2).step, table.lease(3, batches=2).batches) == (8, 2)


def test_a_gate_among_leased_updates_is_behind_them() -> None:
    table = Table(steps=100)
    lease = table.lease(1, batches=8)
    table.slice.apply(Change(SetGate(3)))
    assert isinstance(table.ask(2), NoLease)
    table.complete(1, lease)
    assert table.ask(2) == AtGate(8, last=False, completed=1)

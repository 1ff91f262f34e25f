"""Parts of tables take what shards say in any order, from anybody, several times; a step is applied once."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from distbelief.errors import DistBeliefError
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import ApplyStep, Inspect, MeasureStep, ReadState
from distbelief.strategies.ps.server.stores import Change
from distbelief.strategies.ps.tables.messages import CountRows, PullRows
from distbelief.strategies.ps.tables.slices import SynchronousTableSlice
from distbelief.strategies.tables.rowgradients import RowGradients
from tests.support.ps.tableparts import PARTS, SHARDS, Kit

STEPS = 6


@pytest.fixture(scope="module")
def kit() -> Kit:
    return Kit()


def answered(store: SynchronousTableSlice, question: object) -> Framed | None:
    return store.reply(question, "", everywhere=True, caught_up=True)  # type: ignore[arg-type]


def shards_of(kit: Kit, stores: list[SynchronousTableSlice], step: int) -> dict[int, list[RowGradients]]:
    occupied = range(kit.schedule.occupied(step))
    return {s: kit.found_out(step, s, kit.pulled(stores, kit.wanted(step, s))) for s in occupied}


def go(kit: Kit, stores: list[SynchronousTableSlice], step: int) -> None:
    factor = kit.factor([store._measured[1] for store in stores])
    for store in stores:
        store.apply(Change(ApplyStep(step, factor)))


@pytest.mark.parametrize("seed", range(5))
def test_any_messages_in_any_order_give_the_same_bits(kit: Kit, seed: int) -> None:
    """Shards in groups of any size, some twice, and now and then a store is copied in the middle of a step."""
    chance = random.Random(seed)
    stores = [kit.store() for _ in range(PARTS)]
    assert kit.contents(stores) == kit.history(STEPS)[0]
    for step in range(STEPS):
        found = shards_of(kit, stores, step)
        left = [*found, *chance.choices(list(found), k=2)]
        chance.shuffle(left)
        while left:
            some = [left.pop() for _ in range(min(chance.randint(1, 3), len(left)))]
            some = list(dict.fromkeys(some))
            for part, change in enumerate(kit.changes(step, some, [found[shard] for shard in some])):
                stores[part].apply(change)
                if chance.random() < 0.2:
                    copy = kit.store()
                    copy.load(stores[part].state())
                    stores[part] = copy
        go(kit, stores, step)
        for part, change in enumerate(kit.changes(step, [0], [found[0]])):
            stores[part].apply(change)  # too late: it changes nothing
        assert kit.contents(stores) == kit.history(STEPS)[step + 1]


def test_a_step_is_not_applied_before_all_shards_are_there_and_it_is_told_to(kit: Kit) -> None:
    store = kit.store()
    found = shards_of(kit, [store] * PARTS, 0)
    store.apply(kit.changes(0, [0, 1, 2, 3], [found[s] for s in range(4)])[3])
    assert answered(store, MeasureStep(1, 3, 0)) is None
    looked = answered(store, Inspect(2, 3))
    assert looked is not None
    assert looked.message.nodes == [(s, s + 1) for s in range(4)]
    store.apply(kit.changes(0, [4], [found[4]])[3])
    assert store.version == 0
    assert answered(store, MeasureStep(1, 3, 0)) is not None
    store.apply(Change(ApplyStep(0, 1.0)))
    assert store.version == 1


def test_rows_of_another_step_are_not_given(kit: Kit) -> None:
    """Neither those of the next one, nor those of before."""
    store = kit.store()
    rows = np.array([1, 2, 3]).tobytes()
    questions = [PullRows(1, 0, 1, 1, rows), CountRows(2, 0, 1), ReadState(3, 0, 1)]
    assert [answered(store, question) for question in questions] == [None] * 3
    found = shards_of(kit, [store] * PARTS, 0)
    store.apply(kit.changes(0, list(found), list(found.values()))[0])
    store.apply(Change(ApplyStep(0, 1.0)))
    now = [answered(store, question) for question in questions]
    assert [framed.message.version for framed in now if framed] == [1, 1, 1]
    late = [
        answered(store, question) for question in (PullRows(1, 0, 0, 1, rows), CountRows(2, 0, 0), ReadState(3, 0, 0))
    ]
    assert [(framed.message.version, framed.payload) for framed in late if framed] == [(-1, None)] * 3


def test_a_loss_that_is_no_number_is_not_applied(kit: Kit) -> None:
    store = kit.store()
    found = shards_of(kit, [store] * PARTS, 0)
    (change, *_) = kit.changes(0, list(found), list(found.values()))
    told = np.frombuffer(change.content.told).copy()  # type: ignore[union-attr]
    told[0] = np.nan
    content = type(change.content)(0, list(found), change.content.counts, told.tobytes())  # type: ignore[union-attr]
    store.apply(Change(content, change.payload))
    assert answered(store, MeasureStep(1, 0, 0)) is not None  # who asks hears at once, and sees the reason elsewhere
    store.apply(Change(ApplyStep(0, 1.0)))
    assert store.version == 0


def test_wrong_messages_are_refused(kit: Kit) -> None:
    store = kit.store()
    found = shards_of(kit, [store] * PARTS, 0)
    (change, *_) = kit.changes(0, [0], [found[0]])
    with pytest.raises(DistBeliefError, match="bytes"):
        store.apply(Change(change.content, bytes(change.payload) + b"x"))
    (change, *_) = kit.changes(0, [SHARDS], [found[0]]) if False else kit.changes(0, [0], [found[0]])
    content = type(change.content)(0, [SHARDS], change.content.counts, change.content.told)  # type: ignore[union-attr]
    with pytest.raises(DistBeliefError, match="no shard"):
        store.apply(Change(content, change.payload))


def test_updates_are_applied_as_they_come_and_a_copy_goes_on_with_the_same_bits(kit: Kit) -> None:
    one, other = ([kit.free() for _ in range(PARTS)] for _ in range(2))
    for number in range(8):
        found = kit.found_out(number, number % SHARDS, kit.pulled(one, kit.wanted(number, number % SHARDS)))
        for part, change in enumerate(kit.update(number, number, found)):
            one[part].apply(change)
            if number == 4:
                other[part].load(one[part].state())
            elif number > 4:
                other[part].apply(change)
    assert kit.contents(one) == kit.contents(other)
    assert {store.version for store in (*one, *other)} == {8}


def test_the_schedule_and_the_rate_are_the_jobs(kit: Kit) -> None:
    """The first step of Adagrad moves by the rate, whatever the gradient is."""
    store = kit.free()
    rows = np.array([5])
    before = store.tables[1].pull(torch.from_numpy(rows)).clone()
    found = [
        RowGradients(np.zeros(0, np.int64), np.zeros((0, 3), np.float32)),
        RowGradients(rows, np.ones((1, 2), "f")),
    ]
    for part, change in enumerate(kit.update(0, 3, found)):
        if change.content.counts[1]:  # type: ignore[union-attr]
            store.apply(change)
            assert part >= 0
    moved = before - store.tables[1].pull(torch.from_numpy(rows))
    assert moved.tolist()[0] == pytest.approx([0.05 / 4, 0.05 / 4])

"""A slice takes partial sums in any order, from anybody, several times: a step is applied once, with the same bits."""

from __future__ import annotations

import random

import numpy as np
import pytest

from distbelief.errors import DistBeliefError
from distbelief.shards import Range, split
from distbelief.strategies.ps.protocol.messages import ApplyStep, Note, PartialSum
from distbelief.strategies.ps.server.syncslice import Change, SynchronousSlice
from distbelief.transport.exchange import ROW
from distbelief.transport.shm.segment import Segment
from tests.support.ps.parts import SHARDS, Kit

STEPS = 5  # the last one fills two shards of five


@pytest.fixture(scope="module")
def kit() -> Kit:
    return Kit()


def tree(node: Range = (0, SHARDS)) -> list[Range]:
    """All nodes of the tree over the shards."""
    if node[1] - node[0] == 1:
        return [node]
    left, right = split(node)
    return [node, *tree(left), *tree(right)]


def any_nodes(chance: random.Random) -> list[Range]:
    """Any cover of all shards by nodes, with some that it contains, some twice, in any order."""

    def visit(node: Range) -> list[Range]:
        if node[1] - node[0] == 1 or chance.random() < 0.3:
            return [node]
        left, right = split(node)
        return [*visit(left), *visit(right)]

    found = visit((0, SHARDS)) + chance.sample(tree()[1:], 3)
    chance.shuffle(found)
    return found


def go(kit: Kit, stores: list[SynchronousSlice], step: int) -> Change:
    return Change(ApplyStep(step, kit.factor([store.measured[1] for store in stores])))


def test_any_nodes_in_any_order_give_the_same_bits(kit: Kit) -> None:
    expected = kit.history(STEPS)
    chance = random.Random(1)
    for _ in range(10):
        stores = [kit.store(number) for number in range(len(kit.shapes))]
        for step in range(STEPS):
            for number, store in enumerate(stores):
                for node in any_nodes(chance):
                    store.apply(kit.change(number, expected[step], step, node))
                assert store.measured[0] == step
            change = go(kit, stores, step)
            for store in stores:
                store.apply(change)
                store.apply(change)  # twice
            assert kit.values(stores) == expected[step + 1]
            assert [store.version for store in stores] == [step + 1] * len(stores)


def test_changes_of_other_steps_change_nothing(kit: Kit) -> None:
    expected = kit.history(STEPS)
    store = kit.store(0)
    before = bytes(store.memory.contents().numpy())
    store.apply(kit.change(0, expected[0], 1, (0, SHARDS)))
    store.apply(Change(ApplyStep(1, 1.0)))
    store.apply(Change(ApplyStep(0, 1.0)))  # it is not complete: it waits for its sums
    assert (store.version, store.nodes(), bytes(store.memory.contents().numpy())) == (0, [], before)


def test_a_copy_in_the_middle_of_a_step_goes_on_with_the_same_bits(kit: Kit) -> None:
    """Of each slice, after every change; the copy has none of the original's memory."""
    expected = kit.history(2)
    stores = [kit.store(number) for number in range(len(kit.shapes))]
    for step in range(2):
        for number, store in enumerate(stores):
            for node in ((4, 5), (0, 2), (2, 4)):
                store.apply(kit.change(number, expected[step], step, node))
                store.apply(Change(Note(step, b"a note")))
                about, content = store.state()
                other = kit.store(number, first=False)
                other.load((about, content.clone()))
                content.zero_()
                assert (other.nodes(), other.note, other.version) == (store.nodes(), (step, b"a note"), step)
                stores[number] = store = other
        change = go(kit, stores, step)
        for number, store in enumerate(stores):
            store.apply(change)
            other = kit.store(number, first=False)
            other.load(store.state())
            assert (other.measured, other.integers) == (store.measured, b"after %d" % step)
            assert [one.step for one in other.past] == ([*range(step + 1)] if number == 0 else [])
            stores[number] = other
        assert kit.values(stores) == expected[step + 1]


def test_a_copy_between_the_order_and_the_last_sum(kit: Kit) -> None:
    expected = kit.history(1)
    stores = [kit.store(number) for number in range(len(kit.shapes))]
    for number, store in enumerate(stores):
        store.apply(kit.change(number, expected[0], 0, (0, SHARDS)))
    change = go(kit, stores, 0)
    late = kit.store(0)
    late.apply(change)
    other = kit.store(0, first=False)
    other.load(late.state())
    other.apply(kit.change(0, expected[0], 0, (0, SHARDS)))
    shape = kit.shapes[0]
    assert bytes(other.memory.value_view()) == expected[1][shape.first_byte : shape.end_byte]


def test_an_unsound_loss_is_not_applied(kit: Kit) -> None:
    expected = kit.history(1)
    store = kit.store(0)
    before = bytes(store.memory.contents().numpy())
    change = kit.change(0, expected[0], 0, (0, SHARDS))
    assert isinstance(change.content, PartialSum)
    rows = np.frombuffer(change.content.rows).reshape(-1, ROW).copy()
    rows[3, 0] = np.nan
    bad = PartialSum(0, 0, SHARDS, rows.tobytes(), change.content.touched)
    store.apply(Change(bad, change.payload))
    store.apply(Change(ApplyStep(0, 1.0)))
    assert (store.version, store.unsound) == (0, True)
    assert store.rows(1) == rows.tobytes()  # the workers see for themselves
    assert bytes(store.memory.contents().numpy()) == before


def test_sums_that_do_not_fit_are_refused(kit: Kit) -> None:
    store, fit = kit.store(0), kit.node(0, (0, SHARDS))
    with pytest.raises(DistBeliefError, match="slice 0 has"):
        store.apply(Change(fit, bytearray(8)))
    for first, end in ((0, SHARDS + 1), (3, 3), (-1, 2)):
        with pytest.raises(DistBeliefError, match="there are no shards"):
            store.apply(Change(PartialSum(0, first, end, fit.rows, fit.touched), bytearray(8)))


def test_a_change_keeps_its_bytes(kit: Kit) -> None:
    """For somebody who reads it when the worker has gone on."""
    memory = Segment.private(kit.layout.size_bytes)
    store = kit.store(1, opened={"slot": memory}.__getitem__)
    shape = kit.shapes[1]
    memory.view(shape.first_byte, shape.value_bytes)[:] = bytes([7]) * shape.value_bytes
    kept = store.with_bytes(Change(kit.node(0, (0, 2), "slot")))
    memory.view(shape.first_byte, shape.value_bytes)[:] = bytes(shape.value_bytes)
    assert (kept.content, bytes(kept.payload)) == (kit.node(0, (0, 2)), bytes([7]) * shape.value_bytes)
    late = Change(kit.node(3, (0, 2), "slot"))
    assert store.with_bytes(late) is late  # nobody will read it

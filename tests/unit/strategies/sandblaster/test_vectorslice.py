"""A slice of vectors: commands in their order, sums in the tree's, and copies that are the same in everything."""

from __future__ import annotations

import random

import pytest
import torch

from distbelief.errors import DistBeliefError
from distbelief.shards import Range, split
from distbelief.strategies.base import nothing_saved
from distbelief.strategies.ps.protocol.messages import VALUES_AT, Inspect, PartialSum, PulledValues, PullValues
from distbelief.strategies.ps.server.stores import Change
from distbelief.strategies.sandblaster.messages import (
    Combine,
    Command,
    Copy,
    Do,
    Drop,
    Finish,
    Produced,
    Products,
    ReadVectors,
    Show,
    first_number,
)
from distbelief.strategies.sandblaster.slices import SliceMaker, VectorSlice
from distbelief.transport.shm.segment import Segment
from tests.support.ps.searchworld import Kit

FIRST = first_number(3)


@pytest.fixture(scope="module")
def kit() -> Kit:
    return Kit(1)


def unmapped(name: str) -> Segment:
    raise AssertionError(f"nobody may open {name} here")


def made(kit: Kit, number: int = 0, first: bool = True) -> VectorSlice:
    shape = kit.shapes[number]
    stores = SliceMaker(kit.prepared(), kit.schedule.shards, unmapped)
    return stores.slice(shape, Segment.private(VALUES_AT + shape.value_bytes), nothing_saved if first else None)


def do(store: VectorSlice, number: int, *commands: Command) -> None:
    store.apply(Change(Do(number, list(commands))))


def products(store: VectorSlice, asked: Products) -> Produced | None:
    letter = store.reply(asked, "", True, True)
    return letter.message if letter else None


def shown(store: VectorSlice, version: int) -> bytes | None:
    letter = store.reply(PullValues(1, 0, version, inline=True), "", True, True)
    assert letter is None or isinstance(letter.message, PulledValues)
    return letter.payload if letter else None


def test_commands_are_performed_in_the_order_of_their_numbers(kit: Kit) -> None:
    straight, crossed = made(kit), made(kit)
    commands = [
        Combine("a", [(2.0, "start"), (0.5, "start")]),
        Combine("b", [(1.0, "a"), (-1.0, "start")]),
        Show("b"),
    ]
    for number, command in enumerate(commands):
        do(straight, FIRST + number, command)
    for number in (2, 0, 1):
        assert shown(crossed, FIRST + 2) is None
        do(crossed, FIRST + number, commands[number])
    do(crossed, FIRST + 1, commands[0])  # it comes again, or something else does in its name
    assert shown(crossed, FIRST + 2) == shown(straight, FIRST + 2)
    assert crossed.version == FIRST + 2


def test_what_an_earlier_driver_has_said_does_not_count_once_a_later_one_has_begun(kit: Kit) -> None:
    store = made(kit)
    do(store, FIRST + 1, Combine("late", [(1.0, "start")]))  # it waits for the command before it
    do(store, first_number(4) + 1, Copy("new", "start"))
    do(store, first_number(4), Show("start"))
    do(store, FIRST, Show("start"))
    assert store.version == first_number(4)
    assert products(store, Products(1, 0, first_number(4) + 1, largest=["new"])) is not None
    with pytest.raises(DistBeliefError, match="no vector called 'late'"):
        products(store, Products(1, 0, FIRST, largest=["late"]))


def test_questions_wait_for_the_command_that_they_follow(kit: Kit) -> None:
    store = made(kit)
    asked = Products(1, 0, FIRST, dots=[("two", "start")], sums=["two"], largest=["two"])
    assert products(store, asked) is None
    do(store, FIRST, Combine("two", [(2.0, "start")]))
    found = products(store, asked)
    assert found is not None
    assert found.largest[0] == 2 * products(store, Products(1, 0, FIRST, largest=["start"])).largest[0]  # type: ignore[union-attr]
    do(store, FIRST + 1, Drop(["two"]))
    with pytest.raises(DistBeliefError, match="no vector called 'two'"):
        products(store, asked)
    with pytest.raises(DistBeliefError, match="does not answer Inspect"):
        store.reply(Inspect(1, 0), "", True, True)


def tree_sum(parts: list[torch.Tensor], node: Range) -> torch.Tensor:
    if node[1] - node[0] == 1:
        return parts[node[0]]
    left, right = split(node)
    return tree_sum(parts, left) + tree_sum(parts, right)


def test_sums_of_portions_in_any_order_and_any_number_of_copies_are_the_trees(kit: Kit) -> None:
    portions, dice = kit.schedule.shards, random.Random(5)
    numel = kit.shapes[0].value_bytes // 4
    parts = [torch.randn(numel, generator=torch.Generator().manual_seed(p)) for p in range(portions)]
    expected = tree_sum(parts, (0, portions)) * 0.25
    nodes = [(p, p + 1) for p in range(portions)] + [(0, 2), (0, 4), (4, 8), (8, 10), (8, 11)]
    for _ in range(20):
        store = made(kit)
        do(store, FIRST, Show("start", 7))
        dice.shuffle(nodes)
        for node in nodes:
            part = tree_sum(parts, node).numpy().tobytes()
            store.apply(Change(PartialSum(7, *node, b"", b""), bytearray(part)))
            store.apply(Change(PartialSum(6, *node, b"", b""), bytearray(len(part))))  # of another evaluation
        do(store, FIRST + 1, Show("start", 7), Finish(7, "gradient.0", 0.25))
        letter = store.reply(ReadVectors(1, 0, FIRST + 1, ["gradient.0"]), "", True, True)
        assert letter is not None
        assert torch.equal(torch.frombuffer(bytearray(letter.payload), dtype=torch.float32), expected)


def test_a_gradient_of_which_a_sum_is_missing_is_an_error(kit: Kit) -> None:
    store = made(kit)
    do(store, FIRST, Show("start", 7))
    with pytest.raises(DistBeliefError, match="lacks sums of evaluation 7"):
        do(store, FIRST + 1, Finish(7, "gradient.0", 1.0))


@pytest.mark.parametrize("number", [0, -1])  # the last slice has buffers alone
def test_a_copy_has_everything(kit: Kit, number: int) -> None:
    store, copy = made(kit, number), made(kit, number, first=False)
    portions = kit.schedule.shards
    do(store, FIRST, Combine("a", [(3.0, "start")]), Show("a", 7))
    do(store, FIRST + 2, Show("start"))  # it waits
    has_parameters = number == 0
    if has_parameters:
        for p in range(portions - 1):
            part = torch.full((store.shape.value_bytes // 4,), 1.0 + p).numpy().tobytes()
            store.apply(Change(PartialSum(7, p, p + 1, b"", b""), bytearray(part)))
    about, content = store.state()
    copy.load((about, content.clone()))
    for one in (store, copy):
        if has_parameters:
            part = bytearray(one.shape.value_bytes)
            one.apply(Change(PartialSum(7, portions - 1, portions, b"", b""), part))
        do(one, FIRST + 1, Finish(7, "gradient.1", 0.5))
    assert store.version == copy.version == FIRST + 2
    assert shown(store, FIRST + 2) == shown(copy, FIRST + 2)
    assert store.state()[0] == copy.state()[0]
    assert torch.equal(store.state()[1], copy.state()[1])

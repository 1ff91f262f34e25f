"""A slice under ps:sync whose partial sums come compressed: they are one generation's, and the same on every server."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from distbelief.errors import DistBeliefError
from distbelief.shards import Range
from distbelief.strategies.ps.protocol.messages import VALUES_AT, ApplyStep, MeasureStep, RestartStep
from distbelief.strategies.ps.protocol.pushcoding import PushCoding
from distbelief.strategies.ps.server.slicememory import SliceMemory
from distbelief.strategies.ps.server.syncslice import Change, SynchronousSlice
from distbelief.transport.shm.segment import Segment
from tests.support.ps.parts import SHARDS, Kit, no_memory

NODES: list[Range] = [(0, 4), (4, 5)]


@pytest.fixture(scope="module")
def kit() -> Kit:
    return Kit(clip_norm=None)


class Bench:
    """One slice, and what the workers of a generation send to it."""

    def __init__(self, kit: Kit, method: str = "int8", number: int = 0) -> None:
        self.kit = kit
        self.shape = kit.shapes[number]
        self.coding = PushCoding(method, self.shape, kit.layout)

    def store(self, first: bool = True) -> SynchronousSlice:
        values = Segment.private(VALUES_AT + self.shape.value_bytes)
        memory = SliceMemory(self.shape, self.kit.layout, self.kit.prepared.recipe, self.kit.job, values)
        store = SynchronousSlice(memory, self.kit.job, self.kit.schedule, no_memory, self.coding)
        if first:
            store.begin(self.kit.store(self.shape.number).memory.contents(), 0, b"")
        return store

    def node(self, generation: int, node: Range, step: int = 0, owed: float = 0.0) -> Change:
        """`owed`: what its sender owes of every element."""
        tiles = {tile: self.kit.layout.tiles[tile] for tile in self.shape.tiles}
        whole = self.kit.total(self.kit.history(0)[0], step, node)
        parts, at = {}, self.shape.first_byte // 4
        for tile, shape in tiles.items():
            parts[tile] = torch.from_numpy(whole[at : at + shape.numel].copy())
            at += shape.numel
        rests = {tile: torch.full((tiles[tile].numel,), owed) for tile in self.coding.coded}
        frame = torch.zeros(self.coding.size_bytes, dtype=torch.uint8)
        self.coding.write(parts, rests, frame)
        content = msgspec.structs.replace(self.kit.node(step, node), generation=generation, coded=True)
        return Change(content, bytearray(frame.numpy()))

    def afresh(self, step: int, generation: int) -> Change:
        return Change(RestartStep(step, generation))


def everything(store: SynchronousSlice) -> tuple[bytes, bytes]:
    about, contents = store.state()
    return about.about, bytes(contents.numpy())


def measured(store: SynchronousSlice, step: int = 0) -> bool:
    return store.reply(MeasureStep(1, 1, step), "", everywhere=True, caught_up=True) is not None


@pytest.mark.parametrize("method", ["bf16", "int8", "topk=0.1"])
def test_primary_backup_and_a_copy_made_in_between_have_the_same_bits(kit: Kit, method: str) -> None:
    bench = Bench(kit, method)
    primary, backup, recruit = bench.store(), bench.store(), bench.store(first=False)
    changes = [bench.afresh(0, 3), *(bench.node(3, node) for node in NODES), Change(ApplyStep(0, 1.0))]
    for number, change in enumerate(changes):
        if number == 2:
            recruit.load(primary.state())
        for store in [primary, backup] + ([recruit] if number >= 2 else []):
            store.apply(primary.with_bytes(change))
    assert primary.version == 1
    assert everything(primary) == everything(backup)
    assert everything(primary)[1] == everything(recruit)[1]
    assert bytes(primary.memory.value_view()) != bytes(bench.store().memory.value_view())


def test_what_is_applied_is_what_one_generation_has_sent(kit: Kit) -> None:
    """A worker that owes something died after its push; those who are left begin the step again."""
    bench = Bench(kit)
    store, calm = bench.store(), bench.store()
    for change in (bench.afresh(0, 1), bench.node(1, NODES[0], owed=5.0), bench.afresh(0, 2)):
        store.apply(change)
    assert store.nodes() == []
    store.apply(bench.node(1, NODES[1], owed=5.0))  # it was on its way for long
    assert store.nodes() == []
    calm.apply(bench.afresh(0, 2))
    for one in (store, calm):
        for node in NODES:
            assert not measured(one)
            one.apply(bench.node(2, node))
        assert measured(one)
        one.apply(Change(ApplyStep(0, 1.0)))
    assert everything(store) == everything(calm)


def test_a_step_that_is_complete_stays_and_the_next_one_is_the_new_generations(kit: Kit) -> None:
    bench = Bench(kit)
    store = bench.store()
    store.apply(bench.afresh(0, 1))
    for node in NODES:
        store.apply(bench.node(1, node, owed=1.0))
    assert measured(store)
    store.apply(bench.afresh(1, 2))
    assert (store.nodes(), measured(store)) == (NODES, True)
    store.apply(bench.afresh(0, 1))  # of an earlier rank 0 that died: too late
    assert store.nodes() == NODES
    store.apply(Change(ApplyStep(0, 1.0)))
    assert store.version == 1
    store.apply(bench.node(1, (0, SHARDS), step=1))
    assert store.nodes() == []
    store.apply(bench.node(2, (0, SHARDS), step=1))
    assert store.nodes() == [(0, SHARDS)]


def test_a_sum_that_had_been_measured_is_measured_again(kit: Kit) -> None:
    """Else the new generation's step could be applied before its sums are there."""
    bench = Bench(kit)
    store = bench.store()
    store.apply(bench.afresh(0, 1))
    for node in NODES:
        store.apply(bench.node(1, node))
    assert measured(store)
    store.apply(bench.afresh(0, 2))
    assert not measured(store)
    copy = bench.store(first=False)
    copy.load(store.state())
    copy.apply(bench.node(1, NODES[0]))
    assert copy.nodes() == [], "a copy knows whose sums count"


def test_what_cannot_be_decoded_is_one_clear_error(kit: Kit) -> None:
    bench = Bench(kit)
    store = bench.store()
    store.apply(bench.afresh(0, 1))
    content = bench.node(1, NODES[0]).content
    with pytest.raises(DistBeliefError, match="bytes, not 7"):
        store.apply(Change(content, bytearray(7)))
    plain = kit.store(0)
    plain.apply(bench.afresh(0, 1))
    with pytest.raises(DistBeliefError, match="does not say how"):
        plain.apply(bench.node(1, NODES[0]))
    assert np.array_equal(plain.memory.contents(), bench.store().memory.contents())

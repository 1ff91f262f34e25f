"""A slice that applies each update as it comes: late ones are corrected, and copies go on with the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distbelief.strategies.ps.protocol.messages import VALUES_AT, Gradient
from distbelief.strategies.ps.protocol.pushcoding import PushCoding
from distbelief.strategies.ps.server.asyncslice import AsynchronousSlice
from distbelief.strategies.ps.server.slicememory import SliceMemory
from distbelief.strategies.ps.server.stores import Change
from distbelief.transport.shm.segment import Segment
from tests.support.ps.parts import Kit, no_memory

STRENGTH = 0.3


@pytest.fixture(scope="module")
def kit() -> Kit:
    return Kit(clip_norm=None)


class Bench:
    """One slice of a job, what a worker sends to it, and the memory in which it may do so."""

    def __init__(self, kit: Kit, delay: float = STRENGTH, number: int = 0, method: str = "") -> None:
        self.kit = kit
        self.coding = PushCoding(method, kit.shapes[number], kit.layout) if method else None
        self.shape = kit.shapes[number]
        self.memory: dict[str, Segment] = {}
        self.delay = delay

    def store(self) -> AsynchronousSlice:
        made = SliceMemory(
            self.shape, self.kit.layout, self.kit.prepared.recipe, self.kit.job,
            Segment.private(VALUES_AT + self.shape.value_bytes),
        )  # fmt: skip
        store = AsynchronousSlice(made, self.memory.__getitem__ if self.memory else no_memory, self.delay, self.coding)
        store.begin(self.kit.store(self.shape.number).memory.contents(), np.zeros(0, np.int64))
        return store

    def change(self, update: int, values: bytes | None, name: str = "") -> Change:
        """`values`: that come along. `name`: of shared memory, instead of a frame."""
        gradient = np.sin(np.arange(self.shape.value_bytes // 4) + update).astype(np.float32)
        gradient[:3] = (0.0, -0.0, 1e30)  # its square is not finite
        touched = np.ones(len(self.kit.layout.entries), np.uint8).tobytes()
        content, payload = gradient.tobytes(), None
        if name:
            self._lay(name, content)
            self._lay(f"{name} values", values or b"")
        else:
            payload = bytearray(content + (values or b""))
        dated = values is not None
        return Change(Gradient(update, update, touched, b"", name, dated, f"{name} values" if name else ""), payload)

    def _lay(self, name: str, content: bytes) -> None:
        segment = Segment.private(self.kit.layout.size_bytes)
        segment.view(self.shape.first_byte, len(content))[:] = content
        self.memory[name] = segment


def values(store: AsynchronousSlice) -> bytes:
    return bytes(store.memory.value_view())


def everything(store: AsynchronousSlice) -> bytes:
    return bytes(store.state()[1].numpy())


def test_an_update_that_is_not_late_is_left_alone_bit_for_bit(kit: Kit) -> None:
    for number in range(len(kit.shapes)):
        bench = Bench(kit, number=number)
        plain, compensated = bench.store(), bench.store()
        for update in range(3):
            plain.apply(bench.change(update, None))
            compensated.apply(bench.change(update, values(compensated)))
            assert everything(plain) == everything(compensated)


def test_a_late_update_is_corrected_by_the_formula(kit: Kit) -> None:
    bench = Bench(kit)
    store, expected = bench.store(), bench.store()
    before = values(store)
    for one in (store, expected):
        one.apply(bench.change(0, before))
    late = bench.change(1, before)
    numbers = np.frombuffer(late.payload, np.float32)
    half = len(numbers) // 2
    g, then, now = numbers[:half].copy(), numbers[half:], np.frombuffer(values(store), np.float32)
    moved = now - then
    parameters = sum(kit.layout.tiles[tile].numel for tile in store.memory.parameter_tiles)
    with np.errstate(over="ignore", invalid="ignore"):
        corrected = (g + np.float32(STRENGTH) * g * g * moved)[:parameters]
    g[:parameters] = np.where(moved[:parameters] == 0, g[:parameters], corrected)
    expected.apply(Change(Gradient(1, 1, late.content.touched), bytearray(g.tobytes())))  # type: ignore[union-attr]
    store.apply(late)
    found, wanted = (torch.frombuffer(bytearray(values(one)), dtype=torch.float32) for one in (store, expected))
    assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-7, equal_nan=True)
    plain = bench.store()
    plain.apply(bench.change(0, None))
    plain.apply(bench.change(1, None))
    assert values(plain) != values(store)


def test_a_copy_goes_on_with_the_same_bits_wherever_the_bytes_are(kit: Kit) -> None:
    """A primary reads shared memory, one that is copying is sent the bytes, and takes over when the primary dies."""
    bench = Bench(kit)
    first = bench.change(0, None, "slot")
    primary = bench.store()
    before = values(primary)
    primary.apply(first)
    recruit = bench.store()
    recruit.load(primary.state())
    for update in (1, 2):
        late = bench.change(update, before, "slot")
        sent = primary.with_bytes(late)
        assert sent.payload is not None
        primary.apply(late)
        bench.memory.clear()  # the worker has gone on
        recruit.apply(sent)
        assert everything(primary) == everything(recruit)
    assert primary.version == recruit.version == 3


def test_bytes_of_another_length_are_refused(kit: Kit) -> None:
    bench = Bench(kit)
    store = bench.store()
    with pytest.raises(Exception, match="bytes, not"):
        store.apply(bench.change(0, values(store)[:-4]))


def test_what_compressed_updates_lose_is_owed_and_comes_with_later_ones(kit: Kit) -> None:
    """Plain SGD would then have the same sum; here the decoded gradients are added up, tile by tile."""
    for method, most in (("bf16", 0.52), ("int8", 0.27), ("topk=0.05", 0.12)):
        for number, shape in enumerate(kit.shapes):
            coding = PushCoding(method, shape, kit.layout)
            tiles = {tile: kit.layout.tiles[tile] for tile in shape.tiles}
            rests = {tile: torch.zeros(tiles[tile].numel) for tile in coding.coded}
            sent = {tile: torch.zeros(one.numel, dtype=one.dtype) for tile, one in tiles.items()}
            wanted = {tile: torch.zeros(one.numel, dtype=one.dtype) for tile, one in tiles.items()}
            generator = torch.Generator().manual_seed(number)
            for _ in range(6):
                parts = {tile: torch.randn(one.numel, generator=generator) for tile, one in tiles.items()}
                frame = torch.zeros(coding.size_bytes, dtype=torch.uint8)
                coding.write(parts, rests, frame)
                read = {tile: torch.empty_like(part) for tile, part in parts.items()}
                coding.read(bytearray(frame.numpy()), read)
                for tile, part in parts.items():
                    sent[tile] += read[tile]
                    wanted[tile] += part
            for tile in tiles:
                owed = sent[tile] + rests[tile] if tile in rests else sent[tile]
                assert torch.allclose(owed, wanted[tile], atol=1e-5)
            if all(tile in rests for tile in tiles) and coding.plain_bytes > 10_000:
                assert coding.size_bytes < most * coding.plain_bytes


def test_a_compressed_update_gives_the_same_bits_on_primary_and_backup(kit: Kit) -> None:
    bench = Bench(kit, delay=0.0, method="int8")
    assert bench.coding is not None
    primary, backup = bench.store(), bench.store()
    before = values(primary)
    touched = np.ones(len(kit.layout.entries), np.uint8).tobytes()
    frame = torch.zeros(bench.coding.size_bytes, dtype=torch.uint8)
    parts = {tile: torch.ones(kit.layout.tiles[tile].numel) for tile in bench.shape.tiles}
    rests = {tile: torch.zeros(kit.layout.tiles[tile].numel) for tile in bench.coding.coded}
    bench.coding.write(parts, rests, frame)
    change = Change(Gradient(0, 0, touched, coded=True), bytearray(frame.numpy()))
    for store in (primary, backup):
        store.apply(primary.with_bytes(change))
    assert everything(primary) == everything(backup)
    assert values(primary) != before
    plain = Bench(kit, delay=0.0).store()
    with pytest.raises(Exception, match="does not say how"):
        plain.apply(change)
    with pytest.raises(Exception, match="bytes, not"):
        primary.apply(Change(Gradient(1, 0, touched, coded=True), bytearray(7)))

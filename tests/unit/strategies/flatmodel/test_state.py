"""A tile that was torn in the middle of its update has its old bytes back, exactly, and nothing else; and what is kept
with the values: integers, what the last steps gave, a note."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn, optim

from distbelief.strategies.base import Applied
from distbelief.strategies.flatmodel.layout import Layout, lay_out, trainable
from distbelief.strategies.flatmodel.state import ReplicaState
from distbelief.strategies.flatmodel.tileoptimizer import Recipe, TileMemory, TileOptimizer
from distbelief.transport.exchange import Geometry
from distbelief.transport.shm.segment import SegmentClient
from tests.support.replicas.alone import exchange, kept

INTEGER_BYTES = 24


class Setting:
    """A model with several tiles of parameters and one of buffers, and its state in shared memory."""

    def __init__(self, segments: SegmentClient) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(100, 90), nn.BatchNorm1d(90), nn.Linear(90, 30))
        self.recipe = Recipe(lambda p: optim.AdamW(p, lr=0.01), [p for _, p in trainable(model)])
        self.layout: Layout = lay_out(model)
        self.segments = segments
        assert self.layout.parameter_tiles == 3
        assert len(self.layout.tiles) == 4
        self.generation = 0

    def join(self) -> ReplicaState:
        """The state as a member of another generation sees it: other mappings of the same memory."""
        return self.together(1)[0]

    def together(self, members: int) -> list[ReplicaState]:
        """The same, of each of several members."""
        self.generation += 1
        geometry = Geometry(self.layout.tiles, self.layout.size_bytes, [1] * members, 1, 6, INTEGER_BYTES)
        groups = [exchange(self.segments, self.generation, geometry, rank) for rank in range(members)]
        states = [ReplicaState(self.layout, self.recipe, group, INTEGER_BYTES) for group in groups]
        states[0].expect(members)
        return states

    def fill(self, state: ReplicaState) -> None:
        for values, optimizer in zip(state.values, state.optimizer, strict=True):
            values.copy_(torch.randn(values.shape))
            optimizer.random_(0, 256)


@pytest.fixture
def setting() -> Iterator[Setting]:
    with kept() as client:
        yield Setting(client)


def contents(state: ReplicaState, tile: int) -> bytes:
    return state.values[tile].numpy().tobytes() + state.optimizer[tile].numpy().tobytes()


def everything(state: ReplicaState) -> list[bytes]:
    return [contents(state, tile) for tile in range(len(state.values))]


def tear(state: ReplicaState, tile: int) -> None:
    """What a member that dies in the middle of a tile may leave: some bytes new, some old, some in between."""
    for tensor in (state.values[tile].view(torch.uint8), state.optimizer[tile]):
        if tensor.numel():
            tensor[: tensor.numel() // 2 + 1] = torch.frombuffer(
                bytearray(os.urandom(tensor.numel() // 2 + 1)), dtype=torch.uint8
            )


def test_a_new_state_is_not_initialised_and_members_see_when_it_is(setting: Setting) -> None:
    one, two = setting.join(), setting.join()
    assert not one.initialised
    assert not two.initialised
    one.begin_at(0)
    assert two.initialised
    assert two.steps_applied == 0


@pytest.mark.parametrize("tile", range(4))
def test_a_torn_tile_gets_its_exact_bytes_back(setting: Setting, tile: int) -> None:
    state = setting.join()
    setting.fill(state)
    before = everything(state)
    state.open(tile, 0)
    tear(state, tile)
    assert everything(state) != before
    newcomer = setting.join()
    assert newcomer.repair() == [tile]
    assert everything(newcomer) == before
    assert everything(state) == before
    assert newcomer.steps_applied == 0
    assert newcomer.repair() == []


def test_of_a_step_that_was_applied_in_part_only_torn_tiles_go_back(setting: Setting) -> None:
    first, second = setting.together(2)
    setting.fill(first)
    before = everything(first)
    for state, tile in ((first, 0), (second, 1), (first, 2)):  # the fourth is not reached
        state.open(tile, 0)
        tear(state, tile)
        if tile == 0:
            state.close(tile, 0)
    applied = contents(first, 0)
    newcomer = setting.join()
    assert newcomer.repair() == [2, 1]
    assert everything(newcomer) == [applied, *before[1:]]
    assert newcomer.steps_applied == 0
    assert newcomer.is_applied_in_part
    assert [newcomer.has(tile, 0) for tile in range(4)] == [True, False, False, False]
    for tile in range(1, 4):
        newcomer.open(tile, 0)
        newcomer.close(tile, 0)
    assert not newcomer.is_applied_in_part
    assert newcomer.steps_applied == 1


def test_the_place_of_a_member_of_long_ago_is_not_mistaken_for_a_torn_tiles(setting: Setting) -> None:
    """The second of two had tile 1 in its undo log in step 0, and is gone. In step 1 it is in the undo log of the first
    one."""
    first, second = setting.together(2)
    setting.fill(first)
    for tile in range(4):
        state = second if tile == 1 else first
        state.open(tile, 0)
        tear(state, tile)
        state.close(tile, 0)
    alone = setting.join()
    assert alone.repair() == []
    before = everything(alone)
    alone.open(1, 1)
    tear(alone, 1)
    assert setting.together(3)[2].repair() == [1]
    assert everything(alone) == before


def test_a_death_while_the_undo_log_is_written_tears_nothing(setting: Setting) -> None:
    state = setting.join()
    setting.fill(state)
    before = everything(state)
    state.open(0, 0)
    state.close(0, 0)
    state._undo_log.save(1, 0, state._current[1])  # type: ignore[union-attr]
    assert setting.join().repair() == []
    assert everything(state) == before
    assert [state.has(tile, 0) for tile in (0, 1)] == [True, False]


def test_a_step_that_every_tile_has_behind_it_is_never_undone(setting: Setting) -> None:
    state = setting.join()
    setting.fill(state)
    for tile in range(4):
        state.open(tile, 0)
        tear(state, tile)
        state.close(tile, 0)
    applied = everything(state)
    assert setting.join().repair() == []
    state.open(2, 1)
    tear(state, 2)
    assert setting.join().repair() == [2]
    assert everything(state) == applied


def test_applied_steps_are_those_that_every_tile_has_behind_it(setting: Setting) -> None:
    state, other = setting.join(), setting.join()
    for step in range(3):
        for tile in range(4):
            assert other.steps_applied == step
            state.open(tile, step)
            assert other.steps_applied == step
            state.close(tile, step)
        assert other.steps_applied == step + 1
    state.open(1, 3)
    assert other.repair() == [1]
    assert other.steps_applied == 3


def test_an_update_that_is_torn_and_run_again_gives_the_bits_of_an_undisturbed_one(setting: Setting) -> None:
    def update(fresh: Setting, state: ReplicaState, step: int, tile: int) -> None:
        make = torch.Generator().manual_seed(100 * step + tile)
        gradient = torch.randn(state.values[tile].shape, generator=make)
        state.open(tile, step)
        memory = TileMemory(tile, state.values[tile], state.optimizer[tile])
        TileOptimizer(fresh.recipe, fresh.layout, [memory]).update({tile: gradient}, 1.0, None)

    def train(disturb: bool) -> list[bytes]:
        with kept() as segments:
            fresh = Setting(segments)
            state = fresh.join()
            for number, values in enumerate(state.values):
                values.copy_(torch.randn(values.shape, generator=torch.Generator().manual_seed(number)))
            tiles = range(len(fresh.layout.tiles))
            parameter_tiles = range(fresh.layout.parameter_tiles)
            for step in range(4):
                if disturb:  # the first tiles are done, one is torn, the others are not begun
                    for tile in parameter_tiles[:2]:
                        update(fresh, state, step, tile)
                        if tile == 0:
                            state.close(tile, step)
                    tear(state, 1)
                    state = fresh.join()
                    assert state.repair() == [1]
                for tile in tiles:
                    if state.has(tile, step):
                        continue
                    if tile in parameter_tiles:
                        update(fresh, state, step, tile)
                    else:
                        state.open(tile, step)
                    state.close(tile, step)
            return everything(state)

    assert train(disturb=True) == train(disturb=False)


# --- what goes with the values ---------------------------------------------------------------------------------------


def apply(state: ReplicaState, step: int, tiles: range = range(4)) -> None:
    for tile in tiles:
        state.open(tile, step)
        state.close(tile, step)


def gave(step: int) -> Applied:
    return Applied(
        step, loss=step / 8, samples=64 + step, fingerprint=f"{step:016x}", at=1e9 + step, generation=1 + step
    )


def test_the_integers_of_before_a_step_are_there_until_it_is_applied_whole(setting: Setting) -> None:
    state, other = setting.join(), setting.join()
    state.write_integers(0, bytes([0]) * INTEGER_BYTES)
    for step in range(4):
        before, after = bytes([step]) * INTEGER_BYTES, bytes([step + 1]) * INTEGER_BYTES
        state.write_integers(step + 1, after)
        apply(state, step, range(2))
        assert other.integers(other.steps_applied) == before
        other.repair()
        assert other.integers(other.steps_applied) == before
        state.write_integers(step + 1, after)
        apply(state, step)
        assert other.integers(other.steps_applied) == after


def test_a_model_without_integers_has_none(setting: Setting) -> None:
    geometry = Geometry(setting.layout.tiles, setting.layout.size_bytes, [1], 1, 6)
    state = ReplicaState(setting.layout, setting.recipe, exchange(setting.segments, 99, geometry), 0)
    state.write_integers(1, b"")
    assert state.integers(1) == b""


def test_what_applied_steps_gave_is_kept_and_what_an_unfinished_one_gave_is_not_told(setting: Setting) -> None:
    state, other = setting.join(), setting.join()
    assert other.remembered(0) == []
    for step in range(3):
        state.remember(gave(step))
        assert other.remembered(0) == [gave(s) for s in range(step)], "not before it is applied"
        apply(state, step)
        assert other.remembered(0) == [gave(s) for s in range(step + 1)]
    assert other.remembered(2) == [gave(2)]
    assert other.remembered(3) == []
    state.remember(Applied(3, 0.5, 1, "f" * 16, 7, 2e9))  # and then whoever applied it died
    other.repair()
    assert other.remembered(0) == [gave(0), gave(1), gave(2)]
    other.remember(gave(3))
    apply(other, 3)
    assert state.remembered(3) == [gave(3)]


def test_steps_that_were_applied_elsewhere_gave_nothing_that_is_known_here(setting: Setting) -> None:
    """A state that begins at a checkpoint: not even the first step, whose place is that of memory never written."""
    state = setting.join()
    state.begin_at(5)
    assert state.remembered(0) == []
    state.remember(gave(5))
    apply(state, 5)
    assert state.remembered(0) == [gave(5)]


def test_only_the_last_steps_are_kept(setting: Setting) -> None:
    state = setting.join()
    steps = 1024 + 100
    for step in range(steps):
        state.remember(gave(step))
        apply(state, step)
    assert state.remembered(0) == [gave(step) for step in range(steps - 1024, steps)]
    assert state.remembered(steps - 2) == [gave(steps - 2), gave(steps - 1)]


def test_a_note_says_to_which_state_it_belongs(setting: Setting) -> None:
    state, other = setting.join(), setting.join()
    assert other.note() == (0, b"")
    state.write_note(5, b"accuracy")
    assert other.note() == (5, b"accuracy")
    state.write_note(6, b"")
    assert other.note() == (6, b"")
    state.write_note(7, b"a" * 1000)
    with pytest.raises(ValueError, match="too long"):
        state.write_note(8, b"b" * (1 << 20))
    assert other.note() == (7, b"a" * 1000), "what does not fit is not kept"


def test_the_blocks_are_all_that_another_replica_needs(setting: Setting) -> None:
    state = setting.join()
    setting.fill(state)
    state.write_integers(0, b"x" * INTEGER_BYTES)
    state.write_note(0, b"note")
    state.begin_at(0)
    for step in range(3):
        state.remember(gave(step))
        state.write_integers(step + 1, bytes([step]) * INTEGER_BYTES)
        apply(state, step)
    with kept() as segments:
        other = Setting(segments).join()
        assert not other.initialised
        for theirs, mine in zip(other.blocks(), state.blocks(), strict=True):
            theirs.copy_(mine)
        assert other.initialised
        assert other.steps_applied == 3
        assert everything(other) == everything(state)
        assert other.remembered(0) == state.remembered(0)
        assert other.note() == state.note()
        assert [other.integers(n) for n in (2, 3)] == [state.integers(n) for n in (2, 3)]


def test_the_block_with_the_stamps_alone_says_whether_it_is_a_state(setting: Setting) -> None:
    """A newcomer that dies, or whose peer dies, before it has the first block, has no state."""
    state = setting.join()
    state.begin_at(0)
    apply(state, 0)
    numbers, rest, first = state.blocks()
    assert first.numel() == 4096
    assert rest.data_ptr() == first.data_ptr() + 4096
    assert numbers.data_ptr() == rest.data_ptr() + rest.numel()
    with kept() as segments:
        other = Setting(segments).join()
        for theirs, mine in zip(other.blocks()[:2], (numbers, rest), strict=True):
            theirs.copy_(mine)
        assert (other.initialised, other.steps_applied) == (False, 0)

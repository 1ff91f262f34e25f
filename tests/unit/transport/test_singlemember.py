"""A member without any other. What it shares with all exchanges is in the contract; here is what only it can do."""

from __future__ import annotations

import numpy as np
import torch

from distbelief.transport.exchange import Contribution, Exchange, Geometry, Source, StepPlan, Tile
from distbelief.transport.shm.segment import Segment
from distbelief.transport.singlemember import SingleMemberExchange

TILES = [Tile(0, torch.float32, 0, 300), Tile(1, torch.bfloat16, 1216, 64)]
GEOMETRY = Geometry(TILES, 2048, slots=[4], shards=4, marks=2)


def filled(step: int) -> tuple[SingleMemberExchange, list[list[torch.Tensor]]]:
    """An exchange whose four slots hold numbers, and those numbers, by tile."""
    exchange = SingleMemberExchange(GEOMETRY)
    generator = torch.Generator().manual_seed(step)
    parts: list[list[torch.Tensor]] = [[], []]
    for slot in range(4):
        for tile in TILES:
            values = torch.randn(tile.numel, generator=generator) * 10.0 ** float(slot - 2)
            at = exchange.slot(slot).tensor(tile.dtype, tile.offset_bytes, tile.numel)
            parts[tile.index].append(at.copy_(values).clone())
    return exchange, parts


def test_it_is_an_exchange() -> None:
    exchange: Exchange = SingleMemberExchange(GEOMETRY)
    assert (exchange.rank, exchange.size, list(exchange.tiles), exchange.shares_state) == (0, 1, [0, 1], False)
    assert (exchange.waiting, exchange.backups, exchange.published_sums(3), exchange.died_computing()) == (
        False,
        None,
        None,
        [],
    )


def test_partial_sums_in_several_slots_are_added_along_the_tree() -> None:
    exchange, parts = filled(1)
    sources = [Source(0, slot) for slot in range(4)]
    for program, add in (
        (((0, 1), (2, 3)), lambda p: (p[0] + p[1]) + (p[2] + p[3])),
        ((0, (1, (2, 3))), lambda p: p[0] + (p[1] + (p[2] + p[3]))),
        (2, lambda p: p[2]),
    ):
        exchange.begin(StepPlan(0, sources, program))
        for tile in (0, 1):
            assert torch.equal(exchange.reduced(tile), add(parts[tile]))
            exchange.reduced(tile).zero_()  # a commit may overwrite it
    for tile in TILES:
        for slot, values in enumerate(parts[tile.index]):
            at = exchange.slot(slot).tensor(tile.dtype, tile.offset_bytes, tile.numel)
            assert torch.equal(at, values), "a partial sum was written to"


def test_what_is_shared_does_not_change_with_what_was_given() -> None:
    """The giver uses its arrays again for the next step."""
    exchange = SingleMemberExchange(GEOMETRY)
    rows, untouched = np.full((4, 4), 5.0), np.array([True, False])
    shared = exchange.share(Contribution(rows, [(1, 3)], [], untouched, b"abc"))
    rows.fill(0)
    untouched.fill(False)
    assert shared.rows[:, 0].tolist() == [0.0, 5.0, 5.0, 0.0]
    assert (shared.untouched.tolist(), shared.integers) == ([True, False], b"abc")


def test_a_state_is_made_once_or_taken_over() -> None:
    first = SingleMemberExchange(GEOMETRY)
    state = first.state(4096)
    assert (state.size_bytes, first.state(4096)) == (4096, state)
    given = Segment.private(4096)
    assert SingleMemberExchange(GEOMETRY, given).state(4096) is given

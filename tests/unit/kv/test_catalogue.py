"""The catalogue of a key-value store, by plain calls."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from distbelief.kv.catalogue import GRAIN, PIECE_BYTES, Catalogue, cut
from distbelief.kv.messages import Arrive, Consult, Consulted, DeclareKey, Dense, SealKey, Withdraw
from distbelief.strategies.ps.server.stores import Change

FORM = Dense("float32", (10,))


def tell(catalogue: Catalogue, *contents: Any) -> None:
    for content in contents:
        catalogue.apply(Change(content))


def ask(catalogue: Catalogue, caught_up: bool = True, **question: Any) -> Consulted | None:
    wanted = {"ticket": 1, "slice": 0, "client": 1, "after": 0, "keys": ["w"], **question}
    letter = catalogue.reply(Consult(**wanted), "", True, caught_up)
    return letter.message if letter else None


def copy_of(catalogue: Catalogue) -> Catalogue:
    other = Catalogue(1, 0)
    snapshot, content = catalogue.state()
    assert content.dtype == torch.uint8
    other.load((snapshot, content))
    return other


@given(st.integers(0, 20 * PIECE_BYTES), st.sampled_from([2, 4, 8]), st.integers(1, 20), st.data())
def test_stretches_cover_a_value_at_cuts_of_the_grain(elements: int, item: int, slices: int, data: Any) -> None:
    loads = {number: data.draw(st.integers(0, 5 * PIECE_BYTES)) for number in range(1, slices + 1)}
    before = dict(loads)
    found = cut(elements, item, loads)
    assert [one.first for one in found] == [0, *(one.end for one in found[:-1])]
    assert found[-1].end == elements
    assert all(one.end % GRAIN == 0 for one in found[:-1])
    assert len({one.slice for one in found}) == len(found)
    assert sum(loads.values()) - sum(before.values()) == elements * item
    lightest = sorted(before, key=lambda number: (before[number], number))[: len(found)]
    assert [one.slice for one in found] == lightest


def test_many_small_keys_are_spread_by_bytes() -> None:
    loads = dict.fromkeys(range(1, 5), 0)
    for size in range(1, 400):
        cut(size, 4, loads)
    assert max(loads.values()) - min(loads.values()) <= 4 * 400


def test_the_first_to_declare_gives_the_value_and_others_wait() -> None:
    catalogue = Catalogue(4, 1 << 30)
    tell(catalogue, DeclareKey(1, "w", FORM), DeclareKey(2, "w", Dense("float64", (3,))))
    found = ask(catalogue)
    assert found is not None
    assert (found.entries["w"].owner, found.entries["w"].form, found.entries["w"].sealed) == (1, FORM, False)
    assert ask(catalogue, sealed=True) is None
    tell(catalogue, SealKey(2, "w", 0))
    assert ask(catalogue, sealed=True) is None  # it was not its to seal
    tell(catalogue, SealKey(1, "w", 0))
    found = ask(copy_of(catalogue), sealed=True)
    assert found is not None
    assert found.entries["w"].sealed


def test_one_takes_over_from_the_dead_and_the_dead_cannot_seal() -> None:
    catalogue = Catalogue(4, 1 << 30)
    tell(catalogue, DeclareKey(1, "w", FORM), DeclareKey(2, "w", FORM, 0), DeclareKey(3, "w", FORM, 0))
    found = ask(catalogue)
    assert found is not None
    assert (found.entries["w"].owner, found.entries["w"].attempt) == (2, 1)
    tell(catalogue, SealKey(1, "w", 0))
    assert ask(catalogue, sealed=True) is None
    tell(catalogue, SealKey(2, "w", 1), DeclareKey(3, "w", FORM, 1))
    found = ask(catalogue, sealed=True)
    assert found is not None
    assert found.entries["w"].owner == 2


def test_nothing_is_told_that_a_death_could_undo() -> None:
    catalogue = Catalogue(4, 1 << 30)
    tell(catalogue, DeclareKey(1, "w", FORM))
    assert ask(catalogue, caught_up=False) is None
    assert ask(catalogue) is not None


def test_what_does_not_fit_into_memory_is_refused_by_all_alike() -> None:
    catalogue = Catalogue(4, room=100)
    tell(catalogue, DeclareKey(1, "v", Dense("float32", (26,))), DeclareKey(1, "w", Dense("float32", (24,))))
    catalogue = copy_of(catalogue)
    tell(catalogue, DeclareKey(1, "x", Dense("float16", (3,))), DeclareKey(1, "y", Dense("float16", (2,))))
    found = ask(catalogue, keys=["v", "w", "x", "y"])
    assert found is not None
    assert sorted(found.entries) == ["w", "y"]
    assert found.room == 0


def test_a_barrier_is_over_when_all_have_come() -> None:
    catalogue = Catalogue(4, 1 << 30)
    tell(catalogue, Arrive(1, 0, 3), Arrive(2, 1, 3))
    assert ask(catalogue, client=1, rank=0) is None
    waiting = ask(catalogue)
    assert waiting is not None
    assert (waiting.arrived, waiting.workers) == ([0, 1], 3)
    catalogue = copy_of(catalogue)
    tell(catalogue, Arrive(9, 1, 3))  # in place of a dead one
    tell(catalogue, Arrive(3, 2, 3))
    assert ask(catalogue, client=1, rank=0) is not None
    assert ask(catalogue, client=9, rank=1) is not None
    tell(catalogue, Arrive(1, 0, 3))  # the next one
    assert ask(catalogue, client=1, rank=0) is None
    assert ask(catalogue, client=3, rank=2) is not None


def test_one_that_gave_up_is_not_waited_for_twice() -> None:
    catalogue = Catalogue(4, 1 << 30)
    tell(catalogue, Arrive(1, 0, 2), Withdraw(2, 0))
    assert ask(catalogue, client=1, rank=0) is None
    tell(catalogue, Withdraw(1, 0), Arrive(2, 1, 2))
    assert ask(catalogue, client=2, rank=1) is None

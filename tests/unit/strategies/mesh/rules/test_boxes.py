"""Boxes get from any division of tensors to any other; moves are carried out here on plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distbelief.checkpoint.rules.boxes import inside, sizes, volume, whole
from distbelief.strategies.mesh.rules.boxes import Holding, Missing, Move, first_incomplete, moves, writers
from tests.support.mesh.divisions import SHAPES, Held, divisions

WHOLE = {name: torch.arange(prod(shape), dtype=torch.float32).view(shape) + 1 for name, shape in SHAPES.items()}


def pieces(held: Held) -> dict[str, torch.Tensor]:
    return {name: WHOLE[name][tuple(slice(*one) for one in box)].clone() for name, box in held.items()}


def carried_out(plan: Sequence[Move], held: Sequence[Holding], wanted: Sequence[Held]) -> list[dict[str, torch.Tensor]]:
    """What everybody has then; -1 where nothing arrived. Nothing arrives twice."""
    given_by = [pieces(dict(one.boxes)) for one in held]
    result = [{name: torch.full(sizes(box), -1.0) for name, box in one.items()} for one in wanted]
    for move in plan:
        assert held[move.holding].rank == move.source
        part = given_by[move.holding][move.tensor][inside(move.box, held[move.holding].boxes[move.tensor])]
        there = result[move.target][move.tensor][inside(move.box, wanted[move.target][move.tensor])]
        assert bool((there == -1).all())
        there.copy_(part)
    return result


def check(held: Sequence[Holding], wanted: Sequence[Held]) -> list[Move]:
    plan = moves(held, wanted)
    for got, boxes in zip(carried_out(plan, held, wanted), wanted, strict=True):
        expected = pieces(boxes)
        assert all(torch.equal(got[name], expected[name]) for name in boxes)
    return plan


@given(st.integers(1, 5).flatmap(lambda n: st.tuples(divisions(n), divisions(n))))
def test_any_division_becomes_any_other(both: tuple[list[Held], list[Held]]) -> None:
    before, after = both
    held = [Holding(rank, boxes) for rank, boxes in enumerate(before)]
    assert first_incomplete(before, SHAPES) == ""
    plan = check(held, after)
    for move in plan:
        mine = before[move.target].get(move.tensor)
        if mine == after[move.target][move.tensor]:
            assert move.source == move.target, "what one has already goes over no wire"


@given(st.integers(2, 5).flatmap(lambda n: st.tuples(divisions(n), divisions(n), st.integers(0, n - 1))))
def test_the_dead_members_parts_come_from_its_neighbour(case: tuple[list[Held], list[Held], int]) -> None:
    """Several holdings per rank: a member's own, and a copy of the one before it; ranks count without the dead."""
    before, after, dead = case
    alive = [old for old in range(len(before)) if old != dead]
    held = [
        Holding(rank, before[theirs]) for rank, old in enumerate(alive) for theirs in (old, (old - 1) % len(before))
    ]
    check(held, after[: len(alive)])


@given(st.tuples(divisions(4), divisions(4), divisions(3)))
def test_parts_of_two_plans_may_overlap(case: tuple[list[Held], list[Held], list[Held]]) -> None:
    """One member has its part of the new plan already, another one was called away and still has that of the old."""
    old, new, wanted = case
    mixed = [old[0], new[1], old[2], new[3], {}]
    every: dict[str, torch.Tensor] = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for boxes in mixed:
        for name, box in boxes.items():
            every[name][tuple(slice(*one) for one in box)] = 1
    missing = {name for name, there in every.items() if not bool(there.all())}
    assert (first_incomplete(mixed, SHAPES) == "") is (not missing)
    held = [Holding(rank, boxes) for rank, boxes in enumerate(mixed)]
    lacking = {
        name
        for boxes in wanted
        for name, box in boxes.items()
        if not bool(every[name][tuple(slice(*one) for one in box)].all())
    }
    if lacking:
        with pytest.raises(Missing) as caught:
            moves(held, wanted)
        assert caught.value.tensor in lacking
    else:
        check(held, wanted)


@given(st.integers(1, 5).flatmap(divisions), st.data())
def test_what_nobody_holds_is_named(held: list[Held], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["matrix", "vector", "number", "cube"]))
    lost = data.draw(st.sampled_from([boxes[name] for boxes in held if name in boxes and volume(boxes[name])]))
    left: list[Held] = [{k: box for k, box in boxes.items() if k != name or box != lost} for boxes in held]
    assert first_incomplete(left, SHAPES) == name
    with pytest.raises(Missing) as caught:
        moves([Holding(rank, boxes) for rank, boxes in enumerate(left)], [{name: whole(SHAPES[name])}])
    assert caught.value.tensor == name


def test_those_who_hold_the_same_take_turns_in_giving() -> None:
    held = [Holding(rank, {f"t{n}": whole((2,)) for n in range(6)}) for rank in range(3)]
    plan = moves(held, [{}, {}, {}, {f"t{n}": whole((2,)) for n in range(6)}])
    assert sorted(move.source for move in plan) == [0, 0, 1, 1, 2, 2]


@given(st.integers(1, 5).flatmap(divisions))
def test_every_element_is_written_by_one_member(held: list[Held]) -> None:
    mine = writers(held)
    for name, shape in SHAPES.items():
        count = torch.zeros(shape)
        for rank, names in enumerate(mine):
            if name in names:
                count[tuple(slice(*one) for one in held[rank][name])] += 1
        assert bool((count == 1).all())


def test_those_who_hold_the_same_take_turns_in_writing() -> None:
    held = [{f"t{n}": whole((2,)) for n in range(9)} for _ in range(3)]
    assert [len(names) for names in writers(held)] == [3, 3, 3]

"""Boxes and stretches of a tensor, compared with what torch makes of the same indices."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distbelief.checkpoint.rules import boxes
from distbelief.checkpoint.rules.boxes import Box, Stretch, coverage_fault
from tests.support.checkpoint.boxes import boxes_within, cuts_of

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def places(shape: tuple[int, ...], box: Box) -> list[int]:
    """The elements of a box, by their places in the order."""
    order = torch.arange(prod(shape)).view(shape)
    return [int(place) for place in order[boxes.inside(box, boxes.whole(shape))].reshape(-1)]


@given(SHAPES, st.data())
def test_a_stretch_is_its_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, prod(shape)))
    count = data.draw(st.integers(0, prod(shape) - first))
    found = boxes.boxes_of(shape, first, count)
    assert [place for box in found for place in places(shape, box)] == list(range(first, first + count))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(SHAPES, st.data())
def test_a_box_is_a_stretch_exactly_if_its_elements_follow_each_other(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    box = data.draw(boxes_within(shape))
    if not boxes.volume(box):
        return
    found = places(shape, box)
    follow = found == list(range(found[0], found[0] + len(found)))
    assert boxes.stretch_of(shape, box) == ((found[0], len(found)) if follow else None)
    assert boxes.first_of(shape, box) == found[0]


@given(SHAPES, st.integers(0, 30), st.data())
def test_spans_hold_a_box_and_leave_out_no_less_than_the_gap(
    shape: tuple[int, ...], gap: int, data: st.DataObject
) -> None:
    box = data.draw(boxes_within(shape))
    spans = list(boxes.spans_of(shape, box, gap))
    wanted = places(shape, box)
    assert {place for start, end in spans for place in range(start, end)} >= set(wanted)
    assert all(later - end > gap for (_, end), (later, _) in itertools.pairwise(spans))
    if gap == 0:
        assert [place for start, end in spans for place in range(start, end)] == wanted


@given(SHAPES, st.data())
def test_what_two_boxes_share(shape: tuple[int, ...], data: st.DataObject) -> None:
    one, other = data.draw(boxes_within(shape)), data.draw(boxes_within(shape))
    shared = boxes.common(one, other)
    both = set(places(shape, one)) & set(places(shape, other))
    assert (set() if shared is None else set(places(shape, shared))) == both


def stretch(shape: tuple[int, ...], box: Box, part: int = 1) -> Stretch:
    return Stretch(part, boxes.first_of(shape, box), boxes.volume(box), box)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), st.data())
def test_exactly_the_cuts_of_a_tensor_cover_it(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = boxes.whole(shape)
    cut = data.draw(cuts_of(whole))
    held = [stretch(shape, box, part=k + 1) for k, box in enumerate(cut)]
    flat = [  # some of them as stretches
        Stretch(s.part, *found) if (found := boxes.stretch_of(shape, s.box or ())) and data.draw(st.booleans()) else s
        for s in held
    ]
    assert coverage_fault("w", shape, data.draw(st.permutations(flat))) == ""
    lost = data.draw(st.sampled_from(held))
    rest = [s for s in held if s is not lost]
    assert coverage_fault("w", shape, rest).endswith("of tensor 'w' are in no part")
    again = data.draw(boxes_within(shape))
    if boxes.volume(again):
        fault = coverage_fault("w", shape, [*held, stretch(shape, again, part=99)])
        assert fault.startswith("elements [")
        assert fault.endswith(" and in part 99")


def test_boxes_that_no_cut_through_the_whole_tensor_makes() -> None:
    """Four around a fifth, like the vanes of a pinwheel."""
    wheel: list[Box] = [
        ((0, 1), (0, 2)),
        ((0, 2), (2, 3)),
        ((2, 3), (1, 3)),
        ((1, 3), (0, 1)),
        ((1, 2), (1, 2)),
    ]
    held = [stretch((3, 3), box, part=k + 1) for k, box in enumerate(wheel)]
    assert coverage_fault("w", (3, 3), held) == ""
    assert coverage_fault("w", (3, 3), held[:4]) == "elements [1:2,1:2] of tensor 'w' are in no part"
    assert coverage_fault("w", (3, 3), [*held, Stretch(6, 4, 1)]) == (
        "elements [1:2,1:2] of tensor 'w' are in part 5 and in part 6"
    )


@pytest.mark.parametrize(
    ("held", "fault"),
    [
        (
            [Stretch(1, 0, 8, ((0, 4), (0, 2))), Stretch(2, 3, 12, ((0, 4), (3, 6)))],
            "elements [0:4,2:3] of tensor 'w' are in no part",
        ),
        (
            [Stretch(1, 0, 16, ((0, 4), (0, 4))), Stretch(2, 3, 12, ((0, 4), (3, 6)))],
            "elements [0:4,3:4] of tensor 'w' are in part 1 and in part 2",
        ),
        (
            [Stretch(1, 0, 12, ((0, 4), (0, 3))), Stretch(1, 0, 12, ((0, 4), (0, 3)))],
            "elements [0:4,0:3] of tensor 'w' are twice in a part",
        ),
        (
            [Stretch(1, 0, 12), Stretch(2, 12, 6, ((2, 4), (0, 3)))],
            "elements [2:4,3:6] of tensor 'w' are in no part",
        ),
        (
            [Stretch(1, 0, 28, ((0, 4), (0, 7)))],
            "tensor 'w' of shape 4×6 has a box that lies outside of it: [0:4,0:7]",
        ),
        (
            [Stretch(1, 0, 4, ((-1, 1), (0, 2)))],
            "tensor 'w' of shape 4×6 has a box that lies outside of it: [-1:1,0:2]",
        ),
        (
            [Stretch(1, 0, 4, ((3, 1), (0, 2)))],
            "tensor 'w' of shape 4×6 has a box that lies outside of it: [3:1,0:2]",
        ),
        ([Stretch(1, 0, 4, ((0, 4),))], "tensor 'w' of shape 4×6 has a box of 1 dimensions: [0:4]"),
        ([Stretch(1, 0, 7, ((0, 4), (0, 2)))], "tensor 'w' of shape 4×6 has the box [0:4,0:2] with 7 elements"),
        ([Stretch(1, 0, 0, ((0, 4), (2, 2)))], "tensor 'w' of shape 4×6 has the box [0:4,2:2] with 0 elements"),
        ([Stretch(1, 1, 8, ((0, 4), (0, 2)))], "tensor 'w' of shape 4×6 has the box [0:4,0:2] from element 1 on"),
        (
            [Stretch(1, 0, 8, ((0, 4), (0, 2))), Stretch(1, 20, 8)],
            "tensor 'w' of shape 4×6 has a stretch of 8 elements from 20 on",
        ),
    ],
)
def test_what_is_wrong_is_named(held: list[Stretch], fault: str) -> None:
    assert coverage_fault("w", (4, 6), held) == fault


def test_a_grid_of_many_boxes_is_looked_at_quickly() -> None:
    """32 × 32 members; as many looks as there are boxes in every row, not as there are pairs of them."""
    cells = [((r, r + 1), (2 * c, 2 * c + 2)) for r in range(32) for c in range(32)]
    held = [stretch((32, 64), box, part=k + 1) for k, box in enumerate(cells)]
    assert coverage_fault("w", (32, 64), held) == ""
    assert coverage_fault("w", (32, 64), held[:-1]) == "elements [31:32,62:64] of tensor 'w' are in no part"

"""Any division of tensors among ranks, for hypothesis."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from distbelief.checkpoint.rules.boxes import Box, whole

Held = dict[str, Box]


SHAPES: dict[str, tuple[int, ...]] = {"matrix": (5, 4), "vector": (7,), "number": (), "cube": (2, 3, 2), "none": (0, 3)}


@st.composite
def divisions(draw: st.DrawFn, ranks: int) -> list[Held]:
    """By rank. Every tensor is cut along each dimension as a plan would do it; parts are held by one or several."""
    held: list[Held] = [{} for _ in range(ranks)]
    for name, shape in SHAPES.items():
        cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
        parts = [tuple(box) for box in itertools.product(*(itertools.pairwise(cut) for cut in cuts))]
        if len(parts) > ranks or not parts:
            parts = [whole(shape)]
        owners = draw(st.permutations(range(ranks)))
        for number, owner in enumerate(owners):
            if number < len(parts):
                held[owner][name] = parts[number]
            elif draw(st.booleans()):
                held[owner][name] = draw(st.sampled_from(parts))
    return held

"""Whether a member, with its parts of the parameters, would do what one process does: two traces side by side."""

from __future__ import annotations

from collections.abc import Mapping

from distbelief.strategies.mesh.tensor.trace import Trace

RESHAPING = ("view", "_unsafe_view", "reshape", "expand")
"""Their arguments are sizes, which a member's part has others of."""


def first_difference(whole: Trace, part: Trace, dims: Mapping[int, int], degree: int) -> int | None:
    """Where a member's forward stops doing what the whole one does, with its part of each divided value."""
    same: dict[int, set[int]] = {}
    for index, (one, other) in enumerate(zip(whole.operations, part.operations, strict=False)):
        if (one.name, one.layer, len(one.reads), len(one.gives)) != (
            other.name,
            other.layer,
            len(other.reads),
            len(other.gives),
        ):
            return index
        for a, b in zip(one.reads, other.reads, strict=True):
            if a not in same.setdefault(b, {a}):
                return index
        for a, b in zip(one.gives, other.gives, strict=True):
            same.setdefault(b, set()).add(a)
            expected = list(whole.values[a].shape)
            if a in dims:
                expected[dims[a]] //= degree
            if tuple(expected) != part.values[b].shape:
                return index
        reshapes = one.name.split(".")[0] in RESHAPING and any(n in dims for n in one.reads)
        if not reshapes and one.plain_arguments() != other.plain_arguments():
            return index
    lengths = len(whole.operations), len(part.operations)
    return None if lengths[0] == lengths[1] else min(lengths)

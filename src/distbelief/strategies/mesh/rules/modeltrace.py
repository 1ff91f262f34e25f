"""A trace: what a model computes, operation by operation, as data without tensors. Pure.

`tensor/trace.py` records traces. `first_difference` compares the trace of the whole model with the trace of a member
that has its parts of the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

RANDOM = ("attention", "dropout")
"""The names of operations that may draw random numbers."""


@dataclass(frozen=True)
class Ref:
    """A tensor among an operation's arguments."""

    number: int


@dataclass(frozen=True)
class Value:
    """A tensor of the trace. `trained`: gradients flow back through it. `order`: its dimensions in the order of
    memory."""

    shape: tuple[int, ...]
    trained: bool
    order: tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """One operation, with the numbers of the values that it reads and gives."""

    name: str  # "layer", "attention", "dropout", "matmul", "einsum", or torch's own, e.g. "transpose.int"
    arguments: Mapping[str, Any]
    plain: tuple[str, ...]
    """All arguments except tensors, as text."""
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    layer: str = ""
    pointwise: bool = False
    random: bool = False


@dataclass
class Trace:
    """The operations of one forward pass, and the values between them."""

    operations: list[Operation] = field(default_factory=list)
    values: dict[int, Value] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    by_keyword: set[str] = field(default_factory=set)
    """Layers that were called with anything but one positional tensor."""
    outputs: set[int] = field(default_factory=set)

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """For each value, the indices of the operations that read it."""
        found: dict[int, list[int]] = {}
        for index, operation in enumerate(self.operations):
            for number in operation.reads:
                found.setdefault(number, []).append(index)
        return found

    @cached_property
    def calls(self) -> dict[str, list[int]]:
        """For each layer, the indices of the operations that are calls of it."""
        found: dict[str, list[int]] = {}
        for index, operation in enumerate(self.operations):
            if operation.layer:
                found.setdefault(operation.layer, []).append(index)
        return found

    @cached_property
    def _makers(self) -> dict[int, list[Operation]]:
        found: dict[int, list[Operation]] = {}
        for operation in self.operations:
            for given in operation.gives:
                found.setdefault(given, []).append(operation)
        return found

    def sources(self, number: int) -> frozenset[str]:
        """The layers whose outputs contribute to this value."""
        found, seen, waiting = set(), {number}, [number]
        while waiting:
            for maker in self._makers.get(waiting.pop(), ()):
                if maker.layer:
                    found.add(maker.layer)
                    continue
                waiting += [read for read in maker.reads if read not in seen]
                seen.update(maker.reads)
        return frozenset(found)


RESHAPING = ("view", "_unsafe_view", "reshape", "expand")
"""Operations whose arguments are sizes, which differ for a member's part."""


def first_difference(whole: Trace, part: Trace, dims: Mapping[int, int], degree: int) -> int | None:
    """The index of the first operation at which a member's forward pass, with its part of each divided value, differs
    from the whole one; None if it does not."""
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
        if not reshapes and one.plain != other.plain:
            return index
    lengths = len(whole.operations), len(part.operations)
    return None if lengths[0] == lengths[1] else min(lengths)

"""The partial sums of the step that a slice waits for: which are there, and whether they are enough. Pure.

Sums are named by their shards. Whoever computes one gives the same bits, and a node of the tree is the sum of its
children; so it does not matter which of them come, in which order, and from whom, as long as they cover all shards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from distbelief.shards import Program, Range, program

Sum = TypeVar("Sum")


@dataclass
class Gathered(Generic[Sum]):
    """
    >>> step = Gathered(shards=4, occupied=4)
    >>> step.add((0, 1), "a"), step.add((0, 2), "b"), step.add((1, 2), "c"), sorted(step.sums)
    (True, True, False, [(0, 2)])
    >>> step.order() is None, step.add((2, 4), "d"), step.order()
    (True, True, (0, 1))
    """

    shards: int
    occupied: int
    sums: dict[Range, Sum] = field(default_factory=dict)

    def add(self, node: Range, value: Sum) -> bool:
        """False: what is there contains it already."""
        if any(first <= node[0] and node[1] <= end for first, end in self.sums):
            return False
        inside = [known for known in self.sums if node[0] <= known[0] and known[1] <= node[1]]
        for known in inside:
            del self.sums[known]
        self.sums[node] = value
        return True

    def order(self) -> Program | None:
        """How the sums (in the order of `values`) are to be added; None: some are missing."""
        try:
            return program(self.shards, self.occupied, {node: n for n, node in enumerate(sorted(self.sums))})
        except KeyError:
            return None

    def values(self) -> list[Sum]:
        return [self.sums[node] for node in sorted(self.sums)]

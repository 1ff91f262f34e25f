"""The names of the changes that a slice has applied, so that a change that is sent again is not applied again. Pure.

A change is named by its source (the number of a client, or `RUN` for all updates of a run) and its sequence number
there. The sequence numbers of a source are kept as "all below n, and these stretches beyond": a few bytes while changes
come in order, and one stretch per gap where they do not.
"""

from __future__ import annotations

from bisect import bisect_right

from msgspec import Struct
from msgspec.structs import replace

from distbelief.errors import DistBeliefError


class NumberSet(Struct, frozen=True):
    """A set of numbers from 0 on: all below `below`, and sorted half-open stretches beyond, with gaps between them.

    >>> NumberSet(3).add(5).add(4)
    NumberSet(below=3, beyond=((4, 6),))
    >>> NumberSet(3).add(5).add(4).add(3)
    NumberSet(below=6, beyond=())
    """

    below: int = 0
    beyond: tuple[tuple[int, int], ...] = ()

    def holds(self, number: int) -> bool:
        if number < self.below:
            return number >= 0
        at = self._after(number)
        return at > 0 and number < self.beyond[at - 1][1]

    def add(self, number: int) -> NumberSet:
        if number < 0:
            raise DistBeliefError(
                f"changes are numbered from 0, not {number}", hint="Count the pushes of a client from 0."
            )
        if self.holds(number):
            return self
        if number == self.below and not self.beyond:  # the usual case: in order
            return NumberSet(number + 1)
        at = self._after(number)
        first, last, left, right = number, number + 1, at, at
        if at > 0 and self.beyond[at - 1][1] == first:
            first, left = self.beyond[at - 1][0], at - 1
        if at < len(self.beyond) and self.beyond[at][0] == last:
            last, right = self.beyond[at][1], at + 1
        if first == self.below:  # nothing lies before it: a stretch there would have been part of `below`
            return NumberSet(last, self.beyond[right:])
        return NumberSet(self.below, (*self.beyond[:left], (first, last), *self.beyond[right:]))

    @property
    def count(self) -> int:
        return self.below + sum(last - first for first, last in self.beyond)

    def _after(self, number: int) -> int:
        return bisect_right(self.beyond, number, key=lambda stretch: stretch[0])


class AppliedChanges(Struct, frozen=True):
    """The names of all changes that a slice has applied.

    >>> applied, new = AppliedChanges().add(source=7, sequence=0)
    >>> new, applied.add(7, 0)[1], applied.holds(7, 0), applied.holds(7, 1)
    (True, False, True, False)
    """

    sources: dict[int, NumberSet] = {}

    def holds(self, source: int, sequence: int) -> bool:
        """Whether the change was applied."""
        marks = self.sources.get(source)
        return marks is not None and marks.holds(sequence)

    def all_below(self, source: int) -> int:
        """All changes of the source before this one were applied."""
        marks = self.sources.get(source)
        return marks.below if marks is not None else 0

    def add(self, source: int, sequence: int) -> tuple[AppliedChanges, bool]:
        """Add the change. False: it was applied before, and must not be applied again."""
        held = self.sources.get(source, NumberSet())
        more = held.add(sequence)
        if more is held:
            return self, False
        return replace(self, sources={**self.sources, source: more}), True

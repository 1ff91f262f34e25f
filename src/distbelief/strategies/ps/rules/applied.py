"""Which changes a slice has applied, so that one that is sent again counts once.

A change is named by its source (a client's number, or one number for all updates of a run) and its sequence there.
Names are kept as "all below n, and these stretches beyond": a few bytes while a source's changes come in order, and
one stretch per gap where they do not. Pure values; knows nothing of what the changes are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from distbelief.errors import DistBeliefError


class NumberSet(Struct, frozen=True):
    """A set of numbers from 0 on: all below `below`, and half-open stretches beyond, sorted, with gaps between them.

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

    def merge(self, other: NumberSet) -> NumberSet:
        """What either holds."""
        joined: list[tuple[int, int]] = []
        for first, last in sorted([(0, self.below), (0, other.below), *self.beyond, *other.beyond]):
            if joined and first <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], last))
            else:
                joined.append((first, last))
        return NumberSet(joined[0][1], tuple(joined[1:]))

    def gaps(self) -> Iterator[int]:
        """The numbers that are missing below the highest one held, in order."""
        at = self.below
        for first, last in self.beyond:
            yield from range(at, first)
            at = last

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
    gone: NumberSet = NumberSet()
    """Sources that have left on purpose, as numbers: given in order and never again, they take a few bytes together."""

    def holds(self, source: int, sequence: int) -> bool:
        """Whether the change was applied. All changes of a source that has left were."""
        marks = self.sources.get(source)
        return marks.holds(sequence) if marks is not None else self.gone.holds(source)

    def all_below(self, source: int) -> int:
        """All changes of the source before this one were applied."""
        marks = self.sources.get(source)
        return marks.below if marks is not None else 0

    def add(self, source: int, sequence: int) -> tuple[AppliedChanges, bool]:
        """Note the change; False when it was applied before, and must not be again."""
        marks = self.sources.get(source)
        if marks is None and self.gone.holds(source):
            return self, False
        held = marks or NumberSet()
        more = held.add(sequence)
        if more is held:
            return self, False
        return replace(self, sources={**self.sources, source: more}), True

    def merge(self, other: AppliedChanges) -> AppliedChanges:
        """What either has applied: the same whichever is asked, and when asked twice."""
        gone = self.gone.merge(other.gone)
        sources = {
            source: self.sources.get(source, NumberSet()).merge(other.sources.get(source, NumberSet()))
            for source in sorted(self.sources.keys() | other.sources.keys())
            if not gone.holds(source)
        }
        return AppliedChanges(sources, gone)

    def forget(self, source: int) -> AppliedChanges:
        """A client has left on purpose, all its changes answered: what still comes in its name is a repetition.

        Its number is never given to another client. A client that died is not forgotten: whoever takes over its work
        sends changes in its name.
        """
        sources = {number: marks for number, marks in self.sources.items() if number != source}
        return AppliedChanges(sources, self.gone.add(source))

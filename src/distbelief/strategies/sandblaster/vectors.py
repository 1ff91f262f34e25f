"""Named vectors on servers: `SlicedVectors` is one server's part, `ServedVectors` the driver's side over the network.

A vector has `size` elements in the flat order of the parameters (flatmodel/layout.py). Servers hold slices of every
vector, cut at multiples of 64 elements. No result may depend on where the cuts are, so:
- sums are taken in float64 over blocks of 64 elements, halves added to halves, and the blocks are added along the tree
  of `shards.split`. A part answers with the sums of the largest subtrees that it holds; `add_partials` does the rest.
- combinations are elementwise: every product and every sum is rounded to float64, in the order of the terms, and the
  result once to the type of the vectors. No fused multiply-add, whose use depends on where a vector register ends.

The driver's commands wait until it asks for something, then go out together: a few messages per iteration and slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from distbelief.errors import DistBeliefError
from distbelief.shards import Range, cover, split
from distbelief.strategies.ps.protocol.client import ServerClient, Stop
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import Question
from distbelief.strategies.sandblaster.messages import (
    Combine,
    Command,
    Copy,
    Do,
    Drop,
    Finish,
    Produced,
    Products,
    Show,
    first_number,
)
from distbelief.strategies.sandblaster.rules.lbfgs import Pair, Term

BLOCK = 64  # elements: the alignment of every cut (strategies/flatmodel/layout.py), and the leaf of every sum
_SCRATCH = 1 << 19  # float64 elements at work at once: a few MiB, about what a core's cache holds

Partials = list[tuple[Range, list[float]]]
"""By subtree (a range of blocks): the sum for each pair or vector asked for."""


class SlicedVectors:
    """One server's part: flat tensors, one per vector and slice.

    >>> part = SlicedVectors(100, [(0, 64), (64, 100)])
    >>> part.tensor("ones", (0, 64)).fill_(1.0).sum(), part.tensor("ones", (64, 100)).fill_(1.0).sum()
    (tensor(64.), tensor(36.))
    >>> part.combine("twos", [(3.0, "ones"), (-1.0, "ones")])
    >>> part.partial_dot([("ones", "twos"), ("twos", "twos")])
    [((0, 1), [128.0, 256.0]), ((1, 2), [72.0, 144.0])]
    """

    def __init__(self, size: int, slices: Sequence[Range], dtype: torch.dtype = torch.float32) -> None:
        for first, end in slices:
            if first % BLOCK or (end % BLOCK and end != size) or not 0 <= first < end <= size:
                raise DistBeliefError(
                    f"elements {first} to {end} of {size} cannot be a slice of a vector",
                    hint=f"cut at multiples of {BLOCK} elements, so that sums do not depend on the cuts",
                )
        self._blocks = -(-size // BLOCK)
        self._slices = sorted(slices)
        self._dtype = dtype
        self._vectors: dict[str, dict[Range, torch.Tensor]] = {}

    def tensor(self, name: str, where: Range) -> torch.Tensor:
        """The storage of a vector in one slice, for reading or writing. Makes a zero vector if it does not exist."""
        if name not in self._vectors:
            self._vectors[name] = {(a, b): torch.zeros(b - a, dtype=self._dtype) for a, b in self._slices}
        return self._vectors[name][where]

    @property
    def names(self) -> list[str]:
        return sorted(self._vectors)

    def partial_dot(self, pairs: Sequence[Pair]) -> Partials:
        names = list(dict.fromkeys(name for pair in pairs for name in pair))
        row = {name: i for i, name in enumerate(names)}

        def products(wide: torch.Tensor, out: torch.Tensor) -> None:
            for k, (left, right) in enumerate(pairs):
                torch.mul(wide[row[left]], wide[row[right]], out=out[k])

        return self._sums(names, len(pairs), products)

    def partial_sum_abs(self, names: Sequence[str]) -> Partials:
        return self._sums(names, len(names), lambda wide, out: torch.abs(wide, out=out))

    def max_abs(self, names: Sequence[str]) -> list[float]:
        self._check(names)
        return [_largest([float(t.abs().amax()) for t in self._vectors[name].values()]) for name in names]

    def combine(self, target: str, terms: Sequence[Term]) -> None:
        self._check([name for _, name in terms])
        length = _SCRATCH // 4
        total, term = torch.empty(2, min(length, self._blocks * BLOCK), dtype=torch.float64)
        for where in self._slices:
            into = self.tensor(target, where)
            for first, end in _stretches(len(into), length):
                total[: end - first].zero_()
                for coefficient, name in terms:
                    one = term[: end - first]
                    one.copy_(self._vectors[name][where][first:end]).mul_(coefficient)
                    total[: end - first].add_(one)
                into[first:end].copy_(total[: end - first])

    def copy(self, target: str, source: str) -> None:
        self._check([source])
        for where in self._slices:
            self.tensor(target, where).copy_(self._vectors[source][where])

    def drop(self, names: Sequence[str]) -> None:
        for name in names:
            self._vectors.pop(name, None)

    def _sums(
        self, names: Sequence[str], asked: int, terms: Callable[[torch.Tensor, torch.Tensor], object]
    ) -> Partials:
        """The sums of the elements that `terms` computes from the vectors `names`, by subtree of these slices."""
        self._check(names)
        found: Partials = []
        length = max(_SCRATCH // max(asked, 1) // BLOCK, 1) * BLOCK
        wide = torch.zeros(len(names), length, dtype=torch.float64)
        each = torch.zeros(asked, length, dtype=torch.float64)
        for where in self._slices:
            first_block, blocks = where[0] // BLOCK, -(-(where[1] - where[0]) // BLOCK)
            leaves = torch.empty(asked, blocks, dtype=torch.float64)
            for first, end in _stretches(where[1] - where[0], length):
                padded = -(-(end - first) // BLOCK) * BLOCK
                wide[:, end - first : padded] = 0.0
                for i, name in enumerate(names):
                    wide[i, : end - first].copy_(self._vectors[name][where][first:end])
                terms(wide[:, :padded], each[:, :padded])
                leaves[:, first // BLOCK : (first + padded) // BLOCK] = _leaves(each[:, :padded])
            for low, high in cover(self._blocks, (first_block, first_block + blocks)):
                inside = leaves[:, low - first_block : high - first_block]
                found.append(((low, high), _tree(inside).tolist()))
        return found

    def _check(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._vectors:
                raise DistBeliefError(
                    f"there is no vector called '{name}' on this server",
                    hint=f"it holds {', '.join(self.names) or 'none'}; a driver must only use what it made before",
                )


class JoinedVectors:
    """`Vectors` in this process: several parts that together hold every slice.

    >>> parts = [SlicedVectors(128, [(0, 64)]), SlicedVectors(128, [(64, 128)])]
    >>> for part, where in zip(parts, [(0, 64), (64, 128)]):
    ...     _ = part.tensor("v", where).fill_(0.5)
    >>> JoinedVectors(128, parts).dot([("v", "v")])
    [32.0]
    """

    def __init__(self, size: int, parts: Sequence[SlicedVectors]) -> None:
        self._size = size
        self._parts = list(parts)

    @property
    def size(self) -> int:
        return self._size

    def dot(self, pairs: Sequence[Pair]) -> list[float]:
        return add_partials(self._size, [p for part in self._parts for p in part.partial_dot(pairs)])

    def sum_abs(self, names: Sequence[str]) -> list[float]:
        return add_partials(self._size, [p for part in self._parts for p in part.partial_sum_abs(names)])

    def max_abs(self, names: Sequence[str]) -> list[float]:
        return [_largest(values) for values in zip(*(part.max_abs(names) for part in self._parts), strict=True)]

    def combine(self, target: str, terms: Sequence[Term]) -> None:
        for part in self._parts:
            part.combine(target, terms)

    def copy(self, target: str, source: str) -> None:
        for part in self._parts:
            part.copy(target, source)

    def drop(self, names: Sequence[str]) -> None:
        for part in self._parts:
            part.drop(names)


def add_partials(size: int, partials: Partials) -> list[float]:
    """Add the subtrees of all parts along the tree over all blocks, in whatever order they arrived.

    >>> add_partials(192, [((2, 3), [4.0]), ((0, 2), [3.0])])
    [7.0]
    """
    known = dict(partials)

    def visit(node: Range) -> list[float]:
        if node in known:
            return known[node]
        if node[1] - node[0] <= 1:
            raise DistBeliefError(
                f"no server answered for elements {node[0] * BLOCK} to {min(node[1] * BLOCK, size)}",
                hint="every slice needs a server before a driver may go on: ask for the map of slices again",
            )
        left, right = split(node)
        return [a + b for a, b in zip(visit(left), visit(right), strict=True)]

    return visit((0, -(-size // BLOCK)))


def _leaves(values: torch.Tensor) -> torch.Tensor:
    """(asked, elements) to (asked, blocks): each block is folded in half until one number is left."""
    folded = values.reshape(len(values), values.shape[1] // BLOCK, BLOCK)
    while (half := folded.shape[2] // 2) > 0:
        folded = folded[..., :half] + folded[..., half:]
    return folded[..., 0]


def _tree(leaves: torch.Tensor) -> torch.Tensor:
    """(asked, blocks) to (asked,): neighbours are added, an odd last one waits: the bracketing of `shards.split`."""
    while leaves.shape[1] > 1:
        even = leaves.shape[1] // 2 * 2
        paired = leaves[:, 0:even:2] + leaves[:, 1:even:2]
        leaves = torch.cat([paired, leaves[:, even:]], dim=1)
    return leaves[:, 0]


def _stretches(length: int, most: int) -> Iterator[Range]:
    return ((first, min(first + most, length)) for first in range(0, length, most))


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(math.isnan(value) for value in values) else max(values, default=0.0)


class ServedVectors:
    """`Vectors` on servers. Commands go out in numbered batches (`Do`); answers are scalars."""

    def __init__(self, client: ServerClient, slices: int, size: int, generation: int, abort: Stop) -> None:
        self._client = client
        self._slices = slices
        self._size = size
        self._abort = abort
        self._number = first_number(generation) - 1
        self._waiting: list[Command] = []

    @property
    def size(self) -> int:
        return self._size

    @property
    def number(self) -> int:
        """The number of the last batch that was sent."""
        return self._number

    def combine(self, target: str, terms: Sequence[Term]) -> None:
        self._waiting.append(Combine(target, list(terms)))

    def copy(self, target: str, source: str) -> None:
        self._waiting.append(Copy(target, source))

    def drop(self, names: Sequence[str]) -> None:
        self._waiting.append(Drop(list(names)))

    def show(self, point: str, evaluation: int = -1) -> None:
        """Let members fetch a point. This sends the batch, whose number is `number` afterwards."""
        self._waiting.append(Show(point, evaluation))
        self._send()

    def finish(self, evaluation: int, gradient: str, factor: float) -> None:
        self._waiting.append(Finish(evaluation, gradient, factor))

    def settle(self) -> None:
        """Wait until every command is acknowledged: then it survives the death of a server."""
        self._send()
        self._client.settle(self._abort)

    def dot(self, pairs: Sequence[Pair]) -> list[float]:
        found = self._ask(Products(0, 0, 0, dots=list(pairs)))
        return add_partials(self._size, [one for reply in found for one in reply.dots])

    def sum_abs(self, names: Sequence[str]) -> list[float]:
        found = self._ask(Products(0, 0, 0, sums=list(names)))
        return add_partials(self._size, [one for reply in found for one in reply.sums])

    def max_abs(self, names: Sequence[str]) -> list[float]:
        found = self._ask(Products(0, 0, 0, largest=list(names)))
        values = zip(*(reply.largest for reply in found), strict=True)
        # Python's max does not notice a NaN that is not first.
        return [next((one for one in some if one != one), max(some)) for some in values]

    def _send(self) -> None:
        if not self._waiting:
            return
        self._number += 1
        commands = Do(self._number, self._waiting)
        self._waiting = []
        for number in range(self._slices):
            self._client.push(number, commands)
        self._client.flush()

    def _ask(self, asked: Products) -> list[Produced]:
        self._send()
        found: list[Produced] = []

        def produced(framed: Framed) -> None:
            found.append(framed.message)

        questions = [partial(_of_slice, asked, self._number, number) for number in range(self._slices)]
        self._client.ask(questions, self._abort, produced)
        return found


def _of_slice(asked: Products, after: int, number: int, ticket: int) -> Question:
    return Products(ticket, number, after, asked.dots, asked.sums, asked.largest)

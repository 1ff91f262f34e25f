"""How a divided value passes through a model's operations, and where the division must stop. Pure.

A layer divided by columns gives each member some of its columns: a value divided along one dimension into equal parts.
Each rule tells, for one kind of operation, along which dimension the result is divided if every member applies the
operation to its own part. A rule raises `Stop` if the members' results would not be parts of the result in one process.
A rule also raises `Stop` if an undivided operand would get an incomplete gradient. An operation without a rule stops
the division: only divisions known to be right are made. `follow_division` applies the rules from layers divided by
columns to the layers that add everything up again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

# --- a trace: what a model computes, operation by operation, as data without tensors ------------------------------
# `tensor/trace.py` records traces. `first_difference` compares the trace of the whole model with the trace of a member
# that has its parts of the parameters.

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


# --- one operation ---------------------------------------------------------------------------------------------------


class Stop(Exception):
    """The division cannot pass an operation. `needs`: values that would have to be divided too."""

    def __init__(self, reason: str, needs: Sequence[int] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.needs = tuple(needs)


def propagate(trace: Trace, operation: Operation, dims: Mapping[int, int], heads: set[int]) -> dict[int, int]:
    """The dimensions along which an operation's results are divided, if some of its arguments are (`dims`). Adds to
    `heads` into how many parts the code splits a divided dimension."""
    name = operation.name.split(".")[0]
    if operation.random:
        raise Stop(f"random numbers ({name}) are drawn for its output")
    step = _Step(trace, operation, dims, heads)
    if operation.pointwise or name in _POINTWISE:
        return step.aligned(operation.reads)
    rule = _RULES.get(name)
    if rule is None:
        raise Stop(f"its output goes into torch's {name}, for which there is no rule")
    return rule(step)


@dataclass
class _Step:
    """One operation that reads at least one divided value."""

    trace: Trace
    operation: Operation
    dims: Mapping[int, int]
    heads: set[int]

    def shape(self, number: int) -> tuple[int, ...]:
        return self.trace.values[number].shape

    def given(self, name: str, default: Any = None) -> Any:
        return self.operation.arguments.get(name, default)

    def one(self, name: str = "self") -> tuple[int, int]:
        """For an operation on a single divided value: the value's rank and the dimension along which it is divided."""
        number = self.given(name).number
        others = [n for n in self.operation.reads if n != number]
        if number not in self.dims:
            raise Stop("its output changes a value that is not divided", [number])
        self.whole(others)
        return len(self.shape(number)), self.dims[number]

    def whole(self, numbers: Sequence[int]) -> None:
        """Check values that stay whole beside divided values."""
        for number in numbers:
            if number in self.dims:
                raise Stop(f"its output meets another divided value in {self.operation.name.split('.')[0]}")
            if self.trace.values[number].trained:
                raise Stop("its output meets a trained value that is not divided")

    def all(self, dim: int) -> dict[int, int]:
        return dict.fromkeys(self.operation.gives, dim)

    def aligned(self, numbers: Sequence[int]) -> dict[int, int]:
        """Element by element, with shapes aligned at their ends: divided values must be divided at one place, and no
        other value may extend there."""
        places = {len(self.shape(n)) - self.dims[n] for n in numbers if n in self.dims}
        if len(places) != 1:
            raise Stop("its output meets a value that is divided along another dimension")
        place = places.pop()
        others = [n for n in numbers if n not in self.dims]
        full = [n for n in others if len(self.shape(n)) >= place and self.shape(n)[-place] != 1]
        if full:
            raise Stop("its output meets a value that is not divided", full)
        self.whole(others)
        return {number: len(self.shape(number)) - place for number in self.operation.gives}


def _view(step: _Step) -> dict[int, int]:
    """A dimension keeps its division if it is the outermost of the dimensions that are joined, before and after."""
    _, dim = step.one()
    before, after = step.shape(step.given("self").number), step.shape(step.operation.gives[0])
    for place, size in enumerate(after):
        if prod(after[:place]) == prod(before[:dim]) and size != 1:
            if size != before[dim] and size < before[dim]:
                step.heads.add(size)
            return step.all(place)
    raise Stop(f"the code rearranges its output from {list(before)} to {list(after)}")


def _permute(step: _Step) -> dict[int, int]:
    rank, dim = step.one()
    return step.all([d % rank for d in step.given("dims")].index(dim))


def _transpose(step: _Step) -> dict[int, int]:
    rank, dim = step.one()
    one, two = step.given("dim0", 0) % rank, step.given("dim1", 1) % rank
    return step.all({one: two, two: one}.get(dim, dim))


def _unsqueeze(step: _Step) -> dict[int, int]:
    rank, dim = step.one()
    return step.all(dim + (step.given("dim") % (rank + 1) <= dim))


def _squeeze(step: _Step) -> dict[int, int]:
    rank, dim = step.one()
    shape, chosen = step.shape(step.given("self").number), step.given("dim", range(rank))
    gone = {d % rank for d in ([chosen] if isinstance(chosen, int) else chosen) if shape[d % rank] == 1}
    return step.all(dim - sum(d < dim for d in gone))


def _expand(step: _Step) -> dict[int, int]:
    rank, dim = step.one()
    return step.all(dim + len(step.shape(step.operation.gives[0])) - rank)


def _select(step: _Step) -> dict[int, int]:
    rank, dim = step.one()
    chosen = step.given("dim", 0) % rank
    if chosen == dim:
        raise Stop("the code takes single parts out of its output")
    return step.all(dim - (chosen < dim))


def _cut(step: _Step) -> dict[int, int]:
    rank, dim = step.one()
    before = step.shape(step.given("self").number)
    if step.given("dim", 0) % rank == dim and any(step.shape(n)[dim] != before[dim] for n in step.operation.gives):
        raise Stop("the code splits its output, as for query, key and value from one matrix")
    return step.all(dim)


def _cat(step: _Step) -> dict[int, int]:
    parts = [ref.number for ref in step.given("tensors") if prod(step.shape(ref.number)) > 0]
    if any(n not in step.dims for n in parts):
        raise Stop("its output is joined to a value that is not divided", [n for n in parts if n not in step.dims])
    dims = {step.dims[n] for n in parts}
    if len(dims) != 1:
        raise Stop("its output is joined to a value that is divided along another dimension")
    dim = dims.pop()
    rank = len(step.shape(step.operation.gives[0]))
    along = step.given("dim", 0) % rank
    if step.operation.name.startswith("stack"):
        return step.all(dim + (along <= dim))
    if along == dim:
        raise Stop("its output is joined to others along the dimension that is divided")
    return step.all(dim)


def _along(step: _Step) -> dict[int, int]:
    """Sums, means, softmax: along other dimensions than the divided one."""
    rank, dim = step.one()
    chosen = step.given("dim")
    along = {d % rank for d in ([chosen] if isinstance(chosen, int) else chosen or range(rank))}
    if dim in along:
        raise Stop(f"the code takes the {step.operation.name.split('.')[0].strip('_')} of all its output")
    kept = len(step.shape(step.operation.gives[0])) == rank
    return step.all(dim if kept else dim - sum(d < dim for d in along))


def _norm(step: _Step) -> dict[int, int]:
    rank, dim = step.one("input")
    if dim >= rank - len(step.given("normalized_shape")):
        raise Stop("a normalisation needs all its output")
    return step.all(dim)


def _triangle(step: _Step) -> dict[int, int]:
    rank, dim = step.one()
    if dim >= rank - 2:
        raise Stop("the code takes a triangle of its output")
    return step.all(dim)


def _alike(step: _Step) -> dict[int, int]:
    return step.all(step.one()[1])


def _dropout(step: _Step) -> dict[int, int]:
    return step.all(step.one("input")[1])


def _matmul(step: _Step) -> dict[int, int]:
    one, two = step.given("self").number, step.given("other").number
    dims, ranks = step.dims, (len(step.shape(one)), len(step.shape(two)))
    if min(ranks) < 2:
        raise Stop("its output is multiplied with a vector")
    batched = all(n not in dims or dims[n] < rank - 2 for n, rank in zip((one, two), ranks, strict=True))
    if batched:
        return step.aligned((one, two))
    rank = len(step.shape(step.operation.gives[0]))
    if dims.get(one) == ranks[0] - 2:
        step.whole([two])
        return step.all(rank - 2)
    if dims.get(two) == ranks[1] - 1:
        step.whole([one])
        return step.all(rank - 1)
    raise Stop("a matrix product adds over its output")


def _einsum(step: _Step) -> dict[int, int]:
    left, _, right = step.given("equation").replace(" ", "").partition("->")
    numbers, terms = [ref.number for ref in step.given("operands")], left.split(",")
    if "." in left or not right:
        raise Stop("its output goes into an einsum that does not name all dimensions")
    labels = {term[step.dims[n]] for n, term in zip(numbers, terms, strict=True) if n in step.dims}
    label = labels.pop()
    if labels or label not in right:
        raise Stop("an einsum adds over its output")
    beside = [n for n, term in zip(numbers, terms, strict=True) if n not in step.dims]
    full = [n for n, term in zip(numbers, terms, strict=True) if n not in step.dims and label in term]
    if full:
        raise Stop("its output meets a value that is not divided", full)
    step.whole(beside)
    return step.all(right.index(label))


def _attention(step: _Step) -> dict[int, int]:
    numbers = [step.given(name).number for name in ("query", "key", "value")]
    missing = [n for n in numbers if n not in step.dims]
    if missing:
        raise Stop("attention takes its output together with values that are not divided", missing)
    if any(len(step.shape(n)) < 3 or step.dims[n] != len(step.shape(n)) - 3 for n in numbers):
        raise Stop("attention takes its output divided otherwise than by heads")
    mask = step.given("attn_mask")
    if isinstance(mask, Ref):
        aligned = [numbers[0], mask.number]
        step.aligned(aligned)
    return step.all(len(step.shape(step.operation.gives[0])) - 3)


_POINTWISE = ("_to_copy", "copy_", "alias", "detach", "lift_fresh", "clone", "contiguous")
_RULES: dict[str, Callable[[_Step], dict[int, int]]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), _view),
    **dict.fromkeys(("transpose", "t"), _transpose),
    **dict.fromkeys(("slice", "split", "split_with_sizes", "narrow"), _cut),
    **dict.fromkeys(("select", "unbind"), _select),
    **dict.fromkeys(("cat", "stack"), _cat),
    **dict.fromkeys(
        ("_softmax", "_safe_softmax", "_log_softmax", "sum", "mean", "var", "amax", "amin", "cumsum", "logsumexp"),
        _along,
    ),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _norm),
    **dict.fromkeys(("tril", "triu"), _triangle),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "empty_like"), _alike),
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "dropout": _dropout,
    "matmul": _matmul,
    "einsum": _einsum,
    "attention": _attention,
}


# --- from columns to rows --------------------------------------------------------------------------------------------


@dataclass
class DividedRegion:
    """The values and layers that a division reaches: each divided value's dimension, and the layers that take divided
    inputs."""

    dims: dict[int, int] = field(default_factory=dict)
    rows: set[str] = field(default_factory=set)
    heads: set[int] = field(default_factory=set)
    """Into how many parts the model's code splits divided values."""
    touched: list[int] = field(default_factory=list)

    def counts(self, trace: Trace) -> set[int]:
        """The sizes that must all be divisible by the degree."""
        return {trace.values[number].shape[dim] for number, dim in self.dims.items()}


def follow_division(trace: Trace, columns: Collection[str]) -> DividedRegion:
    """Follow the outputs of these layers, divided along their last dimension, to the layers that add them up again."""
    result = DividedRegion()
    waiting = [index for name in columns for index in trace.calls.get(name, ())]
    heapq.heapify(waiting)
    last = -1
    while waiting:
        index = heapq.heappop(waiting)
        if index == last:
            continue
        last = index
        operation = trace.operations[index]
        if operation.layer:
            fresh = _through_layer(trace, operation, columns, result)
        else:
            fresh = propagate(trace, operation, result.dims, result.heads)
        result.touched.append(index)
        for number, dim in fresh.items():
            if result.dims.get(number, dim) != dim:
                raise Stop("the code changes its output in place")
            if number not in result.dims:
                result.dims[number] = dim
                if number in trace.outputs:
                    raise Stop("the model gives out its output as it is")
                for reader in trace.readers.get(number, ()):
                    if reader > index:
                        heapq.heappush(waiting, reader)
    for row in result.rows:
        if any(result.dims.keys().isdisjoint(trace.operations[index].reads) for index in trace.calls[row]):
            raise Stop(f"{row} takes its output, and at another time a value that is not divided")
    return result


def _through_layer(
    trace: Trace, operation: Operation, columns: Collection[str], result: DividedRegion
) -> dict[int, int]:
    taken = [(n, result.dims[n]) for n in operation.reads if n in result.dims]
    if operation.layer in columns:
        if taken:
            raise Stop(f"its output reaches {operation.layer}, which is to be divided by columns too")
        return {number: len(trace.values[number].shape) - 1 for number in operation.gives}
    for number, dim in taken:
        if dim != len(trace.values[number].shape) - 1:
            raise Stop(f"{operation.layer} takes its output divided along another dimension than the last")
    result.rows.add(operation.layer)
    return {}

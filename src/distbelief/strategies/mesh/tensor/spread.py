"""How far a division of values reaches: from layers divided by columns to the layers that add everything up again."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass, field

from distbelief.strategies.mesh.tensor.propagation import Stop, through
from distbelief.strategies.mesh.tensor.trace import Operation, Trace


@dataclass
class Spread:
    """What a division reaches: each divided value's dimension, and the layers that take divided inputs."""

    dims: dict[int, int] = field(default_factory=dict)
    rows: set[str] = field(default_factory=set)
    heads: set[int] = field(default_factory=set)
    """Into how many parts the code itself takes divided values apart."""
    touched: list[int] = field(default_factory=list)

    def counts(self, trace: Trace) -> set[int]:
        """The sizes that must all be divisible by the degree."""
        return {trace.values[number].shape[dim] for number, dim in self.dims.items()}


def spread(trace: Trace, columns: Collection[str]) -> Spread:
    """Follow the outputs of these layers, divided along their last dimension, to the layers that add them up again."""
    result = Spread()
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
            fresh = through(trace, operation, result.dims, result.heads)
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


def _through_layer(trace: Trace, operation: Operation, columns: Collection[str], result: Spread) -> dict[int, int]:
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

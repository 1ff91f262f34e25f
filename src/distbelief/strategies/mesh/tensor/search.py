"""Searches for layers that can be divided together: groups that begin with layers divided by columns and end with
layers divided by rows.

The search uses the traces of one model in training and in evaluation, and the job's `tensor_plan`. A group must be
right in both modes. A layer that does not fit stays whole, with the reason. Only attention heads that cannot be shared
evenly are an error: a user who asks for that degree expects attention to be divided.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn

from torch import nn

from distbelief.errors import JobError
from distbelief.strategies.mesh.rules.propagation import (
    RANDOM,
    DividedRegion,
    Stop,
    Trace,
    first_difference,
    follow_division,
)
from distbelief.strategies.mesh.tensor.trace import TraceFailed, is_layer

Style = Literal["column", "row", "column_gather", "row_split", "vocabulary"]
"""`column` (with a divided output) and `row` (with a divided input) are the two ends of a group. `column_gather`
gathers its output, `row_split` splits a whole input; an embedding's `vocabulary` is divided by rows."""


class DropoutSite(NamedTuple):
    """A place where random numbers are drawn for a divided value."""

    dim: int
    order: tuple[int, ...]  # the whole value's dimensions in the order of memory
    row: str  # the layer that its group ends with


SMALL = 0.01
"""The smallest share of the model at which a single layer is divided: it costs a gather or a sum at each call."""

Run = Callable[[bool, Mapping[str, tuple[int, ...]]], Trace]
"""Traces a forward pass, in training or not, with these shapes of parameters."""


@dataclass
class LayerGroup:
    """Layers that are divided together."""

    columns: frozenset[str]
    regions: list[DividedRegion]

    @property
    def layers(self) -> frozenset[str]:
        return self.columns | self.regions[0].rows

    def end(self, trace: Trace) -> str:
        """The layer that is called last."""
        return trace.operations[max(self.regions[0].touched)].layer


class Search:
    """Sorts the layers of one model into groups, single divided layers, and whole layers."""

    def __init__(self, model: nn.Module, degree: int, traces: list[Trace], wishes: Mapping[str, str]) -> None:
        self.degree, self.traces, self.wishes = degree, traces, wishes
        self.modules = dict(model.named_modules())
        self.styles: dict[str, Style] = {}
        self.groups: list[LayerGroup] = []
        self._elements = sum(p.numel() for p in model.parameters())
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._owners: dict[int, list[str]] = {}
        for name, module in self.modules.items():
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(id(parameter), []).append(name)
        self._direct = {t.parameters[n] for t in traces for o in t.operations for n in o.reads if n in t.parameters}
        self._obstacles = {
            name: self._obstacle(name, module)
            for name, module in self.modules.items()
            if next(module.parameters(recurse=False), None) is not None
        }
        self.whole = dict(self._obstacles)

    def _obstacle(self, name: str, module: nn.Module) -> str:
        """The reason why a module cannot be divided in any surroundings; "" if it can."""
        if self.wishes.get(name) == "whole":
            return "the job says so"
        if isinstance(module, nn.modules.conv._ConvNd):
            return "dividing the channels of a convolution does not pay"
        if not is_layer(module):
            flat = all(p.ndim < 2 for p in module.parameters(recurse=False))
            return "it is small" if flat else f"{type(module).__name__} is no Linear or Embedding layer"
        if any(self._names[id(p)] in self._direct for p in module.parameters(recurse=False)):
            return "the code uses its weight directly"
        if any(name not in t.called for t in self.traces):
            return "the code does not call it"
        if "weight" not in module._parameters:
            return "its weight is computed from other parameters"
        if any(name in t.by_keyword for t in self.traces):
            return "it is not called with one positional argument"
        if isinstance(module, nn.Embedding) and (module.padding_idx, module.max_norm) != (None, None):
            return "an embedding with padding_idx or max_norm needs all its rows"
        if isinstance(module, nn.Embedding) and (module.sparse or module.scale_grad_by_freq):
            return "its gradients are sparse or scaled by frequency"
        return ""

    def _tied(self, name: str) -> list[str]:
        owners = {o for p in self.modules[name].parameters(recurse=False) for o in self._owners[id(p)]}
        return sorted(owners - {name})

    def _free(self, name: str) -> bool:
        """Whether a layer may be at either end of a group."""
        module = self.modules[name]
        able = self._obstacles.get(name) == "" and isinstance(module, nn.Linear)
        return able and name not in self.styles and not self._tied(name)

    # --- groups ------------------------------------------------------------------------------------------------------

    def find_groups(self) -> None:
        for name in dict.fromkeys(o.layer for o in self.traces[0].operations if o.layer):
            if not self._free(name) or self.wishes.get(name) == "row":
                continue
            try:
                self._take(self._grow(name))
            except Stop as stop:
                self.whole[name] = stop.reason

    def _grow(self, name: str) -> LayerGroup:
        """The group that begins with this layer. Layers join it if their outputs meet its output (query, key and
        value)."""
        columns = {name}
        while True:
            try:
                regions = [follow_division(t, columns) for t in self.traces]
                break
            except Stop as stop:
                more = {source for number in stop.needs for source in self.traces[0].sources(number)} - columns
                if not more or not all(self._free(o) and self.wishes.get(o) != "row" for o in more):
                    raise
                columns |= more
        rows = regions[0].rows
        if any(s.rows != rows for s in regions):
            raise Stop("training and evaluation use it in different ways")
        if not rows:
            raise Stop("no layer takes its output")
        for row in rows:
            if not self._free(row) or self.wishes.get(row) == "column":
                raise Stop(f"{row} takes its output, and is not divided")
        return LayerGroup(frozenset(columns), regions)

    def _take(self, group: LayerGroup) -> None:
        heads = group.regions[0].heads
        uneven = sorted(n for n in group.regions[0].counts(self.traces[0]) if n % self.degree)
        if any(n % self.degree for n in heads):
            self._refuse_heads(group)
        if uneven:
            raise Stop(f"{uneven[0]} cannot be divided by {self.degree} evenly")
        self.groups.append(group)
        for name in group.layers:
            self.styles[name] = "column" if name in group.columns else "row"
            del self.whole[name]

    def _refuse_heads(self, group: LayerGroup) -> NoReturn:
        heads = sorted(group.regions[0].heads)
        names = [name for name in self.modules if name in group.columns]
        fit = math.gcd(*heads)
        degrees = [f"tensor:{n}" for n in range(2, fit + 1) if fit % n == 0]
        patterns = ", ".join(f"'{kind_of(name)}': 'whole'" for name in names)
        raise JobError(
            f"tensor:{self.degree} cannot divide {', '.join(names)}: "
            f"{' and '.join(map(str, heads))} heads cannot be shared evenly by {self.degree} members",
            hint=(f"{' or '.join(degrees)} would fit" if degrees else "no degree would fit")
            + f"; or keep them whole: Job(tensor_plan={{{patterns}}})",
        )

    # --- the trial ---------------------------------------------------------------------------------------------------

    def try_groups(self, run: Run) -> None:
        """Trace forward passes with the sizes of one member, dropping groups until all that remain pass."""
        while self.groups and (failure := self._trial(run)):
            group, reason = failure
            kind = {kind_of(name) for name in group.columns}
            for other in [g for g in self.groups if {kind_of(name) for name in g.columns} == kind]:
                self._drop(other, reason)

    def _drop(self, group: LayerGroup, reason: str) -> None:
        self.groups.remove(group)
        for name in group.layers:
            del self.styles[name]
            self.whole[name] = reason

    def _trial(self, run: Run) -> tuple[LayerGroup, str] | None:
        for mode, whole in enumerate(self.traces):
            reason = "with a part of its output the code would do something else"
            try:
                part = run(mode == 0, self._local_shapes())
            except TraceFailed as failure:
                part, reason = failure.trace, f"the code does not fit a part of its output ({failure})"
            dims = {number: dim for group in self.groups for number, dim in group.regions[mode].dims.items()}
            index = first_difference(whole, part, dims, self.degree)
            if index is not None:
                return self._at(index, mode), reason
        return None

    def _at(self, index: int, mode: int) -> LayerGroup:
        """The group that was the last to be reached before this operation."""
        return max(
            self.groups, key=lambda group: max((i for i in group.regions[mode].touched if i <= index), default=-1)
        )

    def _local_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {}
        for name, style in self.styles.items():
            for parameter in self.modules[name].parameters(recurse=False):
                shape = list(parameter.shape)
                if style == "column" or len(shape) == 2:
                    shape[0 if style == "column" else 1] //= self.degree
                shapes[self._names[id(parameter)]] = tuple(shape)
        return shapes

    # --- what stands alone -------------------------------------------------------------------------------------------

    def add_single_layers(self) -> None:
        """Divide single layers (embeddings, output heads, layers that the job names): right in any surroundings, at the
        price of a gather."""
        ends = {source for number in self.traces[0].outputs for source in self._only_source(number)}
        for name in [name for name, obstacle in self._obstacles.items() if obstacle == "" and name not in self.styles]:
            style = self._alone(name, name in ends)
            if style is None:
                continue
            weight = self.modules[name].get_parameter("weight")
            size = weight.shape[dim_of(self.modules[name], style)]
            if (self.degree - 1) * math.ceil(size / self.degree) >= size:
                self.whole[name] = f"{size} are too few for {self.degree} members"
            elif name not in self.wishes and weight.numel() < SMALL * self._elements:
                self.whole[name] = "it is small"
            else:
                self.styles[name] = style
                del self.whole[name]
        for name in [name for name in self.styles if self._tied(name)]:
            self._keep_tie(name)

    def _alone(self, name: str, at_end: bool) -> Style | None:
        linear = isinstance(self.modules[name], nn.Linear)
        match self.wishes.get(name):
            case "column":
                return "column_gather"
            case "row":
                return "row_split" if linear else "vocabulary"
        if not linear:
            return "vocabulary"
        return "column_gather" if at_end or self._tied(name) else None

    def _only_source(self, number: int) -> frozenset[str]:
        sources = self.traces[0].sources(number)
        return sources if len(sources) == 1 else frozenset()

    def _keep_tie(self, name: str) -> None:
        """Keep tied layers alike: all layers that share a tensor divide it in the same way, or all keep it whole."""
        owners = [name, *self._tied(name)]
        dims = {dim_of(self.modules[o], self.styles[o]) if o in self.styles else None for o in owners}
        if len(dims) == 1 and None not in dims:
            return
        for owner in owners:
            if self.styles.pop(owner, None):
                others = ", ".join(o for o in owners if o != owner)
                self.whole[owner] = f"its weight is also that of {others}, which cannot be divided in the same way"

    # --- dropout -----------------------------------------------------------------------------------------------------

    def sites(self) -> dict[tuple[str, int], DropoutSite]:
        """The places where random numbers are drawn for divided values, counted from the last call of a layer of a
        group."""
        groups = {number: group for group in self.groups for number in group.regions[0].dims}
        grouped = {name for group in self.groups for name in group.layers}
        found: dict[tuple[str, int], DropoutSite | None] = {}
        last, count = "", 0
        for operation in self.traces[0].operations:
            if operation.layer in grouped:
                last, count = operation.layer, 0
            if operation.name in RANDOM:
                site, number = None, operation.reads[0]
                if group := groups.get(number):
                    order = self.traces[0].values[number].order
                    order = order if operation.name == "dropout" else tuple(range(len(order)))
                    site = DropoutSite(group.regions[0].dims[number], order, group.end(self.traces[0]))
                if found.setdefault((last, count), site) != site:
                    raise JobError(
                        f"{last} is called several times, and dropout after it meets different values",
                        hint=f"keep it whole: Job(tensor_plan={{'{last}': 'whole'}})",
                    )
                count += 1
        return {key: site for key, site in found.items() if site is not None}


def dim_of(module: nn.Module, style: Style) -> int:
    """The dimension of its weight along which a layer is divided. Linear layers have their outputs in the first
    dimension."""
    if isinstance(module, nn.Embedding):
        return 0 if style == "vocabulary" else 1
    return 0 if style in ("column", "column_gather") else 1


def kind_of(name: str) -> str:
    """A name without its numbers: equal for repeated blocks.

    >>> kind_of("blocks.11.mlp.0")
    'blocks.*.mlp.0'
    """
    return re.sub(r"(?:^|(?<=\.))\d+(?=\.)", "*", name)

"""Any torch optimizer, run tile by tile, with its state in memory that other members can take over.

Element-wise optimizers (SGD, Adam…) run on the pieces of parameters that lie in a tile. The others (LARS-like, or a
class we do not know) need whole parameters: the layout then keeps each parameter inside one tile. A piece is the
very stretch of numbers that an ordinary loop would update, so the bits are those of an ordinary loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import optim

from distbelief.errors import JobError
from distbelief.strategies.layout import Layout

Factory = Callable[[list[torch.nn.Parameter]], optim.Optimizer]

ELEMENTWISE: frozenset[type] = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adagrad,
        optim.Adadelta,
        optim.Adamax,
        optim.ASGD,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
    }
)
FUSED: frozenset[type] = frozenset({optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad})
_PROBE = 64  # elements: enough for a vector, so that the probe takes the same path as the real thing


@dataclass(frozen=True)
class Field:
    """One entry of an optimizer's state for one piece."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    number: type | None = None
    """int, float or bool where the optimizer keeps a plain Python number."""

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def size_bytes(self) -> int:
        return -(-self.numel * self.dtype.itemsize // 64) * 64


class Recipe:
    """What the job's optimizer is, learnt by making it once and trying it on a small copy."""

    def __init__(self, factory: Factory, parameters: Sequence[torch.nn.Parameter]) -> None:
        template = factory(list(parameters))
        if not isinstance(template, optim.Optimizer):
            raise JobError(f"`optimizer` made a {type(template).__name__}, not a torch.optim.Optimizer")
        if isinstance(template, optim.LBFGS | optim.SparseAdam):
            raise JobError(
                f"allreduce cannot run {type(template).__name__}",
                hint="SparseAdam: use Adam, Adagrad or SGD (sparse gradients are added up densely); LBFGS: use Adam",
            )
        self.factory = factory
        self.kind: Any = type(template)
        self.elementwise = self.kind in ELEMENTWISE
        accepted = inspect.signature(self.kind).parameters
        self.defaults = {k: v for k, v in template.defaults.items() if k in accepted}
        self.groups = [{k: v for k, v in g.items() if k != "params"} for g in template.param_groups]
        numbers = {id(p): index for index, p in enumerate(parameters)}
        self.group_of: dict[int, int] = {}
        for number, group in enumerate(template.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in numbers:
                    raise JobError("`optimizer` was given parameters that are not among those it was called with")
                self.group_of[numbers[id(parameter)]] = number
        self.fused = self.kind in FUSED and all(_may_fuse(g) for g in self.groups)
        self._fields = self._probe(parameters)

    def describe(self) -> str:
        return f"{self.kind.__name__}{' fused' if self.fused else ''}{'' if self.elementwise else ' per parameter'}"

    def fields(self, parameter: int, numel: int) -> list[Field]:
        """The state of a piece with so many elements of that parameter."""
        found = self._fields.get(parameter, [])
        if not self.elementwise:
            return found
        return [Field(f.key, f.dtype, (numel,) if f.shape else (), f.number) for f in found]

    def make(self, pieces: Sequence[tuple[int, torch.nn.Parameter]]) -> optim.Optimizer:
        """An optimizer over (parameter number, piece)."""
        if not self.elementwise:
            return self.factory([piece for _, piece in pieces])
        options: dict[str, Any] = {"fused": True} if self.fused else {}
        groups = [
            {**hyper, **options, "params": [piece for parameter, piece in pieces if self.group_of[parameter] == number]}
            for number, hyper in enumerate(self.groups)
        ]
        # The defaults too: Adagrad looks there, not into its groups, for the value that its sums start from.
        optimizer: optim.Optimizer = self.kind([g for g in groups if g["params"]], **{**self.defaults, **options})
        return optimizer

    def _probe(self, parameters: Sequence[torch.nn.Parameter]) -> dict[int, list[Field]]:
        """Take one step on throw-away copies and look at what state appears: per group and type, or per parameter."""
        generator = torch.random.get_rng_state()
        tried: dict[Any, list[Field]] = {}
        found: dict[int, list[Field]] = {}
        try:
            for number, group in self.group_of.items():
                value = parameters[number].detach()
                key = (group, value.dtype) if self.elementwise else number
                if key not in tried:
                    tried[key] = self._try(number, value.new_zeros(_PROBE) if self.elementwise else value.clone())
                found[number] = tried[key]
        finally:
            torch.random.set_rng_state(generator)
        return found

    def _try(self, number: int, value: torch.Tensor) -> list[Field]:
        probe = torch.nn.Parameter(value)
        probe.grad = torch.full_like(value, 1e-3)
        optimizer = self.make([(number, probe)])
        optimizer.step()
        return [field for key, entry in optimizer.state[probe].items() if (field := _field(key, entry))]


def _may_fuse(group: dict[str, Any]) -> bool:
    """The user has not asked for another implementation."""
    return group.get("fused") is not False and not group.get("foreach") and not group.get("differentiable")


def _field(key: str, entry: Any) -> Field | None:
    if entry is None:
        return None
    if isinstance(entry, torch.Tensor):
        return Field(key, entry.dtype, tuple(entry.shape))
    if type(entry) in (int, float, bool):
        return Field(key, torch.float64, (), type(entry))
    raise JobError(
        f"the optimizer keeps '{key}', a {type(entry).__name__}, in its state: only tensors and numbers can be shared"
    )


class TileOptimizer:
    """The optimizer of one tile. `values` are the tile's parameters, `state` the bytes of its optimizer state."""

    def __init__(self, recipe: Recipe, layout: Layout, tile: int, values: torch.Tensor, state: torch.Tensor) -> None:
        self._recipe = recipe
        self._pieces = [p for p in layout.pieces[tile] if p.entry in recipe.group_of]
        shapes = [(p.numel,) if recipe.elementwise else layout.entries[p.entry].shape for p in self._pieces]
        self._parameters = [
            torch.nn.Parameter(values[p.tile_first : p.tile_first + p.numel].view(shape))
            for p, shape in zip(self._pieces, shapes, strict=True)
        ]
        self._shapes = shapes
        self._present, self._views = _state_views(recipe, self._pieces, state)
        self._optimizer = None
        if self._pieces:
            self._optimizer = recipe.make([(p.entry, q) for p, q in zip(self._pieces, self._parameters, strict=True)])
            self._rates = [float(g["lr"]) if "lr" in g else None for g in self._optimizer.param_groups]
            self._load()

    def update(self, gradient: torch.Tensor, factor: float, untouched: np.ndarray | None) -> None:
        """One step of the optimizer on this tile. `gradient` may be overwritten. Untouched parameters are skipped."""
        if self._optimizer is None:
            return
        for piece, parameter, shape in zip(self._pieces, self._parameters, self._shapes, strict=True):
            skip = untouched is not None and bool(untouched[piece.entry])
            part = gradient[piece.tile_first : piece.tile_first + piece.numel]
            parameter.grad = None if skip else part.view(shape)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            if rate is not None:
                group["lr"] = rate * factor
        late = self._take_apart()
        self._optimizer.step()
        if late:
            for parameter in self._parameters:
                parameter.grad = late.get(parameter)
            self._optimizer.step()
        self._save()

    def _take_apart(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """The gradients of pieces that begin while others have begun: torch's fused SGD wants a first step for all or
        for none (it raises a TypeError), so these take theirs after the others."""
        assert self._optimizer is not None
        given = [p for p in self._parameters if p.grad is not None]
        new = [p for p in given if not self._optimizer.state.get(p)]
        late = {p: p.grad for p in new if p.grad is not None} if len(new) < len(given) else {}
        for parameter in late:
            parameter.grad = None
        return late

    def _load(self) -> None:
        assert self._optimizer is not None
        for number, parameter in enumerate(self._parameters):
            if self._present[number]:
                self._optimizer.state[parameter] = {
                    key: field.number(view.item()) if field.number else view
                    for key, (field, view) in self._views[number].items()
                }

    def _save(self) -> None:
        """Whatever the optimizer keeps must lie in the tile's state: new tensors move there, numbers are written."""
        assert self._optimizer is not None
        for number, parameter in enumerate(self._parameters):
            state = self._optimizer.state.get(parameter)
            if not state:
                continue
            views = self._views[number]
            for key, entry in state.items():
                if entry is None or (key in views and entry is views[key][1]):
                    continue
                if key not in views:
                    raise JobError(
                        f"the optimizer's state '{key}' appeared only after its first step: it cannot be shared"
                    )
                field, view = views[key]
                if field.number:
                    view.fill_(entry)
                else:
                    view.copy_(entry)
                    state[key] = view
            self._present[number] = 1


def state_bytes(recipe: Recipe, layout: Layout, tile: int) -> int:
    """How many bytes of optimizer state a tile needs."""
    pieces = [p for p in layout.pieces[tile] if p.entry in recipe.group_of]
    return _flag_bytes(len(pieces)) + sum(f.size_bytes for p in pieces for f in recipe.fields(p.entry, p.numel))


def _flag_bytes(pieces: int) -> int:
    return -(-pieces // 64) * 64


def _state_views(
    recipe: Recipe, pieces: Sequence[Any], state: torch.Tensor
) -> tuple[torch.Tensor, list[dict[str, tuple[Field, torch.Tensor]]]]:
    """Per piece a flag (1 when it has state) and views of its fields, in the tile's bytes."""
    at = _flag_bytes(len(pieces))
    views = []
    for piece in pieces:
        mine = {}
        for field in recipe.fields(piece.entry, piece.numel):
            raw = state[at : at + field.numel * field.dtype.itemsize]
            mine[field.key] = (field, raw.view(field.dtype).view(field.shape))
            at += field.size_bytes
        views.append(mine)
    return state[: len(pieces)], views

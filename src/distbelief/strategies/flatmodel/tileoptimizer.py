"""Any torch optimizer, run tile by tile, with its state in memory that other members can take over.

- `Recipe` is what the job's optimizer is, learnt by making it once and trying it on a small copy.
- `TileOptimizer` runs it on some tiles. Element-wise optimizers (SGD, Adam…) run on the pieces of parameters that lie
  in a tile. The others (LARS-like, or an unknown class) need whole parameters: the layout then keeps each parameter
  inside one tile. A piece is the same stretch of numbers that an ordinary training loop would update, so the bits are
  those of an ordinary loop.
- `TileUpdates` is the update of one step: which optimizers run on which tiles, with which seeds and factors.
- `eager_step` runs an optimizer without the import of torch's compiler.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import optim

from distbelief.data.sources import seed_everything
from distbelief.errors import JobError
from distbelief.shards import mix
from distbelief.strategies.flatmodel.afterupdate import Functions
from distbelief.strategies.flatmodel.layout import Layout, Piece

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
_PROBE = 64  # elements; enough for vector instructions, so that the probe takes the same code path as training


@dataclass(frozen=True)
class Field:
    """One entry of an optimizer's state for one piece."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    number: type | None = None
    """int, float or bool, if the optimizer keeps a plain Python number."""
    on_host: bool = False
    """The optimizer keeps this tensor in host memory even if its parameters are on a device."""

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def size_bytes(self) -> int:
        return -(-self.numel * self.dtype.itemsize // 64) * 64


class Recipe:
    """The job's optimizer, as learnt from making it once and trying it on a small copy."""

    def __init__(
        self, factory: Factory, parameters: Sequence[torch.nn.Parameter], functions: Functions | None = None
    ) -> None:
        """`functions`: those of the job's `after_update`."""
        template = factory(list(parameters))
        if not isinstance(template, optim.Optimizer):
            raise JobError(f"`optimizer` made a {type(template).__name__}, not a torch.optim.Optimizer")
        if isinstance(template, optim.LBFGS | optim.SparseAdam):
            raise JobError(
                f"no strategy can run {type(template).__name__}",
                hint="SparseAdam: use Adam, Adagrad or SGD (sparse gradients are added up densely); LBFGS: use Adam, "
                "or --strategy sandblaster, which is L-BFGS",
            )
        self.factory = factory
        self.functions: Functions = functions or {}
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
                    raise JobError("`optimizer` was given parameters other than the ones it was called with")
                self.group_of[numbers[id(parameter)]] = number
        fusable = FUSED if parameters[0].device.type == "cpu" else FUSED - {optim.Adagrad}
        self.fused = self.kind in fusable and all(_may_fuse(g) for g in self.groups)
        if self.kind is optim.SGD and any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters):
            self.fused = False  # torch 2.13's fused kernel differs from the definition of SGD here
        self._fields = self._probe(parameters)

    def describe(self) -> str:
        return f"{self.kind.__name__}{' fused' if self.fused else ''}{'' if self.elementwise else ' per parameter'}"

    def fields(self, parameter: int, numel: int) -> list[Field]:
        """The optimizer state of a piece of `numel` elements of this parameter."""
        found = self._fields.get(parameter, [])
        if not self.elementwise:
            return found
        return [Field(f.key, f.dtype, (numel,) if f.shape else (), f.number, f.on_host) for f in found]

    def make(self, pieces: Sequence[tuple[int, torch.nn.Parameter]]) -> optim.Optimizer:
        """Make an optimizer over pieces, given as (parameter number, piece)."""
        if not self.elementwise:
            made = self.factory([piece for _, piece in pieces])
            self._check_groups(made, pieces)
            return made
        options: dict[str, Any] = {"fused": True} if self.fused else {}
        groups = [
            {**hyper, **options, "params": [piece for parameter, piece in pieces if self.group_of[parameter] == number]}
            for number, hyper in enumerate(self.groups)
        ]
        # The defaults too: Adagrad reads the start value of its sums from there, not from its groups.
        optimizer: optim.Optimizer = self.kind([g for g in groups if g["params"]], **{**self.defaults, **options})
        return optimizer

    def _check_groups(self, made: optim.Optimizer, pieces: Sequence[tuple[int, torch.nn.Parameter]]) -> None:
        """Check that the factory groups a few parameters as it groups them all: by their properties, not by their
        positions."""
        numbers = {id(piece): number for number, piece in pieces}
        for group in made.param_groups:
            hyper = {k: v for k, v in group.items() if k != "params"}
            for parameter in group["params"]:
                if hyper != self.groups[self.group_of[numbers[id(parameter)]]]:
                    raise JobError(
                        "`optimizer` puts a parameter into another group when it is given only some of them",
                        hint="group parameters by what they are (e.g. p.ndim), not by their place in the list",
                    )

    def _probe(self, parameters: Sequence[torch.nn.Parameter]) -> dict[int, list[Field]]:
        """Take one step on copies and record the state that appears: per group and type, or per parameter."""
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
        eager_step(optimizer)()
        return [field for key, entry in optimizer.state[probe].items() if (field := _field(key, entry, value.device))]


def _may_fuse(group: dict[str, Any]) -> bool:
    """Whether the user has not chosen another implementation."""
    return group.get("fused") is not False and not group.get("foreach") and not group.get("differentiable")


def _field(key: str, entry: Any, device: torch.device) -> Field | None:
    if entry is None:
        return None
    if isinstance(entry, torch.Tensor):
        return Field(key, entry.dtype, tuple(entry.shape), on_host=entry.device.type != device.type)
    if type(entry) in (int, float, bool):
        return Field(key, torch.float64, (), type(entry))
    raise JobError(
        f"the optimizer keeps '{key}', a {type(entry).__name__}, in its state: only tensors and numbers can be shared"
    )


@dataclass(frozen=True)
class TileMemory:
    """One tile of this member: its parameters, and the bytes of its optimizer state."""

    tile: int
    values: torch.Tensor
    state: torch.Tensor


@dataclass
class _OptimizedPiece:
    """One piece of a parameter, as the optimizer sees it."""

    tile: int
    piece: Piece
    shape: tuple[int, ...]
    parameter: torch.nn.Parameter
    views: dict[str, tuple[Field, torch.Tensor]]
    flag: torch.Tensor
    begun: bool


class TileOptimizer:
    """The optimizer of some tiles: one torch optimizer for all of them, so that its overhead is paid once per step."""

    def __init__(self, recipe: Recipe, layout: Layout, tiles: Sequence[TileMemory]) -> None:
        self._held = [held for memory in tiles for held in _hold(recipe, layout, memory)]
        self._elementwise = recipe.elementwise
        self._fused = recipe.fused
        self._optimizer = None
        self._gradients: dict[int, torch.Tensor] = {}
        if self._held:
            self._optimizer = recipe.make([(held.piece.entry, held.parameter) for held in self._held])
            self._step = eager_step(self._optimizer)
            self._rates = [float(g["lr"]) if "lr" in g else None for g in self._optimizer.param_groups]
            for held in self._held:
                if held.begun:
                    self._optimizer.state[held.parameter] = {
                        key: _restored(field, view) for key, (field, view) in held.views.items()
                    }
        self._functions = [
            (held.piece.entry, held.parameter.detach().view(layout.entries[held.piece.entry].shape), one)
            for held in self._held
            for one in recipe.functions.get(held.piece.entry, ())
        ]

    def update(
        self,
        gradients: dict[int, torch.Tensor],
        factor: float,
        untouched: np.ndarray | None,
        divisor: torch.Tensor | None = None,
    ) -> None:
        """One step on all tiles. The gradients (by tile) may be overwritten. Untouched parameters are skipped.
        `divisor`: the fused optimizer divides the gradients by it."""
        if self._optimizer is None:
            return
        self._assign_gradients(gradients, untouched)
        if self._fused:
            self._optimizer.grad_scale = divisor  # type: ignore[attr-defined]  # as torch.amp tells it
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            if rate is not None:
                group["lr"] = rate * factor
        late = self._take_apart()
        self._step()
        if late:
            for held in self._held:
                held.parameter.grad = late.get(held.parameter)
            self._step()
            self._gradients = {}
        self._save()

    def after_update(self, step: int, untouched: np.ndarray | None) -> None:
        """Apply the functions of `Job.after_update` to the parameters that the step's `update` has updated."""
        for entry, value, one in self._functions:
            if untouched is None or not untouched[entry]:
                one.apply(value, step)

    def _assign_gradients(self, gradients: dict[int, torch.Tensor], untouched: np.ndarray | None) -> None:
        """Set each piece's `.grad` to its part of the tile's gradient. Does nothing if the same tensors were assigned
        in the last step and no piece was or is skipped."""
        same = self._gradients and all(gradients[t] is g for t, g in self._gradients.items())
        if untouched is None and same and self._elementwise:  # an unknown optimizer may have cleared them
            return
        for held in self._held:
            skip = untouched is not None and bool(untouched[held.piece.entry])
            part = gradients[held.tile][held.piece.tile_first : held.piece.tile_first + held.piece.numel]
            held.parameter.grad = None if skip else part.view(held.shape)
        self._gradients = dict(gradients) if untouched is None else {}

    def _take_apart(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Remove, and return, the gradients of pieces without state while other pieces have state. torch's fused SGD
        takes a first step for all pieces or for none (it raises a TypeError), so the new pieces take their step
        afterwards."""
        given = [held for held in self._held if held.parameter.grad is not None]
        new = [held.parameter for held in given if not held.begun]
        if not new or len(new) == len(given):
            return {}
        late = {parameter: parameter.grad for parameter in new if parameter.grad is not None}
        for parameter in late:
            parameter.grad = None
        return late

    def _save(self) -> None:
        """Keep the optimizer's whole state in the tiles' memory: move new tensors there and write numbers."""
        assert self._optimizer is not None
        for held in self._held:
            state = self._optimizer.state.get(held.parameter)
            if not state:
                continue
            for key, entry in state.items():
                if entry is None or (key in held.views and entry is held.views[key][1]):
                    continue
                if key not in held.views:
                    raise JobError(
                        f"the optimizer's state '{key}' appeared only after its first step: it cannot be shared"
                    )
                field, view = held.views[key]
                if field.number:
                    view.fill_(entry)
                elif field.on_host:
                    view.copy_(entry)
                else:
                    view.copy_(entry)
                    state[key] = view
            if not held.begun:
                held.begun = True
                held.flag.fill_(1)


def _restored(field: Field, view: torch.Tensor) -> Any:
    if field.number:
        return field.number(view.item())
    return view.cpu() if field.on_host else view


@dataclass(frozen=True)
class StatePlace:
    """Where the optimizer state of one piece lies in the state bytes of its tile."""

    piece: Piece
    flag_at: int
    """One byte: whether the optimizer has state for the piece."""
    fields: tuple[tuple[Field, int], ...]
    """The fields, each with its first byte."""


def state_places(recipe: Recipe, layout: Layout, tile: int) -> list[StatePlace]:
    """| a flag per piece | fields of the first piece | fields of the second…"""
    pieces = [p for p in layout.pieces[tile] if p.entry in recipe.group_of]
    at = -(-len(pieces) // 64) * 64
    found = []
    for number, piece in enumerate(pieces):
        fields = []
        for field in recipe.fields(piece.entry, piece.numel):
            fields.append((field, at))
            at += field.size_bytes
        found.append(StatePlace(piece, number, tuple(fields)))
    return found


def state_bytes(recipe: Recipe, layout: Layout, tile: int) -> int:
    """The bytes of optimizer state of a tile."""
    pieces = [p for p in layout.pieces[tile] if p.entry in recipe.group_of]
    flags = -(-len(pieces) // 64) * 64
    return flags + sum(f.size_bytes for p in pieces for f in recipe.fields(p.entry, p.numel))


def _hold(recipe: Recipe, layout: Layout, memory: TileMemory) -> list[_OptimizedPiece]:
    """The pieces of a tile, with views of their values and state."""
    found = []
    for place in state_places(recipe, layout, memory.tile):
        piece = place.piece
        views = {}
        for field, at in place.fields:
            raw = memory.state[at : at + field.numel * field.dtype.itemsize]
            views[field.key] = (field, raw.view(field.dtype).view(field.shape))
        shape = (piece.numel,) if recipe.elementwise else tuple(layout.entries[piece.entry].shape)
        values = memory.values[piece.tile_first : piece.tile_first + piece.numel].view(shape)
        flag = memory.state[place.flag_at]
        found.append(_OptimizedPiece(memory.tile, piece, shape, torch.nn.Parameter(values), views, flag, bool(flag)))
    return found


_SCALED_EXACTLY = (torch.float32, torch.float64)
"""Types whose gradients the optimizer scales to the same bits. It widens narrower types before the division and does
not round them afterwards."""


class TileUpdates:
    """The job's optimizer over some tiles of parameters. `apart`: update the tiles one by one."""

    def __init__(
        self, seed: int, recipe: Recipe, layout: Layout, tiles: Sequence[TileMemory], apart: bool = False
    ) -> None:
        self._seed = seed
        self._elementwise = recipe.elementwise
        self._scales = recipe.fused and all(one.values.dtype in _SCALED_EXACTLY for one in tiles)
        self._parameters = len(layout.entries_of("parameter"))
        # An optimizer that is not element-wise may couple its parameters and draw random numbers. So each tile gets its
        # own optimizer and seed, which do not depend on the number of members.
        sets = [tiles] if recipe.elementwise and not apart else [[one] for one in tiles]
        self._optimizers = {some[0].tile: TileOptimizer(recipe, layout, some) for some in sets if some}

    def may_scale(self, factor: float) -> bool:
        """Whether the optimizer can scale the gradients in its own pass with the same bits as in a separate pass. It
        divides by the inverse of the factor, which is exact only for powers of two."""
        return self._scales and math.frexp(factor)[0] == 0.5

    def apply(
        self,
        step: int,
        gradients: dict[int, torch.Tensor],
        rate: float,
        untouched: np.ndarray,
        scale: float = 1.0,
    ) -> None:
        """Run the optimizer on the tiles in `gradients`: all tiles, or any of them if tiles are updated `apart`. It may
        overwrite the gradients. Untouched entries stay as they are. `rate`: factor of the learning rate; `scale`:
        factor of the gradients, only if `may_scale`."""
        skip = untouched if untouched[: self._parameters].any() else None
        divisor = _divisor(scale)
        for first in gradients:
            if optimizer := self._optimizers.get(first):
                if not self._elementwise:
                    seed_everything(mix(self._seed, 4, step, first) >> 1)
                optimizer.update(gradients, rate, skip, divisor)
                optimizer.after_update(step, skip)


@lru_cache(maxsize=4)
def _divisor(scale: float) -> torch.Tensor | None:
    if scale == 1.0:
        return None
    return torch.tensor(1.0 / scale, dtype=torch.float32, device="cpu")  # a job may change the defaults


def norms(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The norm of each tensor, taken in float64. All tensors are on one device; the host waits for it once."""
    found = [torch.linalg.vector_norm(one, dtype=torch.float64) for one in tensors]
    numbers: list[float] = torch.stack(found).tolist() if found else []
    return numbers


def set_buffers(values: torch.Tensor, average: torch.Tensor, pieces: Sequence[Piece], untouched: np.ndarray) -> None:
    """Set the tile's changed float buffers to their average over the shards. Unchanged buffers stay as they are,
    because the average of equal numbers may differ from them."""
    for piece in pieces:
        if not untouched[piece.entry]:
            part = slice(piece.tile_first, piece.tile_first + piece.numel)
            values[part] = average[part]


# --- an optimizer's step without torch's compiler ----------------------------------------------------------------
# torch.optim imports the compiler (`torch._dynamo`, more than a second, half of a worker's launch) at the first
# optimizer and at the first step, only to exclude them from compilation. The functions below avoid this import and call
# the same functions on the same tensors, so the bits are the same. They do nothing if the compiler is imported already,
# for example by a job that compiles its model; if a later torch differs inside, it imports the compiler as usual.

_COMPILER = "torch._dynamo"


def avoid_compiler_import() -> None:
    """Make, save and load optimizers without importing the compiler. Called once per process."""
    if _COMPILER in sys.modules:
        return
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        inner = getattr(getattr(optim.Optimizer, name, None), "__wrapped__", None)
        if inner is not None and not hasattr(inner, "__dynamo_disable"):
            # torch stores the result of `torch._dynamo.disable` here for the next call
            setattr(inner, "__dynamo_disable", inner)


def eager_step(optimizer: optim.Optimizer) -> Callable[[], Any]:
    """A function that does the same as `optimizer.step`, for repeated calls.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> weight.grad = torch.ones(1)
    >>> eager_step(torch.optim.SGD([weight], lr=0.25))()
    >>> weight.item()
    0.75
    """
    inner = getattr(type(optimizer).step, "__wrapped__", None)
    code = getattr(inner, "__code__", None)
    if code is None or code.co_name != "_use_grad" or _has_hooks(optimizer) or "step" in vars(optimizer):
        return optimizer.step
    plain: Callable[..., Any] = inner.__wrapped__  # type: ignore[union-attr]
    differentiable = bool(optimizer.defaults.get("differentiable", False))

    def step() -> None:
        with torch.set_grad_enabled(differentiable):
            plain(optimizer)

    return step


def _has_hooks(optimizer: optim.Optimizer) -> bool:
    """Whether any hook runs before or after a step."""
    module = sys.modules[optim.Optimizer.__module__]
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    everywhere = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    return any(getattr(optimizer, name, None) for name in names) or any(getattr(module, n, None) for n in everywhere)

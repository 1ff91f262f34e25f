"""The job's optimizer over the parameters, or pieces of parameters, that one member holds; its state under names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from distbelief.checkpoint.boxes import Box, sizes, whole
from distbelief.errors import JobError
from distbelief.strategies.flatmodel.tileoptimizer import Field, Recipe


@dataclass(frozen=True)
class Local:
    """A trainable parameter as this member holds it."""

    name: str
    number: int
    """Among the model's trainable parameters."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    box: Box
    value: torch.nn.Parameter
    """My piece. It shares its memory with the module's own parameter."""


class LocalOptimizer:
    """One torch optimizer over all of them. Optimizers that look at whole parameters are given whole ones only."""

    def __init__(self, recipe: Recipe, held: Sequence[Local]) -> None:
        for one in held:
            if tuple(one.value.shape) != sizes(one.box):  # a fused kernel would write beyond its state
                raise RuntimeError(f"'{one.name}' is held as {tuple(one.value.shape)}, and not as the box {one.box}")
        self.held = held
        self._recipe = recipe
        pieces = [one for one in held if one.value.numel() < torch.Size(one.shape).numel()]
        if pieces and not recipe.elementwise:
            raise JobError(
                f"{recipe.kind.__name__} looks at whole parameters, and this strategy divides '{pieces[0].name}'",
                hint="use allreduce or pipeline, which keep parameters whole, or an optimizer such as AdamW or SGD",
            )
        self._optimizer = recipe.make([(one.number, one.value) for one in held]) if held else None
        groups = self._optimizer.param_groups if self._optimizer else []
        self._rates = [float(group["lr"]) if "lr" in group else None for group in groups]

    def step(self, gradients: Sequence[torch.Tensor | None], rate_factor: float) -> None:
        """One step on the parameters that have a gradient. Those that have one for the first time go last, by
        themselves: torch's fused SGD wants a first step for all that it is given, or for none."""
        if self._optimizer is None:
            return
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            if rate is not None:
                group["lr"] = rate * rate_factor
        given = [one.value for one, gradient in zip(self.held, gradients, strict=True) if gradient is not None]
        new = {id(value) for value in given if not self._optimizer.state.get(value)}
        rounds = [False, True] if new and len(new) < len(given) else [None]
        for first_time in rounds:
            for one, gradient in zip(self.held, gradients, strict=True):
                skip = first_time is not None and (id(one.value) in new) is not first_time
                one.value.grad = None if skip else gradient
            self._optimizer.step()
        for one in self.held:
            one.value.grad = None

    # --- its state under names ---------------------------------------------------------------------------------------

    def forms(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], Box]]:
        """(name, type, shape of the whole, my box) of everything that it may keep."""
        for one in self.held:
            for field in self._fields(one):
                shape, box = self._place(one, field)
                yield f"optimizer/{field.key}/{one.name}", field.dtype, shape, box
            yield f"begun/{one.name}", torch.uint8, (), ()

    def _fields(self, one: Local) -> list[Field]:
        return self._recipe.fields(one.number, one.value.numel())

    def _place(self, one: Local, field: Field) -> tuple[tuple[int, ...], Box]:
        if self._recipe.elementwise and field.shape:
            return one.shape, one.box
        return field.shape, whole(field.shape)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What it keeps now; zeros for what it has not begun to keep."""
        found: dict[str, torch.Tensor] = {}
        for one in self.held:
            state = self._optimizer.state.get(one.value, {}) if self._optimizer else {}
            for field in self._fields(one):
                value = state.get(field.key)
                if value is None:
                    value = torch.zeros(sizes(self._place(one, field)[1]), dtype=field.dtype)
                elif not isinstance(value, torch.Tensor):
                    value = torch.tensor(value, dtype=field.dtype)
                found[f"optimizer/{field.key}/{one.name}"] = value
            found[f"begun/{one.name}"] = torch.tensor(int(bool(state)), dtype=torch.uint8)
        return found

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The tensors become its own memory."""
        for one in self.held:
            if self._optimizer is None or not int(tensors[f"begun/{one.name}"]):
                continue
            state = {}
            for field in self._fields(one):
                value = tensors[f"optimizer/{field.key}/{one.name}"]
                number = field.number
                state[field.key] = number(value.item()) if number else value.view(sizes(self._place(one, field)[1]))
            self._optimizer.state[one.value] = state

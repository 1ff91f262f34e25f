"""The optimizer over the pieces that a member holds, against torch's own over whole parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn, optim

from distbelief.checkpoint.rules.boxes import Box, sizes, whole
from distbelief.errors import JobError
from distbelief.strategies.flatmodel.afterupdate import ParameterFunction
from distbelief.strategies.flatmodel.tileoptimizer import Recipe
from distbelief.strategies.mesh.run.modelpart import HeldParameter
from distbelief.strategies.mesh.state.memberstate import PartOptimizer

Make = Callable[[list[nn.Parameter]], optim.Optimizer]

KINDS: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: optim.Adam(p, lr=0.01),
    "AdamW in two groups": lambda p: optim.AdamW(
        [{"params": [q for q in p if q.ndim > 1]}, {"params": [q for q in p if q.ndim < 2], "lr": 0.3}], lr=0.01
    ),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.25),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5),
}
NEVER_BEGINS, BEGINS_AT_ONCE = "SGD", "Adagrad"
SHAPES = {"matrix": (6, 4), "vector": (5,), "number": ()}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES.values()]


def gradients(step: int) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def held(boxes: dict[str, Box]) -> list[HeldParameter]:
    found = []
    for number, (name, value) in enumerate(zip(SHAPES, parameters(), strict=True)):
        if name in boxes:
            piece = value.detach()[cut(boxes[name])].clone()
            found.append(HeldParameter(name, number, SHAPES[name], boxes[name], nn.Parameter(piece)))
    return found


def cut(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in box)


PARTS: list[dict[str, Box]] = [
    {"matrix": ((0, 4), (0, 4)), "vector": ((0, 5),), "number": ()},
    {"matrix": ((4, 6), (0, 4))},
    {"vector": ((5, 5),), "number": ()},
]


def mine(local: Iterable[HeldParameter], of_all: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = []
    for one in local:
        gradient = of_all[one.number]
        found.append(None if gradient is None else gradient[cut(one.box)].clone())
    return found


class Plain:
    """torch's own, over whole parameters."""

    def __init__(self, make: Make) -> None:
        self.parameters = parameters()
        self.optimizer = make(self.parameters)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def step(self, given: list[torch.Tensor | None], factor: float = 1.0) -> None:
        for parameter, gradient in zip(self.parameters, given, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()


def check(plain: Plain, local: Iterable[HeldParameter]) -> None:
    for one in local:
        torch.testing.assert_close(one.value.detach(), plain.parameters[one.number].detach()[cut(one.box)])


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_updated_as_the_whole_would_be(kind: str) -> None:
    plain, recipe = Plain(KINDS[kind]), Recipe(KINDS[kind], parameters())
    members = [PartOptimizer(recipe, held(boxes)) for boxes in PARTS]
    for step in range(4):
        factor = 1.0 / (1 + step)
        plain.step(gradients(step), factor)
        for member in members:
            member.step(mine(member.held, gradients(step)), factor)
    for member in members:
        check(plain, member.held)


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_without_a_gradient_waits_and_may_begin_later(kind: str) -> None:
    """torch's fused SGD wants a first step for all that it is given, or for none."""
    plain, recipe = Plain(KINDS[kind]), Recipe(KINDS[kind], parameters())
    member = PartOptimizer(recipe, held({name: whole(shape) for name, shape in SHAPES.items()}))
    for step, there in enumerate([(True, False, True), (False, False, False), (True, True, False), (True, True, True)]):
        given = [g if flag else None for g, flag in zip(gradients(step), there, strict=True)]
        plain.step(given)
        member.step([None if g is None else g.clone() for g in given], 1.0)
        begun = [int(member.tensors()[f"begun/{name}"]) for name in SHAPES]
        if kind not in (NEVER_BEGINS, BEGINS_AT_ONCE):
            assert begun == [1, int(step >= 2), 1]
    check(plain, member.held)
    assert all(one.value.grad is None for one in member.held)


@pytest.mark.parametrize("kind", KINDS)
def test_state_under_names_goes_on_in_other_pieces(kind: str) -> None:
    """Two steps on one division, then the state is put together, divided anew, and two more steps follow."""
    plain, recipe = Plain(KINDS[kind]), Recipe(KINDS[kind], parameters())
    old = [PartOptimizer(recipe, held(boxes)) for boxes in PARTS]
    for step in range(2):
        given = [*gradients(step)[:2], None]  # the last one has not begun
        plain.step(given)
        for member in old:
            member.step(mine(member.held, given), 1.0)
    together: dict[str, torch.Tensor] = {}
    for member in old:
        kept = member.tensors()
        forms = list(member.forms())
        assert {name for name, *_ in forms} == set(kept)
        for name, dtype, shape, box in forms:
            assert (kept[name].dtype, tuple(kept[name].shape)) == (dtype, sizes(box))
            together.setdefault(name, torch.zeros(shape, dtype=dtype))[cut(box)] = kept[name]
    if kind not in (NEVER_BEGINS, BEGINS_AT_ONCE):
        assert [int(together[f"begun/{name}"]) for name in SHAPES] == [1, 1, 0]
    others: list[dict[str, Box]] = [
        {"matrix": ((0, 6), (0, 1)), "vector": ((0, 2),), "number": ()},
        {"matrix": ((0, 6), (1, 4)), "vector": ((2, 5),), "number": ()},
    ]
    for boxes in others:
        local = held(boxes)
        for one in local:
            with torch.no_grad():
                one.value.copy_(plain.parameters[one.number][cut(one.box)])
        member = PartOptimizer(recipe, local)
        member.load({name: together[name][cut(box)].clone() for name, _, _, box in member.forms()})
        later = Plain(KINDS[kind])
        for parameter, value in zip(later.parameters, plain.parameters, strict=True):
            parameter.data.copy_(value)
        later.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
        for step in range(2, 4):
            later.step(gradients(step))
            member.step(mine(local, gradients(step)), 1.0)
        check(later, local)


class Lars(optim.SGD):
    """Looks at the norm of a whole parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(parameter.norm() / (parameter.grad.norm() + 1e-9))
        return super().step(closure)


def test_an_optimizer_that_looks_at_whole_parameters_is_given_no_pieces() -> None:
    make = lambda p: Lars(p, lr=0.1, momentum=0.9)  # noqa: E731
    recipe = Recipe(make, parameters())
    with pytest.raises(JobError, match="'matrix'") as caught:
        PartOptimizer(recipe, held(PARTS[0]))
    assert "Lars" in str(caught.value)
    assert "pipeline" in caught.value.hint


def limit(p: torch.Tensor) -> None:
    p.mul_((0.5 / p.norm()).clamp(max=1.0))


def test_the_functions_of_after_update_get_whole_parameters_with_a_gradient_or_are_refused() -> None:
    make, limited = KINDS["momentum"], {0: [ParameterFunction("mat*", "matrix", limit)]}
    plain, recipe = Plain(make), Recipe(make, parameters(), limited)
    member = PartOptimizer(recipe, held(PARTS[0] | {"matrix": whole(SHAPES["matrix"])}))
    for step in range(4):
        given = gradients(step) if step != 2 else [None, *gradients(step)[1:]]
        plain.step(given)
        member.step([None if g is None else g.clone() for g in given], 1.0)
        member.after_update(step, given)
        if step != 2:
            limit(plain.parameters[0].data)
    check(plain, member.held)
    assert plain.parameters[0].norm() < 0.51
    PartOptimizer(recipe, held(PARTS[2]))  # not the limited one
    with pytest.raises(JobError, match=r"`after_update`.*divides 'matrix'"):
        PartOptimizer(recipe, held(PARTS[1]))


def test_whole_parameters_are_fine_for_it_and_its_state_has_names() -> None:
    make = lambda p: Lars(p, lr=0.1, momentum=0.9)  # noqa: E731
    plain, recipe = Plain(make), Recipe(make, parameters())
    member = PartOptimizer(recipe, held({"matrix": whole((6, 4)), "number": ()}))
    for step in range(2):
        plain.step(gradients(step))
        member.step(mine(member.held, gradients(step)), 1.0)
    check(plain, member.held)
    again = PartOptimizer(recipe, member.held)
    again.load({name: value.clone() for name, value in member.tensors().items()})
    plain.step(gradients(2))
    again.step(mine(again.held, gradients(2)), 1.0)
    check(plain, again.held)


def test_a_member_without_parameters_has_nothing_to_do() -> None:
    member = PartOptimizer(Recipe(KINDS["Adam"], parameters()), [])
    member.step([], 1.0)
    member.load({})
    assert member.tensors() == {}
    assert list(member.forms()) == []

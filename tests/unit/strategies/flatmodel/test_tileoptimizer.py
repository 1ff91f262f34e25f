"""Optimizers run tile by tile give the bits of torch's own optimizer over whole parameters, and can be handed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from distbelief.errors import JobError
from distbelief.strategies.flatmodel.layout import Layout, lay_out, trainable
from distbelief.strategies.flatmodel.tileoptimizer import (
    ELEMENTWISE,
    FUSED,
    Factory,
    Recipe,
    TileMemory,
    TileOptimizer,
    state_bytes,
)

STEPS = 6
SOMETIMES = 2  # the parameter that has no gradient in some steps
IDLE = (0, 1, 4)  # these steps
FACTORS = [1.0, 0.5, 2.0, 1.0, 0.1, 0.7]


def model_of(*dtypes: torch.dtype) -> nn.Module:
    """Parameters of odd sizes, some of them longer than a tile."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Module()
    shapes = [(70, 67), (67,), (3, 5), (), (90, 45), (1000,), (1,)]
    for number, shape in enumerate(shapes):
        value = torch.randn(shape, generator=generator).to(dtypes[number % len(dtypes)])
        model.register_parameter(f"p{number}", nn.Parameter(value))
    return model


def gradients(model: nn.Module, step: int, idle: Sequence[int]) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(100 + step)
    made: list[torch.Tensor | None] = [
        torch.randn(p.shape, generator=generator).mul(10.0 ** (step % 3 - 1)).to(p.dtype) for _, p in trainable(model)
    ]
    if step in idle:
        made[SOMETIMES] = None
    return made


def plain_loop(model: nn.Module, factory: Factory, idle: Sequence[int] = IDLE) -> None:
    optimizer = factory([p for _, p in trainable(model)])
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(STEPS):
        for (_, parameter), gradient in zip(trainable(model), gradients(model, step, idle), strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * FACTORS[step]
        optimizer.step()


class Tiled:
    """A model's values and optimizer state in bytes, and two TileOptimizers over them, as of two members."""

    def __init__(self, model: nn.Module, factory: Factory) -> None:
        self.model = model
        self.recipe = Recipe(factory, [p for _, p in trainable(model)])
        self.layout: Layout = lay_out(model, whole_parameters=not self.recipe.elementwise)
        self.values = [torch.zeros(t.numel, dtype=t.dtype) for t in self.layout.tiles]
        self.state = [
            torch.zeros(state_bytes(self.recipe, self.layout, t.index), dtype=torch.uint8) for t in self.layout.tiles
        ]
        self._copy([p.detach() for _, p in trainable(model)], self.values)
        self.take_over()

    def take_over(self) -> None:
        """As a newcomer does: new optimizers over the bytes that are there."""
        memory = [TileMemory(t, self.values[t], self.state[t]) for t in range(len(self.layout.tiles))]
        self.optimizers = [TileOptimizer(self.recipe, self.layout, memory[rank::2]) for rank in range(2)]

    def _copy(self, tensors: Sequence[torch.Tensor | None], tiles: Sequence[torch.Tensor]) -> None:
        for tile, pieces in zip(tiles, self.layout.pieces, strict=True):
            for piece in pieces:
                source = tensors[piece.entry]
                if source is not None:
                    part = source.reshape(-1)[piece.first : piece.first + piece.numel]
                    tile[piece.tile_first : piece.tile_first + piece.numel] = part

    def run(self, steps: Sequence[int], idle: Sequence[int] = IDLE) -> None:
        for step in steps:
            made = gradients(self.model, step, idle)
            flat = [torch.zeros_like(value) for value in self.values]
            self._copy(made, flat)
            untouched = np.array([gradient is None for gradient in made])
            skip = untouched if untouched.any() else None
            for optimizer in self.optimizers:
                optimizer.update(dict(enumerate(flat)), FACTORS[step], skip)

    def parameters(self) -> list[torch.Tensor]:
        found = [torch.full_like(p.detach(), float("nan")).reshape(-1) for _, p in trainable(self.model)]
        for tile, pieces in zip(self.values, self.layout.pieces, strict=True):
            for piece in pieces:
                part = tile[piece.tile_first : piece.tile_first + piece.numel]
                found[piece.entry][piece.first : piece.first + piece.numel] = part
        return [flat.view(p.shape) for flat, (_, p) in zip(found, trainable(self.model), strict=True)]


def assert_same_bits(tiled: Tiled, reference: nn.Module) -> None:
    for found, (name, expected) in zip(tiled.parameters(), trainable(reference), strict=True):
        one, two = found.reshape(-1).view(torch.uint8), expected.detach().reshape(-1).view(torch.uint8)
        assert torch.equal(one, two), f"{name}: {(found != expected).sum()} of {found.numel()} elements differ"


def with_groups(kind: Any, options: dict[str, Any]) -> Factory:
    """Two groups by ndim, as is usual: no weight decay for biases and norms."""

    def make(parameters: list[nn.Parameter]) -> optim.Optimizer:
        matrices = {"params": [p for p in parameters if p.ndim > 1]}
        vectors = {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0, "lr": 3e-3}
        made: optim.Optimizer = kind([matrices, vectors], **options)
        return made

    return make


class Drifting(optim.Optimizer):
    """A class we do not know: it draws random numbers, so it is not element-wise."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter), alpha=group["lr"])


def test_grouping_by_place_is_refused_where_tiles_hold_only_some_parameters() -> None:
    def by_place(parameters: list[nn.Parameter]) -> optim.Optimizer:
        return Drifting(
            [{"params": parameters[:1], "lr": 1.0}, {"params": parameters[1:]}] if parameters[1:] else parameters
        )

    with pytest.raises(JobError, match="another group"):
        Recipe(by_place, [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(5))])


CASES: list[tuple[Any, dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": False}),
    (optim.Adam, {"lr": 1e-2}),
    (optim.Adam, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}),
    (optim.Adam, {"lr": 1e-2, "foreach": True}),
    (optim.AdamW, {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}),
    (optim.AdamW, {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    (optim.AdamW, {"lr": 1e-2, "fused": False}),
    (optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.1}),
    (optim.Adadelta, {"lr": 1.0, "weight_decay": 0.01}),
    (optim.Adamax, {"lr": 1e-2, "weight_decay": 0.01}),
    (optim.ASGD, {"lr": 1e-2, "t0": 2, "weight_decay": 0.01}),
    (optim.NAdam, {"lr": 1e-2, "weight_decay": 0.01, "decoupled_weight_decay": True}),
    (optim.RAdam, {"lr": 1e-2, "weight_decay": 0.01}),
    (optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True, "weight_decay": 0.01}),
    (optim.RMSprop, {"lr": 1e-2}),
    (optim.Rprop, {"lr": 1e-2}),
]
IDS = [f"{kind.__name__}-{'-'.join(k for k in options if k != 'lr')}" for kind, options in CASES]


def reference_options(kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    """What torch is asked for in the plain loop: the implementation that is recorded with a run."""
    fused = kind in FUSED and "fused" not in options and "foreach" not in options
    return {**options, "fused": True} if fused else options


def test_every_elementwise_optimizer_is_tried() -> None:
    assert {kind for kind, _ in CASES} == set(ELEMENTWISE)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("kind", "options"), CASES, ids=IDS)
def test_tiles_give_the_bits_of_whole_parameters(kind: Any, options: dict[str, Any], grouped: bool) -> None:
    reference_kwargs = reference_options(kind, options)
    factory = with_groups(kind, options) if grouped else lambda parameters: kind(parameters, **options)
    plain = with_groups(kind, reference_kwargs) if grouped else lambda parameters: kind(parameters, **reference_kwargs)
    tiled = Tiled(model_of(torch.float32), factory)
    reference = model_of(torch.float32)
    assert tiled.recipe.elementwise
    assert len(tiled.layout.tiles) > 1
    assert max(len([1 for pieces in tiled.layout.pieces for p in pieces if p.entry == e]) for e in range(7)) > 1
    idle = (1, 4) if kind is optim.SGD and "momentum" in options else IDLE  # see the next test
    tiled.run(range(3), idle)
    tiled.take_over()  # in the middle, somebody else goes on from the same bytes
    tiled.run(range(3, STEPS), idle)
    plain_loop(reference, plain, idle)
    assert_same_bits(tiled, reference)


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_parameter_that_begins_late_has_a_first_step_of_its_own(dampening: float) -> None:
    """torch's fused SGD (2.13) raises a TypeError where only some of its parameters have their momentum yet. One
    optimizer per parameter shows what is right."""
    options = {"lr": 0.1, "momentum": 0.9, "dampening": dampening, "fused": True}
    tiled = Tiled(model_of(torch.float32), lambda parameters: optim.SGD(parameters, **options))
    tiled.run(range(4))
    tiled.take_over()
    tiled.run(range(4, STEPS))
    reference = model_of(torch.float32)
    made = [gradients(reference, step, IDLE) for step in range(STEPS)]
    for number, (_, parameter) in enumerate(trainable(reference)):
        optimizer = optim.SGD([parameter], **options)
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = 0.1 * FACTORS[step]
            parameter.grad = made[step][number]
            optimizer.step()
    assert_same_bits(tiled, reference)


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW, optim.Adagrad, optim.RMSprop])
def test_types_may_be_mixed(kind: Any) -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    tiled, reference = Tiled(model_of(*dtypes), lambda parameters: kind(parameters, lr=0.01)), model_of(*dtypes)
    # torch's fused SGD does not give SGD's numbers for bfloat16, so it is not used there.
    options = {"lr": 0.01} if kind is optim.SGD else reference_options(kind, {"lr": 0.01})
    assert tiled.recipe.fused == ("fused" in options)
    tiled.run(range(STEPS))
    plain_loop(reference, lambda parameters: kind(parameters, **options))
    assert_same_bits(tiled, reference)


def test_the_fused_implementation_is_used_where_it_is_recorded() -> None:
    """It gives other bits than torch's default loop, so a record that says otherwise would not be reproducible."""
    tiled = Tiled(model_of(torch.float32), lambda parameters: optim.AdamW(parameters, lr=0.01))
    assert tiled.recipe.describe() == "AdamW fused"
    tiled.run(range(STEPS))
    loops = {}
    for fused in (False, True):
        reference = model_of(torch.float32)
        plain_loop(reference, lambda parameters, f=fused: optim.AdamW(parameters, lr=0.01, fused=f))
        loops[fused] = torch.cat([p.detach().reshape(-1) for _, p in trainable(reference)])
    found = torch.cat([p.reshape(-1) for p in tiled.parameters()])
    assert not torch.equal(loops[False], loops[True])
    assert torch.equal(found, loops[True])


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": False}])
def test_the_users_own_choice_of_implementation_is_kept(options: dict[str, Any]) -> None:
    recipe = Recipe(lambda parameters: optim.Adam(parameters, **options), list(model_of(torch.float32).parameters()))
    assert not recipe.fused
    assert recipe.describe() == "Adam"


def test_parameters_that_the_optimizer_was_not_given_stay_as_they_are() -> None:
    tiled = Tiled(model_of(torch.float32), lambda parameters: optim.AdamW(parameters[:1] + parameters[4:], lr=0.01))
    tiled.run(range(STEPS))
    before = [p for _, p in trainable(model_of(torch.float32))]
    assert [torch.equal(a, b) for a, b in zip(before, tiled.parameters(), strict=True)] == [
        False,
        *[True] * 3,
        *[False] * 3,
    ]


class Lars(optim.Optimizer):
    """Layer-wise rates: needs the norm of a whole parameter, counts its steps as a plain number, and starts each
    parameter's momentum in its first step."""

    def __init__(self, parameters: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                trust = parameter.norm() / (parameter.grad.norm() + 1e-3) / state["step"]
                if "velocity" not in state:
                    state["velocity"] = torch.zeros_like(parameter)
                state["velocity"] = state["velocity"] * group["momentum"] + parameter.grad * trust
                parameter -= group["lr"] * state["velocity"]


@pytest.mark.parametrize("factory", [Lars, lambda parameters: optim.Adafactor(parameters, lr=0.01)])
def test_other_optimizers_run_on_whole_parameters(factory: Factory) -> None:
    tiled, reference = Tiled(model_of(torch.float32), factory), model_of(torch.float32)
    assert not tiled.recipe.elementwise
    assert tiled.recipe.describe().endswith(" per parameter")
    tiled.run(range(3))
    tiled.take_over()
    tiled.run(range(3, STEPS))
    plain_loop(reference, factory)
    assert_same_bits(tiled, reference)


def test_a_lars_on_pieces_would_give_other_bits() -> None:
    """Why whole parameters matter: the same class declared element-wise cuts a parameter's norm."""

    class Pretender(Lars):
        pass

    tiled = Tiled(model_of(torch.float32), Pretender)
    cut = lay_out(tiled.model)
    assert len(cut.tiles) > 1
    whole, parts = model_of(torch.float32), []
    weight = whole.p0.detach().reshape(-1)
    first = cut.pieces[0][0].numel
    assert first < weight.numel()
    for part in (weight[:first].clone(), weight[first:].clone()):
        piece = nn.Parameter(part)
        piece.grad = torch.ones_like(piece)
        Lars([piece]).step()
        parts.append(piece.detach())
    whole.p0.grad = torch.ones_like(whole.p0)
    Lars([whole.p0]).step()
    assert not torch.equal(torch.cat(parts), whole.p0.detach().reshape(-1))


def test_an_unused_parameter_is_not_moved_and_has_its_own_step_count() -> None:
    tiled = Tiled(model_of(torch.float32), lambda parameters: optim.AdamW(parameters, lr=0.01, weight_decay=0.5))
    tiled.run([0, 1])  # it is untouched in both
    start = dict(trainable(model_of(torch.float32)))
    assert torch.equal(tiled.parameters()[SOMETIMES], start[f"p{SOMETIMES}"])
    assert not torch.equal(tiled.parameters()[0], start["p0"])


class Odd(optim.Optimizer):
    """Keeps something in its state that is neither a tensor nor a number."""

    def __init__(self, parameters: Any, keep: Callable[[int], dict[str, Any]]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.keep, self.calls = keep, 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update(self.keep(self.calls))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda parameters: [optim.SGD(parameters, lr=0.1)], "made a list, not a torch.optim.Optimizer"),
        (lambda parameters: None, "made a NoneType"),
        (optim.LBFGS, "can run LBFGS"),
        (optim.SparseAdam, "can run SparseAdam"),
        (
            lambda parameters: optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1),
            "other than the ones it was called with",
        ),
        (lambda parameters: Odd(parameters, lambda calls: {"history": [1, 2]}), "'history', a list"),
    ],
)
def test_an_optimizer_that_cannot_be_run_is_refused(factory: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        Recipe(factory, list(model_of(torch.float32).parameters()))


def test_state_that_appears_late_is_refused_by_name() -> None:
    tiled = Tiled(
        model_of(torch.float32),
        lambda parameters: Odd(parameters, lambda calls: {"a": 1.0} if calls == 1 else {"late": torch.zeros(1)}),
    )
    tiled.run([2])
    with pytest.raises(JobError, match="'late' appeared only after its first step"):
        tiled.run([3])


def test_trying_an_optimizer_draws_no_random_numbers() -> None:
    class Noisy(Lars):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            torch.rand(3)
            super().step()

    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    Recipe(Noisy, list(model_of(torch.float32).parameters()))
    assert torch.equal(torch.rand(1), expected)

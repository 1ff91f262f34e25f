"""`Job.after_update`: which parameters its functions get, what they may do, and what is refused with their name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from distbelief import EmbeddingTable
from distbelief.errors import JobError, StepCodeError
from distbelief.job import Job
from distbelief.strategies.flatmodel.afterupdate import ParameterFunction, parameter_functions
from distbelief.strategies.tables.embedding import on_servers
from tests.support.replicas.alone import Alone, kept

Function = Callable[[torch.Tensor], object]


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(6, 6)
        self.critic = nn.Linear(6, 4)
        self.mirror = nn.Linear(6, 4, bias=False)
        self.mirror.weight = self.critic.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.idle = nn.Parameter(torch.full((3,), 5.0))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.critic(self.generator(x)) + self.mirror(x))  # type: ignore[no-any-return]


def job_of(model: Any = Gan, **after_update: Function) -> Job:
    """`critic__x` stands for the pattern `critic.x`."""
    generator = torch.Generator().manual_seed(0)
    return Job(
        model=model,
        loss=F.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
        data=(torch.randn(12, 6, generator=generator), torch.randn(12, 4, generator=generator)),
        global_batch=6,
        shards=3,
        steps=4,
        after_update={name.replace("__", "."): function for name, function in after_update.items()},
    )


def found(job: Job) -> dict[str, list[str]]:
    torch.manual_seed(0)
    model = job.model if isinstance(job.model, nn.Module) else job.model()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    functions = parameter_functions(job, model)
    return {names[number]: [one.pattern for one in several] for number, several in functions.items()}


def clip(p: torch.Tensor) -> torch.Tensor:
    return p.clamp_(-0.01, 0.01)


# --- which parameters ------------------------------------------------------------------------------------------------


def test_patterns_match_names_and_any_name_of_a_tied_parameter() -> None:
    job = job_of(**{"critic.*": clip, "mirror__weight": clip, "c*weight": clip})
    assert found(job) == {"critic.weight": ["critic.*", "mirror.weight", "c*weight"], "critic.bias": ["critic.*"]}
    assert found(job_of()) == {}


@pytest.mark.parametrize("pattern", ["crtic.*", "frozen.weight", "seen"])
def test_a_pattern_that_matches_no_trainable_parameter(pattern: str) -> None:
    with pytest.raises(JobError, match="matches no trainable parameter") as caught:
        found(job_of(**{pattern: clip}))
    assert f"after_update['{pattern}']" in caught.value.message
    assert "critic.weight" in caught.value.hint


def test_a_table_whose_rows_are_on_servers_is_refused_and_another_is_a_parameter() -> None:
    def model() -> nn.Module:
        return nn.ModuleDict({"table": EmbeddingTable(10, 4), "head": nn.Linear(4, 2)})

    assert found(job_of(model, **{"*": clip}))["table.weight"] == ["*"]
    with (
        on_servers(),
        pytest.raises(JobError, match=r"after_update\['\*'\].*'table.weight', a table whose rows are on"),
    ):
        found(job_of(model, **{"*": clip}))


@pytest.mark.parametrize("wrong", [clip, {"critic.*": 0.01}, {3: clip}])
def test_what_is_no_mapping_from_patterns_to_functions(wrong: Any) -> None:
    with pytest.raises(JobError, match="`after_update` must map patterns") as caught:
        Job(**{**vars(job_of()), "after_update": wrong})
    assert "clamp_" in caught.value.message


# --- what a function may do ------------------------------------------------------------------------------------------


def exchanged(p: torch.Tensor) -> None:
    p.data = p.data.clamp(-0.5, 0.5).t().contiguous().t()


FORMS: dict[str, tuple[Function, Function]] = {
    "in place": (lambda p: p.clamp_(-0.5, 0.5), lambda p: p.clamp(-0.5, 0.5)),
    "in place, without a result": (exchanged, lambda p: p.clamp(-0.5, 0.5)),
    "a new tensor": (lambda p: p.clamp(-0.5, 0.5), lambda p: p.clamp(-0.5, 0.5)),
    "a view of itself": (lambda p: p.t(), lambda p: p.t().clone()),
    "nothing": (lambda p: None, lambda p: p),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_value_is_changed_in_its_memory(form: str) -> None:
    function, expected = FORMS[form]
    memory = torch.randn(30, generator=torch.Generator().manual_seed(1))
    value = memory[2:27].view(5, 5)
    before = memory.clone()
    ParameterFunction("*", "p", function).apply(value, 3)
    assert torch.equal(value, expected(before[2:27].view(5, 5)))
    assert torch.equal(memory[:2], before[:2])
    assert torch.equal(memory[27:], before[27:])


def test_only_what_was_updated_is_changed() -> None:
    """`idle` never has a gradient: its first value is beyond the limit and stays there."""
    calls: list[tuple[int, ...]] = []

    def limited(p: torch.Tensor) -> None:
        calls.append(tuple(p.shape))
        p.clamp_(-0.2, 0.2)

    with kept() as segments:
        alone = Alone(job_of(**{"*": limited}), segments)
        calls.clear()
        alone.step(0)
        weights = dict(alone.model.named_parameters())
        assert calls == [(6, 6), (6,), (4, 6), (4,)]
        assert weights["idle"].tolist() == [5.0] * 3
        assert all(weights[name].abs().max() <= 0.2 for name in ("generator.weight", "critic.weight", "critic.bias"))


class Covariance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(6))
        self.scale = nn.Parameter(torch.full((3,), 0.25))


def positive(p: torch.Tensor) -> torch.Tensor:
    root = torch.linalg.cholesky(p)  # fails on other matrices
    return root @ root.T


def guarded(p: torch.Tensor) -> torch.Tensor:
    assert (p.abs() < 1.5).all(), "weights exploded"
    return p.clamp_(max=0.2)


def test_a_function_is_tried_on_the_initial_value_and_may_refuse_others() -> None:
    assert found(job_of(Covariance, matrix=positive, scale=guarded)) == {"matrix": ["matrix"], "scale": ["scale"]}


@pytest.mark.parametrize("start", [0.0, 1.0, 0.25])
def test_an_impure_function_of_a_domain_is_refused(start: float) -> None:
    """Zeros show no factor: there the made-up values count."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.full((3,), start))

    with pytest.raises(JobError, match="gave two results for one value of 'one'"):
        found(job_of(Model, one=Counting()))


# --- what is refused -------------------------------------------------------------------------------------------------


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, p: torch.Tensor) -> None:
        self.calls += 1
        p.mul_(1.0 - self.calls / 1000)


def noise(p: torch.Tensor) -> None:
    p.add_(torch.randn_like(p))


@pytest.mark.parametrize("function", [Counting(), noise])
def test_an_impure_function_is_refused_with_its_name(function: Function) -> None:
    with pytest.raises(
        JobError, match=r"`after_update\['critic.\*'\]` gave two results for one value of 'critic.weight'"
    ):
        found(job_of(**{"generator.*": clip, "critic.*": function}))


@pytest.mark.parametrize("read", ["generator.weight", "seen", "idle"])
def test_a_function_that_reads_another_tensor_is_refused_and_the_model_keeps_its_bits(read: str) -> None:
    """The other tensor may be updated already, or not yet."""
    model = Gan().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    with pytest.raises(JobError, match=r"gave two results for one value of 'critic.bias'") as caught:
        found(job_of(model, critic__bias=lambda p: p.add_(tensors[read].norm())))
    assert "other parameters" in caught.value.hint
    assert found(job_of(model, critic__bias=clip))
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("name", ["idle", "frozen.bias", "seen", "critic.weight"])
@pytest.mark.parametrize("way", ["in place", "data"])
def test_a_function_that_writes_to_another_tensor_is_refused_with_both_names(name: str, way: str) -> None:
    model = Gan()
    tensor = dict([*model.named_parameters(), *model.named_buffers()])[name]

    def greedy(p: torch.Tensor) -> None:
        if way == "data":
            tensor.data[0] = 77.0
        else:
            tensor[0] = 77.0

    with pytest.raises(JobError, match=rf"`after_update\['generator.bias'\]` writes to '{name}'"):
        found(job_of(model, **{"critic.*": clip, "generator.bias": greedy}))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda p: p[:1], r"made float32 of shape \(1, 6\) of 'critic.weight', which is float32 of shape \(4, 6\)"),
        (lambda p: p.double(), "made float64 of shape"),
        (lambda p: setattr(p, "data", p.data[:2]), r"made float32 of shape \(2, 6\)"),
        (lambda p: p.norm().item(), "returned a float"),
        (lambda p: p.clamp_(-1, 1).norm(), r"made float32 of shape \(\)"),
        (lambda p: p.reshape(7), "failed on 'critic.weight': RuntimeError"),
    ],
)
def test_a_function_that_makes_something_else_is_refused(function: Function, text: str) -> None:
    with pytest.raises(JobError, match=rf"`after_update\['critic.weight'\]` {text}"):
        found(job_of(critic__weight=function))


def test_a_function_that_fails_while_training_is_named_with_the_step() -> None:
    """Before training it is tried with initial values, which are small."""

    def picky(p: torch.Tensor) -> None:
        if p.max() > 4:
            raise ValueError("a large one")

    one = ParameterFunction("w", "w", picky)
    with pytest.raises(StepCodeError, match="'w' at step 7: ValueError: a large one") as caught:
        one.apply(torch.full((2,), 5.0), 7)
    assert caught.value.step == 7
    assert "in picky" in caught.value.details

"""Linear layers that multiply with oneDNN: right within rounding, the same bits wherever their numbers lie, and torch's
own bits where it is left to torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from distbelief import Job
from distbelief.errors import JobError
from distbelief.strategies import parse
from distbelief.strategies.flatmodel import onednn
from distbelief.strategies.flatmodel.onednn import WORTHWHILE, OneDnnLinear, use_onednn
from distbelief.verification.plain import make_model
from tests.support.replicas.linear import (
    WIDE,
    Loss,
    Two,
    in_half_precision,
    mapped,
    ordinary,
    recomputed,
    summed,
    transposed,
    used_elsewhere,
    with_a_penalty,
)

ROWS = 24
"""So that products with the large layers are worth it."""


def of_a_part(model: Any, x: torch.Tensor) -> Any:
    """Rows with a gap after each."""
    return model(torch.cat([x, x], -1)[..., :WIDE]).square().mean()


def of_one_row_everywhere(model: Any, x: torch.Tensor) -> Any:
    return model(x.reshape(-1, WIDE)[:1].expand(ROWS, WIDE)).square().mean()


def in_double_precision(model: Any, x: torch.Tensor) -> Any:
    return copy.deepcopy(model).double()(x.double()).square().mean() + ordinary(model, x)


def of_few_rows(model: Any, x: torch.Tensor) -> Any:
    return model(x.reshape(-1, WIDE)[:3]).square().mean()


def of_no_rows(model: Any, x: torch.Tensor) -> Any:
    return model(x.reshape(-1, WIDE)[:0]).sum()


def gradients(model: nn.Module, loss: Loss, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = x.clone().requires_grad_()
    value = loss(model, x)
    value.backward()
    there = [x, *model.parameters()]
    return value.detach(), [torch.zeros_like(one) if one.grad is None else one.grad for one in there]


def two_models(bias: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(5)
    plain = Two(bias)
    ours = copy.deepcopy(plain)
    use_onednn(ours)
    return plain, ours


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(ROWS, WIDE), (3, ROWS // 3, WIDE), (2, 3, ROWS // 6, WIDE)], ids=str)
@pytest.mark.parametrize(
    "loss",
    [
        ordinary,
        summed,
        transposed,
        of_a_part,
        of_one_row_everywhere,
        used_elsewhere,
        recomputed,
        with_a_penalty,
        in_double_precision,
    ],
)
def test_right_within_rounding_in_whatever_a_model_does(bias: bool, shape: tuple[int, ...], loss: Loss) -> None:
    plain, ours = two_models(bias)
    x = torch.randn(shape)
    expected, wanted = gradients(plain, loss, x)
    value, got = gradients(ours, loss, x)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
    again, same = gradients(two_models(bias)[1], loss, x)
    assert torch.equal(again, value)
    assert all(map(torch.equal, same, got))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("loss", [in_half_precision, mapped, of_few_rows, of_no_rows])
def test_what_is_left_to_torch_has_its_bits(bias: bool, loss: Loss) -> None:
    plain, ours = two_models(bias)
    x = torch.randn(3, ROWS // 3, WIDE)
    expected, wanted = gradients(plain, loss, x)
    value, got = gradients(ours, loss, x)
    assert torch.equal(value, expected)
    assert all(map(torch.equal, got, wanted))


def placed(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The same numbers elsewhere in memory, at an address that is a multiple of 4 bytes."""
    return torch.empty(tensor.numel() + offset)[offset:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("shape", [(ROWS, 256, 256), (129, 127, 131), (64, 768, 96), (1024, 64, 64)], ids=str)
def test_bits_do_not_depend_on_where_numbers_lie(shape: tuple[int, int, int]) -> None:
    """Weights are in ordinary memory here and in shared memory there; and in the end all have the same bits."""
    rows, inputs, outputs = shape
    torch.manual_seed(7)
    layer = nn.Linear(inputs, outputs)
    use_onednn(nn.Sequential(layer))
    assert rows * inputs * outputs >= WORTHWHILE
    x, back = torch.randn(rows, inputs), torch.randn(rows, outputs)

    def passed(offset: int) -> list[torch.Tensor]:
        copied = copy.deepcopy(layer)
        copied.weight.data = placed(layer.weight.detach(), offset)
        given = placed(x, 2 * offset).requires_grad_()
        out = copied(given)
        out.backward(placed(back, offset))
        return [out, given.grad, copied.weight.grad, copied.bias.grad]

    first = passed(0)
    for offset in (1, 5, 16, 31):
        assert all(map(torch.equal, passed(offset), first)), offset


def test_it_is_another_library_that_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large products go to oneDNN, forward and backward, also in evaluation; small ones do not."""
    asked: list[tuple[int, ...]] = []
    product = onednn._product

    def watched(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        asked.append((*left.shape, right.shape[0]))
        return product(left, right, bias)

    monkeypatch.setattr(onednn, "_product", watched)
    layer = nn.Linear(WIDE, WIDE)
    use_onednn(layer)
    x = torch.randn(ROWS, WIDE, requires_grad=True)
    layer(x).sum().backward()
    assert asked == [(ROWS, WIDE, WIDE), (ROWS, WIDE, WIDE), (WIDE, ROWS, WIDE)]
    with torch.no_grad():
        layer(x)
    assert len(asked) == 4
    layer(x[:3])
    assert len(asked) == 4


def test_layers_of_others_and_small_ones_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(Own(WIDE, WIDE), nn.Linear(8, 8), nn.Bilinear(64, 64, 64), nn.Linear(WIDE, WIDE))
    names = list(model.state_dict())
    use_onednn(model)
    assert [type(layer) for layer in model] == [Own, nn.Linear, nn.Bilinear, OneDnnLinear]
    assert list(model.state_dict()) == names


def test_what_torch_need_not_keep_may_be_written_to() -> None:
    """A frozen layer's input is not needed for its own gradient."""
    layer = nn.Linear(WIDE, WIDE).requires_grad_(False)
    use_onednn(layer)
    x = torch.randn(ROWS, WIDE, requires_grad=True)
    h = x * 2
    out = layer(h)
    h += out
    h.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * (1 + layer.weight.sum(0)).expand_as(x), rtol=1e-4, atol=1e-4)


def job(**options: Any) -> Job:
    return Job(
        model=lambda: nn.Linear(WIDE, WIDE),
        loss=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=torch.zeros(8, WIDE),
        global_batch=8,
        steps=1,
        **options,
    )


def test_a_job_asks_for_it() -> None:
    assert type(make_model(job())) is nn.Linear
    assert type(make_model(job(matmul="onednn"))) is OneDnnLinear
    one = nn.Linear(WIDE, WIDE)
    for matmul, kind in (("onednn", OneDnnLinear), ("torch", nn.Linear)):
        made = make_model(Job(**{**vars(job()), "model": one, "matmul": matmul}))
        assert made is one
        assert type(one) is kind
    with pytest.raises(JobError, match="`matmul` is torch or onednn, not 'mkl'"):
        job(matmul="mkl")
    with pytest.raises(JobError, match="do not go together"):
        job(matmul="onednn", compile=True)


@pytest.mark.parametrize("strategy", ["sharded", "pipeline:2", "tensor:2"])
def test_divided_models_refuse_it(strategy: str) -> None:
    from distbelief.shards import Schedule

    with pytest.raises(JobError, match="divided does not multiply with onednn"):
        parse(strategy).prepare(job(matmul="onednn"), Schedule(8, 8, 2, False), torch.device("cpu"))

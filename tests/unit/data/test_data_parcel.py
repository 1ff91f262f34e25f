"""Values between two processes' sockets: every kind of leaf, small and large."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from distbelief.data.parcel import post, receive

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with a, b:
        b.setblocking(False)
        yield a, b


def sent(pair: Pair, value: Any) -> Any:
    post(pair[0], value)
    return receive(pair[1])


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (1,), (300, 200)])
def test_a_tensor_arrives_as_it_was(pair: Pair, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 100).to(torch.int32).to(dtype)
    arrived = sent(pair, tensor)
    assert arrived.dtype == dtype
    assert arrived.shape == shape
    assert arrived.is_contiguous()
    assert arrived.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("size", [3, 300])
def test_strided_conjugate_and_gradient_carrying_tensors(pair: Pair, size: int) -> None:
    base = torch.arange(float(size * size)).reshape(size, size)
    complex_numbers = torch.complex(base, base + 1)
    for tensor in (
        base.t(),
        base[::2, 1::2],
        base[:1].expand(5, size),
        complex_numbers.conj(),
        complex_numbers.conj().imag,
    ):
        assert torch.equal(sent(pair, tensor), tensor)
    learned = torch.ones(size, requires_grad=True) * 2
    assert torch.equal(sent(pair, learned), learned.detach())


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.arange(5)[::-1],
        np.array(3.5),
        np.zeros((0, 7), dtype=np.int16),
        np.array([True, False]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.array(["a", "bcd"]),
        np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
        np.arange(4, dtype=">i4"),
        np.array([{"any": "object"}, None], dtype=object),
        np.arange(100_000),
    ],
    ids=str,
)
def test_an_array_arrives_as_it_was(pair: Pair, array: Any) -> None:
    arrived = sent(pair, array)
    assert type(arrived) is np.ndarray
    assert arrived.dtype == array.dtype
    assert arrived.shape == array.shape
    assert np.array_equal(arrived, array)


class Point(NamedTuple):
    x: torch.Tensor
    name: str


@dataclass
class Padded:
    tokens: torch.Tensor
    lengths: list[int]


@pytest.mark.parametrize("size", [4, 40_000])
def test_tensors_at_any_depth_and_in_any_class(pair: Pair, size: int) -> None:
    tensor = torch.arange(size)
    value = {"p": Point(tensor, "n"), "d": Padded(tensor + 1, [1]), "list": [None, 1.5, "text", (np.int64(3), tensor)]}
    arrived = sent(pair, value)
    assert isinstance(arrived["p"], Point)
    assert torch.equal(arrived["p"].x, tensor)
    assert torch.equal(arrived["d"].tokens, tensor + 1)
    assert arrived["list"][:3] == [None, 1.5, "text"]
    assert torch.equal(arrived["list"][3][1], tensor)


def test_special_tensors_are_pickled(pair: Pair) -> None:
    parameter = sent(pair, torch.nn.Parameter(torch.ones(3)))
    assert isinstance(parameter, torch.nn.Parameter)
    assert torch.equal(sent(pair, torch.eye(3).to_sparse()).to_dense(), torch.eye(3))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_with_the_way_out(pair: Pair, layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=layout)
    with pytest.raises(TypeError, match="nested tensors are not supported: pad the samples"):
        post(pair[0], {"x": nested})


@pytest.mark.parametrize("size", [10, 100_000])
def test_what_arrives_is_aligned_writable_and_one_autograd_does_not_mix_up(pair: Pair, size: int) -> None:
    x, mask, y = sent(pair, (torch.ones(size), torch.ones(3, dtype=torch.bool), torch.ones(size)))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in (x, mask, y))
    weight = torch.ones(size, requires_grad=True)
    product = (weight * y).sum()  # keeps y for the backward pass
    x.add_(1)
    product.backward()
    assert torch.equal(y, torch.ones(size))
    assert x.sum() == 2 * size


def test_memory_and_descriptors_are_given_back(pair: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))
    kept = [sent(pair, torch.full((50_000,), float(i))) for i in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert [int(tensor[-1]) for tensor in kept] == list(range(20))


def test_sending_does_not_wait_for_the_receiver(pair: Pair) -> None:
    large = torch.arange(12_500_000, dtype=torch.int32)
    for _ in range(3):
        post(pair[0], large)
    assert all(torch.equal(receive(pair[1]), large) for _ in range(3))


def test_the_end_and_the_absence_of_messages(pair: Pair) -> None:
    with pytest.raises(BlockingIOError):
        receive(pair[1])
    post(pair[0], 1)
    pair[0].close()
    assert receive(pair[1]) == 1
    with pytest.raises(EOFError):
        receive(pair[1])


def test_a_value_that_cannot_be_sent_leaves_nothing_in_the_way(pair: Pair) -> None:
    with pytest.raises(Exception, match="lambda"):
        post(pair[0], (torch.ones(3), lambda: None))
    assert sent(pair, 5) == 5

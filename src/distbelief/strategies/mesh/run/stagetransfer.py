"""Point-to-point transfer between the stages of a pipeline: activations go forward and gradients back, as a few tensors
and integers per shard, over gloo.

A receiver must know shapes before it can receive. The sender tells them ahead of the first shard of each size, or ahead
of every shard where samples differ in shape (a Dataset may do that). Sends do not wait; receives are posted early.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from distbelief.errors import JobError
from distbelief.transport.gloo.group import TorchGroup

_HEADER_LENGTH = 256
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
_NUMBER = -1  # in place of a type: the value is an integer, not a tensor

TensorHeader = tuple[int, ...]
"""(type, whether it needs a gradient, sizes…) of a tensor, or (_NUMBER, value) of an integer."""


class StageTransfer:
    """Sends and receives between this member and the members with the stages before and after its own, for one
    generation."""

    def __init__(self, group: TorchGroup, same_shapes: bool) -> None:
        """`same_shapes`: all samples have the same shapes, so all shards with equally many samples do."""
        self._group = group
        self._same_shapes = same_shapes
        self._told: set[tuple[int, int, int]] = set()
        self._known: dict[tuple[int, int, int], list[TensorHeader]] = {}
        self._sent: list[tuple[dist.Work | None, torch.Tensor]] = []
        self._early: dict[tuple[int, int], tuple[list[dist.Work | None], list[Any]]] = {}
        self._early_gradients: dict[tuple[int, int], tuple[list[dist.Work | None], list[torch.Tensor]]] = {}
        self.waited_s: dict[int, float] = {}
        """Seconds of waiting since the generation began, by the rank that this member waited for."""

    def send(self, values: Sequence[Any], to: int, stage: int, shard: int, kind: int) -> None:
        """Send a stage's values of a shard to the member with the next stage. Shards of one kind (equally many samples,
        training or not) have the same shapes."""
        headers = [_header_of(value) for value in values]
        key = (stage, kind, to)
        if not self._same_shapes or key not in self._told:
            self._told.add(key)
            self._post_send(_pack(headers), to, _tag(stage, shard, 0))
        for number, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                self._post_send(value.detach().contiguous(), to, _tag(stage, shard, 2 + number))

    def expect(self, source: int, stage: int, shard: int, kind: int) -> None:
        """Post the receives of `receive` early, if the shapes are known."""
        known = self._known.get((stage, kind, source)) if self._same_shapes else None
        if known is not None and (stage, shard) not in self._early:
            self._early[stage, shard] = self._post_receives(known, source, stage, shard)

    def receive(self, source: int, stage: int, shard: int, kind: int) -> list[Any]:
        """The values that `stage`, on another member, made of a shard."""
        if (stage, shard) not in self._early:
            key = (stage, kind, source)
            if not self._same_shapes or key not in self._known:
                head = torch.empty(_HEADER_LENGTH, dtype=torch.int64)
                self._wait_for([self._post_receive(head, source, _tag(stage, shard, 0))], source)
                self._known[key] = _unpack(head)
            self._early[stage, shard] = self._post_receives(self._known[key], source, stage, shard)
        works, values = self._early.pop((stage, shard))
        self._wait_for(works, source)
        return values

    def send_gradients(self, gradients: Sequence[torch.Tensor], to: int, stage: int, shard: int) -> None:
        """Send the gradients of the values that came from `stage`."""
        for number, gradient in enumerate(gradients):
            self._post_send(gradient.contiguous(), to, _tag(stage, shard, 128 + number))

    def receive_gradients(
        self, like: Sequence[torch.Tensor], source: int, stage: int, shard: int
    ) -> list[torch.Tensor]:
        self.expect_gradients(like, source, stage, shard)
        works, found = self._early_gradients.pop((stage, shard))
        self._wait_for(works, source)
        return found

    def expect_gradients(self, like: Sequence[torch.Tensor], source: int, stage: int, shard: int) -> None:
        """Post the receives of `receive_gradients` early."""
        if (stage, shard) not in self._early_gradients:
            found = [torch.empty(t.shape, dtype=t.dtype) for t in like]
            works = [self._post_receive(t, source, _tag(stage, shard, 128 + n)) for n, t in enumerate(found)]
            self._early_gradients[stage, shard] = (works, found)

    def settle(self) -> None:
        """Wait until all sends are complete."""
        with self._group.network():
            for work, _ in self._sent:
                if work is not None:
                    work.wait()
        self._sent.clear()

    def _post_receives(
        self, headers: Sequence[TensorHeader], source: int, stage: int, shard: int
    ) -> tuple[list[dist.Work | None], list[Any]]:
        works: list[dist.Work | None] = []
        values: list[Any] = []
        for number, header in enumerate(headers):
            if header[0] == _NUMBER:
                values.append(header[1])
                continue
            tensor = torch.empty(header[2:], dtype=_DTYPES[header[0]])
            works.append(self._post_receive(tensor, source, _tag(stage, shard, 2 + number)))
            values.append(tensor.requires_grad_(bool(header[1])))
        return works, values

    def _post_receive(self, tensor: torch.Tensor, source: int, tag: int) -> dist.Work | None:
        if not tensor.numel():
            return None
        with self._group.network():
            return dist.irecv(tensor.detach(), source, tag=tag)

    def _post_send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        if not tensor.numel():
            return
        with self._group.network():
            self._sent = [(work, kept) for work, kept in self._sent if work is not None and not work.is_completed()]
            self._sent.append((dist.isend(tensor, to, tag=tag), tensor))

    def _wait_for(self, works: Sequence[dist.Work | None], source: int) -> None:
        started = time.perf_counter()
        with self._group.network():
            for work in works:
                if work is not None:
                    work.wait()
        self.waited_s[source] = self.waited_s.get(source, 0.0) + time.perf_counter() - started


def _tag(stage: int, shard: int, number: int) -> int:
    return (stage << 23) + (shard << 8) + number


def _header_of(value: Any) -> TensorHeader:
    if isinstance(value, torch.Tensor):
        if value.dtype not in _DTYPES:
            raise JobError(f"a {value.dtype} tensor goes from one stage to the next: it cannot be sent")
        return (_DTYPES.index(value.dtype), int(value.requires_grad), *value.shape)
    return (_NUMBER, int(value))


def _pack(headers: Sequence[TensorHeader]) -> torch.Tensor:
    numbers = [len(headers)]
    for header in headers:
        numbers += [len(header), *header]
    if len(numbers) > _HEADER_LENGTH:
        raise JobError(
            f"{len(headers)} values go from one stage to the next: too many",
            hint="name split points with few values between them: Job(split=[…])",
        )
    return torch.tensor(numbers + [0] * (_HEADER_LENGTH - len(numbers)))


def _unpack(head: torch.Tensor) -> list[TensorHeader]:
    numbers = head.tolist()
    headers, at = [], 1
    for _ in range(numbers[0]):
        headers.append(tuple(numbers[at + 1 : at + 1 + numbers[at]]))
        at += 1 + numbers[at]
    return headers

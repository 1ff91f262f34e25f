"""The sum of the gradients of some portions on a worker, and their losses: a node of the tree over all portions."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable

import torch

from distbelief.errors import JobError
from distbelief.shards import Range, split
from distbelief.strategies.base import Fetch
from distbelief.strategies.flatmodel.compute import ShardComputer, ShardResult
from distbelief.strategies.ps.worker.exchange import ServerExchange
from distbelief.strategies.sandblaster.rules.wholedata import portion_seed

Losses = list[tuple[float, float]]


class PortionSums:
    def __init__(
        self, computer: ShardComputer, exchange: ServerExchange, fetch: Fetch, size: int, buffers: list[torch.Tensor]
    ) -> None:
        """`size`: elements of all parameters."""
        self.spent_s = 0.0
        self._computer = computer
        self._exchange = exchange
        self._fetch = fetch
        self._size = size
        self._buffers = buffers

    def compute(self, step: int, node: Range, are_over: Callable[[], bool]) -> Losses | None:
        """Into the first slot. Gives up between two portions where the generation is over, or its values are."""
        started = time.perf_counter()
        losses: Losses = []
        try:
            self._visit(step, node, 0, losses, are_over)
            whole = len(losses) == node[1] - node[0]
            if whole:
                self._exchange.bring(0)
        finally:
            self.spent_s += time.perf_counter() - started
        return losses if whole else None

    def _visit(self, step: int, node: Range, level: int, losses: Losses, are_over: Callable[[], bool]) -> None:
        if are_over():
            return
        if node[1] - node[0] == 1:
            losses.append(self._portion(step, node[0], level))
            return
        left, right = split(node)
        self._visit(step, left, level, losses, are_over)
        self._visit(step, right, level + 1, losses, are_over)
        self._flat(level).add_(self._flat(level + 1))

    def _portion(self, step: int, portion: int, level: int) -> tuple[float, float]:
        self._exchange.abort.check()
        self._exchange.working_on(step, portion)
        batch, samples = self._fetch(step, portion, portion + 1)
        room = self._exchange.room(level)
        seed = portion_seed(self._computer.job, portion)
        result = self._computer.run(batch, samples, seed, room, self._buffers, _nothing)
        self._exchange.working(-1)
        require_steady(self._computer, result)
        return result.loss_sum, result.weight

    def _flat(self, level: int) -> torch.Tensor:
        return self._exchange.room(level).tensor(self._computer.layout.tiles[0].dtype, 0, self._size)


def require_steady(computer: ShardComputer, result: ShardResult) -> None:
    """The loss must be a function of the parameters alone, for a line search goes forth and back."""
    moved = bool(result.touched[len(computer.parameters) :].any())
    if moved or result.integers != zlib.crc32(computer.committed_integer_bytes()):
        raise JobError(
            "training changes buffers of the model, as BatchNorm does: sandblaster needs a loss that depends on the "
            "parameters alone",
            hint="use GroupNorm or LayerNorm, or BatchNorm with track_running_stats=False, or another strategy",
        )


_nothing: Callable[[int], None] = lambda tile: None  # noqa: E731

"""A worker's part of an evaluation: fetch the point that the servers show, and add up gradients of portions there."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from distbelief.errors import JobError
from distbelief.shards import Range, split
from distbelief.strategies.base import Fetch as FetchBatch
from distbelief.strategies.flatmodel.compute import ShardComputer, ShardResult
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import PulledValues, PullValues, Question
from distbelief.strategies.ps.rules.slicing import SliceShape
from distbelief.strategies.ps.worker.exchange import ServerExchange
from distbelief.strategies.sandblaster.rules.portions import portion_seed
from distbelief.transport.shm.segment import Segment

FETCH_AGAIN_S = 0.01

Losses = list[tuple[float, float]]
"""By portion: the loss as a sum, and its weight."""


class ShownValues:
    """The values of the vector that the servers show. The servers may overwrite them while this member fetches them,
    so a fetch may fail."""

    def __init__(
        self, computer: ShardComputer, exchange: ServerExchange, slices: Sequence[SliceShape],
        take: Callable[[PulledValues, Any], None],
    ) -> None:  # fmt: skip
        """`take`: copies the values of a slice to their places."""
        self.number = -1
        """The number of the command that showed the values of this member; -1: its values are incomplete."""
        self._computer = computer
        self._exchange = exchange
        self._slices = slices
        self._take = take
        self._mapped: dict[str, Segment] = {}
        self._versions: np.ndarray | None = None
        """The two version numbers of a slice whose memory this process has mapped (see slices.py)."""

    def bring(self, number: int) -> bool:
        """Fetch the values that command `number` showed. False: the servers show other values by now."""
        if number == self.number:
            return True
        self.number = -1
        whole = True

        def fetched(framed: Framed) -> None:
            nonlocal whole
            message: PulledValues = framed.message
            whole &= message.version == number and self._copied(message, framed.payload)
            if message.slice == 0:
                self._computer.commit_integers(message.integers or None)

        inline = not self._exchange.maps
        questions = [partial(_fetch, shape.number, number, inline) for shape in self._slices]
        self._exchange.client.ask(questions, self._exchange.abort, fetched)
        if whole:
            self.number = number
        return whole

    def insist(self, number: int) -> None:
        """Fetch until it succeeds. Only for a point that the driver shows until every member has it."""
        while not self.bring(number):
            self._exchange.client.nap(FETCH_AGAIN_S)

    def _copied(self, message: PulledValues, payload: Any) -> bool:
        """Copy the values of a slice. False: the server began to overwrite them before the copy was complete."""
        self._take(message, payload)
        if not message.segment:
            return True
        if message.segment not in self._mapped:
            assert self._exchange.segments is not None
            self._mapped[message.segment] = self._exchange.segments.segment(message.segment)
        self._versions = np.frombuffer(self._mapped[message.segment].buffer, np.int64, 2)
        return int(self._versions[0]) == message.version  # the server sets it before it writes anything

    def are_over(self) -> bool:
        """Whether the servers are known to show other values by now: a gradient at these values is of no use."""
        return self._versions is not None and int(self._versions[0]) != self.number


def _fetch(number: int, version: int, inline: bool, ticket: int) -> Question:
    return PullValues(ticket, number, version, inline)


class PortionSums:
    """Adds up the gradients of the portions below a node of the tree over all portions, along that tree."""

    def __init__(
        self,
        computer: ShardComputer,
        exchange: ServerExchange,
        fetch: FetchBatch,
        size: int,
        buffers: list[torch.Tensor],
    ) -> None:
        """`size`: elements of all parameters."""
        self.spent_s = 0.0
        self._computer = computer
        self._exchange = exchange
        self._fetch = fetch
        self._size = size
        self._buffers = buffers

    def compute(self, step: int, node: Range, are_over: Callable[[], bool]) -> Losses | None:
        """Write the sum of the node's gradients into slot 0 and return the losses. None: `are_over` said between two
        portions that the sum is of no use any more."""
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
    """Refuse a model whose training changes buffers: a line search goes forth and back, so the loss must be a function
    of the parameters alone."""
    moved = bool(result.touched[len(computer.parameters) :].any())
    if moved or result.integers != zlib.crc32(computer.committed_integer_bytes()):
        raise JobError(
            "training changes buffers of the model, as BatchNorm does: sandblaster needs a loss that depends on the "
            "parameters alone",
            hint="use GroupNorm or LayerNorm, or BatchNorm with track_running_stats=False, or another strategy",
        )


_nothing: Callable[[int], None] = lambda tile: None  # noqa: E731

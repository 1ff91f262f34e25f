"""The committed model: measured on validation data, and saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from distbelief.atomicfile import ROOM_WAIT_S
from distbelief.checkpoint.weights import Streamed, save_weights, weights_sha256
from distbelief.data.sources import seed_everything, split_batch
from distbelief.strategies.base import Task
from distbelief.strategies.flatmodel.compute import ShardComputer, move


class CommittedModel:
    """Every method first restores the committed buffers in the model, because a shard changes them."""

    def __init__(self, computer: ShardComputer, buffers: Sequence[torch.Tensor]) -> None:
        self._computer = computer
        self._buffers = buffers

    def measure(self, tasks: Sequence[Task], measure: Callable[[Task, Any, Any], None]) -> None:
        model = self.restore()
        model.eval()
        try:
            with torch.no_grad():
                for task in tasks:
                    batch, _ = task.fetch()
                    seed_everything(task.seed)
                    args, kwargs, target = split_batch(move(batch, self._computer.device))
                    with self._computer.forward_context():
                        output = model(*args, **kwargs)
                    measure(task, output, target)
        finally:
            model.train()

    def save(self, path: Path, besides: Mapping[str, torch.Tensor | Streamed] | None = None) -> str:
        """Save the weights at the end of a run. Returns their digest. `besides`: tensors that belong to the weights
        but are not in the model."""
        return save_weights(self.restore(), path, besides or {}, ROOM_WAIT_S)

    def sha256(self) -> str:
        return weights_sha256(self.restore())

    def restore(self) -> torch.nn.Module:
        self._computer.restore_buffers(self._buffers)
        return self._computer.model

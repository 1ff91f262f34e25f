"""The state of a member's part, and how a step is applied to it without asking anybody.

A step is committed in two phases. First all members finish its gradients, and vote: one all-reduce at the end of all
communication. Whoever comes out of it knows that everybody has the gradients, and applies them. A member that is called
away inside of the vote keeps them: if anybody has applied the step, it applies it too, later on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec
import torch

from distbelief.checkpoint.boxes import Box
from distbelief.job import Job
from distbelief.strategies.base import Applied
from distbelief.strategies.mesh.run.part import Part
from distbelief.strategies.mesh.run.shardbuffers import ShardBuffers
from distbelief.strategies.mesh.state.optimizer import LocalOptimizer

REMEMBERED = 1024  # steps: many more than are committed between two heartbeats


class Verdict(msgspec.Struct, frozen=True):
    """What the vote on a step has given: all that is needed to apply it."""

    step: int
    loss: float
    samples: int
    fingerprint: str
    generation: int
    at: float
    factor: float
    """On every gradient: one over the batch's weight, and clipping. 0: no parameter is touched."""
    shards: int
    """That had samples: buffers are averaged over them."""
    untouched: list[int] = []
    """The numbers of parameters to which no shard gave a gradient."""


class LiveState:
    def __init__(self, job: Job, part: Part, optimizer: LocalOptimizer, buffers: Mapping[int, ShardBuffers]) -> None:
        self.part = part
        self.optimizer = optimizer
        self.applied = 0
        self.last: Verdict | None = None
        """On the last step that was applied."""
        self.history: deque[Applied] = deque(maxlen=REMEMBERED)
        self.note: tuple[int, bytes] = (-1, b"")
        self.pending = -1
        """The step whose gradients are complete and not applied."""
        self._gradients: list[torch.Tensor | None] = []
        self._job = job
        self._buffers = buffers

    def ready(self, step: int, gradients: list[torch.Tensor | None]) -> None:
        """The gradients of this step are complete, over all members."""
        self._gradients = gradients
        self.pending = step

    def squares(self, shares: Mapping[str, float]) -> float:
        """My contribution to the square of the gradient's norm. `shares`: parameter -> 1 / how many members hold it."""
        held = zip(self.optimizer.held, self._gradients, strict=True)
        given = [(gradient, shares[one.name]) for one, gradient in held if gradient is not None]
        if not given:
            return 0.0
        norms = torch.stack(torch._foreach_norm([gradient for gradient, _ in given], 2, torch.float64))
        return float(norms.square() @ torch.tensor([share for _, share in given], dtype=torch.float64))

    def apply(self, verdict: Verdict) -> None:
        """Apply the pending step. It needs nobody else."""
        assert self.pending == verdict.step
        gradients = self._gradients
        if verdict.factor == 0:  # nothing to learn from: as if no parameter had a gradient; buffers have seen samples
            gradients = [None] * len(gradients)
        if verdict.untouched:
            skipped = set(verdict.untouched)
            held = zip(self.optimizer.held, gradients, strict=True)
            gradients = [None if one.number in skipped else gradient for one, gradient in held]
        given = [gradient for gradient in gradients if gradient is not None]
        if given:
            torch._foreach_mul_(given, verdict.factor)
        rate = self._job.schedule(verdict.step) if self._job.schedule else 1.0
        self.optimizer.step(gradients, rate)
        for buffers in self._buffers.values():
            buffers.commit(verdict.shards)
        self._gradients = []
        self.pending = -1
        self.applied = verdict.step + 1
        self.last = verdict
        self.history.append(
            Applied(verdict.step, verdict.loss, verdict.samples, verdict.fingerprint, verdict.generation, verdict.at)
        )

    def keep_buffers(self) -> None:
        """The buffers have been given their values from elsewhere."""
        for buffers in self._buffers.values():
            buffers.keep()

    def restore_buffers(self) -> None:
        """To the committed values: a step that was given up may have left others."""
        for buffers in self._buffers.values():
            buffers.restore()

    def tensors(self) -> dict[str, tuple[Box, torch.Tensor]]:
        """Everything that it consists of, under the names of a checkpoint."""
        self.restore_buffers()
        found = self.part.tensors()
        kept = self.optimizer.tensors()
        for name, _, _, box in self.optimizer.forms():
            found[name] = (box, kept[name])
        return found

    def boxes(self) -> dict[str, Box]:
        found = {name: box for name, (box, _) in self.part.tensors().items()}
        return {**found, **{name: box for name, _, _, box in self.optimizer.forms()}}

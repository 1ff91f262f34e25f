"""The state of a member's part of the model, and how a step is applied to it: by this member alone.

A step is committed in two phases. First all members complete its gradients and vote, with one all-reduce at the end of
all communication. A member that gets the result of the vote knows that every member has the gradients, and applies
them. A member that is interrupted inside the vote keeps its gradients. If any other member has applied the step, it
applies the step later, when the next generation begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch

from distbelief.checkpoint.rules.boxes import Box, sizes, whole
from distbelief.errors import JobError
from distbelief.job import Job
from distbelief.strategies.base import REMEMBERED, Applied
from distbelief.strategies.flatmodel.tileoptimizer import Field, Recipe
from distbelief.strategies.mesh.rules.agreement import CommitDecision
from distbelief.strategies.mesh.run.modelpart import HeldParameter, ModelPart
from distbelief.strategies.mesh.run.runner import ShardBuffers

# --- the optimizer ---------------------------------------------------------------------------------------------------


class PartOptimizer:
    """The job's torch optimizer over the parameters, or pieces of parameters, that this member holds. Optimizers that
    look at whole parameters get whole parameters only."""

    def __init__(self, recipe: Recipe, held: Sequence[HeldParameter]) -> None:
        for one in held:
            if tuple(one.value.shape) != sizes(one.box):  # a fused kernel would write beyond its state
                raise RuntimeError(f"'{one.name}' is held as {tuple(one.value.shape)}, and not as the box {one.box}")
        self.held = held
        self._recipe = recipe
        pieces = [one for one in held if one.value.numel() < torch.Size(one.shape).numel()]
        if pieces and not recipe.elementwise:
            raise JobError(
                f"{recipe.kind.__name__} looks at whole parameters, and this strategy divides '{pieces[0].name}'",
                hint="use allreduce or pipeline, which keep parameters whole, or an optimizer such as AdamW or SGD",
            )
        cut = [one for one in pieces if one.number in recipe.functions]
        if cut:
            raise JobError(
                f"`after_update` gets whole parameters, and this strategy divides '{cut[0].name}'",
                hint="use allreduce or pipeline, which keep parameters whole, or a pattern that does not match it",
            )
        self._optimizer = recipe.make([(one.number, one.value) for one in held]) if held else None
        groups = self._optimizer.param_groups if self._optimizer else []
        self._rates = [float(group["lr"]) if "lr" in group else None for group in groups]

    def step(self, gradients: Sequence[torch.Tensor | None], rate_factor: float) -> None:
        """One step on the parameters that have a gradient. Parameters with their first gradient go last, in a step of
        their own: torch's fused SGD requires a first step for all its parameters or for none."""
        if self._optimizer is None:
            return
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            if rate is not None:
                group["lr"] = rate * rate_factor
        given = [one.value for one, gradient in zip(self.held, gradients, strict=True) if gradient is not None]
        new = {id(value) for value in given if not self._optimizer.state.get(value)}
        rounds = [False, True] if new and len(new) < len(given) else [None]
        for first_time in rounds:
            for one, gradient in zip(self.held, gradients, strict=True):
                skip = first_time is not None and (id(one.value) in new) is not first_time
                one.value.grad = None if skip else gradient
            self._optimizer.step()
        for one in self.held:
            one.value.grad = None

    def after_update(self, step: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Apply the functions of `Job.after_update` to the parameters that have a gradient."""
        for one, gradient in zip(self.held, gradients, strict=True):
            if gradient is not None and one.number in self._recipe.group_of:
                for function in self._recipe.functions.get(one.number, ()):
                    function.apply(one.value.detach(), step)

    # --- the optimizer's state under names ---------------------------------------------------------------------------

    def forms(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], Box]]:
        """Yields (name, type, shape of the whole, this member's box) of every tensor that the optimizer may keep."""
        for one in self.held:
            for field in self._fields(one):
                shape, box = self._place(one, field)
                yield f"optimizer/{field.key}/{one.name}", field.dtype, shape, box
            yield f"begun/{one.name}", torch.uint8, (), ()

    def _fields(self, one: HeldParameter) -> list[Field]:
        return self._recipe.fields(one.number, one.value.numel())

    def _place(self, one: HeldParameter, field: Field) -> tuple[tuple[int, ...], Box]:
        if self._recipe.elementwise and field.shape:
            return one.shape, one.box
        return field.shape, whole(field.shape)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that the optimizer keeps, with zeros for tensors that it has not begun to keep."""
        found: dict[str, torch.Tensor] = {}
        for one in self.held:
            state = self._optimizer.state.get(one.value, {}) if self._optimizer else {}
            for field in self._fields(one):
                value = state.get(field.key)
                if value is None:
                    value = torch.zeros(sizes(self._place(one, field)[1]), dtype=field.dtype)
                elif not isinstance(value, torch.Tensor):
                    value = torch.tensor(value, dtype=field.dtype)
                found[f"optimizer/{field.key}/{one.name}"] = value
            found[f"begun/{one.name}"] = torch.tensor(int(bool(state)), dtype=torch.uint8)
        return found

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make the tensors the optimizer's own memory."""
        for one in self.held:
            if self._optimizer is None or not int(tensors[f"begun/{one.name}"]):
                continue
            state = {}
            for field in self._fields(one):
                value = tensors[f"optimizer/{field.key}/{one.name}"]
                number = field.number
                state[field.key] = number(value.item()) if number else value.view(sizes(self._place(one, field)[1]))
            self._optimizer.state[one.value] = state


# --- the state -------------------------------------------------------------------------------------------------------

Forms = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""For each tensor's name, its type and the shape of the whole tensor."""

Pieces = Mapping[str, tuple[Box, torch.Tensor]]
"""For each tensor's name, a box of the tensor and the values in it."""


class MemberState:
    """The parameters, buffers and optimizer state of one member's part, with the step that it has reached."""

    def __init__(
        self, job: Job, part: ModelPart, optimizer: PartOptimizer, buffers: Mapping[int, ShardBuffers]
    ) -> None:
        self.part = part
        self.optimizer = optimizer
        self.applied = 0
        self.last: CommitDecision | None = None
        """The decision on the last applied step."""
        self.history: deque[Applied] = deque(maxlen=REMEMBERED)
        self.note: tuple[int, bytes] = (-1, b"")
        self.pending = -1
        """The step whose gradients are complete but not applied; -1: none."""
        self._gradients: list[torch.Tensor | None] = []
        self._job = job
        self._buffers = buffers

    def ready(self, step: int, gradients: list[torch.Tensor | None]) -> None:
        """Take the complete gradients of a step, summed over all members."""
        self._gradients = gradients
        self.pending = step

    def squares(self, shares: Mapping[str, float]) -> float:
        """This member's contribution to the square of the gradient's norm. `shares`: for each parameter, one over the
        number of its holders."""
        held = zip(self.optimizer.held, self._gradients, strict=True)
        given = [(gradient, shares[one.name]) for one, gradient in held if gradient is not None]
        if not given:
            return 0.0
        norms = torch.stack(torch._foreach_norm([gradient for gradient, _ in given], 2, torch.float64))
        return float(norms.square() @ torch.tensor([share for _, share in given], dtype=torch.float64))

    def apply(self, decision: CommitDecision) -> None:
        """Apply the pending step, without any other member."""
        assert self.pending == decision.step
        gradients = self._gradients
        if decision.factor == 0:  # no gradient counts, but buffers have seen samples
            gradients = [None] * len(gradients)
        if decision.untouched:
            skipped = set(decision.untouched)
            held = zip(self.optimizer.held, gradients, strict=True)
            gradients = [None if one.number in skipped else gradient for one, gradient in held]
        given = [gradient for gradient in gradients if gradient is not None]
        if given:
            torch._foreach_mul_(given, decision.factor)
        rate = self._job.rate_factor(decision.step)
        self.optimizer.step(gradients, rate)
        self.optimizer.after_update(decision.step, gradients)
        for buffers in self._buffers.values():
            buffers.commit(decision.shards)
        self._gradients = []
        self.pending = -1
        self.applied = decision.step + 1
        self.last = decision
        self.history.append(
            Applied(
                decision.step, decision.loss, decision.samples, decision.fingerprint, decision.generation, decision.at
            )
        )

    def keep_buffers(self) -> None:
        """Take over the buffers' present values as the committed ones."""
        for buffers in self._buffers.values():
            buffers.keep()

    def restore_buffers(self) -> None:
        """Give the modules the committed buffers again: an abandoned step may have left other values."""
        for buffers in self._buffers.values():
            buffers.restore()

    def tensors(self) -> dict[str, tuple[Box, torch.Tensor]]:
        """Every tensor of the state, under the names of a checkpoint."""
        self.restore_buffers()
        found = self.part.tensors()
        kept = self.optimizer.tensors()
        for name, _, _, box in self.optimizer.forms():
            found[name] = (box, kept[name])
        return found

    def boxes(self) -> dict[str, Box]:
        """The boxes of `tensors`, without the values."""
        found = {name: box for name, (box, _) in self.part.tensors().items()}
        return {**found, **{name: box for name, _, _, box in self.optimizer.forms()}}

"""A member of a generation: its process groups, its state, and what every member holds; and the transfer of boxes of
tensors between members, over gloo.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist

from distbelief.checkpoint.rules.boxes import Box, inside, volume
from distbelief.checkpoint.sources import MODEL
from distbelief.job import Job
from distbelief.strategies.flatmodel.layout import trainable
from distbelief.strategies.flatmodel.namedtensors import tied
from distbelief.strategies.flatmodel.tileoptimizer import Recipe
from distbelief.strategies.mesh.rules.boxes import Move
from distbelief.strategies.mesh.run.gradientsum import ErrorFeedback, GradientCompression, with_residuals
from distbelief.strategies.mesh.run.groups import MeshGroups
from distbelief.strategies.mesh.state.memberstate import Forms, MemberState, Pieces
from distbelief.transport.gloo.group import TorchGroup


@dataclass(frozen=True)
class MeshMember:
    """One member in one generation, with everything that the rest of the code asks about it."""

    job: Job
    groups: MeshGroups
    state: MemberState
    recipe: Recipe
    model: torch.nn.Module
    """The whole model on meta, for its names."""
    forms: Forms
    """Type and whole shape of every tensor that a state consists of."""
    held: Sequence[Mapping[str, Box]]
    """The boxes that each member holds, by rank."""
    compression: GradientCompression | None
    feedback: ErrorFeedback | None = None
    """Where gradients are compressed: this member's residual."""

    def with_residuals(self) -> tuple[list[dict[str, Box]], Forms]:
        """Returns `held` and `forms`, with the residuals of the error feedback added to both."""
        rows = [self.groups.degrees.place(rank).data for rank in range(self.groups.world.size)]
        return with_residuals(self.held, self.forms, rows, [name for name, _ in trainable(self.model)])

    def shares(self) -> dict[str, float]:
        """Returns, for each of this member's parameters, one over the number of members that hold the same box of
        it."""
        found = {}
        for one in self.state.optimizer.held:
            name = f"{MODEL}{one.name}"
            found[one.name] = 1.0 / sum(boxes.get(name) == one.box for boxes in self.held)
        return found

    def names(self, persistent: bool) -> dict[str, str]:
        """Maps every name of a tensor of the model to the tensor's first name (tied tensors have several)."""
        first = tied(self.model)
        every = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        every += [name for name, _ in self.model.named_buffers(remove_duplicate=False)]
        kept = self.model.state_dict().keys() if persistent else every
        return {name: first.get(name, name) for name in every if name in kept}

    def has_single_holders(self) -> bool:
        """Whether some box has one holder only, so that this member's death would lose it."""
        count: dict[tuple[str, Box], int] = {}
        for boxes in self.held:
            for key in boxes.items():
                count[key] = count.get(key, 0) + 1
        return self.groups.world.size > 1 and 1 in count.values()


def exchange_boxes(groups: MeshGroups, boxes: Mapping[str, Box]) -> list[dict[str, Box]]:
    """Collective: every member tells the boxes that it holds. Returns them by rank."""
    decoder = msgspec.msgpack.Decoder(dict[str, Box])
    return [decoder.decode(theirs) for theirs in groups.world.gather(msgspec.msgpack.encode(boxes))]


# --- transfer of boxes -----------------------------------------------------------------------------------------------

_WINDOW_BYTES = 64 << 20  # limit on bytes in flight, so that the copies that sending needs stay small


def transfer_boxes(group: TorchGroup, plan: Sequence[Move], held: Mapping[int, Pieces], into: Pieces) -> None:
    """Collective: carry out moves. `plan` is the same on every member; `held`: this member's own holdings, by their
    numbers in the plan; `into`: the memory for the boxes that this member wants."""
    works: list[tuple[dist.Work | None, torch.Tensor, torch.Tensor | None]] = []
    under_way = 0
    for number, move in enumerate(plan):
        size_bytes = 8 * volume(move.box)  # the same estimate on every member, so that all wait at the same places
        if under_way and under_way + size_bytes > _WINDOW_BYTES:
            _finish(group, works)
            under_way = 0
        under_way += size_bytes
        _start(group, number, move, held, into, works)
    _finish(group, works)


def _start(
    group: TorchGroup,
    number: int,
    move: Move,
    held: Mapping[int, Pieces],
    into: Pieces,
    works: list[tuple[dist.Work | None, torch.Tensor, torch.Tensor | None]],
) -> None:
    if group.rank not in (move.source, move.target):
        return
    there = None
    if move.target == group.rank:
        box, memory = into[move.tensor]
        there = memory[inside(move.box, box)]
    if move.source == group.rank:
        box, memory = held[move.holding][move.tensor]
        part = memory[inside(move.box, box)]
        if there is not None:
            there.copy_(part)
            return
        part = part.contiguous()
        if part.numel():
            with group.network():
                works.append((dist.isend(part, move.target, tag=number), part, None))
        return
    assert there is not None
    if there.numel():
        buffer = torch.empty(there.shape, dtype=there.dtype)
        with group.network():
            works.append((dist.irecv(buffer, move.source, tag=number), buffer, there))


def _finish(group: TorchGroup, works: list[tuple[dist.Work | None, torch.Tensor, torch.Tensor | None]]) -> None:
    with group.network():
        for work, buffer, there in works:
            if work is not None:
                work.wait()
            if there is not None:
                there.copy_(buffer)
    works.clear()

"""Carrying out moves: boxes of tensors go over gloo from the members that hold them to those that want them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from distbelief.checkpoint.boxes import Box, inside, volume
from distbelief.strategies.mesh.rules.boxes import Move
from distbelief.transport.gloo.group import TorchGroup

Pieces = Mapping[str, tuple[Box, torch.Tensor]]
"""Tensors of which somebody has a part: the part, and its values."""

_WINDOW_BYTES = 64 << 20  # that many are under way at once: the copies that sending needs stay small


def move_all(
    group: TorchGroup,
    plan: Sequence[Move],
    held: Mapping[int, Pieces],
    into: Pieces,
) -> None:
    """Every member calls it with the same plan, with those of its holdings that are its own, and with what it wants."""
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

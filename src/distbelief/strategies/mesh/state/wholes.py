"""The whole weights of a divided model, one tensor at a time: nobody ever has all of them in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from distbelief.checkpoint.boxes import whole
from distbelief.checkpoint.sources import MODEL
from distbelief.checkpoint.weights import weights_sha256_of, write_weights
from distbelief.strategies.mesh.rules.boxes import Holding, moves
from distbelief.strategies.mesh.run.seated import Seated
from distbelief.strategies.mesh.state.moving import move_all


class WholeTensors:
    """Every member calls these at the same time; the one of rank 0 gets what the others give."""

    def __init__(self, seated: Seated) -> None:
        self._seated = seated
        self._known: tuple[int, str] = (-1, "")

    def save(self, path: Path) -> None:
        state = self._seated.state
        outlines = {
            name: self._seated.forms[f"{MODEL}{first}"] for name, first in self._seated.names(persistent=True).items()
        }
        if self._seated.groups.world.rank == 0:
            digest = write_weights(path, outlines, self._stream())
        else:
            digest = ""
            for _ in self._stream():
                pass
        self._known = (state.applied, digest)

    def sha256(self) -> str:
        state = self._seated.state
        if self._known[0] != state.applied:
            stream = self._stream()
            digest = weights_sha256_of(stream) if self._seated.groups.world.rank == 0 else "" * sum(1 for _ in stream)
            self._known = (state.applied, digest)
        return self._known[1]

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """In name order, a tied tensor under each of its names. On other members than rank 0 the tensors are empty."""
        seated = self._seated
        world = seated.groups.world
        seated.state.restore_buffers()
        mine = seated.state.part.tensors()
        for name, first in sorted(seated.names(persistent=False).items()):
            key = f"{MODEL}{first}"
            dtype, shape = seated.forms[key]
            box = whole(shape)
            into = torch.empty(shape, dtype=dtype) if world.rank == 0 else torch.empty(0)
            held = [Holding(rank, {key: boxes[key]}) for rank, boxes in enumerate(seated.held) if key in boxes]
            numbers = [number for number, holding in enumerate(held) if holding.rank == world.rank]
            wanted = [{key: box}] + [{} for _ in range(world.size - 1)]
            move_all(world, moves(held, wanted), dict.fromkeys(numbers, mine), {key: (box, into)})
            yield name, into

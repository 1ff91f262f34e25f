"""A member's portion of a checkpoint where the state is on servers: it is read from them at once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from distbelief.comm.segment import Segment
from distbelief.comm.serverclient import ServerClient, Stop
from distbelief.comm.serverwords import Contents, Letter, Question, Read
from distbelief.errors import DistBeliefError
from distbelief.strategies.named import TilePortion
from distbelief.strategies.slicing import SliceShape


class AlreadyCopied:
    """See `Copying`."""

    def __init__(self, outside: Mapping[str, torch.Tensor], waited_s: float) -> None:
        self.outside = outside
        self.waited_s = waited_s

    def run(self) -> None:
        """All of it is there."""

    def finish(self) -> None:
        """All of it is there."""


def read_portion(
    client: ServerClient, abort: Stop, slices: Sequence[SliceShape], portion: TilePortion, into: Segment,
    outside: Mapping[str, torch.Tensor], version: int | None,
) -> AlreadyCopied:  # fmt: skip
    """`version`: that the slices must have; None: any."""
    started = time.perf_counter()
    shapes = {shape.number: shape for shape in slices}
    missing: list[int] = []

    def read(letter: Letter) -> None:
        message: Contents = letter.message
        if message.version < 0:
            missing.append(message.slice)
            return
        shape = shapes[message.slice]
        at = portion.starts[shape.tiles[0]]
        into.tensor(torch.uint8, at, shape.size_bytes).copy_(torch.frombuffer(letter.payload, dtype=torch.uint8))

    client.ask([partial(_read, number, -1 if version is None else version) for number in shapes], abort, read)
    if missing:
        raise DistBeliefError(f"the servers have gone on from step {version} before it was saved")
    return AlreadyCopied(outside, time.perf_counter() - started)


def _read(number: int, version: int, ticket: int) -> Question:
    return Read(ticket, number, version)

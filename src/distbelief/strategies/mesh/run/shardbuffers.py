"""The buffers of a stage: each shard has its own copy, and the average over the shards is committed.

What a shard leaves in the buffers (running statistics) must not be seen by the next one; and its own backward pass,
which may come much later, must find what its forward pass has left there. So the committed tensors are never lent.
"""

from __future__ import annotations

import zlib

import torch

from distbelief.errors import JobError


class ShardBuffers:
    def __init__(self, module: torch.nn.Module) -> None:
        self._places = [
            (owner, key, buffer)
            for owner in module.modules()
            for key, buffer in owner._buffers.items()
            if buffer is not None
        ]
        tensors = {id(buffer): (owner, key, buffer) for owner, key, buffer in reversed(self._places)}
        first = [tensors[id(buffer)] for _, _, buffer in self._places]
        unique = list({id(buffer): (owner, key, buffer) for owner, key, buffer in first}.values())
        self._floats = [one for one in unique if one[2].is_floating_point()]
        self._integers = [one for one in unique if not one[2].is_floating_point()]
        self.sums = [torch.zeros_like(buffer) for _, _, buffer in self._floats]
        self.changed = [False] * len(self._floats)
        self._checksum: int | None = None
        self.keep()

    def keep(self) -> None:
        """The committed tensors have been given their values from elsewhere."""
        self.restore()
        self._after = [buffer.clone() for _, _, buffer in self._integers]

    def begin(self) -> None:
        """A step begins."""
        for total in self.sums:
            total.zero_()
        self.changed = [False] * len(self._floats)
        self._checksum = None

    def lend(self) -> None:
        """Give the module copies of the committed values, for one shard."""
        copies: dict[int, torch.Tensor] = {}
        for owner, key, buffer in self._places:
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.clone()
            owner._buffers[key] = copies[id(buffer)]

    def collect(self) -> None:
        """Take in what a shard has left, whether it has written to a buffer or replaced it."""
        for number, (owner, key, buffer) in enumerate(self._floats):
            left = _left(owner, key, buffer)
            self.sums[number] += left
            self.changed[number] = self.changed[number] or not torch.equal(left, buffer)
        if self._integers:
            found = [_left(*one) for one in self._integers]
            checksum = 0
            for left in found:
                checksum = zlib.crc32(left.contiguous().numpy().tobytes(), checksum)
            if self._checksum not in (None, checksum):
                raise JobError(
                    "an integer buffer of the model has other values after one shard than after another: it depends on "
                    "the samples, so there is no single value to go on with"
                )
            self._checksum = checksum
            for kept, left in zip(self._after, found, strict=True):
                kept.copy_(left)

    def restore(self) -> None:
        """Give the module the committed tensors themselves."""
        for owner, key, buffer in self._places:
            owner._buffers[key] = buffer

    def commit(self, shards: int) -> None:
        """`sums` and `changed` are now those of all members, over so many shards: their average counts."""
        # The average of equal numbers is not always that number: what nobody changed is left alone.
        for (_, _, buffer), total, changed in zip(self._floats, self.sums, self.changed, strict=True):
            if changed:
                buffer.copy_(total / shards)
        for (_, _, buffer), after in zip(self._integers, self._after, strict=True):
            buffer.copy_(after)
        self.restore()

    @property
    def after(self) -> list[torch.Tensor]:
        """The integer buffers after the step's shards."""
        return self._after


def _left(owner: torch.nn.Module, key: str, buffer: torch.Tensor) -> torch.Tensor:
    present = owner._buffers[key]
    if present is None or present.shape != buffer.shape:
        raise JobError(f"the model's buffer '{key}' changed its shape while training")
    return present.detach()

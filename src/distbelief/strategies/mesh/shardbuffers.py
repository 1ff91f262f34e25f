"""The buffers of a stage: put back before each shard, averaged over the shards when the step is committed."""

from __future__ import annotations

import zlib

import torch

from distbelief.errors import JobError


class ShardBuffers:
    """What a shard leaves in the buffers (running statistics) must not be seen by the next one."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._places = [
            (owner, key, buffer)
            for owner in module.modules()
            for key, buffer in owner._buffers.items()
            if buffer is not None
        ]
        tensors = {id(buffer): buffer for _, _, buffer in self._places}
        self.floats = [buffer for buffer in tensors.values() if buffer.is_floating_point()]
        self.integers = [buffer for buffer in tensors.values() if not buffer.is_floating_point()]
        self.sums = [torch.zeros_like(buffer) for buffer in self.floats]
        self.changed = [False] * len(self.floats)
        self.shards = 0
        self._checksum: int | None = None
        self.keep()

    def keep(self) -> None:
        """The present values are the committed ones."""
        self._floats = [buffer.clone() for buffer in self.floats]
        self._integers = [buffer.clone() for buffer in self.integers]
        self._after = [buffer.clone() for buffer in self.integers]

    def restore(self) -> None:
        for owner, key, buffer in self._places:  # one that does not count may have replaced some
            owner._buffers[key] = buffer
        # Through `data`: the backward pass of an earlier shard is still to come, and autograd would take this for a
        # change of what it has saved. What it reads there is the committed values, which are the same ones.
        for buffer, value in zip(self.floats, self._floats, strict=True):
            buffer.data.copy_(value)
        for buffer, value in zip(self.integers, self._integers, strict=True):
            buffer.data.copy_(value)

    def begin(self) -> None:
        """A step begins."""
        for total in self.sums:
            total.zero_()
        self.changed = [False] * len(self.floats)
        self.shards = 0
        self._checksum = None

    def collect(self) -> None:
        """Take in what a shard has left."""
        for owner, key, buffer in self._places:
            present = owner._buffers[key]
            if present is not buffer and present is not None:  # replaced instead of written to
                buffer.copy_(present.detach())
                owner._buffers[key] = buffer
        self.shards += 1
        for number, (buffer, before) in enumerate(zip(self.floats, self._floats, strict=True)):
            self.sums[number] += buffer
            self.changed[number] = self.changed[number] or not torch.equal(buffer, before)
        if self.integers:
            checksum = 0
            for buffer in self.integers:
                checksum = zlib.crc32(buffer.contiguous().numpy().tobytes(), checksum)
            if self._checksum not in (None, checksum):
                raise JobError(
                    "an integer buffer of the model has other values after one shard than after another: it depends on "
                    "the samples, so there is no single value to go on with"
                )
            self._checksum = checksum
            for kept, buffer in zip(self._after, self.integers, strict=True):
                kept.copy_(buffer)

    def commit(self, shards: int) -> None:
        """`sums` and `changed` are now those of all members, over so many shards: their average counts."""
        if not self._places:
            return
        # The average of equal numbers is not always that number: what nobody changed is left alone.
        for buffer, before, total, changed in zip(self.floats, self._floats, self.sums, self.changed, strict=True):
            buffer.copy_(total / shards if changed else before)
        for buffer, after in zip(self.integers, self._after, strict=True):
            buffer.copy_(after)
        self.keep()

    @property
    def after(self) -> list[torch.Tensor]:
        """The integer buffers after the step's shards."""
        return self._after

"""Memory for copies of the state, from which checkpoints are written. Two: one is written while the next is taken."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from distbelief.transport.shm.memfd import require_memory
from distbelief.transport.shm.segment import Segment

BUFFERS = 2


@dataclass
class CopyMemory:
    """What is free of it. It is made, and its pages touched, before it is needed: the first touch is what is slow."""

    free: list[Segment] = field(default_factory=list)
    made: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, size_bytes: int, wait: bool) -> Segment | None:
        with self.changed:
            while True:
                fitting = [segment for segment in self.free if segment.size_bytes >= size_bytes]
                if fitting:
                    self.free.remove(fitting[0])
                    return fitting[0]
                if self.free:  # too small, since there were more members
                    self.free.pop()
                    self.made -= 1
                if self.made < BUFFERS:
                    require_memory("a copy of the state, for checkpoints", size_bytes)
                    segment = Segment.private(size_bytes)
                    self.made += 1
                    return segment
                if not wait:
                    return None
                self.changed.wait()

    def give_back(self, segment: Segment) -> None:
        with self.changed:
            self.free.append(segment)
            self.changed.notify_all()

    def prepare(self, size_bytes: int) -> None:
        with self.changed:
            if self.made:
                return
            require_memory("a copy of the state, for checkpoints", size_bytes)
            self.made += 1
        segment = Segment.private(size_bytes)
        segment.tensor(torch.uint8, 0, size_bytes).fill_(0)
        self.give_back(segment)

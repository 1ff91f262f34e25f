"""The interface of all kinds of slices on a server: they are changed, copied and asked. `SliceSource` is the base of
the classes that make them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from distbelief.errors import DistBeliefError
from distbelief.strategies.base import Saved, ServerHost
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import VALUES_AT, Content, PushResult, Question, Snapshot
from distbelief.transport.shm.segment import Segment

SMALL_SLICE_BYTES = 4096
"""The size of the slice of leases, or of a search, for balancing."""
KEPT_SEGMENTS = 256
"""At most this many of the workers' slots stay mapped."""


@dataclass(frozen=True)
class Change:
    """A change as it came: its message, and its payload, if any."""

    content: Content
    payload: Any = None


State = tuple[Snapshot, torch.Tensor]


class SliceStore(Protocol):
    """A `replication.Store` that answers questions. Its state is a function of its changes alone."""

    @property
    def version(self) -> int:
        """Goes up with every step or update that is applied."""

    def apply(self, change: Change) -> None: ...

    def state(self) -> State: ...

    def load(self, state: State) -> None: ...

    def with_bytes(self, change: Change) -> Change:
        """The change with a copy of the bytes that it names: a follower may read late, after they are overwritten."""

    def reply(self, question: Question, segment: str, everywhere: bool, caught_up: bool) -> Framed | None:
        """The reply, or None: not yet. `segment`: the shared memory with its values. `everywhere`: all servers that
        count have the present version. `caught_up`: they have every change since, too."""

    def given(self, client: int) -> PushResult | None:
        """The result of this client's last change, which goes with the acknowledgement."""


class SliceSource:
    """The common base of makers of slices: shared memory, checkpoints, and the workers' slots. See `Slices`."""

    def __init__(self, host: ServerHost, facts: dict[str, str]) -> None:
        self.life: int = 0
        self.sealed: int = 0
        self._host = host
        # The device that workers compute on does not concern a server: it computes no shard.
        self._facts = {name: value for name, value in facts.items() if name != "device"}
        self._mapped: dict[str, Segment] = {}

    def facts(self) -> dict[str, str]:
        return self._facts

    def _segment(self, number: int, value_bytes: int) -> tuple[Segment, str]:
        """Memory for the values of a slice, and its name if workers can map it."""
        size_bytes, segments = VALUES_AT + value_bytes, self._host.segments
        name = f"server {self._host.worker}/life {self.life}/slice {number}" if segments else ""
        return segments.segment(name, size_bytes) if segments else Segment.private(size_bytes), name

    def _open(self, name: str) -> Segment:
        """A worker's slot, by its name."""
        if self._host.segments is None:
            raise DistBeliefError(f"'{name}' is memory of another host")
        if name not in self._mapped:
            while len(self._mapped) >= KEPT_SEGMENTS:
                del self._mapped[next(iter(self._mapped))]
            self._mapped[name] = self._host.segments.segment(name)
        return self._mapped[name]

    def _saved(self, step: int = -1, lazily: bool = False) -> Saved | None:
        """The checkpoint or weights that this life begins from; None: the job's initial values. `lazily`: tensors are
        read when they are asked for."""
        return self._host.saved(self.life, self.sealed, lazily)

"""The interface of all kinds of slices on a server: they are changed, copied and asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import Content, PushResult, Question, Snapshot


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

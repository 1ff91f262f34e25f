"""What all kinds of slices have in common: how they are changed, copied and asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from msgspec import Struct

from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import Content, PushResult, Question


@dataclass(frozen=True)
class Change:
    """A change as it came: the header, and the bytes that came with it, if any."""

    content: Content
    payload: Any = None


class Snapshot(Struct, frozen=True):
    """What a copy of the slice needs beside its bytes."""

    version: int
    about: bytes
    """As that kind of slice understands it."""


State = tuple[Snapshot, torch.Tensor]


class SliceStore(Protocol):
    """A `holding.Store` that can be asked. What it becomes is a function of the changes alone."""

    @property
    def version(self) -> int:
        """Goes up when there is something new to be fetched."""

    def apply(self, change: Change) -> None: ...

    def state(self) -> State: ...

    def load(self, state: State) -> None: ...

    def with_bytes(self, change: Change) -> Change:
        """The change with the bytes that it names, as they are now: for who may read it later than its maker waits."""

    def reply(self, question: Question, segment: str, everywhere: bool, caught_up: bool) -> Framed | None:
        """The answer, or None: not yet. `segment`: where its values can be mapped. `everywhere`: all servers that count
        have the present version; `caught_up`: and every change since."""

    def given(self, client: int) -> PushResult | None:
        """What goes with the answer to this client's last change."""

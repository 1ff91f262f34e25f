"""The messages between parameter servers, by which changes and copies of a slice are replicated (rules/holding.py)."""

from __future__ import annotations

from typing import Generic

from distbelief.strategies.ps.protocol.messages import AnyContent, Header
from distbelief.strategies.ps.rules.applied import AppliedChanges
from distbelief.strategies.ps.server.stores import Snapshot


class ForwardedChange(Header, Generic[AnyContent], frozen=True):
    """See `holding.Forward`."""

    server: int
    """The sender."""
    life: int
    slice: int
    term: int
    before: tuple[int, int]
    tag: tuple[int, int]
    name: tuple[int, int] | None = None
    content: AnyContent | None = None

    @property
    def has_payload(self) -> bool:
        return self.content is not None and self.content.has_payload


class SliceCopySent(Header, frozen=True):
    """See `holding.Copy`; the bytes are in a frame."""

    server: int
    life: int
    slice: int
    term: int
    tag: tuple[int, int]
    applied: AppliedChanges
    about: Snapshot

    @property
    def has_payload(self) -> bool:
        return True


class ChangeAcknowledged(Header, frozen=True):
    """See `holding.Took`."""

    server: int
    life: int
    slice: int
    term: int
    tag: tuple[int, int]
    version: int
    differs: bool = False

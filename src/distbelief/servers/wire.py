"""What parameter servers say to each other, beside what workers say to them (comm/serverwords.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
from msgspec import Struct

from distbelief.comm.letters import Letter, brings_bytes, together
from distbelief.comm.serverwords import Content, FromClient
from distbelief.servers.applied import Applied
from distbelief.servers.stores import Snapshot


class Forwarded(Struct, frozen=True, tag=True):
    """See `holding.Forward`."""

    server: int
    """The sender."""
    life: int
    slice: int
    term: int
    before: tuple[int, int]
    tag: tuple[int, int]
    name: tuple[int, int] | None = None
    content: Content | None = None


class CopySent(Struct, frozen=True, tag=True):
    """See `holding.Copy`; the bytes are in a frame."""

    server: int
    life: int
    slice: int
    term: int
    tag: tuple[int, int]
    applied: Applied
    about: Snapshot


class TookChange(Struct, frozen=True, tag=True):
    """See `holding.Took`."""

    server: int
    life: int
    slice: int
    term: int
    tag: tuple[int, int]
    version: int
    differs: bool = False


FromPeer = Forwarded | CopySent | TookChange
_decoder = msgspec.msgpack.Decoder(list[FromClient | FromPeer])


def _has_payload(message: Any) -> bool:
    if isinstance(message, Forwarded):
        return brings_bytes(message.content)
    return isinstance(message, CopySent)


def unpack(frames: Sequence[zmq.Frame]) -> list[Letter]:
    """What came to a server. Raises msgspec.MsgspecError or DistBeliefError for anything that is not ours."""
    return together(_decoder.decode(frames[0].buffer), frames[1:], _has_payload)

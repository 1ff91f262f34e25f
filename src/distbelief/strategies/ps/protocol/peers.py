"""What parameter servers say to each other, beside what workers say to them (strategies/ps/protocol/messages.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq
from msgspec import Struct

from distbelief.control.decoding import Decoder
from distbelief.control.signatures import SERVER, WORKER, Sender
from distbelief.kv import messages as k
from distbelief.strategies.ps.protocol.frames import Letter, brings_bytes, together
from distbelief.strategies.ps.protocol.messages import Ask, Complete, Content, FromClient, Push
from distbelief.strategies.ps.rules.applied import Applied
from distbelief.strategies.ps.server.stores import Snapshot
from distbelief.strategies.sandblaster import messages as v


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
_decoder = Decoder[list[FromClient | FromPeer]](list[FromClient | FromPeer])


def _has_payload(message: Any) -> bool:
    if isinstance(message, Forwarded):
        return brings_bytes(message.content)
    return isinstance(message, CopySent)


def unpack(frames: Sequence[zmq.Frame]) -> list[Letter]:
    """What came to a server. Raises msgspec.MsgspecError or DistBeliefError for anything that is not ours."""
    return together(_decoder.decode(frames[0].buffer), frames[1:], _has_payload)


def may_say(sender: Sender, message: FromClient | FromPeer) -> bool:
    """Whether it is the sender's to say: clients and servers speak for themselves alone."""
    if isinstance(message, FromPeer):
        return sender == (SERVER, message.server)
    if sender.role != WORKER:
        return False
    match message:
        case Push(content=Ask() | Complete() | v.Begin() | v.Take() | v.Keep() as content):
            return message.client == content.worker == sender.number
        case Push(content=k.DeclareKey() | k.SealKey() | k.Arrive() | k.Withdraw() as content):
            return message.client == content.client == sender.number
        case Push() | k.Consult() | k.PullKey() | k.PullKeyRows():
            return message.client == sender.number
    return True

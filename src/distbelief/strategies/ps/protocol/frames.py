"""Words between workers and servers as frames: a message and the bytes that go with it.

    | signature | a list of messages | bytes of the first message that has any | of the second | …

What servers answer has no signature: it goes back over the connection on which they were asked.

On one host the bytes stay where they are, in shared memory, and a message names the segment instead. No pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from distbelief.control.decoding import Decoder
from distbelief.control.signatures import Signer
from distbelief.errors import DistBeliefError
from distbelief.kv.messages import content_has_payload, reply_has_payload
from distbelief.strategies.ps.protocol.messages import Content, Contents, Fetched, Gradient, Node, Push, ToClient
from distbelief.strategies.ps.tables.messages import Pulled, RowGradient, ShardRows

_encoder = msgspec.msgpack.Encoder()
_to_client = Decoder[list[ToClient]](list[ToClient])


@dataclass(frozen=True)
class Letter:
    """A message, and the bytes that go with it. (A view of them: they must stay as they are until it is sent;
    where values are given away that may change meanwhile, the slice says why that does no harm.)"""

    message: Any
    payload: Any = None


def pack(letters: Sequence[Letter], signer: Signer | None = None) -> list[Any]:
    """The frames of one ZeroMQ message."""
    header = _encoder.encode([letter.message for letter in letters])
    signature = [] if signer is None else [signer.sign(header)]
    return [*signature, header, *(letter.payload for letter in letters if letter.payload is not None)]


def brings_bytes(content: Content | None) -> bool:
    """Whether the bytes of a change are in a frame."""
    if isinstance(content, Node | Gradient):
        return not content.segment
    return isinstance(content, ShardRows | RowGradient) or content_has_payload(content)


def has_payload(message: Any) -> bool:
    """Whether a frame goes with the message."""
    match message:
        case Push(content=content):
            return brings_bytes(content)
        case Fetched():
            return not message.segment and bool(message.version >= 0)
        case Contents() | Pulled():
            return message.version >= 0
    return reply_has_payload(message)


def unpack_for_client(frames: Sequence[zmq.Frame]) -> list[Letter]:
    return together(_to_client.decode(frames[0].buffer), frames[1:])


def together(
    messages: Sequence[Any], frames: Sequence[zmq.Frame], also: Callable[[Any], bool] = lambda message: False
) -> list[Letter]:
    """Every message with its frame. `also`: whether one that is not of these words has one."""
    left = list(frames)
    letters = []
    for message in messages:
        payload = None
        if has_payload(message) or also(message):
            if not left:
                raise DistBeliefError(f"a {type(message).__name__} came without its bytes")
            payload = left.pop(0).buffer
        letters.append(Letter(message, payload))
    return letters

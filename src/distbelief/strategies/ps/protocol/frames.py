"""Words between workers and servers as frames: a message and the bytes that go with it.

    | signature | a list of messages | bytes of the first message that has any | of the second | …

What servers answer has no signature: it goes back over the connection on which they were asked.

On one host the bytes stay where they are, in shared memory, and a message names the segment instead. No pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from distbelief.control.signatures import Signer
from distbelief.errors import DistBeliefError
from distbelief.strategies.ps.protocol.messages import Header

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Framed:
    """A message, and the bytes that go with it. (A view of them: they must stay as they are until it is sent;
    where values are given away that may change meanwhile, the slice says why that does no harm.)"""

    message: Any
    payload: Any = None


def pack(letters: Sequence[Framed], signer: Signer | None = None) -> list[Any]:
    """The frames of one ZeroMQ message."""
    header = _encoder.encode([letter.message for letter in letters])
    signature = [] if signer is None else [signer.sign(header)]
    return [*signature, header, *(letter.payload for letter in letters if letter.payload is not None)]


def attach_payloads(messages: Sequence[Header], frames: Sequence[zmq.Frame]) -> list[Framed]:
    """Every message with its frame."""
    left = list(frames)
    letters = []
    for message in messages:
        payload = None
        if message.has_payload:
            if not left:
                raise DistBeliefError(f"a {type(message).__name__} came without its bytes")
            payload = left.pop(0).buffer
        letters.append(Framed(message, payload))
    return letters

"""What the process that watches over a key-value service hears from servers and clients, and tells them."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from distbelief.control.messages import Decoder, EndRun, Serve, ServerBeat, ServerFailed, ServerReady, SliceCopied


class ClientHere(Struct, frozen=True, tag=True):
    """A client is there: at first to be given a number, then once in a while, to be told of newer maps."""

    name: str
    """Its own, so that one that asks twice is given one number."""
    version: int
    """Of the map that it knows."""


class ClientGone(Struct, frozen=True, tag=True):
    """It has closed, with all its pushes answered."""

    name: str


class Welcome(Struct, frozen=True, tag=True):
    client: int
    """Never given again."""
    slices: int
    """That hold values; the catalogue is one more."""


Heard = ServerReady | ServerBeat | SliceCopied | ServerFailed | ClientHere | ClientGone
Told = Welcome | Serve | EndRun

_encoder = msgspec.msgpack.Encoder()
_heard = Decoder[Heard](Heard)
_told = Decoder[Told](Told)


def encode(message: Heard | Told) -> bytes:
    return _encoder.encode(message)


def decode_heard(data: bytes) -> Heard:
    """Raises msgspec.MsgspecError for anything else."""
    return _heard.decode(data)


def decode_told(data: bytes) -> Told:
    return _told.decode(data)

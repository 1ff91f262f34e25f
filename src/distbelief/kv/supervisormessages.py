"""The messages between the supervisor of a key-value service and its servers and clients."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from distbelief.control.messages import Decoder, EndRun, Serve, ServerBeat, ServerFailed, ServerReady, SliceCopied


class ClientHere(Struct, frozen=True, tag=True):
    """A client's heartbeat. The first one registers the client; the supervisor answers with newer maps."""

    name: str
    """A unique name: a client that registers twice gets one number."""
    version: int
    """The version of the client's map."""


class ClientGone(Struct, frozen=True, tag=True):
    """A client has closed; all its pushes are acknowledged."""

    name: str


class Welcome(Struct, frozen=True, tag=True):
    """The answer to a client's first heartbeat."""

    client: int
    """The client's number, which is used once."""
    slices: int
    """The number of slices that hold values; the catalogue is one more."""


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

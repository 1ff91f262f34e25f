"""What members say to the place where torch groups meet, and what they are answered. A key belongs to a generation."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from distbelief.control.messages import Decoder


class Put(Struct, frozen=True, tag=True):
    ticket: int
    key: str
    value: bytes


class Want(Struct, frozen=True, tag=True):
    """Answered when all of them are there."""

    ticket: int
    keys: list[str]


class Add(Struct, frozen=True, tag=True):
    """To a number; answered with the sum, in decimals."""

    ticket: int
    key: str
    amount: int


class Swap(Struct, frozen=True, tag=True):
    """Put it if what is there is as expected; nothing is there if nothing is expected. Answered with what is there."""

    ticket: int
    key: str
    expected: bytes
    desired: bytes


class Look(Struct, frozen=True, tag=True):
    """Which of them are there? Answered at once, with what is there, or nothing if one is missing."""

    ticket: int
    keys: list[str]


class Remove(Struct, frozen=True, tag=True):
    """Answered with what was there, if anything."""

    ticket: int
    key: str


class Found(Struct, frozen=True, tag=True):
    ticket: int
    values: list[bytes]


Request = Put | Want | Add | Swap | Look | Remove
_encoder = msgspec.msgpack.Encoder()
_requests = Decoder[Request](Request)
_answers = Decoder[Found](Found)


def encode(message: Request | Found) -> bytes:
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """Raises msgspec.MsgspecError for anything else."""
    return _requests.decode(data)


def decode_found(data: bytes) -> Found:
    return _answers.decode(data)

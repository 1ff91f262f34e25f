"""Bytes that are almost right: mutations of messages, by a seeded generator."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

HEADS = (
    b"\xdd\xff\xff\xff\xff",  # msgpack: an array of four billion
    b"\xdf\xff\xff\xff\xff",  # a map of as many
    b"\xc6\xff\xff\xff\xff",  # as many bytes
    b"\xdb\xff\xff\xff\xff",  # a text of as many
    b"\x91" * 2000,  # one in the other
    b"\x81\xa1a" * 700,
    b"\xc1",  # never used
    b"\xd3\x7f\xff\xff\xff\xff\xff\xff\xff",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
)
LONGEST = 4096


def garbage(random: Random) -> bytes:
    return random.randbytes(random.choice((0, 1, 2, 5, 16, 49, 64, 200, 1000)))


def mutated(data: bytes, others: Sequence[bytes], random: Random) -> bytes:
    """One to four changes."""
    for _ in range(random.randrange(1, 5)):
        data = _changed(data, others, random)
    return data[:LONGEST]


def _changed(data: bytes, others: Sequence[bytes], random: Random) -> bytes:
    place = random.randrange(len(data) + 1)
    match random.randrange(8):
        case 0 if place < len(data):
            return data[:place] + bytes([data[place] ^ (1 << random.randrange(8))]) + data[place + 1 :]
        case 1:
            return data[:place] + random.randbytes(1) + data[place + 1 :]
        case 2:
            return data[:place]
        case 3:
            return data[:place] + data[place + random.randrange(1, 9) :]
        case 4:
            return data[:place] + garbage(random) + data[place:]
        case 5:
            return data[:place] + random.choice(HEADS) + data[place:]
        case 6:
            return data[:place] + data[random.randrange(len(data) + 1) :]
        case _:
            other = random.choice(others)
            return data[:place] + other[random.randrange(len(other) + 1) :]

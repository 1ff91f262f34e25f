"""Random values of a type: any message that could be said, and some that could not."""

from __future__ import annotations

import types
import typing
from random import Random
from typing import Any

import msgspec

INTEGERS = (0, 1, -1, 2, 3, 7, 2**31, -(2**31), 2**40, 2**63 - 1, -(2**63))
TEXTS = ("", "a", "worker 1", "generation 2", "../../etc/passwd", "\0", "ä" * 50, "x" * 300)


def instance(kind: Any, random: Random, depth: int = 0) -> Any:
    """A value of that type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return instance(random.choice(arguments), random, depth + 1)
    if origin is list:
        return [instance(arguments[0], random, depth + 1) for _ in range(_count(random, depth))]
    if origin is dict:
        pairs = range(_count(random, depth))
        return {instance(arguments[0], random, depth + 1): instance(arguments[1], random, depth + 1) for _ in pairs}
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return tuple(instance(arguments[0], random, depth + 1) for _ in range(_count(random, depth)))
        return tuple(instance(one, random, depth + 1) for one in arguments)
    structure = origin or kind  # a generic structure is given with the types of its fields
    if isinstance(structure, type) and issubclass(structure, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        return structure(*(instance(field.type, random, depth + 1) for field in fields))
    return _plain(kind, random)


def _count(random: Random, depth: int) -> int:
    return random.choice((0, 0, 1, 1, 2, 3)) if depth < 6 else 0


def _plain(kind: Any, random: Random) -> Any:
    if kind is bool:
        return random.random() < 0.5
    if kind is int:
        return random.choice(INTEGERS) if random.random() < 0.5 else random.randrange(-5, 100)
    if kind is float:
        return random.choice((0.0, -1.0, 1e308, float("inf"), float("nan"), random.random()))
    if kind is str:
        return random.choice(TEXTS)
    if kind is bytes:
        return random.randbytes(random.choice((0, 1, 8, 64)))
    if kind is type(None):
        return None
    raise TypeError(f"no values of {kind}")

"""The one grammar of compression, as an option of a strategy: `bf16`, `int8`, `int8=256`, `topk=0.01`, `powersgd=4`.

This module does not import torch, so the command line can report a wrong option at once. `methods.py` makes the codec
that an option names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from distbelief.errors import JobError

NAMES = ("bf16", "int8", "topk", "powersgd")
KNOWN = "known are bf16, int8, topk=0.01 and powersgd=4"
USUAL_BLOCK, USUAL_RANK = 1024, 4

_BLOCKS = range(8, (1 << 20) + 1)
_KEYS = {"int8": "block", "topk": "fraction", "powersgd": "rank"}
"""The name of each number: `int8=block=256` and `int8:block=256` are read as `int8=256`."""


class Option(NamedTuple):
    """A parsed option. `number` is the block of int8, the fraction of top-k, or the rank of PowerSGD."""

    name: str
    number: float = 0

    def __str__(self) -> str:
        if self.name == "bf16" or self == ("int8", USUAL_BLOCK):
            return self.name
        return f"{self.name}={self.number!r}"


def parse(text: str) -> Option:
    """Parse an option's text. Raises a JobError that says what is wrong.

    >>> parse("int8=256"), parse("topk=1e-2"), parse("powersgd")
    (Option(name='int8', number=256), Option(name='topk', number=0.01), Option(name='powersgd', number=4))
    >>> parse("zip")
    Traceback (most recent call last):
    distbelief.errors.JobError: there is no compression 'zip'
    """
    name, separator, number = text.strip().replace(":", "=", 1).partition("=")
    if name not in NAMES:
        raise JobError(f"there is no compression '{name}'", hint=KNOWN)
    number = number.removeprefix(f"{_KEYS.get(name, '')}=")
    if separator and not number:
        raise JobError(f"nothing follows '{name}{text.strip()[len(name)]}' in the compression '{text}'", hint=KNOWN)
    if name == "bf16":
        if number:
            raise JobError(f"bf16 has no number, and '{number}' follows it", hint=KNOWN)
        return Option(name)
    if name == "topk":
        return Option(name, checked_fraction(_fraction(text, number)))
    if name == "int8":
        return Option(name, checked_block(_whole(text, number) if number else USUAL_BLOCK))
    return Option(name, checked_rank(_whole(text, number) if number else USUAL_RANK))


def canonical(text: str) -> str:
    """The option in its usual spelling.

    >>> [canonical(text) for text in ("bf16", "int8=1024", "int8:block=256", "topk=1e-2", "powersgd")]
    ['bf16', 'int8', 'int8=256', 'topk=0.01', 'powersgd=4']
    """
    return str(parse(text))


def checked_compression(compression: str, always: bool, example: str) -> str:
    """A strategy's option `compression` in its usual spelling; empty stays empty. `example`: a right use of always."""
    if compression:
        return canonical(compression)
    if always:
        raise JobError("always is for compression, and there is none", hint=f"for example {example}")
    return ""


def add_compression(values: dict[str, Any], option: str, strategy: str) -> None:
    """Add a compression to the parsed options of a strategy."""
    if "compression" in values:
        raise JobError(f"the strategy '{strategy}' gives its compression twice", hint="give it once")
    values["compression"] = option


def checked_block(block: int) -> int:
    if block not in _BLOCKS:
        raise JobError(f"int8 cannot have blocks of {block} elements", hint="int8=8 to int8=1048576; 1024 is usual")
    return block


def checked_fraction(fraction: float) -> float:
    if not 0.0 < fraction <= 0.5:
        raise JobError(
            f"top-k cannot send the fraction {fraction:g} of a vector",
            hint="0.01 sends one element in a hundred; above 0.5 the indices cost more than is saved",
        )
    return fraction


def checked_rank(rank: int) -> int:
    if not 1 <= rank <= 1024:
        raise JobError(f"PowerSGD cannot have the rank {rank}", hint="powersgd=1 to powersgd=1024; 4 is usual")
    return rank


def _fraction(text: str, number: str) -> float:
    if not number:
        raise JobError(f"the compression '{text}' must say which fraction to send", hint="for example topk=0.01")
    try:
        return float(number)
    except ValueError:
        raise JobError(
            f"'{number}' in the compression '{text}' is not a fraction", hint="for example topk=0.01"
        ) from None


def _whole(text: str, number: str) -> int:
    if not (number.isascii() and number.isdigit()):
        raise JobError(f"'{number}' in the compression '{text}' is not a whole number", hint=KNOWN)
    return int(number)

"""Compression as people write it: `bf16`, `int8`, `int8:block=1024`, `topk:0.01`, `powersgd:rank=4`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from torch import Tensor

from distbelief.compression.bf16 import Bf16
from distbelief.compression.codec import Codec, Header
from distbelief.compression.int8 import Int8
from distbelief.compression.powersgd import LowRank
from distbelief.compression.topk import TopK
from distbelief.errors import DistBeliefError, JobError

KNOWN = "known are bf16, int8, int8:block=1024, topk:0.01 and powersgd:rank=4"


def parse(text: str) -> Codec | LowRank:
    """A codec of vectors, or PowerSGD, which needs to know the shapes.

    >>> str(parse("int8")), str(parse("topk:0.01")), str(parse("powersgd:rank=2"))
    ('int8:block=1024', 'topk:0.01', 'powersgd:rank=2')
    >>> parse("zip")
    Traceback (most recent call last):
    distbelief.errors.JobError: there is no compression 'zip'
    """
    name, colon, option = text.strip().partition(":")
    if name not in _READERS:
        raise JobError(f"there is no compression {name!r}", hint=KNOWN)
    if colon and not option:
        raise JobError(f"nothing follows the colon in the compression {text!r}", hint=KNOWN)
    try:
        return _READERS[name](option)
    except ValueError as error:
        raise JobError(f"the compression {text!r} is wrong: {error}", hint=KNOWN) from error


def parse_codec(text: str) -> Codec:
    """The same for transports that carry vectors, and so cannot do PowerSGD.

    >>> parse_codec("powersgd:rank=4")
    Traceback (most recent call last):
    distbelief.errors.JobError: powersgd:rank=4 cannot compress what is pushed to servers
    """
    found = parse(text)
    if isinstance(found, LowRank):
        raise JobError(
            f"{found} cannot compress what is pushed to servers",
            hint="it sums matrices over all members: use it with allreduce, or take bf16, int8 or topk:0.01 here",
        )
    return found


def decode(header: Header, frames: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Decode whatever the header says, so that a receiver need not be told how senders compress."""
    return _codec_of(header.codec).decode(header, frames, out)


@lru_cache(maxsize=64)
def _codec_of(text: str) -> Codec:
    try:
        return parse_codec(text)
    except JobError as error:
        raise DistBeliefError(
            f"a message says that it is compressed as {text!r}, which this version cannot decode",
            hint="run the same version of distbelief on all machines",
        ) from error


def _bf16(option: str) -> Codec:
    if option:
        raise ValueError(f"bf16 has no options, and {option!r} follows it")
    return Bf16()


def _int8(option: str) -> Codec:
    return Int8(_named(option, "block")) if option else Int8()


def _topk(option: str) -> Codec:
    if not option:
        raise ValueError("it must say which fraction to send, as in topk:0.01")
    try:
        fraction = float(option.removeprefix("fraction="))
    except ValueError:
        raise ValueError(f"{option!r} is not a fraction") from None
    return TopK(fraction)


def _powersgd(option: str) -> LowRank:
    return LowRank(_named(option, "rank")) if option else LowRank()


def _named(option: str, name: str) -> int:
    key, _, number = option.partition("=")
    if key != name:
        raise ValueError(f"its option is {name}=NUMBER, not {option!r}")
    if not (number.isascii() and number.isdigit()):
        raise ValueError(f"{number!r} is not a whole number")
    return int(number)


_READERS: dict[str, Callable[[str], Codec | LowRank]] = {
    "bf16": _bf16,
    "int8": _int8,
    "topk": _topk,
    "powersgd": _powersgd,
}

"""Makes what a compression option (`option.py`) names: a codec of vectors, or PowerSGD, which needs the shapes."""

from __future__ import annotations

from distbelief.compression.bf16 import Bf16
from distbelief.compression.codec import Codec
from distbelief.compression.int8 import Int8
from distbelief.compression.option import parse
from distbelief.compression.powersgd import LowRank
from distbelief.compression.topk import TopK
from distbelief.errors import JobError


def method_of(text: str) -> Codec | LowRank:
    """
    >>> str(method_of("int8")), str(method_of("topk=0.01")), str(method_of("powersgd=2"))
    ('int8', 'topk=0.01', 'powersgd=2')
    """
    option = parse(text)
    match option.name:
        case "bf16":
            return Bf16()
        case "int8":
            return Int8(int(option.number))
        case "topk":
            return TopK(option.number)
        case _:
            return LowRank(int(option.number))


def codec_of(text: str) -> Codec:
    """The codec that an option names, for transports that carry vectors only. Refuses PowerSGD, which needs matrices.

    >>> codec_of("powersgd=4")
    Traceback (most recent call last):
    distbelief.errors.JobError: powersgd=4 cannot compress what is pushed to servers
    """
    found = method_of(text)
    if isinstance(found, LowRank):
        raise JobError(
            f"{found} cannot compress what is pushed to servers",
            hint="it sums matrices over all members: use it with allreduce, or take bf16, int8 or topk=0.01 here",
        )
    return found

"""What a codec's number may be. Without torch: a command line says what is wrong with one before anything is loaded."""

from __future__ import annotations

from distbelief.errors import JobError

_BLOCKS = range(8, (1 << 20) + 1)


def check_block(block: int) -> None:
    if block not in _BLOCKS:
        raise JobError(f"int8 cannot have blocks of {block} elements", hint="block=8 to block=1048576; 1024 is usual")


def check_fraction(fraction: float) -> None:
    if not 0.0 < fraction <= 0.5:
        raise JobError(
            f"top-k cannot send the fraction {fraction:g} of a vector",
            hint="0.01 sends one element in a hundred; above 0.5 the places cost more than is saved",
        )


def check_rank(rank: int) -> None:
    if not 1 <= rank <= 1024:
        raise JobError(f"PowerSGD cannot have the rank {rank}", hint="rank=1 to rank=1024; 4 is usual")

"""The value and its parser. No torch is imported here: the command line and the coordinator read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from distbelief.errors import JobError
from distbelief.strategies.base import Strategy


@dataclass(frozen=True)
class SignSGD(Strategy):
    """Every shard votes with the signs of its gradient; the optimizer gets the sign that has the majority."""

    on_workers: ClassVar[str] = "signsgd.voting"

    @property
    def exact(self) -> bool:
        return True

    @property
    def transport(self) -> str:
        return "auto"

    @property
    def learning(self) -> str:
        return "signsgd"

    def __str__(self) -> str:
        return "signsgd"


def parse(text: str, options: Sequence[str]) -> SignSGD:
    if options:
        raise JobError(f"the strategy '{text}' has options, and signsgd knows none", hint="write signsgd alone")
    return SignSGD()

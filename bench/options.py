"""Options that several benchmarks have."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


def count(text: str) -> int:
    """A number of things of which there is at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def some_of(kind: str, known: Sequence[str]) -> Callable[[str], list[str]]:
    """Names with commas between them, each one a `known` one; they come out in the order in which they are known."""

    def chosen(text: str) -> list[str]:
        wanted = text.split(",")
        if unknown := [name for name in wanted if name not in known]:
            raise argparse.ArgumentTypeError(f"no such {kind}: {', '.join(unknown)}; choose from {', '.join(known)}")
        return [name for name in known if name in wanted]

    return chosen

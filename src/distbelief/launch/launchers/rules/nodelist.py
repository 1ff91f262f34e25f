"""Slurm's short form of a list of hosts, written out."""

from __future__ import annotations

import itertools
import math
import re

from distbelief.errors import DistBeliefError

MOST_HOSTS = 100_000  # more is a slip, and would only fill the memory
_PARTS = re.compile(r"(?:[^\[\],\s]+|\[[^\[\]]*\])+")
_PIECES = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def hosts_in(text: str) -> list[str]:
    """In order, with the zeros that the numbers were written with.

    >>> hosts_in("node[01-03,7],gpu2"), hosts_in("r[1-2]n[0-1]")
    (['node01', 'node02', 'node03', 'node7', 'gpu2'], ['r1n0', 'r1n1', 'r2n0', 'r2n1'])
    """
    parts = _PARTS.findall(text)
    if not parts or ",".join(parts) != text.strip():
        raise _unreadable(text)
    hosts: list[str] = []
    for part in parts:
        choices = [_numbers(inside, text) if not name else [name] for inside, name in _PIECES.findall(part)]
        if len(hosts) + math.prod(len(choice) for choice in choices) > MOST_HOSTS:
            raise _unreadable(text)
        hosts += ["".join(pieces) for pieces in itertools.product(*choices)]
    return hosts


def _numbers(inside: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _unreadable(text)
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + MOST_HOSTS:
            raise _unreadable(text)
        numbers += [str(value).zfill(len(match[1])) for value in range(first, last + 1)]
    return numbers


def _unreadable(text: str) -> DistBeliefError:
    return DistBeliefError(f"the list of nodes {text!r} cannot be read", hint="it looks like node[01-03,7],gpu2")

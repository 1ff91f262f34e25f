"""Declares which functions a profile times, and finds the declarations and the functions in loaded modules.

A module that a step passes through declares its own functions in a tuple `TIMED`. A strategy declares its members'
functions in `Strategy.instruments`, because processes without torch use the strategy's value too. Declarations cost a
step nothing: `worker/profiling/instruments.py` puts clocks around the functions only while a profile is recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Phase = Literal["data", "forward", "backward", "reduce", "optimizer", "wait", "evaluation", "checkpoint"]
"""The phases of a profile, on which a worker spends its time."""
_PACKAGE = f"{__name__.partition('.')[0]}."


@dataclass(frozen=True)
class Instrument:
    """Functions whose time counts for a phase while a profile is recorded. Modules are named, not imported."""

    phase: Phase
    module: str
    owner: str
    """A class; its subclasses are included. Empty: the functions are module-level."""
    names: tuple[str, ...]
    is_context: bool = False
    """Whether the functions return context managers: the time of the `with` block counts."""


def declared() -> list[Instrument]:
    """The instruments that the loaded modules of this package declare in `TIMED`. A module that is not loaded runs
    nothing that a profile could time."""
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith(_PACKAGE)]
    return [instrument for module in loaded for instrument in vars(module).get("TIMED", ())]


def places(instrument: Instrument, module: Any) -> Iterator[tuple[Any, str]]:
    """The classes, or the module, that have the functions as attributes, with the functions' names.

    >>> import json
    >>> [name for _, name in places(Instrument("data", "json", "JSONDecoder", ("decode", "read")), json)]
    ['decode']
    """
    owners = _family(getattr(module, instrument.owner)) if instrument.owner else [module]
    for owner in owners:
        for name in instrument.names:
            if name in vars(owner):
                yield owner, name


def _family(head: type[Any]) -> list[type[Any]]:
    found = [head]
    for child in type.__subclasses__(head):
        found += [one for one in _family(child) if one not in found]
    return found

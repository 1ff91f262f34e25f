"""How a user says when to save and what to keep, as the workers and the coordinator need it. Pure."""

from __future__ import annotations

import re

from distbelief.errors import DistBeliefError

DEFAULT_EVERY = "10m"
KEEP_LAST = 3

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)([smh])", re.ASCII)


def interval(text: str) -> tuple[int, float] | None:
    """(steps, seconds) between two checkpoints, one of them 0, or both: only at the end. None: never.

    >>> interval("500"), interval("90s"), interval("1.5h"), interval("end"), interval("never")
    ((500, 0.0), (0, 90.0), (0, 5400.0), (0, 0.0), None)
    """
    wanted = text.strip().lower()
    if wanted == "never":
        return None
    if wanted == "end":
        return 0, 0.0
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted), 0.0
    if (match := _TIME.fullmatch(wanted)) and float(match[1]) > 0:
        return 0, float(match[1]) * _UNITS[match[2]]
    raise DistBeliefError(
        f"{text!r} does not say how often to save",
        hint="give a number of steps (500), a time (30s, 10m, 2h), `end` for the last state alone, or `never`",
    )


def best(text: str) -> tuple[str, bool] | None:
    """A metric, and whether higher is better: as it says, or else lower for losses and errors, higher for the rest.

    >>> best("accuracy"), best("loss"), best("distance:min"), best("")
    (('accuracy', True), ('loss', False), ('distance', False), None)
    """
    if not text:
        return None
    name, _, order = text.partition(":")
    if not name or order not in ("", "min", "max"):
        raise DistBeliefError(
            f"{text!r} does not say what the best checkpoint is", hint="give a metric: accuracy, loss, or distance:min"
        )
    lower = order == "min" or (not order and any(word in name.lower() for word in ("loss", "error", "perplexity")))
    return name, not lower

"""Formats numbers and lines for people, in the same way for every view; and numbers for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

WORTH_SAYING = 0.005
"""A smaller share of time is shown as 0 %."""


def finite(value: Any) -> Any:
    """The value for JSON, which has no NaN and no infinity: None (null) replaces them, also in a dict.

    >>> finite(float("inf")), finite({"loss": float("nan"), "steps": 3})
    (None, {'loss': None, 'steps': 3})
    """
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def number(value: float | None) -> str:
    """Format a loss or a metric.

    >>> number(0.21342), number(12), number(3.2e-7), number(float("nan")), number(None)
    ('0.2134', '12.0000', '3.200e-07', 'nan', '–')
    """
    if value is None:
        return "–"
    if value == 0 or not math.isfinite(value) or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4f}"
    return f"{value:.3e}"


def rate(samples_per_s: float) -> str:
    """
    >>> rate(1234.5), rate(0.317)
    ('1,234 samples/s', '0.32 samples/s')
    """
    digits = 0 if samples_per_s >= 100 else 1 if samples_per_s >= 10 else 2
    return f"{samples_per_s:,.{digits}f} samples/s"


def duration(seconds: float) -> str:
    """
    >>> duration(7.4), duration(3723)
    ('0:07', '1:02:03')
    """
    minutes, s = divmod(round(max(seconds, 0)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def percent(fraction: float) -> str:
    """
    >>> percent(0.234)
    '23 %'
    """
    return f"{fraction:.0%}".replace("%", " %")


def waiting(share: float, whom: int | None) -> str:
    """The share of time that a member waits, and the worker that it mostly waits for.

    >>> waiting(0.31, 0), waiting(0.001, 2), waiting(0.0, None)
    ('waits 31 %, mostly for worker 0', 'waits 0 %', 'waits 0 %')
    """
    told = f"waits {percent(share)}"
    return f"{told}, mostly for worker {whom}" if whom is not None and share >= WORTH_SAYING else told


def count(n: int, noun: str) -> str:
    """
    >>> count(1, "worker"), count(2, "worker")
    ('1 worker', '2 workers')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def metrics(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """Sort metrics in the job's order with the loss last: the user's own metrics come first.

    >>> metrics({"loss": 0.1, "accuracy": 0.97})
    [('accuracy', 0.97), ('loss', 0.1)]
    """
    return sorted(values.items(), key=lambda item: item[0] == "loss")


def last_line(line: str) -> str:
    """The text that a terminal shows for a line that a progress bar has overwritten with carriage returns.

    >>> last_line("10 %\\r20 %\\r")
    '20 %'
    """
    return line.rstrip("\r\n ").rsplit("\r", 1)[-1]

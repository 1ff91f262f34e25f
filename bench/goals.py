"""A time or a cost held against the limit that was set for it before it was measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Goal:
    """
    >>> Goal("median", 0.08, below=0.1, unit="s").verdict
    'met'
    """

    what: str
    found: float
    below: float
    unit: str

    @property
    def verdict(self) -> str:
        return "met" if self.found < self.below else "not met"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.verdict == "met"}

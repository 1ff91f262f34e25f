"""Whether a replayed step is the original one: bit for bit, or within rounding. Pure."""

from __future__ import annotations

from typing import Literal

Verdict = Literal["matched", "equal", "differs", "unknown"]

TOLERANCE = 1e-3
"""Of a loss, where only rounding differs. It is 1e-7 at first, and training makes it larger from step to step."""


def judge(found: str | None, recorded: str | None, exact: bool) -> Verdict:
    """Compare what this process found (a fingerprint, a hash) with what the run has recorded.

    Unknown: one of the two is missing, because the step was never committed or cannot be executed; or the run was not
    exact, so that its bits depended on its members.

    >>> judge("1f", "1f", exact=True), judge("1f", "2e", exact=True), judge("1f", None, exact=True)
    ('matched', 'differs', 'unknown')
    >>> judge("1f", "2e", exact=False)
    'unknown'
    """
    if not exact or found is None or recorded is None:
        return "unknown"
    return "matched" if found == recorded else "differs"


def judge_within_rounding(found: float | None, recorded: float | None) -> Verdict:
    """The same for losses of a run whose members divided the model: they add in other orders than one process.

    >>> judge_within_rounding(2.0, 2.0001), judge_within_rounding(2.0, 2.1), judge_within_rounding(None, 2.0)
    ('equal', 'differs', 'unknown')
    """
    if found is None or recorded is None:
        return "unknown"
    return "equal" if abs(found - recorded) <= TOLERANCE * max(abs(found), abs(recorded), 1e-6) else "differs"

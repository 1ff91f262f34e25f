"""Whether a replayed step is the original one, bit for bit. Pure."""

from __future__ import annotations

from typing import Literal

Verdict = Literal["matched", "differs", "unknown"]


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

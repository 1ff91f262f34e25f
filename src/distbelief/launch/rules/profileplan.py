"""How a user says which steps are to be profiled, as the workers need it. Pure."""

from __future__ import annotations

import re

from distbelief.errors import DistBeliefError
from distbelief.worker.spec import ProfilePlan

USUAL = "auto"
"""Some steps after the first ones."""
_STEPS = re.compile(r"(\d+):(\d+)", re.ASCII)


def profile_plan(text: str, is_sent: bool = False) -> ProfilePlan | None:
    """None: no profile. `is_sent`: what is recorded goes to the coordinator, since this host has no other way.

    >>> profile_plan("10:20"), profile_plan("auto").end, profile_plan("")
    (ProfilePlan(first=10, end=20, is_sent=False), 0, None)
    """
    if not text:
        return None
    if text == USUAL:
        return ProfilePlan(0, 0, is_sent)
    steps = _STEPS.fullmatch(text.strip())
    if not steps or int(steps[1]) >= int(steps[2]):
        raise DistBeliefError(
            f"{text!r} does not say which steps to profile",
            hint="give the first one and the one after the last, counted from 0: 10:20",
        )
    return ProfilePlan(int(steps[1]), int(steps[2]), is_sent)


def as_text(profile: bool | str | tuple[int, int]) -> str:
    """What `train(profile=…)` means.

    >>> as_text(False), as_text(True), as_text("5:8"), as_text((5, 8))
    ('', 'auto', '5:8', '5:8')
    """
    if isinstance(profile, bool):
        return USUAL if profile else ""
    return profile if isinstance(profile, str) else ":".join(str(step) for step in profile)

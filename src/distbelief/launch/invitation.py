"""What the agent of another host needs to take part in a run: an address, and the key."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Invitation:
    """Whoever has it is let in."""

    address: str
    """Where the coordinator listens, as in tcp://10.0.0.1:5555."""
    secret: bytes = field(repr=False)

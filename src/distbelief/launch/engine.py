"""What an engine is to the process that leads a run: it brings agents of other hosts. The rest is always the same."""

from __future__ import annotations

from typing import Protocol

from distbelief.launch.invitation import Invitation
from distbelief.launch.launch import Launch


class Engine(Protocol):
    def arrange(self, launch: Launch) -> Launch:
        """What of the launch follows from where it runs: how many workers are here, where to listen."""

    def announce(self, invitation: Invitation) -> None:
        """The coordinator listens: whoever has this invitation can take part."""

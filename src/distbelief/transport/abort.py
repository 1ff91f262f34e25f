"""The abort flag of a generation: the control thread sets it, and every wait of the training thread ends.

Torch-free, so that the coordinator's side and the parameter servers' clients can import it.
"""

from __future__ import annotations

from collections.abc import Callable


class Aborted(Exception):
    """The collective operation in flight was given up: the membership changes or the run ends."""


class Abort:
    """A flag that ends every wait of one generation. A new generation has a new flag: clearing an old one could lose
    the next abort."""

    def __init__(self) -> None:
        self.reason = ""
        self.wake: Callable[[], None] = lambda: None
        """Wakes the threads that wait in this generation; set by the exchange."""
        self.left_behind = False
        """The training thread did not wake up: a successor thread continues in its place."""
        self.leave: Callable[[], None] | None = None
        """Starts the successor thread; None: the process must end instead. See transport/gloo/group.py."""

    def set(self, reason: str) -> None:
        self.reason = reason or "aborted"
        self.wake()

    def check(self) -> None:
        if self.reason:
            raise Aborted(self.reason)

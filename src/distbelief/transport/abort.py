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
        """Wakes the threads that sleep in a wait of this generation."""
        self.left_behind = False
        """The training thread could not be woken from its wait: a successor thread has gone on in its place."""
        self.leave: Callable[[], None] | None = None
        """Starts that successor, if there can be one; see worker/process.py."""

    def set(self, reason: str) -> None:
        self.reason = reason or "aborted"
        self.wake()

    def check(self) -> None:
        if self.reason:
            raise Aborted(self.reason)

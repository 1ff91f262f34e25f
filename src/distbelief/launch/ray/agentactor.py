"""The agent of a node as an actor: it hosts the run's members there as its child processes.

Why not a worker per actor: the members of a node share memory, which their common agent keeps, and an agent can kill a
frozen one with certainty. Ray sees to the agent: it is placed where its CPUs are reserved, and its end, or its node's,
is the end of its members, by the kernel's hand.
"""

from __future__ import annotations

import contextlib
import os

from distbelief.errors import DistBeliefError
from distbelief.launch.invitation import Invitation
from distbelief.launch.invited import serve_host


class AgentActor:
    def serve(self, invitation: Invitation, workers: int, host: str, folder: str) -> str:
        """Host up to so many workers until the run ends. Returns why this node cannot take part, else nothing.

        `folder`: where the run was started. Members work there if the node has it, so that a job finds its files by the
        same relative paths. What they print goes to Ray's log of this actor too.
        """
        with contextlib.suppress(OSError):
            os.chdir(folder)
        try:
            serve_host(invitation, workers, host)
        except DistBeliefError as error:
            return f"{error.message}; {error.hint}" if error.hint else error.message
        return ""

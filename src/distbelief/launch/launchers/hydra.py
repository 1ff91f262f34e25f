"""What names a launch of MPICH's mpirun: its variables do not, but the process that it has on each host was told."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_SAYS = ("--control-port", "--upstream-host", "--upstream-port")


def launch_named_by(command: Sequence[str]) -> str:
    """From the command line of a process above ours; empty when it is not Hydra's.

    >>> launch_named_by(["/usr/bin/hydra_pmi_proxy", "--control-port", "node1:42285", "--proxy-id", "3"])
    'node1:42285'
    """
    if not command or "hydra" not in command[0].rpartition("/")[2]:
        return ""
    return " ".join(value for name, value in itertools.pairwise(command) if name in _SAYS)

"""ps: servers own the parameters and apply the updates; workers compute gradients, push them and fetch parameters.

The value alone, without torch, which the command line and the coordinator need not import.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from distbelief.errors import JobError
from distbelief.job import Job
from distbelief.shards import Schedule

if TYPE_CHECKING:
    import torch

    from distbelief.strategies.served import PreparedServed


@dataclass(frozen=True)
class ParameterServer:
    """`sync`: all shards of a step are added before it is applied, so the weights are those of allreduce, bit for bit.

    Every slice of the parameters has a primary and a backup, on two servers. With one server there is no backup.

    >>> str(ParameterServer(2)), str(ParameterServer(1, over="tcp"))
    ('ps:sync:servers=2', 'ps:sync:servers=1:tcp')
    """

    servers: int = 2
    mode: Literal["sync"] = "sync"
    over: Literal["auto", "shm", "tcp"] = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.servers, bool) or not isinstance(self.servers, int) or self.servers < 1:
            raise JobError(
                f"the number of parameter servers must be at least 1, not {self.servers!r}",
                hint="as in ps:sync:servers=2; with one server there is no backup",
            )
        if self.mode != "sync":
            raise JobError(f"unknown mode '{self.mode}' of parameter servers", hint="known: sync")
        if self.over not in ("auto", "shm", "tcp"):
            raise JobError(f"unknown transport '{self.over}'", hint="use auto, shm (one host) or tcp")

    @property
    def exact(self) -> bool:
        return True

    @property
    def transport(self) -> Literal["auto", "shm", "gloo"]:
        """How the workers meet: that they do so over the network means that servers are reached over it too."""
        return "gloo" if self.over == "tcp" else self.over

    def __str__(self) -> str:
        return f"ps:{self.mode}:servers={self.servers}" + (f":{self.over}" if self.over != "auto" else "")

    def prepare(self, job: Job, schedule: Schedule, device: torch.device) -> PreparedServed:
        from distbelief.strategies.served import PreparedServed

        return PreparedServed(job, schedule, device, exact=True)

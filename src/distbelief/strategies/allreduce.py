"""allreduce: every member holds the whole model; gradients are summed over all of them, synchronously.

The value alone, without torch, which the command line need not import.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from distbelief.errors import JobError
from distbelief.job import Job
from distbelief.shards import Schedule

if TYPE_CHECKING:
    import torch

    from distbelief.strategies.prepared import PreparedAllReduce


@dataclass(frozen=True)
class AllReduce:
    """Synchronous data parallelism. The weights do not depend on the number of workers, unless `exact` is off.

    >>> AllReduce().exact, str(AllReduce(exact=False))
    (True, 'allreduce:inexact')
    """

    exact: bool = True
    """Off: a worker fuses its shards into one batch, and sums may be taken in any order. Faster, not reproducible."""
    transport: Literal["auto", "shm", "gloo"] = "auto"
    """How gradients travel: shared memory on one host, gloo across hosts; auto chooses."""

    def __str__(self) -> str:
        options = [*(["inexact"] if not self.exact else []), *([self.transport] if self.transport != "auto" else [])]
        return ":".join(["allreduce", *options])

    @property
    def stride(self) -> int:
        return 1

    def prepare(self, job: Job, schedule: Schedule, device: torch.device) -> PreparedAllReduce:
        from distbelief.strategies.prepared import PreparedAllReduce

        if device.type != "cpu":
            raise JobError(f"allreduce does not run on '{device}' yet", hint="use --device cpu")
        return PreparedAllReduce(job, schedule, device, self.exact)

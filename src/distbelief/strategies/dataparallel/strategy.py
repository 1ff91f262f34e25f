"""allreduce: every member holds the whole model; gradients are summed over all members, synchronously.

This module has the value alone and imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from distbelief.compression.option import NAMES as COMPRESSIONS
from distbelief.compression.option import add_compression, checked_compression
from distbelief.errors import JobError
from distbelief.instrument import Instrument
from distbelief.strategies.base import Strategy

_UNSAID: Any = None

REPLICA_UPDATE = Instrument(
    "optimizer", "distbelief.strategies.dataparallel.replica", "DataParallelReplica", ("_update",)
)
"""The update of a replica, for a profile of any strategy that builds on it."""


@dataclass(frozen=True)
class AllReduce(Strategy):
    """Synchronous data parallelism. The weights do not depend on the number of workers, unless `exact` is off.

    >>> AllReduce().exact, str(AllReduce(exact=False))
    (True, 'allreduce:inexact')
    >>> AllReduce(compression="topk=0.01")
    AllReduce(exact=False, transport='gloo', compression='topk=0.01', always=False)
    """

    on_workers: ClassVar[str] = "distbelief.strategies.dataparallel.prepared"
    keeps_freed_memory: ClassVar[bool] = True
    instruments: ClassVar[tuple[Instrument, ...]] = (REPLICA_UPDATE,)

    exact: bool = _UNSAID
    """False: a worker fuses its shards into one batch, and the order of additions is not fixed: faster, not
    reproducible. The default is True unless gradients are compressed."""
    transport: Literal["auto", "shm", "gloo", "nccl"] = "auto"
    """How gradients travel: shared memory on one host, gloo across hosts, nccl where every worker has its own GPU; auto
    chooses."""
    compression: str = ""
    """The compression of gradients: bf16, int8, topk=0.01 or powersgd=4. Compressed gradients travel over gloo."""
    always: bool = False
    """Keep compression on even where the link is faster than the codec."""

    def __post_init__(self) -> None:
        said = self.exact is not _UNSAID
        if not said:
            object.__setattr__(self, "exact", not self.compression)
        object.__setattr__(
            self, "compression", checked_compression(self.compression, self.always, "allreduce:int8:always")
        )
        if not self.compression:
            return
        if self.exact:
            raise JobError(
                f"with the compression {self.compression} the weights depend on the assignment: it cannot be exact",
                hint="leave exact out, or leave compression out",
            )
        if self.transport == "shm":
            raise JobError(
                f"in shared memory there is nothing to compress with {self.compression}",
                hint="leave shm out: gradients then go over gloo",
            )
        if self.transport == "nccl":
            raise JobError(
                f"gradients that are compressed with {self.compression} go over gloo, not over NCCL",
                hint="leave nccl out; between GPUs of one machine compression does not pay",
            )
        object.__setattr__(self, "transport", "gloo")

    def __str__(self) -> str:
        if self.compression:  # the rest follows from it
            return ":".join(["allreduce", self.compression, *(["always"] if self.always else [])])
        options = [*(["inexact"] if not self.exact else []), *([self.transport] if self.transport != "auto" else [])]
        return ":".join(["allreduce", *options])

    @property
    def fuses_shards(self) -> bool:
        return not self.exact

    @property
    def inexact_form(self) -> str:
        """
        >>> AllReduce(transport="gloo").inexact_form
        'allreduce:inexact:gloo'
        """
        return str(replace(self, exact=False))

    @property
    def rechecks(self) -> bool:
        return self.exact

    @property
    def state_on_device(self) -> bool:
        return True


def parse(text: str, options: Sequence[str]) -> AllReduce:
    """Parse the strategy's string form.

    >>> str(parse("allreduce:topk=0.01:gloo", ["topk=0.01", "gloo"]))
    'allreduce:topk=0.01'
    """
    values: dict[str, Any] = {}
    for option in options:
        if option == "inexact":
            values["exact"] = False
        elif option in ("auto", "shm", "gloo", "nccl"):
            values["transport"] = option
        elif option == "always":
            values["always"] = True
        elif option.partition("=")[0] in COMPRESSIONS:
            add_compression(values, option, text)
        else:
            raise JobError(
                f"unknown option '{option}' in the strategy '{text}'",
                hint="options of allreduce: inexact, shm, gloo (as in allreduce:gloo); a compression: bf16, int8, "
                "topk=0.01 or powersgd=4, and with it always",
            )
    return AllReduce(**values)

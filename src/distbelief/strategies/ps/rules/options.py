"""The options of `ps:sync`, `ps:async` and `ps:ssp`: their meaning and which of them go together. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from distbelief.compression.option import checked_compression
from distbelief.errors import JobError

MODES = ("sync", "ssp", "async")
ASYNCHRONOUS = {"adaptive": False, "n_push": 1, "n_fetch": 1, "warm_up": 0, "noise": 0.0, "dc": 0.0}
"""Options of async and ssp alone, with their defaults."""


@dataclass(frozen=True)
class ParameterServerOptions:
    servers: int = 2
    mode: Literal["sync", "ssp", "async"] = "sync"
    backups: int = 0
    """sync: other workers compute the missing shards of at most this many late workers, too; the first copy counts."""
    staleness: int | None = None
    """ssp: the bound. An update misses at most this many updates that other workers completed while it was computed."""
    n_push: int = 1
    """Batches whose gradients are pushed together."""
    n_fetch: int = 1
    """Updates that a worker computes from one fetch of the parameters to the next."""
    adaptive: bool = False
    """Each worker chooses n_push and n_fetch itself, from its measurements."""
    warm_up: int = 0
    """The first updates of a life of the servers, which are computed one after the other (a warm start)."""
    noise: float = 0.0
    """The standard deviation of Gaussian noise that is added to every pushed gradient."""
    dc: float = 0.0
    """Delay compensation: how strongly a stale gradient is corrected for the updates that it misses."""
    compression: str = ""
    """The codec of pushed gradients: bf16, int8 or topk=0.01. Empty: none."""
    always: bool = False
    """Compression stays on, also in shared memory and where the link is faster than the codec."""
    over: Literal["auto", "shm", "tcp"] = "auto"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise JobError(f"unknown mode '{self.mode}' of parameter servers", hint=f"known: {', '.join(MODES)}")
        for name, least in (("servers", 1), ("backups", 0), ("n_push", 1), ("n_fetch", 1), ("warm_up", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise JobError(
                    f"{name} of parameter servers must be at least {least}, not {value!r}",
                    hint="as in ps:sync:servers=2; with one server there is no backup" if name == "servers" else "",
                )
        if self.over not in ("auto", "shm", "tcp"):
            raise JobError(f"unknown transport '{self.over}'", hint="use auto, shm (one host) or tcp")
        for name in ("noise", "dc"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise JobError(f"{name} of parameter servers must be 0 or more, not {getattr(self, name)}")
        if (self.mode == "ssp") != (self.staleness is not None):
            raise JobError(
                "ssp needs a bound on staleness, and the other modes have none", hint="for example ps:ssp:staleness=4"
            )
        if self.staleness is not None and self.staleness < 0:
            raise JobError(f"staleness must be 0 or more, not {self.staleness}")
        self._check_compression()
        if self.backups and self.mode != "sync":
            raise JobError(
                "backups are for sync", hint=f"ps:{self.mode} does not wait for late workers: leave backups out"
            )
        if self.adaptive and (self.n_push, self.n_fetch) != (1, 1):
            raise JobError("adaptive chooses n_push and n_fetch itself", hint="leave these out, or adaptive")
        if self.mode == "sync" and any(getattr(self, name) != usual for name, usual in ASYNCHRONOUS.items()):
            names = ", ".join(ASYNCHRONOUS)
            raise JobError(f"{names} are for async and ssp", hint="leave them out of ps:sync")

    def _check_compression(self) -> None:
        object.__setattr__(
            self, "compression", checked_compression(self.compression, self.always, "ps:async:int8:always")
        )
        if not self.compression:
            return
        if self.compression.startswith("powersgd"):
            raise JobError(
                "powersgd cannot compress what is pushed to servers",
                hint="it sums matrices over all workers: use allreduce:powersgd=4, or bf16, int8 or topk=0.01 here",
            )
        if self.backups:
            raise JobError(
                f"with {self.compression} every worker gets another result for a shard, so late shards have no "
                "backup copies",
                hint=f"leave out backups or {self.compression}",
            )
        if self.over == "shm" and not self.always:
            raise JobError(
                f"in shared memory there is nothing to compress with {self.compression}",
                hint="leave shm out, or use tcp",
            )
        if self.dc:
            raise JobError(
                "delay compensation sends the parameters along, which are not compressed",
                hint=f"leave out dc or {self.compression}",
            )

    @property
    def in_steps(self) -> bool:
        """See `Strategy`."""
        return self.mode == "sync"
